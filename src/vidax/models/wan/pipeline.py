"""A Wan model on disk, and its three phases: encode text, denoise, decode.

Nothing here holds weights: the engine loads a part, hands it to the phase and takes its memory back. The jitted
functions are shared by every model and every request, so a shape compiles once in a process.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vidax.errors import UserError
from vidax.models.interface import Part, Text
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.towers.tokenizer import Tokenizer
from vidax.models.wan import mapping
from vidax.models.wan.config import TEXT_TOKENS, dit_config, t5_config, vae_config
from vidax.models.wan.dit import DiT, DiTConfig
from vidax.models.wan.vae import VAE, Decoder, VAEConfig
from vidax.sampling.guidance import guide
from vidax.sampling.solvers import SolverState, SolverTable, initial_state, step
from vidax.weights import Folder, check_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanModel:
    """Wan text-to-video in a diffusers folder; see `vidax.models.interface.Model` for its methods."""

    folder: Folder
    dit: DiTConfig
    vae: VAEConfig
    text: T5Config
    scheduler: dict[str, Any]

    @staticmethod
    def open(folder: Folder) -> "WanModel":
        """Raises UserError where a config is not that of a Wan 2.1 text-to-video model."""
        for option in ("boundary_ratio", "expand_timesteps"):
            if value := folder.index.get(option):
                where = f"{folder.path}/model_index.json"
                raise UserError(f"{where}: {option} is {value!r}, as in Wan 2.2; Wan 2.1 text to video is supported")
        model = WanModel(
            folder=folder,
            dit=dit_config(folder.config("transformer"), f"{folder.path}/transformer/config.json"),
            vae=vae_config(folder.config("vae"), f"{folder.path}/vae/config.json"),
            text=t5_config(folder.config("text_encoder"), f"{folder.path}/text_encoder/config.json"),
            scheduler=folder.config("scheduler"),
        )
        for name, found, wanted in (
            ("text_dim", model.dit.text_dim, model.text.dim),
            ("in_channels", model.dit.in_channels, model.vae.latent_channels),
            ("out_channels", model.dit.out_channels, model.vae.latent_channels),
        ):
            if found != wanted:
                raise UserError(
                    f"{folder.path}: the transformer has {name} {found} where the other components have {wanted}; "
                    "take all of them from one model"
                )
        return model

    @property
    def size_multiple(self) -> int:
        return self.vae.space_factor * self.dit.patch[1]

    @property
    def frame_multiple(self) -> int:
        return self.vae.time_factor * self.dit.patch[0]

    def latent_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int, int]:
        space = self.vae.space_factor
        return (frames - 1) // self.vae.time_factor + 1, height // space, width // space, self.vae.latent_channels

    def attention_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        f, h, w, _ = self.latent_shape(width, height, frames)
        pt, ph, pw = self.dit.patch
        return (f // pt) * (h // ph) * (w // pw), self.dit.heads, self.dit.head_size

    def text_encoder(self, dtype) -> Part:
        return Part(T5Encoder.spec(self.text, dtype), self.folder.checkpoint("text_encoder"), mapping.UMT5_DIFFUSERS)

    def transformer(self, dtype) -> Part:
        return Part(DiT.spec(self.dit, dtype), self.folder.checkpoint("transformer"), mapping.DIT_DIFFUSERS)

    def decoder(self) -> Part:
        """The autoencoder without its encoder, always float32. The whole file is checked, half of it read."""
        checkpoint = self.folder.checkpoint("vae")
        shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
        check_names(VAE.spec(self.vae), mapping.VAE_DIFFUSERS, shapes, source=str(checkpoint.path))
        half = dataclasses.replace(mapping.VAE_DIFFUSERS, skips=mapping.ENCODER_UNUSED)
        return Part(VAE(encoder=None, decoder=Decoder.spec(self.vae)), checkpoint, half)

    def encode_text(self, encoder: T5Encoder, prompts: list[str]) -> Iterator[Text]:
        tokens = Tokenizer.load(self.folder.folder("tokenizer")).encode(prompts, TEXT_TOKENS)
        if (largest := tokens.ids.max()) >= self.text.vocabulary:
            raise UserError(
                f"{self.folder.path}: the tokenizer gives token {largest}, but the text encoder's vocabulary has "
                f"{self.text.vocabulary}; take both from one model"
            )
        for row, truncated in enumerate(tokens.truncated):
            embeddings = encode(encoder, tokens.ids[row : row + 1], tokens.lengths[row : row + 1])
            yield Text(np.array(embeddings[0]), truncated)

    def denoise(
        self,
        transformer: DiT,
        table: SolverTable,
        noise: np.ndarray,
        text: np.ndarray,
        guidance_scale: float | None,
        on_step: Callable[[int], None],
    ) -> jax.Array:
        context = prepare(transformer, text)
        scale = None if guidance_scale is None else jnp.float32(guidance_scale)
        # Committed like the weights: otherwise the first step would compile a program of its own.
        state = jax.device_put(initial_state(table, noise), context.sharding)
        for i in range(table.steps):
            state = denoise_step(transformer, table, jnp.int32(i), state, context, scale)
            state.sample.block_until_ready()
            on_step(i + 1)
        return state.sample

    def decode(self, decoder: VAE, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        cache = None
        for i in range(latents.shape[1]):
            frames, cache = decode_chunk(decoder.decoder, latents[:, i : i + 1], cache, dtype)
            yield np.asarray(frames)


@jax.jit
def encode(encoder: T5Encoder, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    return encoder(ids, lengths)


@jax.jit
def prepare(dit: DiT, text: jax.Array) -> jax.Array:
    return dit.prepare(text)


@functools.partial(jax.jit, donate_argnames="state")
def denoise_step(
    dit: DiT, table: SolverTable, index: jax.Array, state: SolverState, context: jax.Array, scale: jax.Array | None
) -> SolverState:
    """One step of the solver. With a guidance scale, [conditional, unconditional] is one batch in one pass."""
    row = table.row(index)
    latents = state.sample if scale is None else jnp.concatenate([state.sample, state.sample])
    velocity = dit(latents, jnp.full(latents.shape[0], row.timestep), context)
    return step(row, state, velocity if scale is None else guide(velocity, scale))


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="cache")
def decode_chunk(decoder: Decoder, latents: jax.Array, cache: Any, dtype: str) -> tuple[jax.Array, Any]:
    """One chunk of latent frames to frames as `WanModel.decode` gives them, and the cache for the next chunk."""
    frames, cache = decoder(latents, cache)
    if dtype == "uint8":
        return jnp.round((frames + 1) * 127.5).astype(jnp.uint8), cache
    return frames / 2 + 0.5, cache
