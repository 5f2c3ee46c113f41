"""From a part's files to its weights on the mesh, with layers where their residency says; and the second of two
experts, which is read while the first one works.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from vidax.engine.progress import Progress, phase
from vidax.engine.work import Work, warn
from vidax.models.interface import Part
from vidax.nn import Spec, is_spec, parameter_bytes, placement
from vidax.parallel import processes
from vidax.weights import load as load_weights
from vidax.weights.load import Apart
from vidax.weights.memory import host_available, split_bytes
from vidax.weights.residency import (
    DEVICE,
    PINNED,
    RESIDENT,
    UNPINNED,
    Residency,
    Ring,
    layers_apart,
    to_device,
)

ROOM = 1.1  # of what an expert takes in host memory


def apart(mesh: jax.sharding.Mesh, dtype: Any) -> bool:
    """Whether layers run one by one even where all are resident. On CPUs those of bfloat16 do: in a loop over a stack
    of them XLA makes all of it float32 at each step, which takes three times the memory and more than twice the time.
    """
    return on_cpu(mesh) and jnp.dtype(dtype) == jnp.bfloat16


def on_cpu(mesh: jax.sharding.Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """Reads weights for a mesh. Nothing here keeps them: they are gone when the caller lets go."""

    mesh: jax.sharding.Mesh
    dtype: str

    def load(
        self,
        name: str,
        part: Part,
        works: Sequence[Work],
        timings: dict[str, float],
        progress: Progress,
        residency: Residency | None = None,
    ) -> Any:
        """A part's weights; with a residency as many layers on the devices as it says, perhaps in a `Ring`."""

        def read(kind: str) -> Any:
            loading = phase(f"load {name}", parameter_bytes(part.spec), timings, progress)
            with loading as advance, processes.in_step(self.mesh.is_multi_process):
                return self.weights(part, residency, advance, waiting=kind)

        unpinned = functools.partial(warn_unpinned, name, works, progress)
        return self.in_turns(residency, pinned(read, unpinned) if self.one_by_one(residency) else read(PINNED))

    def weights(
        self,
        part: Part,
        residency: Residency | None,
        advance: Callable[[int], None],
        *,
        waiting: str,
        rest: str = DEVICE,
    ) -> Any:
        """A part's weights: the large ones of streamed layers in the memory of the kind `waiting`, or `Stored`, and
        the rest in that of another. Layers that run one by one are arrays of their own (`Apart`). Embedding tables stay
        in their files.
        """
        place = placement(self.mesh)

        def streamed(spec: Spec, layer: int) -> bool:
            return residency is not None and not spec.small and not residency.holds(layer)

        def place_layer(spec: Spec, layer: int) -> jax.sharding.Sharding:
            return place(spec).with_memory_kind(waiting if streamed(spec, layer) else rest)

        def stored(spec: Spec, layer: int | None) -> bool:
            if layer is None:
                return spec.looked_up
            return residency is not None and residency.disk and streamed(spec, layer)

        return load_weights(
            part.spec,
            part.checkpoint,
            part.mapping,
            sharding=lambda spec: place(spec).with_memory_kind(rest),
            layer_sharding=place_layer if self.one_by_one(residency) else None,
            stored=stored,
            progress=lambda done, _: advance(done),
        )

    def one_by_one(self, residency: Residency | None) -> bool:
        """Whether layers are arrays of their own."""
        return residency is not None and (residency != RESIDENT or apart(self.mesh, self.dtype))

    def in_turns(self, residency: Residency | None, loaded: Any) -> Any:
        """What is loaded, with layers that run one by one in a `Ring`."""
        if not self.one_by_one(residency):
            return loaded
        return dataclasses.replace(loaded, blocks=Ring(layers_apart(loaded.blocks, loaded.config.layers)))


def pinned(read: Callable[[str], Any], unpinned: Callable[[Exception], None]) -> Any:
    """`read` with pinned host memory for what waits there, or without where there is none, which `unpinned` is told."""
    try:
        return read(PINNED)
    except jax.errors.JaxRuntimeError as error:
        unpinned(error)
        return read(UNPINNED)


def warn_unpinned(name: str, works: Sequence[Work], progress: Progress, error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    warn(
        f"no pinned host memory for the layers of the {name} ({reason}), so their copies may be slower", works, progress
    )


class Ahead:
    """A network that is read while another works, and waits for its turn in host memory; on a CPU that is the device's.

    Without room for it there it is read when its turn has come.
    """

    def __init__(self, loader: Loader, name: str, part: Part, residency: Residency):
        self.loader, self.name, self.part, self.residency = loader, name, part, residency
        self._stop = threading.Event()
        self._read: Future | None = None
        self._unpinned: list[Exception] = []  # why there is no pinned memory, which only `take` may say

    def start(self, works: Sequence[Work], progress: Progress) -> None:
        """Begin to read, once the other network is where it works: what is free now is free for this one."""
        if self.residency.disk:
            return
        each = split_bytes(self.part.spec, placement(self.loader.mesh))
        available, needed = host_available(), ROOM * each * len(self.loader.mesh.local_devices)
        if available is not None and needed > available:
            warn(
                f"the {self.name} takes {needed / 1e9:.3g} GB of host memory, and {available / 1e9:.3g} GB are free: "
                "it is read from its files when its turn comes, not before",
                works,
                progress,
            )
            return
        pool = ThreadPoolExecutor(1)
        self._read = pool.submit(self._weights)
        pool.shutdown(wait=False)

    def take(self, works: Sequence[Work], timings: dict[str, float], progress: Progress) -> Any:
        """The network on the devices. An error of reading is raised here."""
        if self._read is None:
            return self.loader.load(self.name, self.part, works, timings, progress, self.residency)
        loading = phase(f"load {self.name}", parameter_bytes(self.part.spec), timings, progress)
        with loading, processes.in_step(self.loader.mesh.is_multi_process):
            loaded, self._read = self._read.result(), None
            for error in self._unpinned:
                warn_unpinned(self.name, works, progress, error)
            loaded = jax.tree.map(self._arrive, self.part.spec, loaded, is_leaf=is_spec)
        return self.loader.in_turns(self.residency, loaded)

    def close(self) -> None:
        """Give up what is being read."""
        self._stop.set()
        self._read = None

    def _weights(self) -> Any:
        if on_cpu(self.loader.mesh):
            return self.loader.weights(self.part, self.residency, self._go_on, waiting=PINNED)

        def read(kind: str) -> Any:
            return self.loader.weights(self.part, self.residency, self._go_on, waiting=kind, rest=kind)

        return pinned(read, self._unpinned.append)

    def _go_on(self, done: int) -> None:
        if self._stop.is_set():
            raise RuntimeError(f"reading the {self.name} was given up")

    def _arrive(self, spec: Spec, value: Any) -> Any:
        """A parameter where its residency says; the copies of its layers to the device are only started."""
        if not isinstance(value, Apart):
            return to_device(value).block_until_ready() if isinstance(value, jax.Array) else value
        moves = (spec.layer().small or self.residency.holds(layer) for layer in range(len(value)))
        return Apart(
            to_device(x) if move and isinstance(x, jax.Array) else x for x, move in zip(value, moves, strict=True)
        )
