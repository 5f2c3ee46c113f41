"""Open checkpoints without reading them: names, shapes and dtypes now, bytes only when a view is touched.

A checkpoint is one file, the `.safetensors.index.json` of a sharded one, or a folder that holds either. Safetensors
files are mapped into memory by our own reader: the safetensors library has no numpy dtype for bfloat16 and float8, and
its errors speak to programmers. The format (https://github.com/huggingface/safetensors#format) is eight bytes of header
length, a JSON header that gives each tensor's dtype, shape and byte range, then the data without gaps.

A reader for another format makes a `Checkpoint` of `Tensor`s and takes its line in `READERS`.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vidax.errors import UserError
from vidax.weights.checkpoint import (
    DTYPES,
    HEADER_LIMIT,
    Checkpoint,
    Tensor,
    damaged,
    few,
    map_file,
    parse_json,
    read_json,
)
from vidax.weights.pth import read_pth

VARIANT = r"\.(?:fp16|bf16|fp32|non_ema)"
WHOLE = re.compile(
    rf"(?P<stem>.+?)(?P<variant>{VARIANT})?(?:\.safetensors(?:\.index(?P<late>{VARIANT})?\.json)?|(?P<torch>\.pth?))"
)
SHARD = re.compile(rf"(?P<stem>.+?)(?:{VARIANT})?-\d{{5}}-of-\d{{5}}(?:{VARIANT})?\.safetensors")


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
        "give a .safetensors, .pth or .pt file, the .safetensors.index.json of a sharded one, or their folder"
    )


def find_checkpoint(folder: Path) -> Path:
    """The one checkpoint in `folder`."""
    found = list_checkpoints(folder)
    if len(found) > 1:
        raise UserError(f"{folder}: holds several checkpoints ({', '.join(p.name for p in found)}); name the file")
    if not found:
        raise UserError(f"{folder}: holds no .safetensors, .pth or .pt file")
    return found[0]


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, a sharded one by its index. Of `x.safetensors`, `x.fp16.safetensors` and `x.pth`
    the first that exists stands for all.
    """
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    matches = [match for name in names if not SHARD.fullmatch(name) and (match := WHOLE.fullmatch(name))]

    def rank(match: re.Match) -> int:
        return 2 if match["torch"] else 1 if match["variant"] or match["late"] else 0

    best: dict[str, int] = {}
    for match in matches:
        best[match["stem"]] = min(rank(match), best.get(match["stem"], 2))
    for name in names:
        if (shard := SHARD.fullmatch(name)) and shard["stem"] not in best:
            raise UserError(f"{folder}: holds shards ({name}) without their .safetensors.index.json; download that too")
    return [folder / match[0] for match in matches if rank(match) == best[match["stem"]]]


def read_safetensors(path: Path) -> Checkpoint:
    """Map one file and check its header against its size."""
    buffer = map_file(path)
    size = len(buffer)
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
    r"\.pth?$": read_pth,
}
