"""The components of CogVideoX models as they are published: by which tensors each layout is known, and what their
shapes say.

Sources: diffusers' and transformers' folders; zai-org/CogVideo, sat (its checkpoints are called official here).
"""

import itertools
import math
from typing import Any

from vidax.models.cogvideox import mapping
from vidax.models.cogvideox.config import dit_config, t5_config, vae_config
from vidax.models.cogvideox.dit import DiT
from vidax.models.cogvideox.vae import VAE
from vidax.models.towers import t5_files
from vidax.weights.layouts import Catalogue, Kind, Layout, Shapes, Stranger, ours


def transformer_numbers(shapes: Shapes) -> dict[str, Any]:
    """Of the size of heads and of the positions nothing can be seen but the number of learned ones."""
    dim, text_dim = shapes.shape("text_embedding.weight", 2)
    time_dim = shapes.shape("time_embedding.fc1.weight", 2)[0]
    head_size = shapes.shape("blocks.attn.norm_q.weight", 1)[0]
    per_token = shapes.shape("head.head.weight", 2)[0]
    # 1.0 embeds squares of one latent frame by a convolution, 1.5 pairs of frames by a matrix.
    pairs = shapes.axes("patch_embedding.weight") == 2
    patch = (2, 2, 2) if pairs else (1, *shapes.shape("patch_embedding.weight", 4)[2:])
    channels = shapes.size("patch_embedding.weight") // dim // math.prod(patch)
    ofs = {"ofs_dim": shapes.shape("ofs_embedding.fc1.weight", 2)[1]} if "ofs_embedding.fc1.weight" in shapes else {}
    return ofs | {
        "layers": shapes.layers("blocks.ffn.fc1.weight"),
        "heads": dim // head_size,
        "head_size": head_size,
        "in_channels": channels,
        "out_channels": per_token // math.prod(patch),
        "text_dim": text_dim,
        "time_dim": time_dim,
        "patch": patch,
    }


def vae_numbers(shapes: Shapes) -> dict[str, Any]:
    """Of the number of groups, the frames that are one and the scale nothing can be seen."""
    levels = (f"encoder.down_blocks.{level}.resnets." for level in itertools.count())
    found = list(itertools.takewhile(lambda level: f"{level}0.first.conv.weight" in shapes, levels))
    blocks = itertools.takewhile(lambda i: f"{found[0]}{i}.first.conv.weight" in shapes, itertools.count())
    return {
        "channels": tuple(shapes.shape(f"{level}0.first.conv.weight", 5)[0] for level in found),
        "latent_channels": shapes.shape("decoder.conv_in.weight", 5)[1],
        "blocks": len(list(blocks)) if found else 0,
    }


TRANSFORMER = Kind(
    title="transformer",
    layouts=(
        ours("blocks.norm1.video.weight", "blocks.attn.q.weight", "head.head.weight"),
        Layout(
            name="official",
            markers=("mixins.patch_embed.proj.weight", "transformer.layers.0.attention.query_key_value.weight"),
            names=mapping.dit_official,
        ),
        Layout(
            name="diffusers",
            markers=("patch_embed.text_proj.weight", "transformer_blocks.0.norm1.linear.weight"),
            names=lambda config: mapping.DIT_DIFFUSERS,
        ),
    ),
    classes=("CogVideoXTransformer3DModel",),
    numbers=transformer_numbers,
    config=dit_config,
    spec=DiT.spec,
)

VAE_KIND = Kind(
    title="autoencoder",
    layouts=(
        ours("decoder.out.norm.conv_y.weight", "decoder.out.conv.weight"),
        Layout(
            name="official",
            markers=("encoder.down.0.block.0.conv1.conv.weight", "decoder.norm_out.conv_y.conv.weight"),
            names=mapping.vae_official,
        ),
        Layout(
            name="diffusers",
            markers=("encoder.down_blocks.0.resnets.0.conv1.conv.weight", "decoder.norm_out.conv_y.conv.weight"),
            names=lambda config: mapping.VAE_DIFFUSERS,
        ),
    ),
    classes=("AutoencoderKLCogVideoX",),
    numbers=vae_numbers,
    config=vae_config,
    spec=VAE.spec,
)

TEXT_ENCODER = t5_files.kind("t5", t5_config)

STRANGERS = (
    Stranger(
        what="the encoder of UMT5, each layer of which has its own position biases",
        component="text_encoder",
        markers=(
            "encoder.block.0.layer.0.SelfAttention.q.weight",
            "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        number=("shared.weight", 0, "vocabulary", 32128),
    ),
)

COGVIDEOX = Catalogue(
    title="CogVideoX",
    kinds={"transformer": TRANSFORMER, "vae": VAE_KIND, "text_encoder": TEXT_ENCODER},
    strangers=STRANGERS,
)

# Files of a repository, by component.
FILES = {
    "transformer": ("transformer/config.json", "transformer/*.safetensors*"),
    "vae": ("vae/config.json", "vae/*.safetensors*"),
    "text_encoder": ("text_encoder/config.json", "text_encoder/*.safetensors*"),
    "tokenizer": ("tokenizer/*.json", "tokenizer/spiece.model"),
    "scheduler": ("model_index.json", "scheduler/*.json"),
}
