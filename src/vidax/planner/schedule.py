"""Seconds of a program compiled for TPUs, read from the text of its schedule.

Each part is estimated by somebody else:

    program      scheduled: the cycles that the compiler gives each operation, times how often its loop runs
    attention    scheduled: the kernel's cycles, which the compiler does not give; counted in the kernel's own schedule
                 (ops/attention/tiles.json) and scaled by queries x keys from the nearest counted case
    links        modelled: bytes of a collective over the links that a slice of this shape has; what the compiler runs
                 beside the computation (on v5e nine of ten gathers of weights) costs nothing
    moves        modelled, and beside the total: what the compiler moves within the device's memory and gives no cycles
                 for (reshapes and copies of activations), as bytes read and written over the memory's rate
    unknown      names of what takes time that nobody estimates: a gather, a kernel that is not ours, attention in
                 another type than the counted one

The clock is the published one (peak FLOP/s over FLOP per cycle). Left out are launches, the host, waits for memory
within an operation, clocks below the peak, copies that run beside other operations, and what handles at
most NEGLIGIBLE_BYTES without cycles.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from vidax.ops.attention.pallas_tpu import measured_cycles
from vidax.planner.chips import Chip, Topology

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "token": 0}
KERNEL, ATTENTION = "kernel", "vidax_attention"  # a Pallas call, and the name of the one whose cycles are known
COUNTED = "bf16"  # and for which type
HIDDEN = "async-collective"  # what libtpu calls one that it runs beside the computation, as gathers on v5e
COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute", HIDDEN)
HOST_START, HOST_DONE = "host-copy-start", "host-copy-done"
HOST = "S(5)"  # the memory space, in a layout
HOST_COPIES = ("copy-start", "slice-start", "dynamic-slice-start")
# Takes no time: names for what is there, halves of what is counted elsewhere, and copies beside other operations.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"copy-start", "copy-done", "slice-start", "slice-done", "dynamic-slice-start", "dynamic-slice-done"}
FREE |= {"opt-barrier", "add-dependency", *(f"{kind}-done" for kind in COLLECTIVES)}
FREE_CALLS = ("ConcatBitcast", "AllocateBuffer")
MOVED, UNKNOWN = "moved", "unknown"  # what has no cycles: opcodes that read an operand and write it, and all others
MOVES = {"reshape", "copy", "transpose", "dynamic-update-slice", "dynamic-slice", "slice", "concatenate", "broadcast"}
MOVES |= {"pad", "convert", "iota", "reverse"}
NEGLIGIBLE_BYTES = 4096  # one vector register; scalars above all
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a compiled program: `kind` is an opcode, KERNEL, MOVED, UNKNOWN, or HOST_START or HOST_DONE,
    between which a copy from host memory runs beside other operations.
    """

    kind: str
    times: int  # how often it runs
    cycles: int  # as the compiler estimates, once
    shapes: Shapes  # dtype and shape of the result, and of a kernel's operands
    path: str  # where in the model it comes from; else what the compiler calls it
    asynchronous: bool = False  # started here and awaited elsewhere
    copy: str = ""  # from host memory: which one is started or awaited

    @property
    def bytes(self) -> int:
        """Of the results, of which a combined collective has several. An asynchronous one names its operands first,
        which for a gather are smaller. Raises ValueError for a type that is not known.
        """
        if unknown := {dtype for dtype, _ in self.shapes} - ITEM_BYTES.keys():
            raise ValueError(f"{self.kind} of unknown size, of type {', '.join(sorted(unknown))}: {self.path}")
        sizes = sorted(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.shapes)
        if not self.asynchronous:
            return sum(sizes)
        return sum(sizes[len(sizes) // 2 :]) if self.kind == "all-gather" else sizes[-1]

    @property
    def heads_head_size_queries_keys(self) -> tuple[int, int, int, int]:
        """Of an attention kernel: its result is [heads, head size, queries], its keys [heads, keys, head size]."""
        heads, head_size, queries = self.shapes[0][1]
        (keys, *_) = (s[1] for _, s in self.shapes[1:] if len(s) == 3 and (s[0], s[2]) == (heads, head_size))
        return heads, head_size, queries, keys


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a program or of one operation on each device, by who estimates them; see the module."""

    program: float = 0.0
    attention: float = 0.0
    links: float = 0.0
    moves: float = 0.0
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Of program, attention and links. Raises ValueError where something takes time that is not known."""
        if self.unknown:
            raise ValueError(f"nobody estimates the seconds of {', '.join(self.unknown)}")
        return self.known

    @property
    def known(self) -> float:
        """The same without what is not known."""
        return self.program + self.attention + self.links

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.program + other.program,
            self.attention + other.attention,
            self.links + other.links,
            self.moves + other.moves,
            tuple(dict.fromkeys(self.unknown + other.unknown)),
        )

    def __mul__(self, times: int) -> "Seconds":
        return Seconds(
            times * self.program, times * self.attention, times * self.links, times * self.moves, self.unknown
        )


def operations(text: str) -> list[Operation]:
    """Every operation that takes time, moves data between devices or from the host, or is a kernel, from an
    executable's text, in the order of its schedule. A loop's operations stand where it runs, with their number of
    turns; an iteration that the compiler has taken out of its loop stands beside it.

    Raises ValueError where the text is not understood.
    """
    computations: dict[str, list[str]] = {}
    entry = None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            computations[header[2]] = lines = []
            entry = header[2] if header[1] else entry
        elif computations and line.startswith("  "):
            lines.append(line)
    if entry is None:
        raise ValueError("the compiled text has no entry computation; its format has changed")
    found = list(_walk(computations, entry, 1))
    if not any(op.cycles for op in found):
        raise ValueError("the compiled text estimates no cycles; its format has changed")
    return found


def _walk(computations: Mapping[str, list[str]], name: str, times: int) -> Iterator[Operation]:
    copies: set[str] = set()
    seen: dict[str, re.Match[str]] = {}  # what precedes, by name
    for line in computations[name]:
        if not (match := INSTRUCTION.match(line)):
            continue
        own, result, opcode = match.groups()
        seen[own] = match
        if opcode == "while":
            loop = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            if not loop:
                raise ValueError(f"a loop without condition and body: {line[:200]}")
            turns = trips(computations[loop[1]], _first_index(seen, match))
            yield from _walk(computations, loop[2], times * turns)
        elif opcode in ("conditional", "call"):
            raise ValueError(f"a branch or a call, whose cost is not known: {line[:200]}")
        elif HOST in result and opcode.endswith("-start"):
            if opcode not in HOST_COPIES:
                raise ValueError(f"host memory is used by {opcode}, which is no copy of a part of it: {line[:200]}")
            copies.add(own)
            moved = [shape for shape in _shapes(result) if shape[1]][-1]  # behind the operands; what follows is scalar
            yield Operation(HOST_START, times, 0, (moved,), "", copy=own)
        elif opcode.endswith("-done") and (awaited := (_operands(match) or [""])[0]) in copies:
            yield Operation(HOST_DONE, times, 0, (), "", copy=awaited)
        else:
            yield from _operation(match, times, seen)


def _operation(match: re.Match[str], times: int, seen: Mapping[str, re.Match[str]]) -> Iterator[Operation]:
    """One operation of a computation, unless it takes no time."""
    (own, result, opcode), line = match.groups(), match.string
    shapes, cycles = _shapes(result), re.search(r'"estimated_cycles":"(\d+)"', line)
    origin = re.search(r'op_name="([^"]*)"', line)
    path = origin[1] if origin else own
    kind = opcode.removesuffix("-start")
    if opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in line:
        layouts = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
        shapes += _shapes(layouts[1]) if layouts else ()
        yield Operation(KERNEL if ATTENTION in own + path else UNKNOWN, times, 0, shapes, path)
    elif own.startswith(f"{HIDDEN}-start"):
        yield Operation(HIDDEN, times, int(cycles[1]) if cycles else 0, shapes, path)
    elif cycles or kind in COLLECTIVES:
        yield Operation(kind, times, int(cycles[1]) if cycles else 0, shapes, path, opcode.endswith("-start"))
    elif opcode not in FREE and not own.startswith(f"{HIDDEN}-done"):
        target = re.search(r'custom_call_target="(\w+)"', line)
        operands = [_shapes(seen[name][2]) if name in seen else () for name in _operands(match)]
        if opcode == "dynamic-update-slice" and len(operands) > 1:
            shapes = operands[1] or shapes  # the rest stays where it is
        read = () if opcode in MOVES else operands  # a sum of much is little
        if not (target and target[1] in FREE_CALLS) and max(map(_bytes, (shapes, *read))) > NEGLIGIBLE_BYTES:
            yield Operation(MOVED if opcode in MOVES else UNKNOWN, times, 0, shapes, path)


def _shapes(text: str) -> Shapes:
    return tuple((dtype, tuple(map(int, shape.split(","))) if shape else ()) for dtype, shape in SHAPE.findall(text))


def _bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * ITEM_BYTES.get(dtype, 8) for dtype, shape in shapes)


