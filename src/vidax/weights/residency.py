"""Where the layers of a stack live, and how those of the host come to the device: a ring.

A layer that is not resident lies in pinned host memory, cast, split and laid out as the device has it. Its copy is
started while the layer before it computes and given up once it has computed, so beside the resident layers the device
holds two at most. The order starts again after the last layer: across steps the copies go on.

    while the device computes layer i - 1:    host -> device: layer i
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax

from vidax.errors import UserError
from vidax.weights.load import Apart

PINNED, UNPINNED, DEVICE = "pinned_host", "unpinned_host", "device"


@dataclasses.dataclass(frozen=True)
class Residency:
    """Of every `of` layers, `resident` stay in device memory, spread evenly; the others are streamed."""

    resident: int
    of: int

    def __post_init__(self):
        assert 0 <= self.resident <= self.of and self.of >= 1

    def holds(self, layer: int) -> bool:
        """Whether a layer is resident."""
        share = Fraction(self.resident, self.of)
        return int((layer + 1) * share) > int(layer * share)

    def count(self, layers: int) -> int:
        """How many of a stack's layers are resident."""
        return sum(map(self.holds, range(layers)))

    def __str__(self) -> str:
        return {0: "streamed", self.of: "resident"}.get(self.resident, f"mixed:{self.resident}/{self.of}")


RESIDENT, STREAMED = Residency(1, 1), Residency(0, 1)


def parse(text: str) -> Residency | None:
    """`resident`, `streamed`, `mixed:r/g`; None for `auto`. Raises UserError."""
    if text == "auto":
        return None
    if text in ("resident", "streamed"):
        return RESIDENT if text == "resident" else STREAMED
    if not (match := re.fullmatch(r"mixed:(\d+)/(\d+)", text)):
        raise UserError(
            f"residency {text!r}: choose resident, streamed, auto, or mixed:r/g, of every g layers r resident, "
            "as in mixed:1/2"
        )
    resident, of = int(match[1]), int(match[2])
    if not 0 < resident < of:
        raise UserError(
            f"residency {text!r}: {resident} of every {of} layers; give fewer than all and at least one, as in "
            "mixed:1/2, or say resident or streamed"
        )
    return Residency(resident, of)


Block = Callable[[Any, Any], tuple[Any, jax.Array]]  # (layer, state) to the next state and an array that is ready then


class Ring:
    """The layers of one stack, ready to run in turn, as often as there are steps.

    layers: trees of one structure. What of a layer lies in pinned host memory is copied to the device for its turn;
    small parameters and whole layers that lie on the device are used where they are.
    """

    def __init__(self, layers: Sequence[Any]):
        self.layers = tuple(layers)
        self.streamed = [i for i, layer in enumerate(self.layers) if host_bytes(layer)]
        self.bytes_moved = 0  # to each device
        self.seconds_waited = 0.0  # with the layer before computed and this one not here
        self._coming: tuple[int, Any] | None = None  # a copy that has been started, and for which layer
        self._arriving: Any = None  # the copy that the layer at work needs, which may not be here yet
        self._fence: jax.Array | None = None

    def run(self, block: Block, state: Any) -> Any:
        """The state after all layers."""
        for i in range(len(self.layers)):
            state, fence = block(self._take(i), state)
            if self.streamed:
                self._advance(i, fence)
        return state

    def close(self) -> None:
        """Give up the copy that is on its way."""
        self._coming = self._arriving = self._fence = None

    def _take(self, i: int) -> Any:
        if i not in self.streamed:
            return self.layers[i]
        if self._coming is None:
            self._coming = i, self._copy(i)
        coming, layer = self._coming
        assert coming == i
        self._arriving, self._coming = layer, None
        return layer

    def _advance(self, i: int, fence: jax.Array) -> None:
        """Once layer `i` is dispatched: the layer before it has computed, and its place is free for the next copy."""
        if self._fence is not None:
            self._fence.block_until_ready()
        self._fence = fence
        if self._arriving is not None:
            start = time.perf_counter()
            jax.block_until_ready(self._arriving)
            self.seconds_waited += time.perf_counter() - start
            self._arriving = None
        if self._coming is None:
            after = next((j for j in self.streamed if j > i), self.streamed[0])
            self._coming = after, self._copy(after)

    def _copy(self, i: int) -> Any:
        self.bytes_moved += host_bytes(self.layers[i])
        return jax.tree.map(to_device, self.layers[i])


def to_device(x: jax.Array) -> jax.Array:
    """An array of pinned host memory on its devices, split as it is; the copy is only started."""
    return jax.device_put(x, x.sharding.with_memory_kind(DEVICE)) if on_host(x) else x


def on_host(x: jax.Array) -> bool:
    return x.sharding.memory_kind in (PINNED, UNPINNED)


def host_bytes(layer: Any) -> int:
    """What of a layer has to be copied to each device."""
    arrays = [x for x in jax.tree.leaves(layer) if on_host(x)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def layers_apart(stack: Any, layers: int) -> list[Any]:
    """A stack loaded with `layer_sharding` as one tree for each layer."""
    leaves, structure = jax.tree.flatten(stack, is_leaf=lambda x: isinstance(x, Apart))
    return [jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(layers)]
