"""What a Wan model is made of on disk, and its three phases as functions of arrays: encode text, denoise, decode.

Nothing here holds weights: the engine loads a part, hands it to the phase and takes its memory back. The jitted
    functions are shared by every model and every request, so a shape compiles once in a process.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vidax.errors import UserError
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.towers.tokenizer import Tokenizer
from vidax.models.wan import mapping
from vidax.models.wan.config import TEXT_TOKENS, dit_config, t5_config, vae_config
from vidax.models.wan.dit import DiT, DiTConfig
from vidax.models.wan.vae import VAE, Decoder, VAEConfig
from vidax.sampling.guidance import guide
from vidax.sampling.solvers import SolverState, SolverTable, initial_state, step
from vidax.weights import Checkpoint, Folder, Mapping, check_names


class Part(NamedTuple):
    """What the engine needs to load one part of a model."""

    spec: Any
    checkpoint: Checkpoint
    mapping: Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanModel:
    """A Wan text-to-video model in a diffusers folder; its configs are read and checked, its weights are not."""

    folder: Folder
    dit: DiTConfig
    vae: VAEConfig
    text: T5Config
    scheduler: dict[str, Any]

    @staticmethod
    def open(folder: Folder) -> "WanModel":
        """Raises UserError where the folder is not a Wan 2.1 text-to-video pipeline."""
        if folder.pipeline != "WanPipeline":
            raise UserError(f"{folder.path}: holds a {folder.pipeline}; vidax runs WanPipeline folders (text to video)")
        return WanModel(
            folder=folder,
            dit=dit_config(folder.config("transformer"), f"{folder.path}/transformer/config.json"),
            vae=vae_config(folder.config("vae"), f"{folder.path}/vae/config.json"),
            text=t5_config(folder.config("text_encoder"), f"{folder.path}/text_encoder/config.json"),
            scheduler=folder.config("scheduler"),
        )

    @property
    def size_multiple(self) -> int:
        """Width and height are multiples of this: what the autoencoder and the patches divide by."""
        return self.vae.space_factor * self.dit.patch[1]

    @property
    def frame_multiple(self) -> int:
        """Frames are a multiple of this, plus one."""
        return self.vae.time_factor * self.dit.patch[0]

    def latent_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int, int]:
        """(F, H, W, C) of the latents of a video."""
        space = self.vae.space_factor
        return (frames - 1) // self.vae.time_factor + 1, height // space, width // space, self.vae.latent_channels

    @property
    def text_tokens(self) -> int:
        """The length that prompts are padded to or cut at."""
        return TEXT_TOKENS

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder.folder("tokenizer"))

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


@jax.jit
def encode_text(encoder: T5Encoder, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Token ids [B S] to embeddings [B S text_dim] float32, zero past each length."""
    return encoder(ids, lengths)


@jax.jit
def prepare(dit: DiT, text: jax.Array) -> jax.Array:
    return dit.prepare(text)


@functools.partial(jax.jit, donate_argnames="state")
def denoise_step(
    dit: DiT, table: SolverTable, index: jax.Array, state: SolverState, context: jax.Array, scale: jax.Array | None
) -> SolverState:
    """One step of the solver. With a guidance scale the batch is [conditional, unconditional] in one pass, else one
    branch.
    """
    row = table.row(index)
    latents = state.sample if scale is None else jnp.concatenate([state.sample, state.sample])
    velocity = dit(latents, jnp.full(latents.shape[0], row.timestep), context)
    return step(row, state, velocity if scale is None else guide(velocity, scale))


def denoise(
    dit: DiT,
    table: SolverTable,
    noise: np.ndarray,
    text: jax.Array,
    guidance_scale: float | None,
    on_step: Callable[[int], None],
) -> jax.Array:
    """Latents [B F H W C] from noise of that shape.

    text [B S text_dim] without guidance (`guidance_scale` None), [2B S text_dim] with it, the negative prompts last.
    on_step is called after each step has finished on the device, with the steps done.
    """
    context = prepare(dit, text)
    scale = None if guidance_scale is None else jnp.float32(guidance_scale)
    state = initial_state(table, noise)
    for i in range(table.steps):
        state = denoise_step(dit, table, jnp.int32(i), state, context, scale)
        state.sample.block_until_ready()
        on_step(i + 1)
    return state.sample


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="cache")
def decode_chunk(decoder: Decoder, latents: jax.Array, cache: Any, dtype: str) -> tuple[jax.Array, Any]:
    """One chunk of latent frames to frames as `decode` gives them, and the cache for the next chunk."""
    frames, cache = decoder(latents, cache)
    if dtype == "uint8":
        return jnp.round((frames + 1) * 127.5).astype(jnp.uint8), cache
    return frames / 2 + 0.5, cache


def decode(decoder: Decoder, latents: jax.Array, dtype: str = "uint8") -> Iterator[np.ndarray]:
    """Frames [B f H W 3] of latents [B F H W C], chunk by chunk: the first frame, then four for each latent frame.

    dtype: "uint8", rounded on the device, or "float32" in [0, 1]. Device memory does not grow with the number of
        frames.
    """
    cache = None
    for i in range(latents.shape[1]):
        frames, cache = decode_chunk(decoder, latents[:, i : i + 1], cache, dtype)
        yield np.asarray(frames)
