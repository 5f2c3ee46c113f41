"""Seconds and memory of a denoising step at full size on TPUs, from the compiled program: no TPU, no weights.

    python benchmarks/step_estimate.py                          # the table of CASES; one to two minutes a row
    python benchmarks/step_estimate.py --only v6e --json
    python benchmarks/step_estimate.py --case wan2.1-t2v-14b 1280x720 v4:2x2x1 seq=4

Compiles `denoise_step`, both guidance branches, for a topology with libtpu (extra: compile) and adds up

    program      the compiler's estimated cycles of every operation, times how often its loop runs, over the clock
    attention    the kernel's cycles, which the compiler does not estimate: ops/attention/tiles.json, scaled by
                 queries x keys (the nearest measured row)
    links        bytes of each collective over the links that a slice of this shape has; only what the compiler runs
                 beside the computation (on v5e nine of ten gathers of weights) costs nothing

The clock is the published one (peak FLOP/s over FLOP per cycle). What is left out: launches, the host, waits for memory
within a kernel, and clocks below the peak. Cycles of matrix products are within 5 to 30 % of their floor, which the
table gives as `floor`: FLOPs of the model over the peak of all chips.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server is asked where there is no TPU
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs on one

import jax
from attention_cycles import CHIPS as GENERATIONS
from jax.sharding import Mesh

from vidax.models.wan.config import WAN21_1_3B, WAN21_14B
from vidax.models.wan.dit import DiTConfig, step_flops
from vidax.models.wan.programs import lower_step
from vidax.ops.attention.pallas_tpu import measured_cycles
from vidax.parallel import mesh as meshes
from vidax.weights.memory import program_bytes

MODELS = {"wan2.1-t2v-1.3b": WAN21_1_3B, "wan2.1-t2v-14b": WAN21_14B}
TEXT_TOKENS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device; attention_cycles.py has its topology and kind. Sources: cloud.google.com/tpu/docs (memory, peak),
    the clocks in attention_cycles.py, and jax-ml.github.io/scaling-book/tpus for bytes per second of a link in one
    direction.
    """

    memory_bytes: float
    flops: float
    clock_hz: float
    link_bytes_per_second: float


GIB = 2**30
CHIPS = {
    "v4": Chip(memory_bytes=32 * GIB, flops=275e12, clock_hz=1.05e9, link_bytes_per_second=45e9),
    "v5e": Chip(memory_bytes=16 * GIB, flops=197e12, clock_hz=1.5e9, link_bytes_per_second=45e9),
    "v5p": Chip(memory_bytes=95 * GIB, flops=459e12, clock_hz=1.75e9, link_bytes_per_second=90e9),
    "v6e": Chip(memory_bytes=32 * GIB, flops=918e12, clock_hz=1.75e9, link_bytes_per_second=90e9),
    "tpu7x": Chip(memory_bytes=96 * GIB, flops=1153e12, clock_hz=2.2e9, link_bytes_per_second=90e9),
}

# (model, size, topology, mesh, published seconds per step and whose)
CASES = (
    ("wan2.1-t2v-14b", "1280x720", "v4:2x2x1", "seq=4", "published engine 111.3 to 141.7"),
    ("wan2.1-t2v-14b", "1280x720", "v4:2x2x1", "tensor=4", ""),
    ("wan2.1-t2v-14b", "1280x720", "v6e:2x4", "seq=8", "MaxDiffusion 6.3 (I2V A14B, Ulysses), 6.7 (T2V)"),
    ("wan2.1-t2v-14b", "1280x720", "v6e:2x4", "data=2,seq=4", ""),
    ("wan2.1-t2v-14b", "832x480", "v4:2x2x1", "seq=4", "published engine 26.1"),
    ("wan2.1-t2v-14b", "832x480", "v6e:2x4", "seq=8", "MaxDiffusion 2.2"),
    ("wan2.1-t2v-14b", "1280x720", "tpu7x:2x2x1", "seq=8", "MaxDiffusion 5.0, T2V A14B 2-D ring 2.6"),
    ("wan2.1-t2v-14b", "1280x720", "v5p:2x2x1", "seq=4", ""),
    ("wan2.1-t2v-14b", "1280x720", "v5e:2x4", "seq=8", ""),
    ("wan2.1-t2v-1.3b", "832x480", "v5e:2x4", "data=2,seq=4", ""),
    ("wan2.1-t2v-1.3b", "832x480", "v4:2x2x1", "seq=4", "published engine 7.0"),
)


def devices_of(topology: str) -> list[jax.Device]:
    from jax.experimental import topologies

    config = GENERATIONS[topology.partition(":")[0]].config
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **config).devices)


