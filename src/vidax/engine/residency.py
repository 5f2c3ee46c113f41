"""How many of a transformer's layers stay in device memory: as asked for, or as many as fit."""

import dataclasses

import jax

from vidax.engine.request import Request
from vidax.errors import UserError
from vidax.models.interface import Footprint, Model
from vidax.weights.memory import device_budget, host_available
from vidax.weights.residency import RESIDENT, STREAMED, Residency

# A step's activations in units of its float32 residual stream: 4 for 14B at 1280x720. What takes at most half of the
# budget by this estimate fits; nothing is compiled to find out.
ROUGH_STREAMS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of device memory that may be used, and who says so; None where nothing does."""

    budget: int | None
    origin: str


def memory(mesh: jax.sharding.Mesh, limit_gb: float | None) -> Memory:
    """The budget of each device of a mesh. Raises UserError for a limit that is none."""
    if limit_gb is not None and not limit_gb > 0:
        raise UserError(f"memory limit {limit_gb} GB: give the GB of each device that may be used, as in 14.5")
    budget, own = device_budget(mesh, limit_gb), device_budget(mesh, None)
    return Memory(budget=budget, origin="the memory limit" if budget != own else "what the device has")


def settle(
    model: Model, request: Request, wish: Residency | None, mesh: jax.sharding.Mesh, dtype, have: Memory
) -> Residency:
    """The residency for a request: the wish, or for None the most layers that the budget allows.

    Raises UserError where device or host memory does not suffice, with the numbers and what would help.
    """
    shape = request.width, request.height, request.frames, request.branches
    rough = model.footprint(*shape, dtype, mesh, compiled=False)
    if have.budget is None:
        check_host(rough, wish or RESIDENT, mesh)
        return wish or RESIDENT
    weights = rough.fixed + rough.layers * rough.layer
    if wish in (None, RESIDENT) and 2 * (weights + ROUGH_STREAMS * rough.stream) <= have.budget:
        return RESIDENT
    needs = model.footprint(*shape, dtype, mesh, compiled=True)
    if wish is None:
        wish = fill(needs, have.budget)
    if (total := needs.total(wish)) > have.budget:
        least = needs.total(STREAMED)
        way = "use more devices in seq, a smaller size or fewer frames"
        raise UserError(
            f"{request.width}x{request.height}, {request.frames} frames: with {wish} layers it takes {gb(total)} of "
            f"each device, and {have.origin} is {gb(have.budget)}; "
            + ("let --residency auto choose" if least <= have.budget else f"{way}: streamed, it takes {gb(least)}")
        )
    check_host(needs, wish, mesh)
    return wish


def fill(needs: Footprint, budget: int) -> Residency:
    """The most layers resident within a budget."""
    if needs.total(RESIDENT) <= budget:
        return RESIDENT
    resident = max(0, int(budget - needs.total(STREAMED)) // needs.layer)
    return Residency(min(resident, needs.layers - 1), needs.layers)


def check_host(needs: Footprint, residency: Residency, mesh: jax.sharding.Mesh) -> None:
    streamed = needs.layers - residency.count(needs.layers)
    host, available = streamed * needs.layer * len(mesh.local_devices), host_available()
    if available is not None and host > available:
        raise UserError(
            f"{streamed} of {needs.layers} layers in host memory take {gb(host)}, and {gb(available)} are available; "
            "keep more layers on the device with --residency mixed:r/g, or free host memory"
        )


def gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
