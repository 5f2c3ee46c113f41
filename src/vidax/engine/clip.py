"""A video that has been made: its frames as they come, or all of them."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vidax.media.files import record, write_json
from vidax.media.image import to_float32
from vidax.media.output import open_writer, to_uint8


class Clip(NamedTuple):
    """A job's frames [f H W 3] as they are decoded, and its record, which is complete when the last one is taken.

    What stopped the job, be it steps ago, is raised when its frames are asked for.
    """

    frames: Iterator[np.ndarray]
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A video: frames [F H W 3], float32 in [0, 1] or uint8, frames per second, every setting, version and timing."""

    frames: np.ndarray
    fps: int
    metadata: dict[str, Any]

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> Path:
        """Write the frames as .mp4, .npy or .png and the metadata as .json beside them; returns the path."""
        frames, height, width = self.frames.shape[:3]
        writer = open_writer(
            path, frames=frames, height=height, width=width, fps=self.fps, tags=tags(self.metadata), overwrite=overwrite
        )
        with writer:
            writer.write(as_dtype(self.frames, writer.dtype))
        write_json(record(writer.path), self.metadata, overwrite=overwrite)
        return writer.path


def tags(metadata: dict[str, Any]) -> dict[str, Any]:
    """What goes into the video file itself."""
    kept = ("prompt", "negative_prompt", "seed", "model", "steps", "guidance_scale", "flow_shift", "solver", "noise")
    some = ("guidance_scale_2", "boundary_ratio", "image", "image_sha256", "last_image", "last_image_sha256", "fit")
    found = {key: metadata[key] for key in (*kept, *some) if key in kept or key in metadata}
    return found | {"vidax": metadata["versions"]["vidax"]}


def as_dtype(frames: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Frames as uint8 or as float32 in [0, 1], whichever they are."""
    if frames.dtype == dtype:
        return frames
    return to_uint8(frames * 2 - 1) if dtype == np.uint8 else to_float32(frames)
