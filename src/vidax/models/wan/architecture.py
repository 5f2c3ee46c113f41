"""What a Wan model is without its weights."""

import dataclasses
from typing import ClassVar

import numpy as np

from vidax.media.image import area_size, cover, fitting_size, stretch_bicubic
from vidax.models.architecture import Architecture, Networks
from vidax.models.interface import Video
from vidax.models.programs import Known
from vidax.models.wan.config import TEXT_TOKENS
from vidax.models.wan.dit import DiT
from vidax.models.wan.vae import VAE


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanArchitecture(Architecture):
    """first_frame: whether an image may be given as the clean first frame."""

    family: ClassVar = "wan"
    networks: ClassVar = Networks(DiT, VAE)
    text_tokens: ClassVar = TEXT_TOKENS
    noise_order: ClassVar = (0, 4, 1, 2, 3)

    first_frame: bool = False

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

    def image_size(self, image: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
        choose = area_size if self.by_channels else fitting_size
        return choose(*image, size[0] * size[1], self.size_multiple)

    def fit(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return stretch_bicubic(pixels, size) if self.by_channels else cover(pixels, size)

    def known(self, video: Video) -> Known:
        text = TEXT_TOKENS, self.text.dim
        if not video.images:
            return Known(text)
        states = (video.images * self.image.tokens, self.image.dim) if self.image else None
        return Known(text, states, 0 if self.by_channels else self.dit.patch[0])

    def encoded_chunks(self, video: Video) -> list[int]:
        return [1, *([self.vae.time_factor] * (self.latent_frames(video.frames) - 1) if self.by_channels else ())]

    def decoded_chunks(self, frames: int) -> list[int]:
        return [1] * self.latent_frames(frames)
