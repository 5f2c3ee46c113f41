"""The components of Wan models as they are published: by which tensors each layout is known, and what their shapes say.

Sources: Wan-Video/Wan2.1 and Wan2.2, wan/modules and wan/configs (file names); diffusers' and transformers' folders;
the single files that ComfyUI loads.
"""

import functools
import itertools
import math
from typing import Any

from vidax.models.towers import t5_files
from vidax.models.towers.clip_vision import CLIPVision, CLIPVisionConfig
from vidax.models.wan import mapping
from vidax.models.wan.config import (
    CLIP_VIT_H,
    WAN21_VAE,
    WAN22_VAE,
    clip_config,
    dit_config,
    t5_config,
    vae_config,
)
from vidax.models.wan.dit import DiT
from vidax.models.wan.vae import VAE
from vidax.weights.layouts import Catalogue, Kind, Layout, Shapes, Stranger, ours
from vidax.weights.mapping import Mapping as Names


def transformer_numbers(shapes: Shapes) -> dict[str, Any]:
    dim, channels, *patch = shapes.shape("patch_embedding.weight", 5)
    image: dict[str, Any] = {}
    if "image_embedding.mlp.fc1.weight" in shapes:
        image["image_dim"] = shapes.shape("image_embedding.mlp.fc1.weight", 2)[1]
    if "image_embedding.positions" in shapes:
        image["image_positions"] = shapes.shape("image_embedding.positions", 3)[1]
    return image | {
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
    """The encoder of 2.1 is a flat list in every layout: residual blocks, and after each level but the last a
    downsampling. That of 2.2 is a list of levels.
    """
    base, image_channels = shapes.shape("encoder.conv_in.weight", 5)[:2]
    common = {"base_dim": base, "latent_channels": shapes.shape("decoder.post_quant_conv.weight", 5)[0]}
    if "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes:
        return common | levels_of_22(shapes, base) | {"patch": math.isqrt(image_channels // 3), "residual": True}
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
    return common | {
        "multipliers": tuple(level[-1] // base for level in levels if level),
        "blocks": max(map(len, levels)),
        "time_downsample": tuple(time_downsample),
        "residual": False,
    }


def levels_of_22(shapes: Shapes, base: int) -> dict[str, Any]:
    widths: list[list[int]] = []
    for level in itertools.count():
        resnets = (f"encoder.down_blocks.{level}.resnets.{i}.conv1.weight" for i in itertools.count())
        widths.append([shapes.shape(name, 5)[0] for name in itertools.takewhile(shapes.__contains__, resnets)])
        if not widths[-1]:
            break
    blocks = len(widths[0])
    # The official code numbers a level's downsampling after its residual blocks, of which only now the number is known.
    downs = ("downsamplers.0", f"resnets.{blocks}")
    halves = [
        any(f"encoder.down_blocks.{level}.{down}.time_conv.weight" in shapes for down in downs)
        for level in range(len(widths) - 2)
    ]
    multipliers = tuple(level[-1] // base for level in widths[:-1])
    return {
        "multipliers": multipliers,
        "blocks": blocks,
        "time_downsample": tuple(halves),
        "decoder_base_dim": shapes.shape("decoder.conv_in.weight", 5)[0] // multipliers[-1],
    }


def image_encoder_numbers(shapes: Shapes) -> dict[str, Any]:
    """Of the number of heads nothing can be seen. The last layer is counted, though it is no parameter of ours."""
    dim, _, patch, _ = shapes.shape("patch_embedding.weight", 4)
    tokens = shapes.size("position_embedding") // dim
    return {
        "dim": dim,
        "layers": shapes.layers("blocks.norm1.weight"),
        "mlp_dim": shapes.shape("blocks.mlp.fc1.weight", 2)[0],
        "image": math.isqrt(tokens - 1) * patch,
        "patch": patch,
    }


TRANSFORMER = Kind(
    title="transformer",
    layouts=(
        ours("time_projection.weight", "blocks.self_attn.q.weight", "head.head.weight"),
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
    config=dit_config,
    spec=DiT.spec,
)

VAE_KIND = Kind(
    title="autoencoder",
    layouts=(
        ours("decoder.post_quant_conv.weight", "decoder.out.conv.weight"),
        Layout(
            name="official",
            markers=("encoder.conv1.weight", "decoder.upsamples.0.residual.2.weight", "decoder.head.2.weight"),
            names=lambda config: mapping.vae_official(config or WAN21_VAE),
        ),
        Layout(
            name="official",
            markers=("encoder.downsamples.0.downsamples.0.residual.2.weight", "decoder.head.2.weight"),
            names=lambda config: mapping.vae_official(config or WAN22_VAE),
        ),
        Layout(
            name="diffusers",
            markers=("encoder.down_blocks.0.conv1.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"),
            names=lambda config: mapping.VAE_DIFFUSERS,
        ),
        Layout(
            name="diffusers",
            markers=("encoder.down_blocks.0.resnets.0.conv1.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"),
            names=lambda config: mapping.VAE22_DIFFUSERS,
        ),
    ),
    classes=("AutoencoderKLWan",),
    numbers=vae_numbers,
    config=vae_config,
    spec=VAE.spec,
)

TEXT_ENCODER = t5_files.kind(
    "umt5",
    t5_config,
    Layout(
        name="official",
        markers=("blocks.0.attn.q.weight", "blocks.0.pos_embedding.embedding.weight", "blocks.0.ffn.gate.0.weight"),
        names=lambda config: mapping.UMT5_OFFICIAL,
    ),
)


def clip_diffusers(prefix: str, config: CLIPVisionConfig | None) -> Names:
    return mapping.clip_diffusers(config or CLIP_VIT_H, prefix)


IMAGE_ENCODER = Kind(
    title="image encoder",
    layouts=(
        ours("class_embedding", "pre_norm.weight", "blocks.attention.q.weight"),
        Layout(
            name="official",
            markers=("visual.cls_embedding", "visual.transformer.0.attn.to_qkv.weight"),
            names=lambda config: mapping.clip_official(config or CLIP_VIT_H),
        ),
        *(
            Layout(
                name="diffusers",
                markers=(f"{prefix}embeddings.class_embedding", f"{prefix}encoder.layers.0.self_attn.q_proj.weight"),
                names=functools.partial(clip_diffusers, prefix),
            )
            for prefix in ("vision_model.", "")
        ),
    ),
    classes=("clip_vision_model",),
    numbers=image_encoder_numbers,
    config=clip_config,
    spec=CLIPVision.spec,
)

STRANGERS = (
    Stranger(
        what="the transformer of Wan VACE, which edits video",
        component="transformer",
        markers=("vace_patch_embedding.weight",),
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

WAN = Catalogue(
    title="Wan",
    kinds={
        "transformer": TRANSFORMER,  # of two experts that for high noise
        "transformer_2": TRANSFORMER,
        "vae": VAE_KIND,
        "text_encoder": TEXT_ENCODER,
        "image_encoder": IMAGE_ENCODER,
    },
    optional=("transformer_2", "image_encoder"),
    folders={"transformer": "high_noise_model", "transformer_2": "low_noise_model"},
    strangers=STRANGERS,
)

# Files of a repository, by component: in diffusers' layout, and in the official one.
DIFFUSERS_FILES = {
    "transformer": ("transformer/config.json", "transformer/*.safetensors*"),
    "transformer_2": ("transformer_2/config.json", "transformer_2/*.safetensors*"),
    "vae": ("vae/config.json", "vae/*.safetensors*"),
    "text_encoder": ("text_encoder/config.json", "text_encoder/*.safetensors*"),
    "image_encoder": ("image_encoder/config.json", "image_encoder/*.safetensors*"),
    "tokenizer": ("tokenizer/*.json", "tokenizer/spiece.model"),
    "scheduler": ("model_index.json", "scheduler/*.json", "image_processor/*.json"),
}
OFFICIAL_FILES = {
    "transformer": (
        *("config.json", "diffusion_pytorch_model*.safetensors*"),
        *("high_noise_model/config.json", "high_noise_model/*.safetensors*"),
    ),
    "transformer_2": ("low_noise_model/config.json", "low_noise_model/*.safetensors*"),
    "vae": ("Wan2.[12]_VAE.pth",),
    "text_encoder": ("models_t5_umt5-xxl-enc-bf16.pth",),
    "image_encoder": ("models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",),
    "tokenizer": ("google/umt5-xxl/*",),
}
