"""How many layers of a network stay in device memory, as asked for or as many as fit, and where the others are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from vidax.errors import UserError
from vidax.models.interface import Footprint
from vidax.weights.memory import device_budget
from vidax.weights.residency import RESIDENT, STREAMED, Residency

# A step's activations in units of its float32 residual stream: 4 for 14B at 1280x720. What takes at most half of the
# budget by this estimate fits; nothing is compiled to find out.
ROUGH_STREAMS = 5
SOURCES = ("auto", "memory", "disk")  # of streamed layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of device memory that may be used, and who says so; None where nothing does."""

    budget: int | None
    origin: str


def memory(mesh: jax.sharding.Mesh, limit_gb: float | None) -> Memory:
    """The budget of each device of a mesh. Raises UserError for a limit that is none."""
    check_limit(limit_gb)
    budget, own = device_budget(mesh, limit_gb), device_budget(mesh, None)
    return Memory(budget=budget, origin="the memory limit" if budget != own else "what the device has")


def check_limit(limit_gb: float | None) -> None:
    if limit_gb is not None and not limit_gb > 0:
        raise UserError(f"memory limit {limit_gb} GB: give the GB of each device that may be used, as in 14.5")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A network of many layers, and the work it is wanted for.

    work: how a message names it, as in "1280x720, 81 frames".
    footprint: what it takes; without the compiled program of a layer, activations are left out.
    compile: compiles a layer.
    converted: whether its checkpoint is in the form from which layers can be read one by one.
    """

    work: str
    footprint: Callable[[Any], Footprint]
    compile: Callable[[], Any]
    converted: bool


def decide(stack: Stack, wish: Residency | None, budget: int | None) -> tuple[Residency, Footprint, bool]:
    """The wish, or for None the most layers that a budget of each device allows; what the stack takes, and whether
    that has its activations. A layer is compiled only where it is not clear without it.
    """
    rough = stack.footprint(None)
    weights = rough.fixed + rough.layers * rough.layer
    clear = budget is None or 2 * (weights + ROUGH_STREAMS * rough.stream) <= budget
    if clear and wish in (None, RESIDENT):
        return RESIDENT, rough, False
    if budget is None:
        return wish or RESIDENT, rough, False
    needs = stack.footprint(stack.compile())
    return wish or fill(needs, budget), needs, True


def settle(
    stack: Stack,
    wish: Residency | None,
    source: str,
    mesh: jax.sharding.Mesh,
    have: Memory,
    available: int | None,
    *,
    force: bool = False,
) -> Residency:
    """The residency of a stack as `decide` says; streamed layers come from host memory where `available` bytes of it
    hold them, unless `source` says where from.

    Raises UserError where device memory does not suffice, unless it is to be tried by `force`, or host memory; with the
    numbers and what would help.
    """
    chosen, needs, compiled = decide(stack, wish, have.budget)
    if compiled and not force and have.budget is not None and (total := needs.total(chosen)) > have.budget:
        least = needs.total(STREAMED)
        way = "use more devices in seq, a smaller size or fewer frames"
        raise UserError(
            f"{stack.work}: with {chosen} layers it takes {gb(total)} of each device, and {have.origin} is "
            f"{gb(have.budget)}; "
            + ("let --residency auto choose" if least <= have.budget else f"{way}: streamed, it takes {gb(least)}")
        )
    return with_source(chosen, stack, needs, source, mesh, available)


def fill(needs: Footprint, budget: int) -> Residency:
    """The most layers resident within a budget."""
    if needs.total(RESIDENT) <= budget:
        return RESIDENT
    resident = max(0, int(budget - needs.total(STREAMED)) // needs.layer)
    return Residency(min(resident, needs.layers - 1), needs.layers)


def with_source(
    wish: Residency, stack: Stack, needs: Footprint, source: str, mesh: jax.sharding.Mesh, available: int | None
) -> Residency:
    """Where streamed layers come from."""
    streamed = needs.layers - wish.count(needs.layers)
    host = streamed * needs.layer * len(mesh.local_devices)
    fits = available is None or host <= available
    if not streamed or (source != "disk" and fits):
        return wish
    if source != "memory" and stack.converted:
        return dataclasses.replace(wish, disk=True)
    if source == "disk":
        raise UserError(
            f"{stack.work}: layers are read from disk at each step, and this checkpoint is not in the form for it; "
            "write it once with vidax convert MODEL --output DIR, and run that"
        )
    assert available is not None
    raise UserError(
        f"{stack.work}: {streamed} of {needs.layers} layers in host memory take {gb(host)}, and {gb(available)} are "
        "available; keep more layers on the device with --residency mixed:r/g, free host memory, or "
        + ("stream from disk" if stack.converted else "write the model with vidax convert, whose layers can be")
        + (" (--stream-from disk)" if stack.converted else " read from disk at each step")
    )


def gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
