"""Reads the TPU compiler's dump of a kernel's final VLIW schedule and counts the cycles it takes.

With `LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"`, `*-final_bundles.txt` has one bundle a
line, and a core issues one bundle a cycle. Control flow is a grid loop (a software pipeline: copies run ahead of the
work, so it takes more turns than the grid has steps), loops inside it, and branches. How often each stretch of bundles
runs follows from the branch predicates, which are evaluated for every turn of the grid loop; what cannot be evaluated
is an error, never a guess.

The schedule assumes that a matrix unit takes instructions as fast as they are issued for a while, so a stretch may
have fewer bundles than its matrix unit needs cycles. A stretch counts as the larger of the two. Waits for copies
between memories are not in the schedule and not counted.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter

import numpy as np

MAX_DELAY_SLOTS = 4  # bundles after a branch that run whether it is taken or not

_BUNDLE = re.compile(r"^[ \t]*(0x[0-9a-f]+|0)[ \t]+((?:[A-Z]{2}[ \t]*)*):[ \t]*(>*)[ \t]*(?=\{)", re.M)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)(%\w+)\) )?target = \$region(\d+)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_DEFINITION = re.compile(r"(%[sp]\w+) = (\S+)(.*)", re.S)
_STORE = re.compile(r"= sst \[smem:\[#allocation(\w+_spill)\]\] (?:\(\S+\), )?(%\w+)")
_SPILLED = re.compile(r"\[smem:\[#allocation(\w+_spill)\]\]")
_GUARD = re.compile(r"^\s*\((!?)(%\w+)(?:, (%?\w+))?\),\s*")
_INDEX = re.compile(r"iteration index, stage = (\d+)(?: iter bound = (\d+))?")
_MATRIX = re.compile(r"= (vmat(?:mul|push)\w*(?:\.\w+)*?)\.(?:mrb\[\d+\]\.)?mxu(\d+)\b")


class MeterError(Exception):
    """The dump is not understood, or the count contradicts itself."""


class DataDependentError(MeterError):
    """A branch or a loop depends on what the kernel reads from memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixUnit:
    """Cycles for which an instruction holds its matrix unit, by the type of its operand.

    multiply: `vmatmul` streams one vector register's rows (8 of float32, 16 of bfloat16) through the array.
    push: `vmatpush` loads as many rows of the stationary matrix; a second buffer lets it overlap with multiplying.
    """

    multiply: dict[str, int]
    push: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """Bundles that run together: how many, how often, and the cycles its busiest matrix unit needs each time."""

    bundles: int
    executions: int
    passes: int

    @property
    def cycles(self) -> int:
        return self.executions * max(self.bundles, self.passes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    code: str  # without comments
    comments: str
    raw: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    bundle: int
    end: int  # first bundle that a taken branch skips: delay slots are over
    target: int
    negated: bool
    predicate: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    start: int
    end: int
    trips: int
    grid: tuple[int, ...] | None  # bounds of the grid that its turns walk; None for a plain counter


def schedule_cycles(
    text: str, unit: MatrixUnit, *, all_blocks_run: bool = False, scalar_read: int | None = None
) -> int:
    """Cycles that one core takes for the kernel whose final bundles are `text`. See `stretches`."""
    found = stretches(text, unit, all_blocks_run=all_blocks_run, scalar_read=scalar_read)
    return sum(stretch.cycles for stretch in found)


def stretches(
    text: str, unit: MatrixUnit, *, all_blocks_run: bool = False, scalar_read: int | None = None
) -> list[Stretch]:
    """Every stretch of the schedule between branches and branch targets, in order.

    all_blocks_run: a branch whose predicate depends on data does not skip, because the caller knows that its data
    never skips work (a full mask, say). Otherwise such a branch is an error.
    scalar_read: what every scalar that the kernel reads from memory is taken to be, if not None: for a kernel that
    reads one flag, the flag.
    """
    bundles = parse_bundles(text)
    branches = _branches(bundles)
    program = Program(bundles, scalar_read)
    loops = _loops(bundles, branches, program)
    cuts = {0, len(bundles)}
    cuts |= {branch.end for branch in branches} | {branch.target for branch in branches}
    cuts |= {edge for loop in loops for edge in (loop.start, loop.end)}
    edges = sorted(cuts)
    executions = _executions(edges, branches, loops, program, all_blocks_run)
    return [
        Stretch(bundles=end - start, executions=count, passes=_passes(bundles[start:end], unit))
        for (start, end), count in zip(itertools.pairwise(edges), executions, strict=True)
    ]


def parse_bundles(text: str) -> list[Bundle]:
    """The bundles in order; their addresses must count up by one, or lines were missed."""
    heads = list(_BUNDLE.finditer(text))
    if not heads:
        raise MeterError("no bundles in the schedule")
    for index, head in enumerate(heads):
        if int(head[1], 16) != index:
            raise MeterError(f"bundle {head[1]} stands where bundle {index:#x} should")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bodies = [text[head.end() : end] for head, end in zip(heads, ends, strict=True)]
    return [Bundle(code=_COMMENT.sub("", b), comments=" ".join(_COMMENT.findall(b)), raw=b) for b in bodies]


def _branches(bundles: list[Bundle]) -> list[Branch]:
    starts = {region: i for i, b in enumerate(bundles) for region in _START.findall(b.comments)}
    found = []
    for i, bundle in enumerate(bundles):
        for negated, predicate, region in _BRANCH.findall(bundle.code):
            if region not in starts:
                raise MeterError(f"bundle {i:#x} branches to region {region}, which starts nowhere")
            found.append(
                Branch(
                    bundle=i,
                    end=_after_delay_slots(bundles, i, predicate),
                    target=starts[region],
                    negated=bool(negated),
                    predicate=predicate or None,
                )
            )
    return found


def _after_delay_slots(bundles: list[Bundle], branch: int, predicate: str) -> int:
    """The first bundle that a taken branch skips.

    The region that branches ends with its last delay slot. On TPU7x these marks are missing; there the delay slots are
    empty or hold instructions under the branch's own predicate.
    """
    following = range(branch, min(branch + MAX_DELAY_SLOTS + 1, len(bundles)))
    for i in following:
        if "End region" in bundles[i].comments:
            return i + 1
    for i in following[1:]:
        parts = [part for part in bundles[i].code.strip().strip("{} ").split(";;") if part.strip()]
        if not all(predicate and predicate in part for part in parts):
            return i
    return following[-1] + 1


def _loops(bundles: list[Bundle], branches: list[Branch], program: "Program") -> list[Loop]:
    """Loops are backward branches on a test marked as the loop's exit test against a constant."""
    loops = []
    for branch in branches:
        if branch.target > branch.bundle:
            continue
        if branch.predicate is None or not branch.negated:
            raise MeterError(f"the loop that ends in bundle {branch.bundle:#x} does not end in an exit test")
        start, bound = program.counter(branch.predicate)
        grids = {
            m
            for b in bundles[branch.target : branch.end]
            for m in re.findall(r"iteration_bounds: \(([\d, ]+)\)", b.comments)
        }
        inner = any(branch.target > o.target and branch.end < o.end for o in branches if o.target <= o.bundle)
        grid = None
        if grids and not inner:
            if len(grids) > 1:
                raise MeterError(f"one loop walks several grids: {sorted(grids)}")
            grid = tuple(int(size) for size in grids.pop().split(","))
            if not 0 <= bound - start - math.prod(grid) <= 2:
                raise MeterError(f"a loop of {bound - start} turns walks a grid {grid} of {math.prod(grid)} steps")
        loops.append(Loop(start=branch.target, end=branch.end, trips=bound - start, grid=grid))
    if not loops:
        raise MeterError("no loop in the schedule")
    return loops


def _executions(
    edges: list[int], branches: list[Branch], loops: list[Loop], program: "Program", all_blocks_run: bool
) -> list[int]:
    """How often the stretch from each edge to the next runs."""
    by_end = {branch.end: branch for branch in branches if branch.target > branch.bundle}
    counts = []
    outer: Loop | None = None
    reached: np.ndarray | bool = np.ones(1, bool)  # per turn of the outermost loop
    arriving: dict[int, np.ndarray] = {}
    for start, end in itertools.pairwise(edges):
        around = [loop for loop in loops if loop.start <= start and end <= loop.end]
        outermost = max(around, key=lambda loop: loop.end - loop.start, default=None)
        if outermost is not outer:
            if arriving or not reached.all():
                raise MeterError(f"a branch crosses the edge of a loop at bundle {start:#x}")
            outer, reached = outermost, np.ones(outermost.trips if outermost else 1, bool)
        if start in arriving:
            reached = reached | arriving.pop(start)
        inner = math.prod(loop.trips for loop in around if loop is not outermost)
        counts.append(int(reached.sum()) * inner)
        branch = by_end.get(end)
        if branch is not None:
            _same_loops(branch, loops)
            taken = reached & _taken(branch, program, outer, all_blocks_run)
            arriving[branch.target] = arriving.get(branch.target, False) | taken
            reached = reached & ~taken
    return counts


def _same_loops(branch: Branch, loops: list[Loop]) -> None:
    for loop in loops:
        inside = loop.start <= branch.bundle < loop.end
        if inside and not loop.start <= branch.target < loop.end:
            raise MeterError(f"the branch in bundle {branch.bundle:#x} leaves its loop")


def _taken(branch: Branch, program: "Program", outer: Loop | None, all_blocks_run: bool) -> np.ndarray:
    """Per turn of the outermost loop, whether the branch is taken."""
    if branch.predicate is None:
        return np.ones(1, bool)
    try:
        value = program.evaluate(branch.predicate, outer)
    except DataDependentError:
        if all_blocks_run:
            return np.zeros(1, bool)
        raise
    return np.asarray(value) == (0 if branch.negated else 1)


def _passes(bundles: list[Bundle], unit: MatrixUnit) -> int:
    """Cycles that the busiest matrix unit multiplies, or is loaded, if that takes longer."""
    multiply: Counter[str] = Counter()
    push: Counter[str] = Counter()
    for bundle in bundles:
        if "vmat" not in bundle.code:
            continue
        found = _MATRIX.findall(bundle.code)
        if len(found) != len(re.findall(r"= vmat(?:mul|push)", bundle.code)):
            raise MeterError(f"a matrix instruction is not understood: {bundle.code.strip()[:200]}")
        for opcode, number in found:
            kind, *words = opcode.split(".")
            cycles = unit.multiply if kind.startswith("vmatmul") else unit.push
            known = {"bf16", "f32", "s8", "u8", "s4", "u4", "f8e5m2", "f8e4m3", "f8e4m3fn", "f8e4m3b11"} & set(words)
            operand = known.pop() if known else "f32"  # a float32 push names no type
            if operand not in cycles:
                raise MeterError(f"it is not known how long {opcode} holds its matrix unit")
            (multiply if kind.startswith("vmatmul") else push)[number] += cycles[operand]
    return max([0, *multiply.values(), *push.values()])


class Program:
    """Values of scalar registers, as far as they follow from constants and the turn of the outermost loop.

    The schedule is in single-assignment form: `%s2377_s30` is the register s30, but the number before it is unique.
    """

    def __init__(self, bundles: list[Bundle], scalar_read: int | None = None):
        self.scalar_read = scalar_read
        self.definitions: dict[str, tuple[str, str, str]] = {}
        self.stores: dict[str, list[str]] = {}
        for bundle in bundles:
            for part in bundle.raw.strip().strip("{}").split(";;"):
                code = _COMMENT.sub("", part).strip().rstrip("} \n").lstrip("{ ")
                if match := _DEFINITION.match(code):
                    self.definitions[match[1]] = (match[2], match[3].strip(), " ".join(_COMMENT.findall(part)))
                if match := _STORE.search(code):
                    self.stores.setdefault(match[1], []).append(match[2])

    def counter(self, predicate: str) -> tuple[int, int]:
        """First value and bound of the loop whose exit test is `predicate`: it counts up by one."""
        opcode, operands, comments = self._definition(predicate)
        if "loop exit test" not in comments or not opcode.startswith("scmp.ge.s32"):
            raise MeterError(f"{predicate} is not understood as a loop's exit test: {opcode} {operands}")
        value, bound = _operands(operands)
        opcode, operands, _ = self._definition(self._unspilled(value))
        step, name = _operands(operands) if opcode == "sadd.s32" else (None, None)
        if step != "1":
            raise MeterError(f"the loop that tests {predicate} does not count by one: {opcode} {operands}")
        opcode, operands, _ = self._definition(self._unspilled(name))
        if opcode != "sphi":
            raise MeterError(f"the loop that tests {predicate} has no counter: {opcode} {operands}")
        first = _operands(operands)[0]
        return int(self.evaluate(first, None)), int(self.evaluate(bound, None))

    def evaluate(self, name: str, loop: Loop | None) -> np.ndarray:
        """The value of a register or a constant, per turn of `loop`."""
        cache: dict[str, np.ndarray] = {}

        def value(name: str) -> np.ndarray:
            if not name.startswith("%"):
                return np.asarray(_signed(np.int64(int(name, 0))))
            if name not in cache:
                cache[name] = self._compute(name, loop, value)
            return cache[name]

        return value(name)

    def _compute(self, name: str, loop: Loop | None, value) -> np.ndarray:
        opcode, operands, comments = self._definition(name)
        if opcode == "sphi":
            return _loop_index(name, comments, loop)
        if opcode == "sld":
            if self.scalar_read is not None and not _SPILLED.match(operands):
                return np.asarray(self.scalar_read)
            return value(self._unspilled(name))
        guard = _GUARD.match(operands)
        operands = operands[guard.end() :] if guard else operands
        if opcode == "smov" and guard and guard[3]:  # a select: the guard's value where the guard holds
            holds = value(guard[2]) == (0 if guard[1] else 1)
            return np.where(holds, value(guard[3]), value(operands.strip()))
        # Any other guard only says when the result is used; where it is not used, its value does not matter.
        if opcode not in _OPERATIONS:
            raise MeterError(f"{name} = {opcode} {operands} is not understood")
        return _OPERATIONS[opcode](*(value(operand) for operand in _operands(operands)))

    def _definition(self, name: str) -> tuple[str, str, str]:
        if name not in self.definitions:
            raise MeterError(f"{name} is used but not defined")
        return self.definitions[name]

    def _unspilled(self, name: str) -> str:
        """The register whose value `name` is read back from the spill area, or `name` itself."""
        opcode, operands, _ = self._definition(name)
        if opcode != "sld":
            return name
        spilled = _SPILLED.match(operands)
        if not spilled and self.scalar_read is not None:
            return name
        if not spilled:
            raise DataDependentError(f"{name} = {opcode} {operands} reads the kernel's data")
        stored = self.stores.get(spilled[1], [])
        if len(stored) != 1:
            raise MeterError(f"spill slot {spilled[1]} is written {len(stored)} times")
        return self._unspilled(stored[0])


def _loop_index(name: str, comments: str, loop: Loop | None) -> np.ndarray:
    """A register carried around the loop: the compiler's comment says which index of which pipeline stage it is.

    Stage 0 runs ahead with the copies; stage k is at the grid step that stage 0 was at k turns ago.
    """
    index = _INDEX.search(comments)
    if loop is None or loop.grid is None or not index:
        raise MeterError(f"{name} changes in a loop, and how is not known: {comments[:200]}")
    step = np.arange(loop.trips) - int(index[1])
    if index[2] is None:
        return step
    coordinates = np.unravel_index(np.clip(step, 0, math.prod(loop.grid) - 1), loop.grid)
    return coordinates[int(index[2])]


def _operands(text: str) -> list[str]:
    guard = _GUARD.match(text)
    return [part.strip() for part in (text[guard.end() :] if guard else text).split(",")]


def _signed(value: np.ndarray) -> np.ndarray:
    """Wrapped to a signed 32-bit value."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _unsigned(value: np.ndarray) -> np.ndarray:
    return value % (1 << 32)


def _operations() -> dict:
    compare = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal,
    }  # fmt: skip
    table: dict = {}
    for word, function in compare.items():
        table[f"scmp.{word}.s32.totalorder"] = lambda a, b, f=function: f(a, b).astype(np.int64)
        table[f"scmp.{word}.u32.totalorder"] = lambda a, b, f=function: f(_unsigned(a), _unsigned(b)).astype(np.int64)
    return table | {
        "pand": lambda a, b: a & b,
        "por": lambda a, b: a | b,
        "pxor": lambda a, b: a ^ b,
        "pnand": lambda a, b: 1 - (a & b),
        "pnor": lambda a, b: 1 - (a | b),
        "pneg": lambda a: 1 - a,
        "pmov": lambda a: a,
        "smov": lambda a: a,
        "sadd.s32": lambda a, b: _signed(a + b),
        "ssub.s32": lambda a, b: _signed(a - b),
        "smul.u32": lambda a, b: _signed(a * b),
        "sand.u32": lambda a, b: _signed(_unsigned(a) & _unsigned(b)),
        "sor.u32": lambda a, b: _signed(_unsigned(a) | _unsigned(b)),
        "sxor.u32": lambda a, b: _signed(_unsigned(a) ^ _unsigned(b)),
        "sshll.u32": lambda a, b: _signed(_unsigned(a) << b),
        "sshrl.u32": lambda a, b: _signed(_unsigned(a) >> b),
        "sshra.s32": lambda a, b: a >> b,
        "smin.s32": np.minimum,
        "smax.s32": np.maximum,
        "scalar_select": lambda p, a, b: np.where(p == 1, a, b),
    }


_OPERATIONS = _operations()
