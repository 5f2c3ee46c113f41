"""What a CogVideoX model is without its weights."""

import dataclasses
from typing import ClassVar

import numpy as np

from vidax.media.image import stretch
from vidax.models.architecture import Architecture, Networks
from vidax.models.cogvideox.dit import DiT
from vidax.models.cogvideox.vae import LATENT_FRAMES, VAE, chunks, tile_rows
from vidax.models.interface import Video
from vidax.models.programs import Known


@dataclasses.dataclass(frozen=True, kw_only=True)
class CogVideoXArchitecture(Architecture):
    family: ClassVar = "cogvideox"
    networks: ClassVar = Networks(DiT, VAE)
    text_dtype: ClassVar = "float32"  # padding is a part of the text, and in bfloat16 it is what errs most
    noise_order: ClassVar = (0, 1, 4, 2, 3)
    tiles: ClassVar = True

    @property
    def text_tokens(self) -> int:
        return self.dit.text_tokens

    @property
    def images(self) -> tuple[int, int]:
        count = int(self.dit.in_channels > self.dit.out_channels)
        return count, count

    def image_size(self, image: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
        """1.0 has its own size; in 1.5 the shorter side is that of the card, and the longer follows from the image.

        Source: zai-org/CogVideo, inference/cli_demo.py and sat/sample_video.py.
        """
        if self.dit.patch[0] == 1:
            return size
        short, (small, large) = min(size), sorted(image)
        multiple = self.size_multiple
        long = int(short * large / small / multiple + 0.5) * multiple
        return (short, long) if image[0] <= image[1] else (long, short)

    def fit(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return stretch(pixels, size)

    def known(self, video: Video) -> Known:
        return Known((self.text_tokens, self.text.dim))

    def encoded_chunks(self, video: Video) -> list[int]:
        return [1]

    def decoded_chunks(self, frames: int) -> list[int]:
        return [chunk.stop - chunk.start for chunk in chunks(self.latent_frames(frames), LATENT_FRAMES)]

    @property
    def only(self) -> tuple[int, int, int] | None:
        if self.dit.only_size is None:
            return None
        frames, height, width = self.dit.only_size
        space = self.vae.space_factor
        return width * space, height * space, (frames - 1) * self.vae.time_factor + 1

    @property
    def frame_multiple(self) -> int:
        """An even number of latent frames would be decoded to more frames than make it."""
        return LATENT_FRAMES * self.vae.time_factor

    def latent_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int, int]:
        """In 1.5 with a frame in front that makes pairs of them, and is not decoded."""
        f, h, w, c = super().latent_shape(width, height, frames)
        return f + -f % self.dit.patch[0], h, w, c

    def tiling(self, video: Video) -> list[tuple[int, int]]:
        parts = super().tiling(video)
        if not video.tiled:
            return parts
        return [(tile.height, tile.width) for row in tile_rows(*parts[0], self.vae) for tile in row]