def _operands(match: re.Match[str]) -> list[str]:
    """Names of an operation's operands."""
    return re.findall(r"%([\w.\-]+)", match.string[match.end() :].split(")")[0])


def _first_index(seen: Mapping[str, re.Match[str]], loop: re.Match[str]) -> int:
    """Where a loop's index, the first of its operands, begins: 0 unless a constant says otherwise."""
    origin: re.Match[str] | None = loop
    while origin and origin[3] in ("while", "tuple", "copy", "bitcast"):
        origin = seen.get((_operands(origin) or [""])[0])
    constant = re.search(r" constant\((\d+)\)", origin.string) if origin and origin[3] == "constant" else None
    return int(constant[1]) if constant else 0


def trips(condition: list[str], first: int = 0) -> int:
    """How often a loop runs whose condition is `index < constant`, by ones as `jax.lax.scan` makes it."""
    numbers = re.findall(r"= [su]32\[\]\S* constant\((\d+)\)", "\n".join(condition))
    if len(numbers) != 1 or not any("direction=LT" in line for line in condition):
        raise ValueError(f"a loop whose number of turns is not understood: {condition}")
    return int(numbers[0]) - first


def collectives(ops: list[Operation]) -> dict[str, int]:
    """How many of each kind a layer has: those in a loop, which is over the layers."""
    counts: dict[str, int] = {}
    for op in ops:
        if op.kind in COLLECTIVES and op.times > 1:
            counts[op.kind] = counts.get(op.kind, 0) + 1
    return counts


