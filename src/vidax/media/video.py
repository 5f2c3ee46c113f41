"""H.264 in mp4 through PyAV: uint8 frames in, a file that every player opens.

Colour: RGB is converted with the BT.709 matrix to limited range, and the file says so (matrix, primaries, transfer,
range). FFmpeg's default is the BT.601 matrix with no tag; players then guess, and reds and greens shift.
"""

import contextlib
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter

from vidax.errors import UserError
from vidax.media.files import FrameWriter, json_text

# A chroma sample is the mean of its 2x2 pixels, rounded to nearest; `chromaloc=1` below says that it is their middle.
CHROMA = Interpolation.AREA | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP


class Mp4Writer(FrameWriter):
    """H.264, yuv420p, index at the front (`faststart`), every frame shown for 1/fps seconds.

    tags: what the video was made from (prompt, seed, model, version, ...). The prompt is the file's title; all of it,
          as JSON, is the comment.
    crf:  18 is visually lossless; lower is larger.
    Raises UserError as `FrameWriter` does, and for an odd size (yuv420p halves both sides) or fps <= 0.
    """

    dtype = np.uint8
    failures = (OSError, av.error.FFmpegError)

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        frames: int,
        height: int,
        width: int,
        fps: int | Fraction,
        tags: Mapping[str, Any] | None = None,
        crf: int = 18,
        overwrite: bool = False,
    ):
        if height % 2 or width % 2:
            raise UserError(f"{width}x{height}: an mp4 (H.264, yuv420p) takes an even width and height")
        if fps <= 0:
            raise UserError(f"{fps} frames per second: it has to be above 0")
        super().__init__(path, frames=frames, height=height, width=width, overwrite=overwrite)
        self.fps, self.tags, self.crf = Fraction(fps), dict(tags or {}), crf

    def _open(self) -> None:
        self._container = av.open(str(self.temporary), "w", format="mp4", options={"movflags": "faststart"})
        if self.tags:
            self._container.metadata["title"] = title(self.tags)
            self._container.metadata["comment"] = json_text(self.tags)
        options = {"crf": str(self.crf), "x264-params": "chromaloc=1"}
        self._stream = self._container.add_stream("libx264", rate=self.fps, options=options)
        self._stream.width, self._stream.height, self._stream.pix_fmt = self.width, self.height, "yuv420p"
        codec = self._stream.codec_context
        codec.color_range, codec.colorspace = ColorRange.MPEG, Colorspace.ITU709
        codec.color_primaries, codec.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        self._reformatter = VideoReformatter()

    def _put(self, chunk: np.ndarray) -> None:
        first = self.written - len(chunk)
        for index, rgb in enumerate(np.ascontiguousarray(chunk), first):
            frame = self._reformatter.reformat(
                av.VideoFrame.from_ndarray(rgb, format="rgb24"),
                format="yuv420p",
                interpolation=CHROMA,
                src_color_range=ColorRange.JPEG,
                dst_color_range=ColorRange.MPEG,
                dst_colorspace=Colorspace.ITU709,
            )
            frame.pts, frame.time_base = index, 1 / self.fps
            self._container.mux(self._stream.encode(frame))

    def _finish(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def _release(self) -> None:
        # Closing writes the trailer, and a disk that was full still is.
        with contextlib.suppress(*self.failures):
            self._container.close()


def title(tags: Mapping[str, Any]) -> str:
    """The prompt on one line, without what a text tag cannot hold (NUL, lone surrogates)."""
    line = " ".join(str(tags.get("prompt", "vidax")).replace("\0", " ").split())
    return line.encode("utf-8", "replace").decode()
