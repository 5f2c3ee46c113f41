"""Output by the suffix of its name: a video, float32 frames or one picture; and a contact sheet."""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from vidax.errors import UserError
from vidax.media.files import AtomicFile, FrameWriter, json_text, sentences
from vidax.media.video import Mp4Writer, title

SUFFIXES = {".mp4": "video", ".npy": "float32 frames in [0, 1]", ".png": "one frame"}


def to_uint8(decoded: np.ndarray) -> np.ndarray:
    """The rounding rule: a VAE's output in [-1, 1] to uint8, round((x + 1) * 127.5) with halves to even, clipped.

    As diffusers' VaeImageProcessor, whose (x / 2 + 0.5).clamp(0, 1) * 255 is the same number in float32. The
    official Wan code and diffusers' `export_to_video` cut off instead of rounding: up to one level darker.
    """
    return np.clip(np.rint((decoded + 1) * 127.5), 0, 255).astype(np.uint8)


def check_suffix(path: str | os.PathLike, frames: int) -> str:
    """The suffix of `path` in lower case. Raises UserError where no writer has it, or a .png would hold a video."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        supported = ", ".join(f"{name} ({what})" for name, what in SUFFIXES.items())
        raise UserError(f"{path}: the suffix {suffix!r} is not an output format; use {supported}")
    if suffix == ".png" and frames != 1:
        raise UserError(f"{path}: {frames} frames: a .png holds one; use .mp4 or .npy, or generate 1 frame")
    return suffix


def open_writer(
    path: str | os.PathLike,
    *,
    frames: int,
    height: int,
    width: int,
    fps: int | Fraction,
    tags: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> FrameWriter:
    """The writer for `path`, checked and not yet opened. Raises UserError for whatever can be known now.

    A .npy holds neither `fps` nor `tags`: the JSON record beside it does.
    """
    suffix = check_suffix(path, frames)
    if suffix == ".mp4":
        return Mp4Writer(path, frames=frames, height=height, width=width, fps=fps, tags=tags, overwrite=overwrite)
    if suffix == ".npy":
        return NpyWriter(path, frames=frames, height=height, width=width, overwrite=overwrite)
    return PngWriter(path, height=height, width=width, tags=tags, overwrite=overwrite)


class NpyWriter(FrameWriter):
    """float32 in [0, 1], (frames, height, width, 3). The header goes first, so no video has to fit in memory."""

    dtype = np.float32

    def _open(self) -> None:
        # Not np.lib.format.open_memmap: a full disk would be a SIGBUS there, here it is an OSError.
        self._file = open(self.temporary, "wb")  # noqa: SIM115  closed in _finish or _release
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.frames, self.height, self.width, 3)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def _put(self, chunk: np.ndarray) -> None:
        self._file.write(chunk.astype("<f4").tobytes())

    def _finish(self) -> None:
        self._file.close()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class PngWriter(FrameWriter):
    """One uint8 frame."""

    dtype = np.uint8

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        height: int,
        width: int,
        tags: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ):
        super().__init__(path, frames=1, height=height, width=width, overwrite=overwrite)
        self.tags = dict(tags or {})

    def _put(self, chunk: np.ndarray) -> None:
        _save_png(self.temporary, chunk[0], self.tags)


def contact_sheet(
    frames: Sequence[np.ndarray] | np.ndarray, *, columns: int = 4, rows: int = 3, gap: int = 4
) -> np.ndarray:
    """Up to `columns * rows` evenly spaced frames, first and last among them, on a dark ground, `gap` pixels apart.

    frames: uint8, (F, height, width, 3). Returns uint8, (height, width, 3), no larger than the frames shown need.
    """
    shown = [frames[index] for index in sheet_indices(len(frames), columns * rows)]
    height, width, _ = shown[0].shape
    columns = min(columns, len(shown))
    rows = math.ceil(len(shown) / columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 24, np.uint8)
    for cell, frame in enumerate(shown):
        top, left = (cell // columns) * (height + gap), (cell % columns) * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    return sheet


def sheet_indices(frames: int, count: int) -> list[int]:
    """Which of `frames` frames a sheet of `count` shows, so that a streaming caller keeps only those."""
    assert frames > 0 and count > 0, (frames, count)
    return [int(index) for index in np.rint(np.linspace(0, frames - 1, min(frames, count)))]


def write_png(
    path: str | os.PathLike, image: np.ndarray, *, tags: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write a uint8 (height, width, 3) picture, whole or not at all; returns where it went (see `AtomicFile`)."""
    with sentences(path), AtomicFile(path, overwrite=overwrite) as file:
        _save_png(file.temporary, image, tags or {})
    return file.path


def _save_png(path: Path, image: np.ndarray, tags: Mapping[str, Any]) -> None:
    info = PngImagePlugin.PngInfo()
    if tags:
        info.add_itxt("Title", title(tags))
        info.add_itxt("Comment", json_text(tags))
    Image.fromarray(image).save(path, format="PNG", pnginfo=info)
