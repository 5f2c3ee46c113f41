"""The published models of CogVideoX 1.0 and 1.5, and how `config.json` files are read.

Sources: transformer/config.json and vae/config.json of THUDM/CogVideoX-2b, CogVideoX-5b, CogVideoX-5b-I2V,
CogVideoX1.5-5B and CogVideoX1.5-5B-I2V; zai-org/CogVideo, sat/configs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vidax.errors import UserError
from vidax.models.cogvideox.dit import DiTConfig
from vidax.models.cogvideox.vae import EPS, VAEConfig
from vidax.models.towers.t5 import T5Config
from vidax.models.towers.t5_files import read_config
from vidax.weights.configs import NOTHING, merge

COGVIDEOX_2B = DiTConfig(layers=30, heads=30, rotary=False)
COGVIDEOX_5B = DiTConfig(layers=42, heads=48)
# Beside 16 noisy channels the latents of the image.
COGVIDEOX_5B_I2V = dataclasses.replace(COGVIDEOX_5B, in_channels=32, learned=True)
COGVIDEOX15_5B = dataclasses.replace(COGVIDEOX_5B, patch=(2, 2, 2), sample=(21, 300, 300))
COGVIDEOX15_5B_I2V = dataclasses.replace(COGVIDEOX15_5B, in_channels=32, ofs_dim=512)

COGVIDEOX_2B_VAE = VAEConfig()
COGVIDEOX_VAE = dataclasses.replace(COGVIDEOX_2B_VAE, scaling_factor=0.7)
COGVIDEOX15_VAE = dataclasses.replace(COGVIDEOX_VAE, invert_scale_latents=True)

# The autoencoder of each: one network, whose latents are scaled differently. All have the same text encoder.
PUBLISHED = {
    COGVIDEOX_2B: COGVIDEOX_2B_VAE,
    COGVIDEOX_5B: COGVIDEOX_VAE,
    COGVIDEOX_5B_I2V: COGVIDEOX_VAE,
    COGVIDEOX15_5B: COGVIDEOX15_VAE,
    COGVIDEOX15_5B_I2V: COGVIDEOX15_VAE,
}

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
VAE_FIXED = {
    "act_fn": ("silu",),
    "in_channels": (3,),
    "out_channels": (3,),
    "norm_eps": (EPS,),
    "use_quant_conv": (False,),
    "use_post_quant_conv": (False,),
    "shift_factor": (None,),
    "latents_mean": (None,),
    "latents_std": (None,),
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
VAE_KEYS = {
    "block_out_channels": "channels",
    "latent_channels": "latent_channels",
    "layers_per_block": "blocks",
    "norm_num_groups": "groups",
    "temporal_compression_ratio": "time_factor",
    "scaling_factor": "scaling_factor",
    "invert_scale_latents": "invert_scale_latents",
    "sample_height": "sample_height",
    "sample_width": "sample_width",
}


def dit_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> DiTConfig:
    """The transformer that a diffusers `config.json` describes.

    file: what errors call it. numbers: fields that are known from the tensors; the file must agree with them, and
    where it is silent they stand. Without a file what they do not say is that of the published model of these sizes.
    """
    values = merge(joined(config), DIT_KEYS, DIT_FIXED, file, numbers, "CogVideoX")
    if not config and "rotary" not in values:
        values = usual(values, file)
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


def usual(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The fields of the published model that has these values."""
    known = (dataclasses.asdict(config) for config in PUBLISHED)
    if (fields := next((fields for fields in known if fields.items() >= values.items()), None)) is None:
        raise UserError(
            f"{file}: a transformer of CogVideoX of no published size, and nothing says how positions are made; put "
            "its config.json beside it, as diffusers writes it"
        )
    return fields


def vae_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> VAEConfig:
    """The autoencoder of a diffusers `vae/config.json`; arguments as in `dit_config`. What neither the file nor the
    tensors say is that of every published one; how latents are scaled differs among those, and stays open.
    """
    stated = merge(config, VAE_KEYS, VAE_FIXED, file, numbers, "the autoencoder of CogVideoX")
    read = VAEConfig(**({} if config else {"scaling_factor": None}) | stated)
    if any(dim % read.groups for dim in read.channels):
        raise UserError(
            f"{file}: block_out_channels {list(read.channels)} in norm_num_groups {read.groups}; the groups must "
            "divide each of them"
        )
    if read.time_factor not in (most := tuple(2**level for level in range(len(read.channels)))):
        raise UserError(f"{file}: temporal_compression_ratio is {read.time_factor}; these levels take one of {most}")
    return read


def t5_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> T5Config:
    """The text encoder of a transformers `text_encoder/config.json`; arguments as in `dit_config`."""
    return read_config(config, file, numbers, model_type="t5", model="CogVideoX")
