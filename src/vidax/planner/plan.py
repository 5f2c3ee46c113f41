"""Whether a video fits on devices and how long it takes, before any of them is rented."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from vidax import __version__
from vidax.engine.engine import Engine
from vidax.engine.request import Request
from vidax.engine.residency import check_limit, gb, memory
from vidax.errors import UserError
from vidax.models.architecture import Architecture
from vidax.models.registry import Card
from vidax.parallel import mesh as meshes
from vidax.parallel.mesh import AXES, MeshShape
from vidax.planner.chips import Topology, chip_of, devices, has_libtpu, parse_topology
from vidax.planner.phases import (
    LIMITS,
    Phase,
    Target,
    decode,
    denoise,
    encode_images,
    encode_text,
    look_at_images,
)
from vidax.weights.memory import USABLE
from vidax.weights.residency import Residency

SEARCHED = 3  # meshes that a search compiles
SETTINGS = ("size", "frames", "steps", "guidance_scale", "guidance_scale_2", "boundary_ratio", "solver", "vae_tiling")
NOTEWORTHY = 0.97  # of the chosen mesh's time, below which another is recommended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a video takes on devices. mesh and residency: as `generate` would choose them, or as given.

    limit_bytes: of each device, None where nothing says. others: further meshes that were compiled.
    advice: what would help, or what else to know.
    """

    model: str
    request: Request
    dtype: str
    topology: str
    chips: int
    mesh: MeshShape
    mesh_origin: str
    residency_origin: str
    phases: tuple[Phase, ...]
    limit_bytes: int | None
    others: tuple["Plan", ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def step(self) -> Phase:
        return next(phase for phase in self.phases if phase.name == "denoise")

    @property
    def peak_bytes(self) -> int:
        return max(phase.device_bytes for phase in self.phases)

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits on a device; None where nothing bounds it."""
        return None if self.limit_bytes is None else self.peak_bytes <= USABLE * self.limit_bytes

    @property
    def step_seconds(self) -> float | None:
        total = self.step.total_seconds
        return None if total is None else total / self.step.runs

    @property
    def total_seconds(self) -> float | None:
        """From the text to the last frame, without loading and compiling."""
        seconds = [phase.total_seconds for phase in self.phases]
        return None if None in seconds else sum(value for value in seconds if value is not None)

    def as_json(self) -> dict[str, Any]:
        settings = self.request.settings()
        return {
            "model": self.model,
            **{name: settings[name] for name in SETTINGS if name in settings},
            "images": len(self.request.images),
            "dtype": self.dtype,
            "topology": self.topology,
            "chips": self.chips,
            "mesh": str(self.mesh),
            "mesh_origin": self.mesh_origin,
            "residency": str(self.step.residency),
            "residency_origin": self.residency_origin,
            "fits": self.fits,
            "peak_device_gb": in_gb(self.peak_bytes),
            "limit_gb": None if self.limit_bytes is None else in_gb(self.limit_bytes),
            "step_seconds": rounded(self.step_seconds),
            "total_seconds": rounded(self.total_seconds),
            "phases": [described(phase) for phase in self.phases],
            "others": [
                {
                    "mesh": str(plan.mesh),
                    "residency": str(plan.step.residency),
                    "fits": plan.fits,
                    "peak_device_gb": in_gb(plan.peak_bytes),
                    "step_seconds": rounded(plan.step_seconds),
                }
                for plan in self.others
            ],
            "advice": list(self.advice),
            "versions": versions(),
        }


def described(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "residency": str(phase.residency),
        "device_gb": in_gb(phase.device_bytes),
        "weights_gb": in_gb(phase.weights_bytes),
        "host_gb": in_gb(phase.host_bytes),
        "runs": phase.runs,
        "seconds": rounded(phase.total_seconds),
        "seconds_by": None
        if phase.seconds is None
        else {limit: rounded(phase.seconds[limit]) for limit in LIMITS if phase.seconds.get(limit)},
        "bound": phase.bound,
        "compile_seconds": phase.compile_seconds,
        "known_as": phase.how,
        "not_estimated": list(phase.unknown),
    }


def in_gb(count: int) -> float:
    return float(f"{count / 1e9:.5g}")


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")


def versions() -> dict[str, str]:
    found = {"vidax": __version__, "jax": jax.__version__}
    try:
        return found | {"libtpu": metadata.version("libtpu")}
    except metadata.PackageNotFoundError:
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Devices to plan for: those of a TPU slice that need not be here, or those that are.

    devices: None where none can be described, which is without libtpu. limit_bytes: memory of each, None where
    nothing says.
    """

    name: str
    devices: list[jax.Device] | None
    count: int
    topology: Topology | None
    limit_bytes: int | None

    @property
    def compiles(self) -> bool:
        return self.devices is not None

    @property
    def chips(self) -> int:
        per_chip = self.topology.chip.devices_per_chip if self.topology else 1
        return max(1, self.count // per_chip)

    def mesh(self, shape: MeshShape) -> Any:
        """A mesh of the devices, or of as many that nobody describes."""
        if self.devices is not None:
            return meshes.make(shape, self.devices)
        if shape.devices > self.count:
            raise UserError(f"mesh {shape} has {shape.devices} devices, and {self.name} has {self.count}")
        return on_paper(shape)


def on_paper(shape: MeshShape) -> AbstractMesh:
    """A mesh of devices that nobody describes, for arithmetic."""
    return AbstractMesh(shape.sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def there(name: str, memory_limit: float | None = None) -> Site:
    """A TPU slice by its name; without libtpu its devices are not described. Raises UserError for an unknown one."""
    topology = parse_topology(name)
    check_limit(memory_limit)
    own = topology.chip.memory_bytes
    return Site(
        name=name,
        devices=devices(topology) if has_libtpu() else None,
        count=topology.devices,
        topology=topology,
        limit_bytes=own if memory_limit is None else min(own, of_budget(memory_limit * 1e9)),
    )


def of_budget(budget: float) -> int:
    """Bytes of the memory of a device of which so many are usable."""
    return math.ceil(budget / USABLE)


def here(memory_limit: float | None = None) -> Site:
    """The devices of this machine."""
    found = meshes.default_devices()
    count = len(found)
    budget = memory(meshes.make(MeshShape(seq=count), found), memory_limit).budget
    return Site(
        name=f"{count} x {found[0].device_kind}",
        devices=list(found),
        count=count,
        topology=slice_of(found[0], count),
        limit_bytes=None if budget is None else of_budget(budget),
    )


def require_room(engine: Engine, requests: Iterable[Request]) -> None:
    """Raises UserError for the first request whose frames do not fit on the engine's devices while they are decoded, as
    far as that is known beforehand; the engine itself looks after its networks of many layers.
    """
    if (budget := engine.memory.budget) is None:
        return
    first = engine.mesh.devices.flat[0]
    target = Target(mesh=engine.mesh, topology=slice_of(first, engine.mesh.size), budget=budget, compiles=False)
    for request in {(request.width, request.height, request.tiling): request for request in requests}.values():
        takes = decode(engine.model, request, target, full=False).device_bytes
        if takes > budget:
            raise UserError(
                f"{request.width}x{request.height}: decoding takes {gb(takes)} of each device by the plan, and "
                f"{engine.memory.origin} is {gb(budget)}; use more devices or a smaller size"
                f"{in_tiles(engine.model, request)}, or try it with --force"
            )


def slice_of(device: jax.Device, count: int) -> Topology | None:
    """The usual slice of so many devices of this kind; None where the chip or the slice is not known."""
    chip = chip_of(device)
    found = [] if chip is None else [slice for slice in chip.slices.values() if slice.devices == count]
    return found[0] if found else None


def make_plan(
    card: Card,
    model: Architecture,
    request: Request,
    site: Site,
    *,
    dtype: str = "bfloat16",
    mesh: MeshShape | None = None,
    residency: Residency | None = None,
    full: bool = False,
    search: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
) -> Plan:
    """The plan of a request.

    mesh, residency: as in `vidax.load`; None is what `generate` would choose. full: compile the autoencoder's program
    too, instead of looking it up. search: without a mesh, also compile the most promising others. say: told what is
    being done.
    """
    chosen = mesh or meshes.choose(site.count, model.dit.heads, 2 if card.guidance_scale > 1 else 1)
    on_mesh = functools.partial(_on_mesh, card, model, request, site, dtype, residency, say)
    plan, others = on_mesh(chosen, full), list[Plan]()
    if mesh is None and search and site.compiles and site.count > 1:
        others = [on_mesh(shape) for shape in promising(model, request, site, dtype, chosen)[: SEARCHED - 1]]
    others.sort(key=lambda other: (not other.fits, other.step_seconds or math.inf))
    return dataclasses.replace(
        plan,
        mesh_origin="auto" if mesh is None else "given",
        others=tuple(others),
        advice=(*advise(plan, others), *plan.advice),
    )


def _on_mesh(
    card: Card,
    model: Architecture,
    request: Request,
    site: Site,
    dtype: str,
    residency: Residency | None,
    say: Callable[[str], None],
    shape: MeshShape,
    full: bool = False,
) -> Plan:
    if shape.data > request.branches:
        raise UserError(
            f"mesh {shape}: data={shape.data}, but a video is denoised in {request.branches} "
            f"branch{'es' if request.branches > 1 else ''}; give the other devices to seq"
        )
    target = Target(
        mesh=site.mesh(shape),
        topology=site.topology,
        budget=None if site.limit_bytes is None else int(USABLE * site.limit_bytes),
        compiles=site.compiles,
    )
    kind = jnp.dtype(dtype)
    say(f"{site.name}, {shape}: " + ("compiling" if site.compiles else "estimating, without libtpu"))
    step = denoise(model, request, residency, kind, target)
    text = encode_text(model, request, residency, kind, target)
    images = []
    if request.images and "image_encoder" in model.specs(kind):
        images.append(look_at_images(model, request, kind, target))
    if request.images:
        images.append(encode_images(model, request, target, full))
    frames = decode(model, request, target, full)
    plan = Plan(
        model=card.name,
        request=request,
        dtype=dtype,
        topology=site.name,
        chips=site.chips,
        mesh=shape,
        mesh_origin="auto",
        residency_origin="auto" if residency is None else "given",
        phases=(text, *images, step, frames),
        limit_bytes=site.limit_bytes,
    )
    advice = (way_out(plan, model, target),) if plan.fits is False else ()
    return dataclasses.replace(plan, advice=(*advice, *of_experts(step)))


def promising(model: Architecture, request: Request, site: Site, dtype: str, chosen: MeshShape) -> list[MeshShape]:
    """Other meshes of all devices that the model allows, most promising first by what devices send each other in a
    layer: tokens that are exchanged, weights that are gathered, sums over `tensor` in float32.
    """
    count, heads = site.count, model.dit.heads
    width, found = model.dit.dim, []
    length, _, _ = model.attention_shape(request.width, request.height, request.frames)
    layer = model.footprint(request.video, jnp.dtype(dtype), on_paper(MeshShape())).layer
    for data in (1, 2)[: request.branches]:
        for tensor in (t for t in range(1, count + 1) if heads % t == 0 and count % (data * t) == 0):
            seq = count // (data * tensor)
            rows = request.branches / data * length / seq  # of tokens on a device
            exchanged = 2 * 4 * rows * width / tensor * (seq > 1)
            gathered = layer / tensor * (seq - 1) / seq
            summed = 2 * 2 * 4 * rows * width * (tensor > 1)
            shape = MeshShape(data=data, seq=seq, tensor=tensor)
            if shape != chosen:
                found.append((exchanged + gathered + summed, shape))
    return [shape for _, shape in sorted(found, key=lambda pair: pair[0])]


def advise(plan: Plan, others: list[Plan]) -> list[str]:
    """What else was found."""
    fitting = [other for other in others if other.fits is not False and other.step_seconds]
    if not fitting:
        return []
    best, own = fitting[0], plan.step_seconds
    if plan.fits is False:
        return [f"--mesh {best.mesh} fits, with {best.step.residency} layers: {gb(best.peak_bytes)} of each device"]
    if own and best.step_seconds and best.step_seconds < NOTEWORTHY * own:
        return [f"--mesh {best.mesh} takes {1 - best.step_seconds / own:.0%} less time a step by this estimate"]
    return []


def of_experts(step: Phase) -> list[str]:
    """Where the expert is that does not work."""
    if not step.waiting_bytes:
        return []
    return [
        f"the other expert waits in host memory: {gb(step.waiting_bytes)} of the host; where there is no room for it, "
        "it is read when its turn has come"
    ]


def way_out(plan: Plan, model: Architecture, target: Target) -> str:
    """The nearest change that would fit, for the phase that takes most."""
    request, budget = plan.request, target.budget
    assert budget is not None
    worst = max(plan.phases, key=lambda phase: phase.device_bytes)
    over = f"{worst.name} takes {gb(worst.device_bytes)} of each device, {gb(worst.device_bytes - budget)} too much; "
    if worst.name == "denoise" and worst.residency.resident:
        return f"{over}leave out --residency, or say streamed"
    if worst.name != "denoise":
        share = max(0.01, (budget - worst.weights_bytes) / (worst.device_bytes - worst.weights_bytes))
        way = f"{over}{math.ceil(target.mesh.size / share)} devices would hold it"
        size = f", or a size of at most {share:.0%} of the pixels"
        tiles = in_tiles(model, request) if worst.name == "decode" else ""
        return way + (size if worst.name in ("decode", "encode images") else "") + tiles
    own = worst.device_bytes - worst.weights_bytes
    share = max(0.0, (budget - worst.weights_bytes) / own)
    frames = frames_within(model, request, share)
    more = math.ceil(target.mesh.size / share) if share else 0
    return f"{over}{frames} frames would fit, by their share" + (f", or {more} devices in seq" if share else "")


def frames_within(model: Architecture, request: Request, share: float) -> int:
    """The most frames that take this share of a request's latents, or the fewest that a video has."""

    def latents(frames: int) -> int:
        return model.latent_shape(request.width, request.height, frames)[0]

    fewer = range(request.frames, 0, -model.frame_multiple)
    return next((frames for frames in fewer if latents(frames) <= share * latents(request.frames)), fewer[-1])


def in_tiles(model: Architecture, request: Request) -> str:
    """That a video can be decoded in tiles, where it is not."""
    return ", or decode in tiles (--vae-tiling)" if model.tiles and not request.tiling else ""
