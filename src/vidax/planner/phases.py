"""What each phase of a video takes of each device: bytes, seconds, and how that is known.

    compiled   memory is that of the program that `generate` runs; seconds are read from its schedule (`schedule.py`)
    table      the same, compiled beforehand (`programs.json`)
    modelled   arithmetic: a row of the table scaled by the pixels of a device, or operations over the peak of a chip

Left out are loading weights, writing files and the host's own time between programs.
"""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jax.numpy as jnp

from vidax.engine.loading import apart
from vidax.engine.request import Request
from vidax.engine.residency import ROUGH_STREAMS, Stack, decide, fill
from vidax.models.architecture import Architecture
from vidax.models.interface import Footprint
from vidax.nn import named_leaves, placement
from vidax.planner.chips import Chip, Topology, chips
from vidax.planner.schedule import operation_seconds, operations
from vidax.weights.memory import program_bytes, split_bytes
from vidax.weights.residency import RESIDENT, Residency

SHARE_OF_PEAK = 0.55  # of the matrix units where nothing else is known: about what compiled steps of 14B reach
PASSES = {"bfloat16": 1, "float32": 6}  # through the matrix units, at the highest precision
LIMITS = ("matrix units", "memory", "links", "host link")

Seconds = dict[str, float]  # by what they are spent on, as in LIMITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a plan is made for: devices that are here or described.

    topology: of a TPU slice whose chip is known; without it no seconds are given.
    budget: bytes of each device that may be used, None where nothing bounds them.
    compiles: whether a compiler for these devices is at hand.
    """

    mesh: Any  # a Mesh, or an AbstractMesh where nothing compiles
    topology: Topology | None
    budget: int | None
    compiles: bool

    @property
    def chip(self) -> Chip | None:
        return self.topology.chip if self.topology else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a video.

    device_bytes: of each device at its peak; weights_bytes: of that, what is there when it begins.
    host_bytes: of what waits in host memory: layers, and of two experts the one whose turn it is not, `waiting_bytes`.
    runs: of its program, and seconds those of all runs.
    unknown: operations that take time which nobody estimates.
    """

    name: str
    residency: Residency
    device_bytes: int
    weights_bytes: int
    host_bytes: int
    runs: int
    seconds: Seconds | None
    compile_seconds: float | None
    how: str
    unknown: tuple[str, ...] = ()
    waiting_bytes: int = 0

    @property
    def total_seconds(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def bound(self) -> str | None:
        """What most of the time is spent on."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is known of a program: bytes of each device at its peak, and seconds of one run."""

    device_bytes: int
    seconds: Seconds | None
    compile_seconds: float | None
    how: str
    unknown: tuple[str, ...] = ()


def compiled(lower: Callable[[], Any], target: Target) -> tuple[Program, Any]:
    """A program compiled now, and its executable."""
    start = time.perf_counter()
    executable = lower().compile()
    spent = time.perf_counter() - start
    seconds, unknown = scheduled(executable.as_text(), target)
    program = Program(
        device_bytes=program_bytes(executable),
        seconds=seconds,
        compile_seconds=round(spent, 1),
        how="compiled",
        unknown=unknown,
    )
    return program, executable


def scheduled(text: str, target: Target) -> tuple[Seconds | None, tuple[str, ...]]:
    """Seconds of a compiled program, from its text, and what takes time in it that nobody estimates."""
    if target.topology is None:
        return None, ()
    found, unknown = dict.fromkeys(LIMITS, 0.0), set[str]()
    for op in operations(text):
        once = operation_seconds(op, target.topology, target.mesh.size)
        unknown.update(once.unknown)
        product = any(name in op.path for name in ("dot_general", "conv_general_dilated"))
        found["matrix units" if product else "memory"] += op.times * (once.program + once.moves)
        found["matrix units"] += op.times * once.attention
        found["links"] += op.times * once.links
    return found, tuple(sorted(unknown))


def by_operations(flops: Mapping[str, float], target: Target) -> Seconds | None:
    """Seconds of a program of which only the number of operations is known."""
    if target.chip is None:
        return None
    passes = sum(count * PASSES[dtype] for dtype, count in flops.items())
    return {"matrix units": passes / (SHARE_OF_PEAK * target.chip.flops * target.mesh.size)}


def times(seconds: Seconds | None, count: float) -> Seconds | None:
    return None if seconds is None else {limit: count * value for limit, value in seconds.items()}


def encode_text(model: Architecture, request: Request, wish: Residency | None, dtype: Any, target: Target) -> Phase:
    """The texts of a request, one after the other. wish: the residency, None for as many layers as fit."""
    place = dtype, target.mesh
    return in_layers(
        "encode text",
        model.specs(dtype)["text_encoder"],
        footprint=functools.partial(model.text_footprint, *place),
        lower=functools.partial(model.lower_text, *place),
        lower_layer=functools.partial(model.lower_text_layer, *place),
        flops=lambda: model.flops(request.video._replace(frames=1), dtype)["text"],
        runs=request.branches,
        wish=wish,
        dtype=dtype,
        target=target,
    )


def look_at_images(model: Architecture, request: Request, dtype: Any, target: Target) -> Phase:
    """The image encoder, all images at once."""
    specs = model.specs(dtype)["image_encoder"]
    if target.compiles:
        program, _ = compiled(functools.partial(model.lower_look, len(request.images), dtype, target.mesh), target)
    else:
        seconds = by_operations(model.flops(request.video, dtype)["look"], target)
        weights = device_weights(specs, target.mesh)
        program = Program(device_bytes=weights, seconds=seconds, compile_seconds=None, how="modelled")
    return resident("look at images", specs, program, 1, target)


def encode_images(model: Architecture, request: Request, target: Target, full: bool) -> Phase:
    """The frames from which a video is made, chunk by chunk. Without `full` it is looked up in the table or, where it
    is not there, taken from the decoder by their operations: what the encoder holds is at most as much, of fewer
    layers that are no wider.
    """
    specs = model.specs(jnp.float32)
    pixels = request.width * request.height
    weights, theirs = (device_weights(specs[name], target.mesh) for name in ("encoder", "decoder"))
    program = None if full else known(digest(specs["encoder"]), pixels, weights, target)
    if program is None and not full and (like := known(digest(specs["decoder"]), pixels, theirs, target)):
        flops = model.flops(request.video, jnp.float32)
        own, other = (sum(flops[name].values()) for name in ("encode", "decode"))
        program = dataclasses.replace(
            like,
            device_bytes=weights + like.device_bytes - theirs,
            seconds=times(like.seconds, own / other),
            how="modelled",
        )
    if program is None:
        program = compiled_or_weights(
            functools.partial(model.lower_encode, request.video, target.mesh), weights, target
        )
    return resident("encode images", specs["encoder"], program, len(model.encoded_chunks(request.video)), target)


def denoise(model: Architecture, request: Request, wish: Residency | None, dtype: Any, target: Target) -> Phase:
    """The steps; wish as above. Of two experts one is on the devices at a time, and while it works all of the other
    waits in host memory.
    """
    place = request.video, dtype, target.mesh
    specs = model.specs(dtype)["transformer"]
    others = sum(bool(stage.steps) for stage in request.stages) - 1
    waiting = others * target.mesh.size * split_bytes(specs, placement(target.mesh))
    steps = in_layers(
        "denoise",
        specs,
        footprint=functools.partial(model.footprint, *place),
        lower=functools.partial(model.lower_step, request.video, request.sampler.table(), dtype, target.mesh),
        lower_layer=functools.partial(model.lower_layer, *place),
        flops=lambda: model.flops(request.video, dtype)["step"],
        runs=request.sampler.steps,
        wish=wish,
        dtype=dtype,
        target=target,
    )
    return dataclasses.replace(steps, host_bytes=steps.host_bytes + waiting, waiting_bytes=waiting)


def in_layers(
    name: str,
    specs: Any,
    *,
    footprint: Callable[..., Footprint],
    lower: Callable[[], Any],
    lower_layer: Callable[[], Any],
    flops: Callable[[], Mapping[str, float]],
    runs: int,
    wish: Residency | None,
    dtype: Any,
    target: Target,
) -> Phase:
    """A phase of a network of many layers: one program where all are resident, else that of a layer. Where nothing
    compiles, by a rule of thumb and by the number of operations.
    """
    layers: list[tuple[Program, Any]] = []  # the program of one, where it has been compiled

    def compile_layer() -> Any:
        if not layers:
            layers.append(compiled(lower_layer, target))
        return layers[0][1]

    if not target.compiles:
        rough = footprint()
        needs = dataclasses.replace(rough, fixed=rough.fixed + ROUGH_STREAMS * rough.stream)
        residency = wish or (RESIDENT if target.budget is None else fill(needs, target.budget))
        seconds = by_operations(flops(), target)
        program = Program(device_bytes=needs.total(residency), seconds=seconds, compile_seconds=None, how="modelled")
    else:
        stack = Stack(work=name, footprint=footprint, compile=compile_layer, converted=False)
        residency, needs, _ = decide(stack, wish, target.budget)
        if residency == RESIDENT and not apart(target.mesh, dtype):
            program, _ = compiled(lower, target)
        else:
            needs = footprint(compile_layer())
            layer, _ = layers[0]
            program = dataclasses.replace(
                layer, device_bytes=needs.total(residency), seconds=times(layer.seconds, needs.layers)
            )
    streamed = needs.layers - residency.count(needs.layers)
    seconds = program.seconds
    if seconds is not None and streamed:
        seconds = seconds | {"host link": exposed(sum(seconds.values()), needs, streamed, target)}
    return Phase(
        name=name,
        residency=residency,
        device_bytes=program.device_bytes,
        weights_bytes=device_weights(specs, target.mesh) - streamed * needs.layer,
        host_bytes=streamed * needs.layer * target.mesh.size,
        runs=runs,
        seconds=times(seconds, runs),
        compile_seconds=program.compile_seconds,
        how=program.how,
        unknown=program.unknown,
    )


def exposed(step_seconds: float, needs: Footprint, streamed: int, target: Target) -> float:
    """Seconds of a step that copies from host memory take beyond what hides them: each has the computation of the
    layers between it and the streamed one before.
    """
    assert target.chip is not None
    copy = needs.layer / target.chip.host_link_bytes_per_second
    return max(0.0, streamed * copy - step_seconds)


def device_weights(specs: Any, mesh: Any) -> int:
    """Bytes of a part's parameters on each device: all but embedding tables, which stay in their files."""
    kept = [spec for _, spec in named_leaves(specs) if not spec.looked_up]
    return split_bytes(kept, placement(mesh))


def decode(model: Architecture, request: Request, target: Target, full: bool) -> Phase:
    """The latent frames, chunk by chunk. Its program takes minutes to compile at full size: without `full` it is looked
    up in the table, if its network is there.
    """
    specs, video = model.specs(jnp.float32)["decoder"], request.video
    weights, pixels = device_weights(specs, target.mesh), decoded_pixels(model, request)
    program = None if full else known(digest(specs), pixels, weights, target)
    if program is None:
        program = compiled_or_weights(functools.partial(model.lower_decode, video, target.mesh), weights, target)
    return resident("decode", specs, program, model.decodings(video), target)


def decoded_pixels(model: Architecture, request: Request) -> int:
    """Of a frame, or of one of the tiles that it is decoded in."""
    height, width = model.latents_to_decode(request.video)[-1][2:4]
    return height * width * model.vae.space_factor**2


def compiled_or_weights(lower: Callable[[], Any], weights: int, target: Target) -> Program:
    """A program compiled now; where nothing compiles, of which only the bytes of its weights are known."""
    if target.compiles:
        return compiled(lower, target)[0]
    return Program(device_bytes=weights, seconds=None, compile_seconds=None, how="weights alone")


def resident(name: str, specs: Any, program: Program, runs: int, target: Target) -> Phase:
    """A phase of a network that is on the devices whole."""
    return Phase(
        name=name,
        residency=RESIDENT,
        device_bytes=program.device_bytes,
        weights_bytes=device_weights(specs, target.mesh),
        host_bytes=0,
        runs=runs,
        seconds=times(program.seconds, runs),
        compile_seconds=program.compile_seconds,
        how=program.how,
        unknown=program.unknown,
    )


def digest(specs: Any) -> str:
    """Of what a network is: the shapes and dtypes of its parameters."""
    shapes = [(name, spec.shape, str(jnp.dtype(spec.dtype))) for name, spec in named_leaves(specs)]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


@functools.cache
def table() -> dict[str, Any]:
    """Decoders and encoders compiled beforehand; `benchmarks/plan_table.py` writes it."""
    return json.loads((resources.files("vidax.planner") / "programs.json").read_text())


def known(network: str, pixels: int, weights: int, target: Target) -> Program | None:
    """The row of the table for a coder of frames of so many pixels, or the nearest one scaled by the pixels of a
    device; None where this network is not in it, or the chip is not known.
    """
    rows = [row for row in table()["rows"] if row["network"] == network]
    if target.chip is None or not rows:
        return None
    chip, share = target.chip, pixels / target.mesh.size

    def ratio(row: Mapping[str, Any]) -> float:
        return share / (row["pixels"] / row["devices"])

    def distance(row: Mapping[str, Any]) -> tuple[float, bool]:
        return max(ratio(row), 1 / ratio(row)), row["chip"] != chip.name

    row = min(rows, key=distance)
    exact = (row["chip"], row["devices"], row["pixels"]) == (chip.name, target.mesh.size, pixels)
    slower = chips()[row["chip"]].flops / chip.flops
    own = row["device_bytes"] - row["weights_bytes"]
    return Program(
        device_bytes=weights + round(own * ratio(row)),
        seconds=times(row["seconds"], ratio(row) * slower),
        compile_seconds=None,
        how="table" if exact else "modelled",
        unknown=tuple(row["unknown"]),
    )
