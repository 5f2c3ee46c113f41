"""The published Wan 2.1 text-to-video models, and how a diffusers folder's config files are read.

Sources: Wan-Video/Wan2.1, wan/configs, wan/modules/vae.py (latent statistics) and wan/modules/t5.py; diffusers'
class defaults for keys that a config file leaves out.
"""

from collections.abc import Mapping
from typing import Any

from vidax.errors import UserError
from vidax.models.towers.t5 import T5Config
from vidax.models.wan.dit import DiTConfig
from vidax.models.wan.vae import VAEConfig

WAN21_1_3B = DiTConfig(dim=1536, layers=30, heads=12, mlp_dim=8960)
WAN21_14B = DiTConfig(dim=5120, layers=40, heads=40, mlp_dim=13824)
DEMO = DiTConfig(dim=192, layers=6, heads=6, mlp_dim=512, text_dim=64, frequency_dim=64)  # recipes/train_demo.py

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
# fmt: on

UMT5_XXL = T5Config()

TEXT_TOKENS = 512  # text_len in wan/configs/shared_config.py

# sample_neg_prompt in wan/configs/shared_config.py
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

# What a config must say, or leave out, for this code to compute what diffusers computes.
DIT_FIXED = {
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
VAE_FIXED = {
    "attn_scales": [],
    "is_residual": False,
    "patch_size": None,
    "in_channels": 3,
    "out_channels": 3,
}
T5_FIXED = {"model_type": "umt5", "feed_forward_proj": "gated-gelu"}


def dit_config(config: Mapping[str, Any], file: str) -> DiTConfig:
    """The transformer of a diffusers `transformer/config.json`; `file` names it in errors."""
    _expect(config, DIT_FIXED, file)
    heads, head_size = config.get("num_attention_heads", 40), config.get("attention_head_dim", 128)
    return DiTConfig(
        dim=heads * head_size,
        layers=config.get("num_layers", 40),
        heads=heads,
        mlp_dim=config.get("ffn_dim", 13824),
        in_channels=config.get("in_channels", 16),
        out_channels=config.get("out_channels") or config.get("in_channels", 16),
        text_dim=config.get("text_dim", 4096),
        frequency_dim=config.get("freq_dim", 256),
        patch=tuple(config.get("patch_size", (1, 2, 2))),
        eps=config.get("eps", 1e-6),
    )


def vae_config(config: Mapping[str, Any], file: str) -> VAEConfig:
    """The autoencoder of a diffusers `vae/config.json`."""
    _expect(config, VAE_FIXED, file)
    parsed = VAEConfig(
        base_dim=config.get("base_dim", 96),
        latent_channels=config.get("z_dim", 16),
        multipliers=tuple(config.get("dim_mult", (1, 2, 4, 4))),
        blocks=config.get("num_res_blocks", 2),
        time_downsample=tuple(config.get("temperal_downsample", (False, True, True))),  # the key is spelled so
        latents_mean=tuple(config.get("latents_mean", WAN21_VAE.latents_mean)),
        latents_std=tuple(config.get("latents_std", WAN21_VAE.latents_std)),
    )
    for key, values in (("latents_mean", parsed.latents_mean), ("latents_std", parsed.latents_std)):
        if len(values) != parsed.latent_channels:
            raise UserError(f"{file}: {key} has {len(values)} values for z_dim {parsed.latent_channels}")
    return parsed


def t5_config(config: Mapping[str, Any], file: str) -> T5Config:
    """The text encoder of a transformers `text_encoder/config.json`."""
    _expect(config, T5_FIXED, file)
    return T5Config(
        vocabulary=config["vocab_size"],
        dim=config["d_model"],
        head_size=config["d_kv"],
        heads=config["num_heads"],
        mlp_dim=config["d_ff"],
        layers=config["num_layers"],
        buckets=config.get("relative_attention_num_buckets", 32),
        max_distance=config.get("relative_attention_max_distance", 128),
        eps=config.get("layer_norm_epsilon", 1e-6),
    )


def _expect(config: Mapping[str, Any], fixed: Mapping[str, Any], file: str) -> None:
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise UserError(f"{file}: {key} is {config[key]!r}; Wan 2.1 text-to-video needs {value!r}")
