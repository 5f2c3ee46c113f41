"""Read the `.pth` and `.pt` files of PyTorch without PyTorch, and without running anything that is in them.

Such a file is a zip archive of uncompressed entries (torch/serialization.py): `NAME/data.pkl`, a pickle of the state
dict in which a tensor is a view of a numbered storage, and `NAME/data/NUMBER`, the bytes of each storage. A pickle is
a program for a stack machine that can import and call anything. `Machine` knows the few instructions that a dict of
tensors takes and the few names in `FUNCTIONS` and `STORAGES`, which stand for code of ours; nothing else is looked up.

Checksums of the archive are not verified: that would read every byte of it.
"""

import io
import math
import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from vidax.errors import UserError
from vidax.weights.checkpoint import HEADER_LIMIT, Checkpoint, Tensor, damaged, few, map_file

STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.ShortStorage": np.dtype("<i2"),
    "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype(np.bool_),
}
INSTRUCTIONS = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "BUILD", "BINPERSID"),
}
OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
WRAPPERS = ("state_dict", "model", "module")  # entries that hold the whole of a training checkpoint's tensors
ZIP, PICKLE = b"PK\x03\x04", b"\x80"  # how files begin: since PyTorch 1.6, and before
AXES_LIMIT = 64  # numpy's


class Storage(NamedTuple):
    """Elements of one dtype at a byte offset of the file."""

    dtype: np.dtype
    offset: int
    elements: int


class Function(NamedTuple):
    """A function that a pickle may call, ours in place of PyTorch's."""

    call: Callable[..., Any]


def read_pth(path: Path) -> Checkpoint:
    """Map the file, and make of its pickle the names, shapes and places of its tensors."""
    buffer = map_file(path)
    if buffer[:1] == PICKLE:
        raise UserError(
            f"{path}: in the form that PyTorch wrote before 1.6, which is not read; where PyTorch is installed, "
            "torch.save(torch.load(FILE, weights_only=True), NEW_FILE) writes the present form"
        )
    if buffer[: len(ZIP)] != ZIP:
        raise damaged(path, "not a file that PyTorch wrote: it does not begin as a zip archive")
    entries = read_entries(path, buffer)
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise damaged(path, f"a zip archive with {len(pickles)} entries data.pkl where PyTorch writes one")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries and (order := content(buffer, entries[f"{root}byteorder"])) != b"little":
        raise UserError(
            f"{path}: its byte order is {order[:20].decode(errors='replace')!r}; vidax reads little-endian files, "
            "save it again on such a machine"
        )

    def storage(kind: np.dtype, key: str, elements: int) -> Storage:
        offset, size = entries[f"{root}data/{key}"]
        if elements < 0 or size != elements * kind.itemsize:
            raise ValueError(f"storage {key} has {size} bytes, not {elements} times {kind.itemsize}")
        return Storage(kind, offset, elements)

    pickle = content(buffer, entries[pickles[0]])
    if len(pickle) > HEADER_LIMIT:
        raise damaged(path, f"its data.pkl of {len(pickle)} bytes holds more than names and places of tensors")
    try:
        value = Machine(path, buffer, storage).run(pickle)
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, struct.error) as error:
        raise damaged(path, f"its data.pkl is not a pickle of tensors ({str(error)[:200]})") from None
    return Checkpoint(path, state_dict(path, value), {})


def read_entries(path: Path, buffer: mmap.mmap) -> dict[str, tuple[int, int]]:
    """The archive's entries: name to (byte offset, size)."""
    try:
        with zipfile.ZipFile(buffer) as archive:  # type: ignore[call-overload]  # a map reads and seeks as files do
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, struct.error) as error:
        raise damaged(path, f"cut short, or not a whole zip archive ({error})") from None
    entries: dict[str, tuple[int, int]] = {}
    for info in listed:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise UserError(f"{path}: {info.filename} is compressed or encrypted, as PyTorch writes no file; unpack it")
        # The local header repeats the name and has padding of its own, so the data's place is not in the directory.
        begin = info.header_offset
        if not 0 <= begin <= len(buffer) - 30 or buffer[begin : begin + 4] != ZIP:
            raise damaged(path, f"{info.filename} does not begin where the archive's directory says")
        offset = begin + 30 + sum(struct.unpack_from("<HH", buffer, begin + 26))
        if info.file_size != info.compress_size or offset + info.file_size > len(buffer):
            raise damaged(path, f"{info.filename} of {info.file_size} bytes does not fit where it begins")
        if info.filename in entries:
            raise damaged(path, f"{info.filename} occurs twice")
        entries[info.filename] = offset, info.file_size
    return entries


def content(buffer: mmap.mmap, entry: tuple[int, int]) -> bytes:
    offset, size = entry
    return buffer[offset : offset + size]


