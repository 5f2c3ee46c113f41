"""Tiny CogVideoX transformers and a tiny T5 v1.1, made as tests/tiny.py makes Wan's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tiny import TEXT_ENCODER_CONFIG, Part

from vidax.models.cogvideox import config, mapping
from vidax.models.cogvideox.dit import DiT
from vidax.models.towers import t5_files
from vidax.models.towers.t5 import T5Encoder

TEXT = 8  # tokens

SINCOS = {
    "_class_name": "CogVideoXTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "num_layers": 2,
    "dropout": 0.0,
    "attention_bias": True,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": TEXT,
    "activation_fn": "gelu-approximate",
    "timestep_activation_fn": "silu",
    "norm_elementwise_affine": True,
    "norm_eps": 1e-5,
    "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0,
    "use_rotary_positional_embeddings": False,
    "use_learned_positional_embeddings": False,
}
ROTARY = {**SINCOS, "use_rotary_positional_embeddings": True, "num_attention_heads": 3, "num_layers": 3}
LEARNED = {**ROTARY, "in_channels": 8, "use_learned_positional_embeddings": True}
PAIRS = {**ROTARY, "patch_size_t": 2, "patch_bias": False, "sample_width": 24, "sample_height": 24}
PAIRS_I2V = {**PAIRS, "in_channels": 8, "ofs_embed_dim": 32}
CONFIGS = {"2b": SINCOS, "5b": ROTARY, "5b-i2v": LEARNED, "1.5-5b": PAIRS, "1.5-5b-i2v": PAIRS_I2V}

T5_CONFIG = {**TEXT_ENCODER_CONFIG, "architectures": ["T5EncoderModel"], "model_type": "t5"}


def transformer(config_file: Mapping[str, Any] = SINCOS, dtype=np.float32) -> Part:
    spec = DiT.spec(config.dit_config(config_file, "tiny"), dtype)
    return Part(spec, mapping.DIT_DIFFUSERS, "transformer/diffusion_pytorch_model.safetensors")


def text_encoder(config_file: Mapping[str, Any] = T5_CONFIG, dtype=np.float32) -> Part:
    spec = T5Encoder.spec(config.t5_config(config_file, "tiny"), dtype)
    return Part(spec, t5_files.TRANSFORMERS, "text_encoder/model.safetensors")