def mesh_of(topology: str, mesh: str) -> Mesh:
    """A mesh of a topology's devices, of which it may leave some out."""
    return meshes.make(meshes.parse(mesh), devices_of(topology))


def compile_step(
    config: DiTConfig, size: tuple[int, int], topology: str, mesh: str, frames: int = 81, *, streamed: bool = False
) -> Any:
    """The compiled denoising step of a video of this (width, height) for a topology such as "v4:2x2x1"."""
    latents = (1, (frames - 1) // 4 + 1, size[1] // 8, size[0] // 8, config.in_channels)
    return lower_step(config, latents, branches=2, past=2, mesh=mesh_of(topology, mesh), streamed=streamed).compile()


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a compiled program: `kind` is an opcode, "kernel" for a Pallas call, or HOST_START or HOST_DONE,
    between which a copy from host memory runs beside other operations.
    """

    kind: str
    times: int  # how often it runs
    cycles: int  # as the compiler estimates, once
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of the result, and of a kernel's operands
    path: str  # where in the model it comes from
    asynchronous: bool = False  # started here and awaited elsewhere
    copy: str = ""  # from host memory: which one is started or awaited

    @property
    def bytes(self) -> int:
        """Of the results, of which a combined collective has several. An asynchronous one names its operands first,
        which for a gather are smaller.
        """
        sizes = sorted(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.shapes if dtype in ITEM_BYTES)
        if not self.asynchronous:
            return sum(sizes)
        return sum(sizes[len(sizes) // 2 :]) if self.kind == "all-gather" else sizes[-1]

    @property
    def heads_head_size_queries_keys(self) -> tuple[int, int, int, int]:
        """Of an attention kernel: its result is [heads, head size, queries], its keys [heads, keys, head size]."""
        heads, head_size, queries = self.shapes[0][1]
        (keys, *_) = (s[1] for _, s in self.shapes[1:] if len(s) == 3 and (s[0], s[2]) == (heads, head_size))
        return heads, head_size, queries, keys


ITEM_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "u8": 1}
HIDDEN = "async-collective"  # what libtpu calls one that it runs beside the computation, as gathers on v5e
COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute", HIDDEN)
HOST_START, HOST_DONE = "host-copy-start", "host-copy-done"
HOST = "S(5)"  # the memory space, in a layout
HOST_COPIES = ("copy-start", "slice-start", "dynamic-slice-start")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def operations(text: str) -> list[Operation]:
    """Every operation that has an estimate, moves data between devices or from the host, or is a kernel, from an
    executable's text, in the order of its schedule.

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


def _walk(computations: dict[str, list[str]], name: str, times: int) -> Iterator[Operation]:
    copies: set[str] = set()
    for line in computations[name]:
        if not (match := INSTRUCTION.match(line)):
            continue
        own, result, opcode = match.groups()
        if opcode == "while":
            loop = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            if not loop:
                raise ValueError(f"a loop without condition and body: {line[:200]}")
            yield from _walk(computations, loop[2], times * trips(computations[loop[1]]))
            continue
        if opcode == "conditional":
            raise ValueError(f"a branch, whose choice is not known: {line[:200]}")
        if HOST in result and opcode.endswith("-start"):
            if opcode not in HOST_COPIES:
                raise ValueError(f"host memory is used by {opcode}, which is no copy of a part of it: {line[:200]}")
            copies.add(own)
            moved = [shape for shape in _shapes(result) if shape[1]][-1]  # behind the operands; what follows is scalar
            yield Operation(HOST_START, times, 0, (moved,), "", copy=own)
            continue
        if (awaited := line[match.end() :].split(")")[0].removeprefix("%")) in copies and opcode.endswith("-done"):
            yield Operation(HOST_DONE, times, 0, (), "", copy=awaited)
            continue
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        kernel = 'custom_call_target="tpu_custom_call"' in line
        kind = "kernel" if kernel else opcode.removesuffix("-start")
        if own.startswith("async-collective-start"):
            kind = HIDDEN
        if cycles or kernel or kind in COLLECTIVES:
            shapes = _shapes(result)
            if kernel:
                operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
                shapes += _shapes(operands[1]) if operands else []
            path = re.search(r'op_name="([^"]*)"', line)
            yield Operation(
                kind,
                times,
                int(cycles[1]) if cycles and not kernel else 0,
                tuple(shapes),
                path[1] if path else "",
                opcode.endswith("-start"),
            )


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype, tuple(map(int, shape.split(","))) if shape else ()) for dtype, shape in SHAPE.findall(text)]


