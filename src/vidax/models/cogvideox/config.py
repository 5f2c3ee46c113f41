"""The published transformers of CogVideoX 1.0 and 1.5, and how their `config.json` is read.

Sources: transformer/config.json of THUDM/CogVideoX-2b, CogVideoX-5b, CogVideoX-5b-I2V, CogVideoX1.5-5B and
CogVideoX1.5-5B-I2V; zai-org/CogVideo, sat/configs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vidax.errors import UserError
from vidax.models.cogvideox.dit import DiTConfig
from vidax.models.towers.t5 import T5Config
from vidax.models.towers.t5_files import read_config
from vidax.weights.configs import NOTHING, merge

COGVIDEOX_2B = DiTConfig(layers=30, heads=30, rotary=False)
COGVIDEOX_5B = DiTConfig(layers=42, heads=48)
# Beside 16 noisy channels the latents of the image.
COGVIDEOX_5B_I2V = dataclasses.replace(COGVIDEOX_5B, in_channels=32, learned=True)
COGVIDEOX15_5B = dataclasses.replace(COGVIDEOX_5B, patch=(2, 2, 2), sample=(21, 300, 300))
COGVIDEOX15_5B_I2V = dataclasses.replace(COGVIDEOX15_5B, in_channels=32, ofs_dim=512)
PUBLISHED = (COGVIDEOX_2B, COGVIDEOX_5B, COGVIDEOX_5B_I2V, COGVIDEOX15_5B, COGVIDEOX15_5B_I2V)

# What a config must say, or leave out, for this code to compute what diffusers computes.
DIT_FIXED = {
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "attention_bias": (True,),
    "activation_fn": ("gelu-approximate",),
    "timestep_activation_fn": ("silu",),
    "norm_elementwise_affine": (True,),
    "patch_size_t": (None, 2),
}

# Keys of a config.json to our fields. For `patch_size` and `sample_frames` see `joined`.
DIT_KEYS = {
    "num_layers": "layers",
    "num_attention_heads": "heads",
    "attention_head_dim": "head_size",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "text_embed_dim": "text_dim",
    "max_text_seq_length": "text_tokens",
    "time_embed_dim": "time_dim",
    "ofs_embed_dim": "ofs_dim",
    "patch_size": "patch",
    "sample_frames": "sample",
    "use_rotary_positional_embeddings": "rotary",
    "use_learned_positional_embeddings": "learned",
    "spatial_interpolation_scale": "spatial_scale",
    "temporal_interpolation_scale": "temporal_scale",
    "norm_eps": "eps",
}


def dit_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> DiTConfig:
    """The transformer that a diffusers `config.json` describes.

    file: what errors call it. numbers: fields that are known from the tensors; the file must agree with them, and
    where it is silent they stand. Without a file what they do not say is that of the published model of these sizes.
    """
    values = merge(joined(config), DIT_KEYS, DIT_FIXED, file, numbers, "CogVideoX")
    if not config:
        values = usual(values) | values
    read = DiTConfig(**values)
    if read.heads < 1 or read.head_size % 8 or read.dim % 16:
        raise UserError(
            f"{file}: {read.heads} heads of size {read.head_size}; positions take a size that 8 divides, and heads "
            "times size that 16 divides"
        )
    if read.learned and not read.rotary:
        raise UserError(f"{file}: learned positions without rotary ones; no CogVideoX has them so")
    if read.learned and any(size % patch for size, patch in zip(read.sample, read.patch, strict=True)):
        raise UserError(f"{file}: learned positions for latents of {read.sample}, which no patch {read.patch} divides")
    if read.ofs_dim not in (None, read.time_dim):
        raise UserError(
            f"{file}: ofs_embed_dim is {read.ofs_dim}; it is added to a time of time_embed_dim {read.time_dim}"
        )
    return read


def joined(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with one value each for the patch and for the sample's size in latents."""
    stated = dict(config)
    if (patch := stated.get("patch_size")) is not None:
        stated["patch_size"] = [stated.get("patch_size_t") or 1, patch, patch]
    if all(f"sample_{key}" in stated for key in ("frames", "height", "width")):
        frames = (stated["sample_frames"] - 1) // stated.get("temporal_compression_ratio", 4) + 1
        stated["sample_frames"] = [frames, stated["sample_height"], stated["sample_width"]]
    return stated


def usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the published model that has these values, or none."""
    known = (dataclasses.asdict(config) for config in PUBLISHED)
    return next((fields for fields in known if fields.items() >= values.items()), {})


def t5_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> T5Config:
    """The text encoder of a transformers `text_encoder/config.json`; arguments as in `dit_config`."""
    return read_config(config, file, numbers, model_type="t5", model="CogVideoX")
