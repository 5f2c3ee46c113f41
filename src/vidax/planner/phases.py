"""What each phase of a video takes of each device: bytes, seconds, and who says so.

Every figure is one of

    compiled   memory of the program that `generate` runs, from its executable; seconds are then `scheduled`: the
               compiler's cycles for each operation and the counted cycles of attention, with modelled links
    table      the same, compiled beforehand (`programs.json`)
    modelled   arithmetic: a row of the table scaled by the pixels of a device, or operations over the peak of a chip

Loading weights and writing files are not part of it, nor the host's own time between programs.
"""

import dataclasses
import functools
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vidax.engine.request import Request
from vidax.models.interface import Architecture, Footprint
from vidax.nn import named_leaves, placement
from vidax.planner.chips import Chip, Topology
from vidax.planner.schedule import operation_seconds, operations
from vidax.weights.memory import program_bytes, split_bytes
from vidax.weights.residency import RESIDENT, Residency

SHARE_OF_PEAK = 0.55  # of the matrix units, where nothing else is known; about what compiled steps of 14B reach
PASSES = {"bfloat16": 1, "float32": 6}  # of the matrix units, at the highest precision

Seconds = dict[str, float]  # by what they are spent on, as in LIMITS
LIMITS = ("matrix units", "memory", "links", "host link")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program, or what is known of it: device bytes at its peak, seconds of one run where they are known."""

    device_bytes: int
    seconds: Seconds | None
    compile_seconds: float | None
    how: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a video.

    device_bytes: at most, of each device; weights_bytes: of that, what is there when it begins. host_bytes: of each
    host, for layers that wait there. runs: of its program. seconds: of all runs, None where the chip is not known.
    """

    name: str
    device_bytes: int
    weights_bytes: int
    host_bytes: int
    runs: int
    seconds: Seconds | None
    compile_seconds: float | None
    how: str

    @property
    def total_seconds(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def bound(self) -> str | None:
        """What most of its time is spent on."""
        return max(self.seconds, key=lambda limit: self.seconds[limit]) if self.seconds else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a plan is made for: a mesh of devices that are here or described, and their chip if it is known.

    compiles: whether programs can be compiled for them.
    """

    mesh: Mesh
    topology: Topology | None
    compiles: bool

    @property
    def chip(self) -> Chip | None:
        return self.topology.chip if self.topology else None


def compile_here(lowered: Callable[[], Any], place: Place) -> tuple[Program, Any]:
    """A program compiled now, and the executable."""
    start = time.perf_counter()
    compiled = lowered().compile()
    spent = time.perf_counter() - start
    seconds = scheduled(compiled.as_text(), place)
    return Program(
        device_bytes=program_bytes(compiled), seconds=seconds, compile_seconds=spent, how="compiled"
    ), compiled


def scheduled(text: str, place: Place) -> Seconds | None:
    """Seconds of a compiled program's text."""
    if place.topology is None:
        return None
    found = dict.fromkeys(LIMITS, 0.0)
    for op in operations(text):
        once = operation_seconds(op, place.topology, place.mesh.size)
        product = any(name in op.path for name in ("dot_general", "conv_general_dilated"))
        found["matrix units" if product else "memory"] += op.times * (once.program + once.unestimated)
        found["matrix units"] += op.times * once.attention
        found["links"] += op.times * once.links
    return found


def modelled(flops: Mapping[str, float], place: Place) -> Seconds | None:
    """Seconds of a program from its operations alone."""
    if place.chip is None:
        return None
    passes = sum(count * PASSES[dtype] for dtype, count in flops.items())
    return {"matrix units": passes / (SHARE_OF_PEAK * place.chip.flops * place.mesh.size)}


def denoise(
    model: Architecture, request: Request, residency: Residency, dtype, place: Place, layer: Any | None
) -> Phase:
    """The denoising steps. layer: a layer's executable, where one has been compiled already."""
    shape = request.width, request.height, request.frames, request.branches
    lower_layer = functools.partial(model.lower_layer, *shape, dtype, place.mesh)
    steps, past = request.sampler.steps, kept_predictions(request)
    rough = model.footprint(*shape, dtype, place.mesh)
    weights, spec = 0, model.specs(dtype)["transformer"]
    if not place.compiles:
        program = Program(
            device_bytes=rough.total(residency) + ROUGH_STREAMS * rough.stream,
            seconds=modelled(model.flops(*shape, dtype)["step"], place),
            compile_seconds=None,
            how="modelled",
        )
    elif residency == RESIDENT:
        program, _ = compile_here(lambda: model.lower_step(*shape, past, dtype, place.mesh), place)
    else:
        program = by_layer(lower_layer, layer, rough, residency, place)
        layer_bytes, count = rough.layer, residency.count(rough.layers)
        weights = device_weights(spec, place.mesh) - (rough.layers - count) * layer_bytes
    seconds = program.seconds
    if seconds is not None and residency != RESIDENT:
        seconds = with_copies(seconds, rough, residency, place)
    streamed = rough.layers - residency.count(rough.layers)
    return Phase(
        name="denoise",
        device_bytes=program.device_bytes,
        weights_bytes=weights or device_weights(spec, place.mesh),
        host_bytes=0 if residency.disk else streamed * rough.layer * len(place.mesh.local_devices),
        runs=steps,
        seconds=times(seconds, steps),
        compile_seconds=program.compile_seconds,
        how=program.how,
    )
