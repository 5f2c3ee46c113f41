"""Tiny CogVideoX models: their weights and whole folders in diffusers' layout, made as tests/tiny.py makes Wan's."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pth_files import Ordered, write_pth
from tiny import SEED, TEXT_ENCODER_CONFIG, Part, renamed, write_folder

from vidax.models.cogvideox import config, mapping
from vidax.models.cogvideox.dit import DiT
from vidax.models.cogvideox.vae import VAE
from vidax.models.towers import t5_files
from vidax.models.towers.t5 import T5Encoder

TEXT = 12  # tokens

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

VAE_CONFIG = {
    "_class_name": "AutoencoderKLCogVideoX",
    "act_fn": "silu",
    "block_out_channels": [8, 16, 16, 24],
    "in_channels": 3,
    "invert_scale_latents": False,
    "latent_channels": 4,
    "latents_mean": None,
    "latents_std": None,
    "layers_per_block": 1,
    "norm_eps": 1e-6,
    "norm_num_groups": 4,
    "out_channels": 3,
    "sample_height": 96,  # tiles of 6 x 5 latents
    "sample_width": 80,
    "scaling_factor": 0.7,
    "shift_factor": None,
    "temporal_compression_ratio": 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}

T5_CONFIG = {**TEXT_ENCODER_CONFIG, "architectures": ["T5EncoderModel"], "model_type": "t5"}

DDIM = {
    "_class_name": "CogVideoXDDIMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "set_alpha_to_one": True,
    "snr_shift_scale": 3.0,
    "timestep_spacing": "trailing",
}
DPM = {**DDIM, "_class_name": "CogVideoXDPMScheduler", "snr_shift_scale": 1.0}


def transformer(config_file: Mapping[str, Any] = SINCOS, dtype=np.float32) -> Part:
    spec = DiT.spec(config.dit_config(config_file, "tiny"), dtype)
    return Part(spec, mapping.DIT_DIFFUSERS, "transformer/diffusion_pytorch_model.safetensors")


def text_encoder(config_file: Mapping[str, Any] = T5_CONFIG, dtype=np.float32) -> Part:
    spec = T5Encoder.spec(config.t5_config(config_file, "tiny"), dtype)
    return Part(spec, t5_files.TRANSFORMERS, "text_encoder/model.safetensors")


def vae(config_file: Mapping[str, Any] = VAE_CONFIG) -> Part:
    spec = VAE.spec(config.vae_config(config_file, "tiny"))
    return Part(spec, mapping.VAE_DIFFUSERS, "vae/diffusion_pytorch_model.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """What a pipeline's folder holds, for `tiny.write_folder`."""

    transformer: Mapping[str, Any]
    scheduler: Mapping[str, Any] = dataclasses.field(default_factory=lambda: DPM)
    vae: Mapping[str, Any] = dataclasses.field(default_factory=lambda: VAE_CONFIG)
    text_encoder: Mapping[str, Any] = dataclasses.field(default_factory=lambda: T5_CONFIG)

    @property
    def pipeline(self) -> str:
        to_video = "ImageToVideo" if self.transformer["in_channels"] > self.transformer["out_channels"] else ""
        return f"CogVideoX{to_video}Pipeline"

    @property
    def files(self) -> dict[str, Mapping[str, Any]]:
        index = {
            "_class_name": self.pipeline,
            "_diffusers_version": "0.42.1",
            "scheduler": ["diffusers", self.scheduler["_class_name"]],
            "text_encoder": ["transformers", "T5EncoderModel"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLCogVideoX"],
        }
        return {
            "model_index.json": index,
            "scheduler/scheduler_config.json": self.scheduler,
            "transformer/config.json": self.transformer,
            "vae/config.json": self.vae,
            "text_encoder/config.json": self.text_encoder,
        }

    def parts(self, seed: int = SEED) -> list[tuple[Part, int]]:
        networks = transformer(self.transformer), vae(self.vae), text_encoder(self.text_encoder)
        return [(part, seed) for part in networks]


INVERTED = {**VAE_CONFIG, "invert_scale_latents": True}
FOLDERS = {
    "2b": Folder(transformer=SINCOS, scheduler=DDIM),
    "5b": Folder(transformer=ROTARY),
    "5b-i2v": Folder(transformer=LEARNED),
    "1.5-5b": Folder(transformer=PAIRS, vae=INVERTED),
    "1.5-5b-i2v": Folder(transformer=PAIRS_I2V, vae=INVERTED),
}


def write_official_folder(path: Path, folder: Folder) -> Path:
    """Write a model in the layout of the official code, with the config.json that tells it from the published ones, its
    text encoder and tokenizer as transformers has them.
    """
    write_folder(path, folder)
    shutil.rmtree(path / "scheduler")
    (path / "model_index.json").unlink()
    dit, autoencoder = transformer(folder.transformer), vae(folder.vae)
    for part in (dit, autoencoder):
        (path / part.file).unlink()
    names = dataclasses.replace(mapping.dit_official(dit.spec.config), prefix="model.diffusion_model.")
    coder = renamed(autoencoder, mapping.vae_official()) | {"loss.logvar": np.zeros((), np.float32)}
    write_pth(path / "transformer" / "mp_rank_00_model_states.pt", {"module": Ordered(renamed(dit, names))})
    write_pth(path / "vae" / "3d-vae.pt", {"state_dict": Ordered(coder)})
    return path
