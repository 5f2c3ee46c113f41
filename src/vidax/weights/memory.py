"""How much memory there is, on the devices and on the host."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from vidax.nn import Spec, named_leaves

# Of what a device has: the runtime's own needs, and what fragments.
USABLE = 0.97


def device_budget(mesh: jax.sharding.Mesh, limit_gb: float | None) -> int | None:
    """Bytes that a program may use on each device: what the device says it has, at most the limit; None on a CPU
    without a limit, whose memory is the host's.
    """
    stats: dict[str, Any] = mesh.local_devices[0].memory_stats() or {}
    budgets = [int(USABLE * stats["bytes_limit"])] if "bytes_limit" in stats else []
    if limit_gb is not None:
        budgets.append(int(limit_gb * 1e9))
    return min(budgets, default=None)


def program_bytes(compiled: Any) -> int:
    """What a compiled program takes of each device. Its `peak_memory_in_bytes` would count pinned host memory too."""
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return used - memory.alias_size_in_bytes


def split_bytes(specs: Any, place: Callable[[Spec], jax.sharding.Sharding]) -> int:
    """What parameters take of each device."""
    leaves = [spec for _, spec in named_leaves(specs)]
    return sum(math.prod(place(s).shard_shape(s.shape)) * jnp.dtype(s.dtype).itemsize for s in leaves)


@functools.cache
def _cgroup() -> Path | None:
    """The folder of this process's control group that bounds its memory, version 2 or 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controllers
            for folder in (root / path.lstrip("/"), root):
                if (folder / "memory.max").exists() or (folder / "memory.limit_in_bytes").exists():
                    return folder
    return None


def host_available() -> int | None:
    """Bytes that this process may still take of host memory: what is free, and no more than its container allows."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    if (folder := _cgroup()) is None:
        return free
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit, used in names:
        if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
            reclaimable = _stat(folder, "inactive_file") + _stat(folder, "active_file")
            return min(free, int(text) - int((folder / used).read_text()) + reclaimable)
    return free


def _stat(folder: Path, name: str) -> int:
    lines = (folder / "memory.stat").read_text().splitlines() if (folder / "memory.stat").exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
