"""TPUs that need not be here: what a chip can do, what slices there are, and devices to compile for.

The numbers, each with its source, are in `chips.json`. One JAX device is a chip, except that a TPU7x chip is two.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
from importlib import resources
from typing import Any

import jax

from vidax.errors import UserError, did_you_mean

# Grids of the usual slices by their chips; cloud.google.com/tpu/docs: v4, v5e, v5p, v6e, tpu7x.
SHAPES: dict[int, dict[int, tuple[int, ...]]] = {
    2: {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8)},
    3: {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)},
}
LARGEST_SLICE = 64  # devices of the largest slice that has a name here
HOST = (2, 2)  # libtpu describes whole hosts, whose chips these are in the first two dimensions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A TPU generation, its numbers those of one JAX device.

    flops: bfloat16, a second, at the peak. link_bytes_per_second: of one link to a neighbour, in one direction.
    host_link_bytes_per_second: from the host's memory. dims: of a grid of chips. smallest: the smallest grid that can
    be described. pod_chips: the most that are connected. cores: of one chip; slices are named by how many they have.
    config: further arguments of `jax.experimental.topologies.get_topology_desc`.
    """

    name: str
    device_kind: str
    memory_bytes: int
    flops: float
    clock_hz: float
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    host_link_bytes_per_second: float
    dims: int
    smallest: str
    pod_chips: int
    cores: int
    devices_per_chip: int
    config: dict[str, Any] = dataclasses.field(hash=False)

    @property
    def slices(self) -> dict[str, "Topology"]:
        """The usual slices by name, smallest first. Of those of one chip only the 2-D generations have any."""
        smallest = tuple(map(int, self.smallest.split("x")))
        found = {f"{self.name}-1": Topology(f"{self.name}-1", self, smallest, 1)} if self.dims == 2 else {}
        for chips, grid in SHAPES[self.dims].items():
            if (devices := chips * self.devices_per_chip) <= LARGEST_SLICE:
                name = f"{self.name}-{chips * self.cores}"
                found[name] = Topology(name, self, grid, devices)
        return found


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips in a grid. name: as the user gave it. devices: how many JAX devices are used, which is fewer than the grid
    has only for a slice of one chip, a part of the smallest grid that can be described.
    """

    name: str
    chip: Chip
    grid: tuple[int, ...]
    devices: int

    @property
    def described(self) -> str:
        """As libtpu names it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"


@functools.cache
def chips() -> dict[str, Chip]:
    """Every chip that is known, by name."""
    file = resources.files("vidax.planner") / "chips.json"
    return {name: Chip(name=name, **fields) for name, fields in json.loads(file.read_text())["chips"].items()}


def chip_of(device: jax.Device) -> Chip | None:
    """What a device is, here or described; None if it is not among `chips`."""
    return next((chip for chip in chips().values() if chip.device_kind == device.device_kind), None)


def parse_topology(text: str) -> Topology:
    """`v4:2x2x1`, a grid of chips, or the name of a slice: `v4-8` and `tpu7x-8` have 8 cores on 4 chips, `v5e-8` and
    `v6e-8` have 8 chips. Raises UserError.
    """
    head = f"topology {text!r}"
    name, mark, rest = text.partition(":") if ":" in text else text.partition("-")
    if name not in chips():
        hint = did_you_mean(name, chips())
        raise UserError(f"{head}: {name!r} is no TPU known here; {hint}the known ones are {', '.join(chips())}")
    chip = chips()[name]
    example = f"{name}:{chip.smallest}"
    if mark != ":":
        if text in chip.slices:
            return chip.slices[text]
        raise UserError(
            f"{head}: the usual slices are {', '.join(chip.slices)}; give one of them, or a grid as in {example}"
        )
    sizes = rest.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise UserError(f"{head}: {rest!r} is no grid of chips; give whole numbers of 1 or more, as in {example}")
    if len(sizes) != chip.dims:
        raise UserError(f"{head}: a grid of {name} has {chip.dims} sizes, not {len(sizes)}; give it as in {example}")
    grid = tuple(map(int, sizes))
    if any(size % whole for size, whole in zip(grid, HOST, strict=False)):
        raise UserError(
            f"{head}: libtpu knows whole hosts of 2x2 chips alone; give even numbers for the first two sizes, as in "
            f"{example}" + (f", or {name}-1 for one chip" if chip.dims == 2 else "")
        )
    if (count := math.prod(grid)) > chip.pod_chips:
        raise UserError(f"{head}: {count:,} chips, and {name} has at most {chip.pod_chips:,} in one grid; give fewer")
    return Topology(text, chip, grid, count * chip.devices_per_chip)


def has_libtpu() -> bool:
    """Whether the compiler for TPUs is installed."""
    return importlib.util.find_spec("libtpu") is not None


def devices(topology: Topology) -> list[jax.Device]:
    """The devices of a topology as libtpu describes them, to compile for; nothing runs on them.

    Raises UserError where libtpu is not installed.
    """
    # Read when libtpu is loaded, which is below at the earliest.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server is asked where there is no TPU
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs on one
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")  # whatever it is: without, libtpu looks for one aloud
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # the same
    if not has_libtpu():
        raise UserError(
            f"topology {topology.name!r}: libtpu, which compiles for TPUs, is not installed; "
            "pip install 'vidax[plan]' brings it"
        )
    from jax.experimental import topologies

    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.described, **topology.chip.config
    ).devices
    return list(described)[: topology.devices]
