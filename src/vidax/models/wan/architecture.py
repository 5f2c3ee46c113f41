"""What a Wan model is without its weights: the shapes of a video in it, and what its phases take."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from vidax.models.interface import Footprint
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan.config import TEXT_TOKENS
from vidax.models.wan.dit import DiT, DiTConfig
from vidax.models.wan.programs import (
    footprint,
    lower_decode,
    lower_layer,
    lower_step,
    lower_text,
    lower_text_layer,
    text_footprint,
)
from vidax.models.wan.vae import VAE, Decoder, VAEConfig
from vidax.nn import abstract
from vidax.ops.flops import flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanArchitecture:
    """The configs of a model's parts and what follows from them; see `vidax.models.interface.Architecture`."""

    dit: DiTConfig
    vae: VAEConfig
    text: T5Config
    scheduler: dict[str, Any] | None = None

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

    def flops(self, width: int, height: int, frames: int, branches: int, dtype) -> dict[str, dict[str, float]]:
        specs = {name: abstract(spec) for name, spec in self.specs(dtype).items()}
        _, h, w, c = latents = self.latent_shape(width, height, frames)
        frame = jax.ShapeDtypeStruct((1, 1, h, w, c), jnp.float32)
        decoder = specs["decoder"].decoder
        _, cache = jax.eval_shape(lambda model, z: model(z, None), decoder, frame)
        tokens = jax.ShapeDtypeStruct((1, TEXT_TOKENS, self.text.dim), jnp.float32)
        noise, times = (jax.ShapeDtypeStruct((branches, *shape), jnp.float32) for shape in (latents, ()))
        context = jax.ShapeDtypeStruct((branches, TEXT_TOKENS, self.dit.dim), dtype)
        return {
            "text": flops(
                lambda model, x, n: model.encode(x, n), specs["text_encoder"], tokens, jax.ShapeDtypeStruct((1,), int)
            ),
            "step": flops(lambda model, *inputs: model(*inputs), specs["transformer"], noise, times, context),
            "decode": flops(lambda model, *inputs: model(*inputs), decoder, frame, cache),
        }

    def footprint(
        self, width: int, height: int, frames: int, branches: int, dtype, mesh: Mesh, program: Compiled | None = None
    ) -> Footprint:
        latents = (1, *self.latent_shape(width, height, frames))
        return footprint(self.dit, latents, branches, dtype, mesh, program)

    def text_footprint(self, dtype, mesh: Mesh, program: Compiled | None = None) -> Footprint:
        return text_footprint(self.text, dtype, mesh, program)

    def specs(self, dtype) -> dict[str, Any]:
        return {
            "text_encoder": T5Encoder.spec(self.text, dtype),
            "transformer": DiT.spec(self.dit, dtype),
            "decoder": VAE(encoder=None, decoder=Decoder.spec(self.vae)),
        }

    def lower_text(self, dtype, mesh: Mesh) -> Lowered:
        return lower_text(self.text, dtype, mesh)

    def lower_text_layer(self, dtype, mesh: Mesh) -> Lowered:
        return lower_text_layer(self.text, dtype, mesh)

    def lower_step(self, width: int, height: int, frames: int, branches: int, past: int, dtype, mesh: Mesh) -> Lowered:
        latents = (1, *self.latent_shape(width, height, frames))
        return lower_step(self.dit, latents, branches, past, mesh, dtype)

    def lower_layer(self, width: int, height: int, frames: int, branches: int, dtype, mesh: Mesh) -> Lowered:
        latents = (1, *self.latent_shape(width, height, frames))
        return lower_layer(self.dit, latents, branches, mesh, dtype)

    def lower_decode(self, width: int, height: int, mesh: Mesh) -> Lowered:
        _, h, w, _ = self.latent_shape(width, height, 1)
        return lower_decode(self.vae, (h, w), mesh)
