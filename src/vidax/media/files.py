"""Output files: refused early, written under a temporary name, then whole or not there at all.

A file that costs an hour is checked before the hour (`claim_output`), never left half-written (`AtomicFile`) and never
lost to another run that finished first under the same name (`AtomicFile` then takes the next free one).
"""

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from vidax.errors import UserError


def claim_output(path: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Check that `path` can be written before the work starts; leaves nothing behind.

    The JSON record beside an output shares its stem, so a `.json` already there is refused too.
    Raises UserError: a file is there and `overwrite` is false, the folder is missing, read-only or full.
    """
    path = Path(path)
    with sentences(path):
        for taken in (path, record(path)):
            if taken.is_dir():
                raise UserError(f"{taken} is a folder; name a file in it")
            if os.path.lexists(taken) and not overwrite:
                raise UserError(f"{taken} exists; choose another name, or allow overwriting")
        _create_temporary(path).unlink()
    return path


def names(path: Path) -> Iterator[Path]:
    """`stem.suffix`, then `stem-0002.suffix`, `stem-0003.suffix`, ..."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def free(path: Path) -> bool:
    """Whether neither `path` is there nor the record that would be beside it."""
    return not os.path.lexists(path) and not os.path.lexists(record(path))


def free_name(path: Path) -> Path:
    """The first of `names` that is free."""
    return next(filter(free, names(path)))


def record(path: Path) -> Path:
    """The JSON file beside an output."""
    return path.with_suffix(".json")


def slug(text: str, limit: int = 48) -> str:
    """A prompt as part of a file name: `A cat, walking!` -> `a-cat-walking`, whole words up to `limit` characters."""
    words = re.findall(r"[^\W_]+", text.lower())
    short = "-".join(words)[: limit + 1]
    if len(short) > limit:
        short = short.rpartition("-")[0] or short[:limit]
    return short or "video"


def json_text(data: Any) -> str:
    """Sorted, indented JSON. A lone surrogate (an undecodable byte of an argument) becomes its escape: still JSON."""
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def write_json(path: str | os.PathLike, data: Any, *, overwrite: bool = False) -> Path:
    """Write `data` to `path`, whole or not at all; returns where it went (see `AtomicFile`)."""
    content = json_text(data) + "\n"
    with sentences(path), AtomicFile(path, overwrite=overwrite) as file:
        file.temporary.write_text(content, encoding="utf-8")
    return file.path


class AtomicFile:
    """`with AtomicFile(path) as file:` write to `file.temporary`; renamed to `path` at the end, removed on error.

    After the block `file.path` says where the file is. Without `overwrite` that is a free name beside `path` where
    another process has taken `path` in the meantime: finished work is kept, and so is theirs.
    """

    def __init__(self, path: str | os.PathLike, *, overwrite: bool = False):
        self.path = Path(path)
        self.overwrite = overwrite

    def __enter__(self) -> Self:
        self.temporary = _create_temporary(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if not self.overwrite and os.path.lexists(self.path):
                    self.path = free_name(self.path)
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


class FrameWriter(AtomicFile):
    """One output file, fed as frames are decoded: `with writer: writer.write(chunk)`, chunks (f, height, width, 3).

    The constructor makes every check that can be made early; `with` opens the file. `dtype` says what `write`
    takes: uint8, or float32 in [0, 1]. Exactly `frames` frames have to be written. Errors of the file or the
    encoder are UserErrors; exceptions of the block itself pass through, and the file is gone.
    """

    dtype: ClassVar[type[np.generic]]
    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, path: str | os.PathLike, *, frames: int, height: int, width: int, overwrite: bool = False):
        assert frames > 0 and height > 0 and width > 0, (frames, height, width)
        super().__init__(claim_output(path, overwrite=overwrite), overwrite=overwrite)
        self.frames, self.height, self.width = frames, height, width
        self.written = 0

    def __enter__(self) -> Self:
        with sentences(self.path, self.failures):
            super().__enter__()
            try:
                self._open()
            except BaseException:
                self.temporary.unlink(missing_ok=True)
                raise
        return self

    def write(self, chunk: np.ndarray) -> None:
        chunk = np.asarray(chunk)
        assert chunk.dtype == self.dtype, f"{chunk.dtype} frames for a writer of {self.dtype.__name__}"
        assert len(chunk) > 0 and chunk.shape[1:] == (self.height, self.width, 3), chunk.shape
        self.written += len(chunk)
        assert self.written <= self.frames, f"{self.written} frames for a file of {self.frames}"
        with sentences(self.path, self.failures):
            self._put(chunk)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert self.written == self.frames, f"{self.written} frames for a file of {self.frames}"
                with sentences(self.path, self.failures):
                    self._finish()
                    super().__exit__(None, None, None)
        finally:
            # Removing comes first and closing last: a second Ctrl-C while closing finds the file already gone.
            self.temporary.unlink(missing_ok=True)
            self._release()

    def _open(self) -> None:
        """Open `self.temporary`."""

    def _put(self, chunk: np.ndarray) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Write what is still held back and close."""

    def _release(self) -> None:
        """Close without raising, after success too."""


@contextlib.contextmanager
def sentences(path: str | os.PathLike, failures: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Errors of writing `path` become UserErrors. For our own calls only: a caller's OSError is not about this file."""
    try:
        yield
    except UserError:
        raise
    except failures as error:
        raise UserError(_sentence(Path(path), error)) from error


def _sentence(path: Path, error: Exception) -> str:
    number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
    folder = path.parent
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: no space left in {folder}; free some, or write to another folder"
    if number == errno.ENAMETOOLONG:
        return f"{path}: the name is too long; choose a shorter one"
    if number in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
        return f"{path}: there is no folder {folder}; create it first"
    if number in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path}: the folder {folder} cannot be written to ({reason}); choose another"
    return f"{path}: cannot be written ({reason}); try another folder"


def _create_temporary(path: Path) -> Path:
    """An empty, hidden file beside `path`, so that the final rename stays within one file system.

    Not `tempfile`, whose files only their owner may read. Absolute, because FFmpeg takes `a:b.mp4` for a protocol.
    """
    temporary = Path(os.path.abspath(path.parent)) / f".vidax-{secrets.token_hex(4)}{path.suffix}"
    temporary.touch(exist_ok=False)
    return temporary
