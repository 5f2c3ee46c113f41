"""A CogVideoX model on disk: its parts, what it is given of an image, decoding in tiles, and whether the parts fit
together.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from vidax.errors import UserError
from vidax.media.output import to_uint8
from vidax.models.cogvideox.architecture import CogVideoXArchitecture
from vidax.models.cogvideox.config import PUBLISHED
from vidax.models.cogvideox.layouts import COGVIDEOX
from vidax.models.cogvideox.vae import VAEConfig, decode_tiles
from vidax.models.condition import Given
from vidax.models.interface import Sources, Video
from vidax.models.model import TOGETHER, Model, check_published, check_text, tokenizer_of
from vidax.models.programs import decode_chunk
from vidax.models.towers.t5 import T5_XXL
from vidax.parallel.rules import whole
from vidax.sampling.noise import Stream
from vidax.weights import Component
from vidax.weights.layouts import open_component


@dataclasses.dataclass(frozen=True, kw_only=True)
class CogVideoXModel(CogVideoXArchitecture, Model):
    """A CogVideoX model on disk, in any layout."""

    cleans_text: ClassVar = False
    masks_padding: ClassVar = False

    @staticmethod
    def open(sources: Sources) -> "CogVideoXModel":
        """Raises UserError where a part is not that of a CogVideoX model, or they do not fit together."""
        parts = {name: open_component(COGVIDEOX, name, sources.parts[name]) for name in COGVIDEOX.kinds}
        model = CogVideoXModel(
            parts=parts,
            tokenizer=tokenizer_of(sources, parts["text_encoder"]),
            scheduler=sources.scheduler,
            dit=parts["transformer"].config,
            vae=scaled(parts["vae"], parts["transformer"]),
            text=parts["text_encoder"].config,
        )
        check_parts(model)
        return model

    @property
    def pipeline(self) -> str:
        return "CogVideoXImageToVideoPipeline" if self.images[1] else "CogVideoXPipeline"

    def video_chunks(self, images: Sequence[np.ndarray], frames: int) -> Iterator[np.ndarray]:
        (image,) = images
        yield image[None, None] * 2 - 1

    def given(self, video: Video, encoded: Any, noise: Stream) -> Given:
        """The latents of the image are a sample of what the encoder says, and stand in the first frame, which in 1.5 is
        the one that is not decoded: as in diffusers.
        """
        image = encoded.sample(noise.normal(encoded.mean.shape)) * np.float32(self.vae.image_scale)
        known = np.zeros(self.latents(video), np.float32)
        known[:, :1] = image
        return Given(known, None)

    def decode(self, decoder: Any, video: Video, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        if not video.tiled:
            yield from super().decode(decoder, video, latents, dtype)
            return

        def decode(latents: np.ndarray, cache: Any) -> Any:
            return decode_chunk(decoder.decoder, whole(latents), cache, None)

        frames = decode_tiles(decode, latents, self.vae)
        for start in range(0, frames.shape[1], self.frame_multiple):
            chunk = frames[:, start : start + self.frame_multiple]
            yield to_uint8(chunk) if dtype == "uint8" else np.clip(chunk, -1, 1) / 2 + 0.5


def scaled(vae: Component, transformer: Component) -> VAEConfig:
    """An autoencoder's config. Where no file says how its latents are scaled, that is known of the published
    transformers alone.
    """
    if vae.config.scaling_factor is not None:
        return vae.config
    if (published := PUBLISHED.get(transformer.config)) is None:
        raise UserError(
            f"{vae.path}: nothing says how latents are scaled, and {transformer.path} is no published transformer; put "
            "the autoencoder's config.json beside it, as diffusers writes it"
        )
    scale, invert = published.scaling_factor, published.invert_scale_latents
    return dataclasses.replace(vae.config, scaling_factor=scale, invert_scale_latents=invert)


def check_parts(model: CogVideoXModel) -> None:
    """Raises UserError unless the parts fit together; those of a published transformer are known to the number."""
    dit, files = model.dit, model.files
    transformer, latents = files["transformer"], model.vae.latent_channels
    check_text(model)
    if dit.out_channels != latents:
        raise UserError(
            f"{files['vae']}: latent_channels {latents}; the transformer {transformer} has out_channels "
            f"{dit.out_channels}; {TOGETHER}"
        )
    if dit.in_channels not in (latents, 2 * latents):
        raise UserError(
            f"{transformer}: in_channels {dit.in_channels}; CogVideoX text to video takes {latents}, image to video "
            f"{2 * latents}"
        )
    if vae := PUBLISHED.get(dit):
        check_published(model, COGVIDEOX, {"vae": (model.vae, vae), "text_encoder": (model.text, T5_XXL)})
