"""Write the zip form of PyTorch's `.pth` files without PyTorch: a pickle instruction by instruction, then the archive.

What `torch.save` writes is read in tests/parity/test_pth.py.
"""

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

KINDS = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}


class Raw(bytes):
    """Pickle instructions, put in as they are."""


class View(NamedTuple):
    """A tensor that is part of a storage; offset and strides count elements."""

    storage: np.ndarray
    offset: Any
    shape: Any
    strides: Any


class Ordered(dict):
    """Written as an OrderedDict with attributes, as `Module.state_dict()` is."""


def name(module: str, function: str) -> Raw:
    return Raw(f"c{module}\n{function}\n".encode())


def call(function: Raw, *arguments: Any, storages: list[np.ndarray] | None = None) -> Raw:
    storages = [] if storages is None else storages
    return Raw(function + instructions(tuple(arguments), storages) + b"R")


def instructions(value: Any, storages: list[np.ndarray]) -> bytes:
    """Instructions that put `value` on the stack; its arrays are appended to `storages`."""

    def each(values: Sequence[Any]) -> bytes:
        return b"".join(instructions(item, storages) for item in values)

    def storage(array: np.ndarray) -> bytes:
        known = next((i for i, other in enumerate(storages) if other is array), None)
        if known is None:
            known = len(storages)
            storages.append(array)
        identity = ("storage", name("torch", KINDS[array.dtype]), str(known), "cpu", array.size)
        return each([identity]) + b"Q"

    match value:
        case Raw():
            return value
        case None | bool():
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case View(array, offset, shape, strides):
            hooks = Raw(name("collections", "OrderedDict") + b")R")
            arguments = (Raw(storage(array)), offset, shape, strides, False, hooks)
            return name("torch._utils", "_rebuild_tensor_v2") + each([arguments]) + b"R"
        case np.ndarray():
            flat = np.ascontiguousarray(value).reshape(-1)
            strides = tuple(step // value.itemsize for step in np.empty(value.shape, value.dtype).strides)
            return instructions(View(flat, 0, value.shape, strides), storages)
        case tuple():
            return b"(" + each(value) + b"t"
        case list():
            return b"](" + each(value) + b"e"
        case Ordered():
            items = b"(" + each([part for pair in value.items() for part in pair]) + b"u"
            return (
                name("collections", "OrderedDict") + b")R" + items + each([{"_metadata": {"": {"version": 1}}}]) + b"b"
            )
        case Mapping():
            return b"}(" + each([part for pair in value.items() for part in pair]) + b"u"
    raise TypeError(type(value))


def entries_of(value: Any) -> dict[str, bytes]:
    """The archive's entries in PyTorch's order."""
    storages: list[np.ndarray] = []
    pickle = b"\x80\x02" + instructions(value, storages) + b"."
    data = {f"data/{key}": array.tobytes() for key, array in enumerate(storages)}
    return {"data.pkl": pickle, "byteorder": b"little", **data, "version": b"3\n"}


def archive(entries: Mapping[str, bytes], root: str = "archive", compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for entry, content in entries.items():
            written.writestr(zipfile.ZipInfo(f"{root}/{entry}"), content, compression)
    return file.getvalue()


def write_pth(path: Path, value: Any) -> Path:
    """What `torch.save(value, path)` would write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(archive(entries_of(value)))
    return path
