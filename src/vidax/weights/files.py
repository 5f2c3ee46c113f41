"""Open checkpoints without reading them: names, shapes and dtypes now, bytes only when a view is touched.

A checkpoint is one `.safetensors` file, the `.safetensors.index.json` of a sharded one, or a folder that holds either.
Files are mapped into memory by our own reader: the safetensors library has no numpy dtype for bfloat16 and float8, and
its errors speak to programmers. The format (https://github.com/huggingface/safetensors#format) is eight bytes of header
length, a JSON header that gives each tensor's dtype, shape and byte range, then the data without gaps.

A reader for another format makes a `Checkpoint` of `Tensor`s and takes its line in `READERS`.
"""

import dataclasses
import json
import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
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

VARIANT = r"\.(?:fp16|bf16|fp32|non_ema)"
SINGLE_OR_INDEX = re.compile(
    rf"(?P<stem>.+?)(?P<variant>{VARIANT})?\.safetensors(?:\.index(?P<late>{VARIANT})?\.json)?"
)
SHARD = re.compile(rf".+-\d{{5}}-of-\d{{5}}(?:{VARIANT})?\.safetensors")


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor in a checkpoint file: what it is, and where its bytes lie in the file's memory map."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    buffer: mmap.mmap
    offset: int

    def view(self) -> np.ndarray:
        """The values, read-only and not copied: pages are read from the file as they are touched."""
        return np.ndarray(self.shape, self.dtype, self.buffer, self.offset)


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


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint file, the index of a sharded one, or the folder that holds either."""
    path = Path(path)
    if path.is_dir():
        path = find_checkpoint(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    for ending, read in READERS.items():
        if re.search(ending, path.name):
            return read(path)
    raise UserError(
        f"{path}: not a checkpoint format that vidax reads; "
        "give a .safetensors file, the .safetensors.index.json of a sharded one, or their folder"
    )


def find_checkpoint(folder: Path) -> Path:
    """The one checkpoint in `folder`; where `model.safetensors` and `model.fp16.safetensors` both exist, the former."""
    files = sorted(file.name for file in folder.iterdir())
    matches = [match for name in files if not SHARD.fullmatch(name) and (match := SINGLE_OR_INDEX.fullmatch(name))]
    plain = {match["stem"] for match in matches if not (match["variant"] or match["late"])}
    found = [match[0] for match in matches if not (match["variant"] or match["late"]) or match["stem"] not in plain]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise UserError(f"{folder}: holds several checkpoints ({', '.join(found)}); name the file")
    if shards := [name for name in files if SHARD.fullmatch(name)]:
        raise UserError(
            f"{folder}: holds shards ({shards[0]}) without their .safetensors.index.json; download that too"
        )
    raise UserError(f"{folder}: holds no .safetensors file")


def read_safetensors(path: Path) -> Checkpoint:
    """Map one file and check its header against its size."""
    buffer = map_file(path)
    size = len(buffer)
    if buffer[: len(GIT_LFS)] == GIT_LFS:
        raise UserError(f"{path}: a Git LFS pointer, not the file it stands for; run `git lfs pull` in that folder")
    length = int.from_bytes(buffer[:8], "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        raise damaged(path, f"a header of {length} bytes does not fit in a file of {size} bytes")
    header = parse_json(path, buffer[8 : 8 + length], what="the header")
    if not isinstance(metadata := header.pop("__metadata__", {}), dict):
        raise damaged(path, "its __metadata__ is not a JSON object")
    data, position = 8 + length, 0
    tensors = {}
    for begin, end, name, dtype, shape in sorted(parse_entry(path, *item) for item in header.items()):
        if end > size - data:
            raise damaged(path, f"cut short: {name} ends at byte {data + end} of a file of {size} bytes")
        if begin != position:
            raise damaged(path, f"{name} {'overlaps another tensor' if begin < position else 'has a gap before it'}")
        tensors[name] = Tensor(path, DTYPES[dtype], shape, buffer, data + begin)
        position = end
    if position != size - data:
        raise damaged(path, f"{size - data - position} bytes follow the last tensor")
    return Checkpoint(path, tensors, metadata)


def parse_entry(path: Path, name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(begin, end, name, dtype, shape) of one line of the header."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise damaged(path, f"{name} has shape {shape} and byte range {begin} to {end}")
        case _:
            raise damaged(path, f"{name} is described by {str(entry)[:80]}, not by dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise UserError(f"{path}: {name} is of dtype {dtype}; vidax reads {', '.join(DTYPES)}")
    if end - begin != (need := math.prod(shape) * DTYPES[dtype].itemsize):
        raise damaged(path, f"{name} has {end - begin} bytes, but {dtype} {shape} takes {need}")
    return begin, end, name, dtype, tuple(shape)


def read_index(path: Path) -> Checkpoint:
    """Open every shard of an index and check that each holds what the index says, no less and no more."""
    where = read_json(path).get("weight_map")
    # A shard is a bare file name: an index must not point out of its folder.
    if not isinstance(where, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in where.values()
    ):
        raise damaged(path, "its weight_map does not map tensor names to file names")
    shards = sorted(set(where.values()))
    if missing := [shard for shard in shards if not (path.parent / shard).exists()]:
        raise UserError(
            f"{path}: {len(missing)} of {len(shards)} shards are not beside it: {few(missing)}; download them"
        )
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        part = read_safetensors(path.parent / shard)
        listed = {name for name, file in where.items() if file == shard}
        if absent := sorted(listed - part.keys()):
            raise damaged(path, f"{shard} does not hold {few(absent)}, which the index places there")
        if extra := sorted(part.keys() - listed):
            places = f"places in {where[extra[0]]}" if extra[0] in where else "does not list"
            raise damaged(path, f"{shard} holds {few(extra)}, which the index {places}")
        tensors |= part.tensors
        metadata |= part.metadata
    return Checkpoint(path, tensors, metadata)


READERS: dict[str, Callable[[Path], Checkpoint]] = {
    r"\.safetensors$": read_safetensors,
    r"\.safetensors\.index(\.\w+)?\.json$": read_index,
}


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # what mmap says of an empty file
        raise damaged(path, "an empty file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


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