def link_seconds(op: Operation, chip: Chip, grid: tuple[int, ...], parts: int) -> float:
    """Modelled seconds of one collective on a slice of this shape without wrap-around links.

    Gathers and sums are bound by the two links of a chip at the corner, exchanges by the links across the middle.
    """
    link = chip.link_bytes_per_second
    if op.kind == HIDDEN:
        return 0.0
    if op.kind == "all-to-all":
        return op.bytes * max(grid) / 4 / link
    share = (parts - 1) / parts
    return (2 if op.kind == "all-reduce" else 1) * op.bytes * share / (2 * link)


def operation_seconds(op: Operation, topology: Topology, devices: int) -> Seconds:
    """Of one operation, once, of a program for this many devices."""
    chip = topology.chip
    if op.kind == UNKNOWN or (op.kind == KERNEL and op.shapes[0][0] != COUNTED):
        return Seconds(unknown=(op.path,))
    if op.kind == KERNEL:
        heads, head_size, queries, keys = op.heads_head_size_queries_keys
        return Seconds(attention=heads * measured_cycles(chip.device_kind, head_size, queries, keys) / chip.clock_hz)
    if op.kind == MOVED:
        return Seconds(moves=2 * op.bytes / chip.hbm_bytes_per_second)
    links = link_seconds(op, chip, topology.grid, devices) if op.kind in COLLECTIVES else 0.0
    return Seconds(program=op.cycles / chip.clock_hz, links=links)


def seconds_of(text: str, topology: Topology, devices: int) -> Seconds:
    """Of a compiled program's text, compiled for this many devices of a topology. Raises ValueError as `operations`."""
    return sum((operation_seconds(op, topology, devices) * op.times for op in operations(text)), Seconds())
