"""The components of Wan 2.1 as they are published: by which tensors each layout is known, and what their shapes say.

Sources: Wan-Video/Wan2.1, wan/modules and wan/configs (file names); diffusers' and transformers' folders; the
single files that ComfyUI loads.
"""

import itertools
import math
from typing import Any

from vidax.models.towers.t5 import T5Encoder
from vidax.models.wan import mapping
from vidax.models.wan.config import WAN21_VAE, dit_config, t5_config, vae_config
from vidax.models.wan.dit import DiT
from vidax.models.wan.vae import VAE
from vidax.weights.held import HELD
from vidax.weights.layouts import Catalogue, Kind, Layout, Shapes, Stranger


def transformer_numbers(shapes: Shapes) -> dict[str, Any]:
    dim, channels, *patch = shapes.shape("patch_embedding.weight", 5)
    return {
        "dim": dim,
        "layers": shapes.layers("blocks.norm3.weight"),
        "mlp_dim": shapes.shape("blocks.ffn.fc1.weight", 2)[0],
        "in_channels": channels,
        "out_channels": shapes.shape("head.head.weight", 2)[0] // math.prod(patch),
        "text_dim": shapes.shape("text_embedding.fc1.weight", 2)[1],
        "frequency_dim": shapes.shape("time_embedding.fc1.weight", 2)[1],
        "patch": tuple(patch),
    }


