"""The published models of Wan 2.1 and 2.2, and how `config.json` files are read.

Sources: Wan-Video/Wan2.1, wan/configs, wan/modules/vae.py (latent statistics), wan/modules/model.py (image branch) and
wan/modules/t5.py; Wan-Video/Wan2.2, wan/configs and wan/modules/vae2_2.py (sizes of `WanVAE_`, and those and latent
statistics of `Wan2_2_VAE`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vidax.errors import UserError
from vidax.models.towers.clip_vision import CLIPVisionConfig
from vidax.models.towers.t5 import T5Config
from vidax.models.towers.t5_files import read_config
from vidax.models.wan.dit import DiTConfig
from vidax.models.wan.vae import VAEConfig
from vidax.weights.configs import NOTHING, merge

WAN21_1_3B = DiTConfig(dim=1536, layers=30, heads=12, mlp_dim=8960)
WAN21_14B = DiTConfig(dim=5120, layers=40, heads=40, mlp_dim=13824)
# Beside 16 noisy channels: a mask for each of the 4 frames that are one latent frame, and the latents that are given.
WAN22_I2V = dataclasses.replace(WAN21_14B, in_channels=36)  # each of two experts
WAN21_I2V = dataclasses.replace(WAN22_I2V, image_dim=1280)
WAN21_FLF2V = dataclasses.replace(WAN21_I2V, image_positions=2 * 257)
WAN22_5B = DiTConfig(dim=3072, layers=30, heads=24, mlp_dim=14336, in_channels=48, out_channels=48)
DEMO = DiTConfig(dim=128, layers=6, heads=4, mlp_dim=384, text_dim=64, frequency_dim=64)  # recipes/train_demo.py

# fmt: off
WAN21_VAE = VAEConfig(
    latents_mean=(
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ),
    latents_std=(
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
    ),
)
WAN22_VAE = VAEConfig(
    base_dim=160,
    decoder_base_dim=256,
    latent_channels=48,
    residual=True,
    patch=2,
    latents_mean=(
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    latents_std=(
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ),
)
# fmt: on

UMT5_XXL = T5Config()
CLIP_VIT_H = CLIPVisionConfig()
# The autoencoder of each; all have the same text encoder, and those that attend to an image the same image encoder.
PUBLISHED = {
    WAN21_1_3B: WAN21_VAE,
    WAN21_14B: WAN21_VAE,
    WAN21_I2V: WAN21_VAE,
    WAN21_FLF2V: WAN21_VAE,
    WAN22_I2V: WAN21_VAE,
    WAN22_5B: WAN22_VAE,
}

TEXT_TOKENS = 512  # text_len in wan/configs/shared_config.py

# sample_neg_prompt in wan/configs/shared_config.py
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

# Those of image to video and of first and last frame, sample_neg_prompt in wan_i2v_14B.py and in __init__.py: camera
# shake, and cuts.
I2V_NEGATIVE_PROMPT = "镜头晃动，" + NEGATIVE_PROMPT
FLF2V_NEGATIVE_PROMPT = "镜头切换，" + I2V_NEGATIVE_PROMPT

# What a config must say, or leave out, for this code to compute what diffusers and the official code compute.
DIT_FIXED = {
    "cross_attn_norm": (True,),
    "qk_norm": ("rms_norm_across_heads", True),  # diffusers' name, the official one
    "model_type": ("t2v", "i2v", "flf2v", "ti2v"),
    "text_len": (TEXT_TOKENS,),
}
VAE_FIXED = {
    "attn_scales": ([],),
    "is_residual": (False,),
    "patch_size": (None,),
    "in_channels": (3,),
    "out_channels": (3,),
}
VAE22_FIXED = {
    "attn_scales": ([],),
    "is_residual": (True,),
    "patch_size": (WAN22_VAE.patch,),
    "in_channels": (3 * WAN22_VAE.patch**2,),
    "out_channels": (3 * WAN22_VAE.patch**2,),
}
CLIP_FIXED = {"model_type": ("clip_vision_model",), "hidden_act": ("gelu",), "num_channels": (3,)}

# Keys of a config.json to our fields.
DIT_KEYS = {
    **{"dim": "dim", "num_heads": "heads", "in_dim": "in_channels", "out_dim": "out_channels"},  # official
    **{"num_attention_heads": "heads", "attention_head_dim": "head_size"},  # diffusers
    **{"image_dim": "image_dim", "pos_embed_seq_len": "image_positions"},  # diffusers
    **{"in_channels": "in_channels", "out_channels": "out_channels", "patch_size": "patch"},
    **{"num_layers": "layers", "ffn_dim": "mlp_dim", "text_dim": "text_dim", "freq_dim": "frequency_dim", "eps": "eps"},
}
VAE_KEYS = {
    "base_dim": "base_dim",
    "z_dim": "latent_channels",
    "dim_mult": "multipliers",
    "num_res_blocks": "blocks",
    "temperal_downsample": "time_downsample",  # the key is spelled so
    "latents_mean": "latents_mean",
    "latents_std": "latents_std",
}
VAE22_KEYS = {**VAE_KEYS, "decoder_base_dim": "decoder_base_dim"}
CLIP_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_dim",
    "image_size": "image",
    "patch_size": "patch",
    "layer_norm_eps": "eps",
}
HEAD_SIZE = 128  # of every published transformer


def dit_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> DiTConfig:
    """The transformer that a `config.json` describes, diffusers' or the official one.

    file: what errors call it. numbers: fields that are known from the tensors; the file must agree with them, and
    where it is silent they stand. Without a file the head size is that of the published models.
    """
    values = merge(config, DIT_KEYS, DIT_FIXED, file, numbers, "Wan")
    head_size = values.pop("head_size", None)
    if "heads" not in values:
        values["heads"] = _usual_heads(values, file)
    heads = values["heads"]
    if type(heads) is not int or heads < 1:
        raise UserError(f"{file}: the number of heads is {heads!r}; it is a whole number of 1 or more")
    dim = values.setdefault("dim", heads * (head_size or HEAD_SIZE))
    if dim % (2 * heads) or head_size not in (None, dim // heads):
        raise UserError(f"{file}: {heads} heads of size {head_size or 'unknown'} do not make dim {dim}")
    return DiTConfig(**values)


def _usual_heads(values: Mapping[str, Any], file: str) -> int:
    sizes = ("dim", "layers", "mlp_dim")
    for known in (*PUBLISHED, DEMO):
        if all(getattr(known, size) == values[size] for size in sizes):
            return known.heads
    if values["dim"] % HEAD_SIZE:
        raise UserError(
            f"{file}: dim {values['dim']} is no multiple of {HEAD_SIZE}, the head size of the published models; "
            "put the config.json beside it that gives the number of heads"
        )
    return values["dim"] // HEAD_SIZE


def vae_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> VAEConfig:
    """The autoencoder of a diffusers `vae/config.json`, of 2.1 or 2.2; arguments as in `dit_config`. What neither the
    file nor the tensors say is that of `WAN22_VAE`, or of `WAN21_VAE` its latent statistics.
    """
    if numbers.get("residual", config.get("is_residual", False)):
        stated = merge(config, VAE22_KEYS, VAE22_FIXED, file, numbers, "the autoencoder of Wan 2.2")
        return _checked(dataclasses.replace(WAN22_VAE, **stated), file)
    stated = merge(config, VAE_KEYS, VAE_FIXED, file, numbers, "the autoencoder of Wan 2.1")
    statistics = {"latents_mean": WAN21_VAE.latents_mean, "latents_std": WAN21_VAE.latents_std}
    return _checked(VAEConfig(**statistics | stated), file)


def _checked(parsed: VAEConfig, file: str) -> VAEConfig:
    for key in ("latents_mean", "latents_std"):
        if (count := len(getattr(parsed, key))) != parsed.latent_channels:
            raise UserError(f"{file}: {key} has {count} values for z_dim {parsed.latent_channels}")
    return parsed


def t5_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> T5Config:
    """The text encoder of a transformers `text_encoder/config.json`; arguments as in `dit_config`."""
    return read_config(config, file, numbers, model_type="umt5", model="Wan")


def clip_config(config: Mapping[str, Any], file: str, numbers: Mapping[str, Any] = NOTHING) -> CLIPVisionConfig:
    """The image encoder of a transformers `image_encoder/config.json`; arguments as in `dit_config`."""
    stated = merge(config, CLIP_KEYS, CLIP_FIXED, file, numbers, "the image encoder of Wan 2.1")
    return CLIPVisionConfig(**stated)
