"""What the readers of checkpoint files share: tensors not yet read, memory maps, JSON, and the wording of faults."""

import dataclasses
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from vidax.errors import UserError

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
GIT_LFS = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor in a checkpoint file: what it is, and where its bytes lie in the file's memory map.

    strides: bytes from one element to the next along each axis; None where the values lie in order without gaps.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    buffer: mmap.mmap | bytes
    offset: int
    strides: tuple[int, ...] | None = None

    def view(self) -> np.ndarray:
        """The values, read-only and not copied: pages are read from the file as they are touched."""
        return np.ndarray(self.shape, self.dtype, self.buffer, self.offset, self.strides)

    def part(self, index: int, count: int) -> "Tensor":
        """One of `count` equal parts along the first axis."""
        rows, rest = divmod(self.shape[0], count)
        assert not rest, f"{count} equal parts of {list(self.shape)}"
        row = self.strides[0] if self.strides else math.prod(self.shape[1:]) * self.dtype.itemsize
        return dataclasses.replace(self, shape=(rows, *self.shape[1:]), offset=self.offset + index * rows * row)

    def give_back(self) -> None:
        """Let go of the pages that a view has read. They come back from the file when they are touched again."""
        if isinstance(self.buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and self.strides is None:
            start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
            nbytes = math.prod(self.shape) * self.dtype.itemsize
            self.buffer.madvise(mmap.MADV_DONTNEED, start, self.offset + nbytes - start)


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, Tensor]):
    """Tensors by the name that the checkpoint gives them. Files stay mapped for as long as it or a view of it lives.

    path:     what was opened.
    metadata: strings in the headers; some models keep their configuration there.
    """

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # what mmap says of an empty file
        raise damaged(path, "an empty file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if buffer[: len(GIT_LFS)] == GIT_LFS:
        raise UserError(f"{path}: a Git LFS pointer, not the file it stands for; run `git lfs pull` in that folder")
    return buffer


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json(path, text, what="it")


def parse_json(path: Path, text: bytes, *, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise damaged(path, f"{what} is not a JSON object")
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these pairs. Python would keep the last of two equal keys in silence."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
    return value


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}; download it again")


def few(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