class Machine:
    """Runs the pickle of a dict of tensors. Any fault of the pickle is a UserError where the user should know the
    reason, else one of Python's exceptions for wrong values; nothing outside this object is touched.
    """

    def __init__(self, path: Path, buffer: mmap.mmap, storage: Callable[[np.dtype, str, int], Storage]):
        self.path, self.buffer, self.storage = path, buffer, storage
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        file = io.BytesIO(pickle)
        while code := file.read(1):
            instruction = OPCODES.get(code)
            if instruction is None or instruction.name not in INSTRUCTIONS:
                raise ValueError(f"it has the instruction {instruction.name if instruction else repr(code)}")
            if (name := instruction.name) == "STOP":
                return self.stack.pop()
            if name in ("GLOBAL", "INST"):  # pickletools would resolve escapes, which a name has none of
                argument: Any = b".".join(file.readline().rstrip(b"\n") for _ in range(2)).decode()
            else:
                argument = instruction.arg.reader(file) if instruction.arg else None
            self.step(name, argument)
        raise ValueError("it ends before its last instruction")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "MARK":
                self.marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self.since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(name[-1]))))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "APPEND":
                self.extend(self.pop(1))
            case "APPENDS":
                self.extend(self.since_mark())
            case "SETITEM":
                self.update(self.pop(2))
            case "SETITEMS":
                self.update(self.since_mark())
            case "GLOBAL" | "INST":
                stack.append(self.known(argument))
                if name == "INST":
                    raise ValueError("it makes an instance of a class")
            case "STACK_GLOBAL":
                stack.append(self.known(".".join(self.pop(2))))
            case "BINPERSID":
                self.load_storage()
            case "REDUCE":
                function, arguments = self.pop(2)
                if not isinstance(function, Function) or not isinstance(arguments, tuple):
                    raise ValueError("it calls what is no function")
                stack.append(function.call(self, *arguments))
            case "BUILD":
                # The attributes of an OrderedDict: module versions (`_metadata`), which no tensor depends on.
                if not isinstance(self.pop(1)[0], dict) or not isinstance(stack[-1], dict):
                    raise ValueError("it sets the attributes of something that is no dict")
            case _:
                raise AssertionError(name)

    def known(self, name: str) -> Any:
        """What stands here for a name of PyTorch's. This is the only way from a pickle to anything callable."""
        if name in STORAGES:
            return STORAGES[name]
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        raise UserError(
            f"{self.path}: asks for {name[:100]}, which weights do not need; vidax runs no code from a checkpoint; "
            "if you trust it, save its tensors alone: torch.save(model.state_dict(), FILE), or as .safetensors"
        )

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("it takes more from its stack than it has put there")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(values)

    def update(self, pairs: list[Any]) -> None:
        keys, values = pairs[::2], pairs[1::2]
        # Not every hashable: to hash a tuple nested deep enough ends the process.
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | int | float) for key in keys):
            raise ValueError("it has a dict with keys other than names and numbers")
        self.stack[-1].update(zip(keys, values, strict=True))

    def load_storage(self) -> None:
        match self.pop(1)[0]:
            case ("storage", np.dtype() as kind, str(key), str(), int(elements)):
                self.stack.append(self.storage(kind, key, elements))
            case _:
                raise ValueError("it refers to something that is no storage")

    def ordered_dict(self, *pairs: Any) -> dict:
        if pairs:  # PyTorch fills it item by item
            raise ValueError("it makes an OrderedDict of pairs")
        return {}

    def parameter(self, tensor: Any, requires_grad: Any = True, hooks: Any = None) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise ValueError("it makes a parameter of what is no tensor")
        return tensor

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
        """A view of a storage; offset and strides count elements. The rest concerns gradients."""
        if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise ValueError("it makes a tensor of what is no storage")
        if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
            raise ValueError("it has a tensor whose shape, strides or offset are no whole numbers of 0 or more")
        size, elements = storage.dtype.itemsize, math.prod(shape)
        if not len(shape) == len(strides) <= AXES_LIMIT or elements * size >= 2**63:
            raise ValueError(
                f"it has a tensor of {len(shape)} axes with {len(strides)} strides and {elements} elements"
            )
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if offset + (last + 1 if elements else 0) > storage.elements:
            raise ValueError(f"it has a tensor that reaches beyond its storage of {storage.elements} elements")
        in_order = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        ordered = not elements or all(n == 1 or a == b for n, a, b in zip(shape, strides, in_order, strict=True))
        steps = None if ordered else tuple(stride * size for stride in strides)
        return Tensor(self.path, storage.dtype, shape, self.buffer, storage.offset + offset * size, steps)


FUNCTIONS = {
    "collections.OrderedDict": Function(Machine.ordered_dict),
    "torch._utils._rebuild_parameter": Function(Machine.parameter),
    "torch._utils._rebuild_tensor_v2": Function(Machine.tensor),
}


def state_dict(path: Path, value: Any) -> dict[str, Tensor]:
    """The tensors of a state dict, or of the one that a training checkpoint wraps; numbers beside them are dropped."""
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}, not tensors by name; save a state dict")
    tensors = {name: item for name, item in value.items() if isinstance(item, Tensor)}
    nested = [name for name, item in value.items() if name not in tensors and holds_tensors(item)]
    if not tensors and len(nested) == 1 and nested[0] in WRAPPERS:
        return state_dict(path, value[nested[0]])
    if nested:
        places = few([*(["the top"] if tensors else []), *map(repr, nested)])
        raise UserError(f"{path}: holds tensors in {places}, where one state dict is wanted; save that alone")
    if not tensors:
        raise UserError(f"{path}: holds no tensors")
    if strange := [repr(name) for name in tensors if not isinstance(name, str)]:
        raise UserError(f"{path}: holds tensors under {few(strange)}, not under names; save a state dict")
    return tensors


def holds_tensors(value: Any) -> bool:
    """Whether there is a tensor anywhere inside. Containers may be shared, or hold themselves."""
    waiting, seen = [value], set()
    while waiting:
        if isinstance(item := waiting.pop(), Tensor):
            return True
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return False