def trips(condition: list[str]) -> int:
    """How often a loop runs whose condition is `index < constant` (from 0, as `jax.lax.scan` makes it)."""
    numbers = re.findall(r"= [su]32\[\]\S* constant\((\d+)\)", "\n".join(condition))
    if len(numbers) != 1 or not any("direction=LT" in line for line in condition):
        raise ValueError(f"a loop whose number of turns is not understood: {condition}")
    return int(numbers[0])


def collectives(ops: list[Operation]) -> dict[str, int]:
    """How many of each kind a layer has: those in a loop, which is over the layers."""
    counts: dict[str, int] = {}
    for op in ops:
        if op.kind in COLLECTIVES and op.times > 1:
            counts[op.kind] = counts.get(op.kind, 0) + 1
    return counts


def link_seconds(op: Operation, chip: Chip, grid: tuple[int, ...], parts: int) -> float:
    """Seconds that one collective takes on a slice of this shape without wrap-around links.

    Gathers and sums are bound by the two links of a chip at the corner, exchanges by the links across the middle.
    """
    link = chip.link_bytes_per_second
    if op.kind == HIDDEN:
        return 0.0
    if op.kind == "all-to-all":
        return op.bytes * max(grid) / 4 / link
    share = (parts - 1) / parts
    return (2 if op.kind == "all-reduce" else 1) * op.bytes * share / (2 * link)


def seconds_of(text: str, topology: str, devices: int) -> tuple[float, float, float]:
    """Seconds of a compiled program's own operations, of its attention kernels and of its collectives."""
    program, kernel, links = 0.0, 0.0, 0.0
    for op in operations(text):
        own, attention, exchange = operation_seconds(op, topology, devices)
        program, kernel, links = program + op.times * own, kernel + op.times * attention, links + op.times * exchange
    return program, kernel, links


def operation_seconds(op: Operation, topology: str, devices: int) -> tuple[float, float, float]:
    """Of one operation, once: seconds as the compiler estimates, of an attention kernel, and of a collective."""
    generation, _, shape = topology.partition(":")
    chip, grid = CHIPS[generation], tuple(map(int, shape.split("x")))
    kernel = 0.0
    if op.kind == "kernel":
        heads, head_size, queries, keys = op.heads_head_size_queries_keys
        kernel = heads * measured_cycles(GENERATIONS[generation].device_kind, head_size, queries, keys)
    links = link_seconds(op, chip, grid, devices) if op.kind in COLLECTIVES else 0.0
    return op.cycles / chip.clock_hz, kernel / chip.clock_hz, links


def estimate(model: str, size: str, topology: str, mesh: str, published: str = "") -> dict[str, Any]:
    """One row of the table."""
    config, generation = MODELS[model], topology.partition(":")[0]
    chip = CHIPS[generation]
    width, height = map(int, size.split("x"))
    start = time.perf_counter()
    compiled = compile_step(config, (width, height), topology, mesh)
    compile_seconds = time.perf_counter() - start
    text = compiled.as_text()
    program, kernel, links = seconds_of(text, topology, (devices := meshes.parse(mesh).devices))
    flops = 2 * step_flops(config, 21 * (height // 16) * (width // 16), TEXT_TOKENS)
    row = {
        "model": model,
        "size": size,
        "topology": topology,
        "mesh": mesh,
        "program_seconds": program,
        "attention_seconds": kernel,
        "links_seconds": links,
        "step_seconds": program + kernel + links,
        "floor_seconds": flops / chip.flops / devices,
        "device_gb": program_bytes(compiled) / 1e9,
        "limit_gb": chip.memory_bytes / 1e9,
        "collectives_per_layer": collectives(operations(text)),
        "compile_seconds": compile_seconds,
        "published": published,
    }
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, metavar=("MODEL", "SIZE", "TOPOLOGY", "MESH"), help="this one alone")
    parser.add_argument("--only", default="", help="cases of the table that contain this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [arguments.case] if arguments.case else [case for case in CASES if arguments.only in " ".join(case)]
    rows = []
    if not arguments.json:
        print(
            "model size | slice mesh | program + attention + links = seconds a step (floor) | GB of limit | published"
        )
    for case in cases:
        rows.append(row := estimate(*case))
        if not arguments.json:
            print(
                "{model} {size} | {topology} {mesh} | {program_seconds} + {attention_seconds} + {links_seconds} = "
                "{step_seconds} ({floor_seconds}) | {device_gb} of {limit_gb} | {published} | {collectives_per_layer}, "
                "compiled in {compile_seconds} s".format(**row),
                flush=True,
            )
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
