"""What a Wan model is without its weights: the shapes of a video in it, and what its phases take."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from vidax.media.image import area_size, cover, fitting_size, stretch_bicubic
from vidax.models.interface import Footprint, Video
from vidax.models.towers.clip_vision import CLIPVision, CLIPVisionConfig
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan.config import TEXT_TOKENS
from vidax.models.wan.dit import Context, DiT, DiTConfig
from vidax.models.wan.programs import (
    Known,
    footprint,
    lower_decode,
    lower_encode,
    lower_layer,
    lower_look,
    lower_step,
    lower_text,
    lower_text_layer,
    text_footprint,
)
from vidax.models.wan.vae import VAE, Decoder, Encoder, VAEConfig
from vidax.nn import abstract
from vidax.ops.flops import flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanArchitecture:
    """The configs of a model's parts and what follows from them; see `vidax.models.interface.Architecture`."""

    dit: DiTConfig
    vae: VAEConfig
    text: T5Config
    image: CLIPVisionConfig | None = None
    experts: int = 1
    first_frame: bool = False  # whether an image may be given as the clean first frame
    boundary_ratio: float | None = None
    scheduler: dict[str, Any] | None = None

    @property
    def by_channels(self) -> bool:
        """Whether images are given in channels beside the noisy ones."""
        return self.dit.in_channels > self.dit.out_channels

    @property
    def images(self) -> tuple[int, int]:
        if not self.by_channels:
            return 0, int(self.first_frame)
        if self.dit.image_positions:
            return 2, 2
        # An image encoder's states of two images have no place of their own without learned positions.
        return 1, 1 if self.image else 2

    def image_size(self, image: tuple[int, int], area: int) -> tuple[int, int]:
        choose = area_size if self.by_channels else fitting_size
        return choose(*image, area, self.size_multiple)

    def fit(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return stretch_bicubic(pixels, size) if self.by_channels else cover(pixels, size)

    def known(self, images: int) -> Known:
        """Sizes of what a video is made from beside its text."""
        states = images * self.image.tokens if self.image else 0
        return Known(states, self.dit.patch[0] if images and not self.by_channels else 0)

    def chunks(self, video: Video) -> int:
        if not video.images:
            return 0
        return self.latent_shape(video.width, video.height, video.frames)[0] if self.by_channels else 1

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

    def flops(self, video: Video, dtype) -> dict[str, dict[str, float]]:
        specs = {name: abstract(spec) for name, spec in self.specs(dtype).items()}
        _, h, w, c = latents = self.latent_shape(video.width, video.height, video.frames)
        frame = jax.ShapeDtypeStruct((1, 1, h, w, c), jnp.float32)
        decoder = specs["decoder"].decoder
        _, cache = jax.eval_shape(lambda model, z: model(z, None), decoder, frame)
        tokens = jax.ShapeDtypeStruct((1, TEXT_TOKENS, self.text.dim), jnp.float32)
        seen = (*latents[:3], self.dit.in_channels)
        noise, times = (jax.ShapeDtypeStruct((video.branches, *shape), jnp.float32) for shape in (seen, ()))
        known = self.known(video.images)
        text, states = (
            count and jax.ShapeDtypeStruct((video.branches, count, self.dit.dim), dtype)
            for count in (TEXT_TOKENS, known.states)
        )
        return {
            "text": flops(
                lambda model, x, n: model.encode(x, n), specs["text_encoder"], tokens, jax.ShapeDtypeStruct((1,), int)
            ),
            "step": flops(
                lambda model, *inputs: model(*inputs, known.frames),
                specs["transformer"],
                *(noise, times, Context(text, states or None)),
            ),
            "decode": flops(lambda model, *inputs: model(*inputs), decoder, frame, cache),
            **(self.flops_of_images(video, specs) if video.images else {}),
        }

    def flops_of_images(self, video: Video, specs: dict[str, Any]) -> dict[str, dict[str, float]]:
        def frames(count: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((1, count, video.height, video.width, 3), jnp.float32)

        encoder, chunk, cache = specs["encoder"].encoder, frames(1), None
        if self.chunks(video) > 1:
            _, cache = jax.eval_shape(lambda model, x: model(x, None), encoder, chunk)
            chunk = frames(self.vae.time_factor)
        found = {"encode": flops(lambda model, *inputs: model(*inputs), encoder, chunk, cache)}
        if self.image is None:
            return found
        pictures = jax.ShapeDtypeStruct((video.images, self.image.image, self.image.image, 3), jnp.float32)
        return found | {"look": flops(lambda tower, x: tower(x), specs["image_encoder"], pictures)}

    def footprint(self, video: Video, dtype, mesh: Mesh, program: Compiled | None = None) -> Footprint:
        return footprint(self.dit, self.latents(video), video.branches, dtype, mesh, program)

    def text_footprint(self, dtype, mesh: Mesh, program: Compiled | None = None) -> Footprint:
        return text_footprint(self.text, dtype, mesh, program)

    def specs(self, dtype) -> dict[str, Any]:
        return {
            "text_encoder": T5Encoder.spec(self.text, dtype),
            **({"image_encoder": CLIPVision.spec(self.image, dtype)} if self.image else {}),
            **({"encoder": VAE(Encoder.spec(self.vae), None)} if self.images[1] else {}),
            "transformer": DiT.spec(self.dit, dtype),
            "decoder": VAE(None, Decoder.spec(self.vae)),
        }

    def latents(self, video: Video) -> tuple[int, ...]:
        return (1, *self.latent_shape(video.width, video.height, video.frames))

    def lower_text(self, dtype, mesh: Mesh) -> Lowered:
        return lower_text(self.text, dtype, mesh)

    def lower_text_layer(self, dtype, mesh: Mesh) -> Lowered:
        return lower_text_layer(self.text, dtype, mesh)

    def lower_step(self, video: Video, past: int, dtype, mesh: Mesh) -> Lowered:
        known = self.known(video.images)
        return lower_step(self.dit, self.latents(video), video.branches, past, mesh, dtype, known=known)

    def lower_layer(self, video: Video, dtype, mesh: Mesh) -> Lowered:
        known = self.known(video.images)
        return lower_layer(self.dit, self.latents(video), video.branches, mesh, dtype, known=known)

    def lower_look(self, images: int, dtype, mesh: Mesh) -> Lowered:
        assert self.image is not None
        return lower_look(self.image, images, dtype, mesh)

    def lower_encode(self, video: Video, mesh: Mesh) -> Lowered:
        return lower_encode(self.vae, (video.height, video.width), mesh, first=self.chunks(video) == 1)

    def lower_decode(self, width: int, height: int, mesh: Mesh) -> Lowered:
        _, h, w, _ = self.latent_shape(width, height, 1)
        return lower_decode(self.vae, (h, w), mesh)