def vae_numbers(shapes: Shapes) -> dict[str, Any]:
    """The encoder is a flat list in every layout: residual blocks, and after each level but the last a downsampling."""
    base, image_channels = shapes.shape("encoder.conv_in.weight", 5)[:2]
    levels: list[list[int]] = [[]]
    time_downsample: list[bool] = []
    for index in itertools.count():
        block = f"encoder.down_blocks.{index}"
        if f"{block}.conv1.weight" in shapes:
            levels[-1].append(shapes.shape(f"{block}.conv1.weight", 5)[0])
        elif f"{block}.conv.weight" in shapes:
            time_downsample.append(f"{block}.time_conv.weight" in shapes)
            levels.append([])
        else:
            break
    return {
        "base_dim": base,
        "latent_channels": shapes.shape("decoder.post_quant_conv.weight", 5)[0],
        "multipliers": tuple(level[-1] // base for level in levels if level),
        "blocks": max(map(len, levels)),
        "time_downsample": tuple(time_downsample),
        "image_channels": image_channels,
    }


def text_encoder_numbers(shapes: Shapes) -> dict[str, Any]:
    vocabulary, dim = shapes.shape("token_embedding.weight", 2)
    buckets, heads = shapes.shape("blocks.attention.relative_attention_bias", 2)
    return {
        "vocabulary": vocabulary,
        "dim": dim,
        "layers": shapes.layers("blocks.norm1.weight"),
        "heads": heads,
        "head_size": shapes.shape("blocks.attention.q.weight", 2)[0] // heads,
        "mlp_dim": shapes.shape("blocks.mlp.gate.weight", 2)[0],
        "buckets": buckets,
    }


TRANSFORMER = Kind(
    title="transformer",
    layouts=(
        Layout(
            name="vidax",
            markers=("time_projection.weight", "blocks.self_attn.q.weight", "head.head.weight"),
            names=lambda config: HELD,
            ours=True,
        ),
        Layout(
            name="official",
            markers=("patch_embedding.weight", "time_projection.1.weight", "blocks.0.self_attn.q.weight"),
            names=lambda config: mapping.DIT_OFFICIAL,
        ),
        Layout(
            name="diffusers",
            markers=("patch_embedding.weight", "condition_embedder.time_proj.weight", "blocks.0.attn1.to_q.weight"),
            names=lambda config: mapping.DIT_DIFFUSERS,
        ),
    ),
    classes=("WanTransformer3DModel", "WanModel"),
    numbers=transformer_numbers,
    limits={"in_channels": 16, "out_channels": 16},
    config=dit_config,
    spec=DiT.spec,
)

VAE_KIND = Kind(
    title="autoencoder",
    layouts=(
        Layout(
            name="vidax",
            markers=("encoder.out.conv.weight", "decoder.out.conv.weight"),
            names=lambda config: HELD,
            ours=True,
        ),
        Layout(
            name="official",
            markers=("encoder.conv1.weight", "decoder.upsamples.0.residual.2.weight", "decoder.head.2.weight"),
            names=lambda config: mapping.vae_official(config or WAN21_VAE),
        ),
        Layout(
            name="diffusers",
            markers=("encoder.down_blocks.0.conv1.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"),
            names=lambda config: mapping.VAE_DIFFUSERS,
        ),
    ),
    classes=("AutoencoderKLWan",),
    numbers=vae_numbers,
    limits={"latent_channels": 16, "image_channels": 3},
    config=vae_config,
    spec=VAE.spec,
)

TEXT_ENCODER = Kind(
    title="text encoder",
    layouts=(
        Layout(
            name="vidax",
            markers=("token_embedding.weight", "blocks.attention.relative_attention_bias", "blocks.mlp.gate.weight"),
            names=lambda config: HELD,
            ours=True,
        ),
        Layout(
            name="official",
            markers=("blocks.0.attn.q.weight", "blocks.0.pos_embedding.embedding.weight", "blocks.0.ffn.gate.0.weight"),
            names=lambda config: mapping.UMT5_OFFICIAL,
        ),
        Layout(
            name="diffusers",
            markers=(
                "encoder.block.0.layer.0.SelfAttention.q.weight",
                "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
            ),
            names=lambda config: mapping.UMT5_DIFFUSERS,
        ),
    ),
    classes=("umt5",),
    numbers=text_encoder_numbers,
    limits={},
    config=t5_config,
    spec=T5Encoder.spec,
)

STRANGERS = (
    *(
        Stranger(
            what="the transformer of an image-to-video Wan 2.1",
            component="transformer",
            markers=(marker,),
            number=("patch_embedding.weight", 1, "in_channels", 16),
        )
        for marker in ("img_emb.proj.1.weight", "condition_embedder.image_embedder.ff.net.0.proj.weight")
    ),
    Stranger(
        what="the transformer of Wan VACE, which edits video",
        component="transformer",
        markers=("vace_patch_embedding.weight",),
    ),
    *(
        Stranger(
            what="the autoencoder of Wan 2.2",
            component="vae",
            markers=(marker,),
            number=(conv, 0, "latent_channels", 16),
        )
        for marker, conv in (
            ("encoder.downsamples.0.downsamples.0.residual.2.weight", "conv2.weight"),
            ("encoder.down_blocks.0.resnets.0.conv1.weight", "post_quant_conv.weight"),
        )
    ),
    Stranger(
        what="a CLIP image encoder, for image to video",
        component="image_encoder",
        markers=("visual.transformer.0.norm1.weight",),
    ),
    Stranger(
        what="the encoder of T5 v1.1, whose position biases are in its first layer only",
        component="text_encoder",
        markers=("encoder.block.1.layer.0.SelfAttention.q.weight",),
        absent=("encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",),
        number=("shared.weight", 0, "vocabulary", 256384),
    ),
    Stranger(
        what="quantized to scaled float8, not bfloat16 or float32",
        component="transformer",
        markers=("scaled_fp8",),
    ),
)

WAN21 = Catalogue(
    title="Wan 2.1 text to video",
    kinds={"transformer": TRANSFORMER, "vae": VAE_KIND, "text_encoder": TEXT_ENCODER},
    strangers=STRANGERS,
)

# Files of a repository, by component: in diffusers' layout, and in the official one.
DIFFUSERS_FILES = {
    "transformer": ("transformer/config.json", "transformer/*.safetensors*"),
    "vae": ("vae/config.json", "vae/*.safetensors*"),
    "text_encoder": ("text_encoder/config.json", "text_encoder/*.safetensors*"),
    "tokenizer": ("tokenizer/*.json", "tokenizer/spiece.model"),
    "scheduler": ("model_index.json", "scheduler/*.json"),
}
OFFICIAL_FILES = {
    "transformer": ("config.json", "diffusion_pytorch_model*.safetensors*"),
    "vae": ("Wan2.1_VAE.pth",),
    "text_encoder": ("models_t5_umt5-xxl-enc-bf16.pth",),
    "tokenizer": ("google/umt5-xxl/*",),
}
