"""Whether streamed layers arrive in time on TPUs: copies from host memory against the computation that hides them.

    python benchmarks/stream_overlap.py                  # every case: two to three minutes each
    python benchmarks/stream_overlap.py --only v6e --json

Of two mechanisms, from compiled programs (`vidax.planner.schedule` says how their seconds are counted):

    ring   `weights/residency.py`: one layer is a program, and the copy of the next one has its whole computation.
           Exposed is, of each layer, what its copy is longer. The first layer's copy starts in the step before.
    graph  `denoise_step` with its layers in host memory: XLA schedules each copy. Exposed is what the program waits
           where it needs a copy; copies share the host link in the order in which they start. The first layer's copy
           starts with the step.

The bound is the larger of both sums, of computation and of copies. No row is measured: on a TPU a record's `streaming`
says what was waited for.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

import jax.numpy as jnp
from step_estimate import compile_step, mesh_of

from vidax.models.interface import Video
from vidax.models.locate import describe
from vidax.models.wan.dit import Block
from vidax.nn import placement
from vidax.planner.chips import parse_topology
from vidax.planner.schedule import HOST_DONE, HOST_START, Operation, operation_seconds, operations, seconds_of
from vidax.weights.memory import split_bytes

CASES = (("v4-8", "seq=4"), ("v5e-8", "seq=8"), ("v6e-8", "seq=8"))
SIZES = ("832x480", "1280x720")
MODEL = "wan2.1-t2v-14b"
FRAMES = (81, 17)
DEFAULT = "ring"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """A step's seconds of computation, of copies, and of waiting for copies."""

    compute: float
    transfer: float
    exposed: float
    after_begin: float = 0.0  # within a layer of the graph: from its begin to where its first copy starts
    before_done: float = 0.0  # and from there to where the last copy is needed, waiting left out


def ring(size: tuple[int, int], frames: int, topology: str, mesh: str) -> Overlap:
    made = mesh_of(topology, mesh)
    _, model = describe(MODEL)
    compiled = model.lower_layer(Video(*size, frames, branches=2), jnp.bfloat16, made).compile()
    compute = seconds_of(compiled.as_text(), (slice_ := parse_topology(topology)), made.size).total
    layer = split_bytes(Block.spec(model.dit, jnp.bfloat16), placement(made))
    copy = layer / slice_.chip.host_link_bytes_per_second
    layers = model.dit.layers
    return Overlap(compute=layers * compute, transfer=layers * copy, exposed=layers * max(0.0, copy - compute))


def graph(size: tuple[int, int], frames: int, topology: str, mesh: str) -> Overlap:
    slice_, devices = parse_topology(topology), mesh_of(topology, mesh).size
    compiled = compile_step(MODEL, size, topology, mesh, frames, streamed=True)
    return overlap(
        operations(compiled.as_text()),
        lambda op: operation_seconds(op, slice_, devices).total,
        slice_.chip.host_link_bytes_per_second,
    )


def overlap(ops: list[Operation], seconds: Callable[[Operation], float], bytes_per_second: float) -> Overlap:
    """The time of a program that copies layers from host memory, operation by operation in the order of its schedule.

    A loop's body is gone through once: a copy is awaited in the turn that starts it. Raises ValueError where the loop
    over layers has no copy, or one is not awaited.
    """
    now = compute = transfer = exposed = 0.0
    free = 0.0  # when the link is
    arrivals: dict[str, float] = {}
    for op in ops:
        if op.kind == HOST_START:
            arrivals[op.copy] = free = max(free, now) + op.bytes / bytes_per_second
            transfer += op.times * op.bytes / bytes_per_second
        elif op.kind == HOST_DONE:
            wait = max(0.0, arrivals.pop(op.copy) - now)
            now += wait
            exposed += op.times * wait
        else:
            now += seconds(op)
            compute += op.times * seconds(op)
    if arrivals:
        raise ValueError(f"copies from host memory that are not awaited where they start: {', '.join(arrivals)}")
    layer = [op for op in ops if op.times > 1]
    starts = [i for i, op in enumerate(layer) if op.kind == HOST_START]
    if not starts:
        raise ValueError("no copy from host memory in the loop over layers; the program does not stream")
    last = max(i for i, op in enumerate(layer) if op.kind == HOST_DONE)
    after_begin, before_done = (sum(map(seconds, part)) for part in (layer[: starts[0]], layer[starts[0] : last]))
    return Overlap(
        compute=compute, transfer=transfer, exposed=exposed, after_begin=after_begin, before_done=before_done
    )


MECHANISMS = {"ring": ring, "graph": graph}


def row(size: str, frames: int, topology: str, mechanism: str, found: Overlap) -> dict[str, Any]:
    return {
        "model": "wan2.1-t2v-14b",
        "size": size,
        "frames": frames,
        "topology": topology,
        "residency": "streamed",
        "mechanism": mechanism,
        "step_seconds": round(found.compute + found.exposed, 3),
        "transfer_seconds": round(found.transfer, 3),
        "exposed_seconds": round(found.exposed, 3),
        "bound_seconds": round(max(found.compute, found.transfer), 3),
        "default": mechanism == DEFAULT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases that contain this text, as in 'v5e' or '832x480 17'")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [
        (size, frames, topology, mesh, mechanism)
        for topology, mesh in CASES
        for size in SIZES
        for frames in FRAMES
        for mechanism in MECHANISMS
        if arguments.only in f"{size} {frames} {topology} {mesh} {mechanism}"
    ]
    rows = []
    for size, frames, topology, mesh, mechanism in cases:
        width, height = map(int, size.split("x"))
        found = MECHANISMS[mechanism]((width, height), frames, topology, mesh)
        chip = parse_topology(topology).chip
        rows.append(row(size, frames, topology, mechanism, found))
        if not arguments.json:
            line = "{topology} {size} {frames:2} frames, {mechanism:5}: a step {step_seconds} s, "
            line += "copies {transfer_seconds} s, of them exposed {exposed_seconds} s"
            if mechanism == "graph":
                after, before = (x * chip.clock_hz for x in (found.after_begin, found.before_done))
                line += f"; a layer's start after {after:,.0f} cycles and {before:,.0f} before the last is needed"
            print(line.format(**rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
