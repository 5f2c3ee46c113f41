"""Where the layers of a stack live, and how those of the host come to the device: a ring.

A layer that is not resident lies in pinned host memory, cast, split and laid out as the device has it. Its copy is
started while the layer before it computes and given up once it has computed, so beside the resident layers the device
holds two at most. The order starts again after the last layer: across steps the copies go on.

    while the device computes layer i - 1:    host -> device: layer i

Where host memory is too small as well, layers are read from a converted checkpoint, in the background and in the order
of their turns, so that a few at most wait in host memory.
"""

import dataclasses
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any

import jax

from vidax.errors import UserError
from vidax.weights.load import Apart, Stored

PINNED, UNPINNED, DEVICE = "pinned_host", "unpinned_host", "device"
READ_AHEAD = 2  # layers from disk that wait in host memory
POLL = 0.005  # seconds between two looks whether a device still computes
READERS = 4  # parameters of a layer that are read side by side


@dataclasses.dataclass(frozen=True)
class Residency:
    """Of every `of` layers, `resident` stay in device memory, spread evenly; the others are streamed from host memory,
    or from disk.
    """

    resident: int
    of: int
    disk: bool = False

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
        way = {0: "streamed", self.of: "resident"}.get(self.resident, f"mixed:{self.resident}/{self.of}")
        return f"{way} from disk" if self.disk else way


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

    layers: trees of one structure. What of a layer lies in pinned host memory, or is `Stored`, comes to the device for
    its turn; small parameters and whole layers that lie on the device are used where they are.
    """

    def __init__(self, layers: Sequence[Any]):
        self.layers = tuple(layers)
        self._bytes = [host_bytes(layer) for layer in self.layers]
        self.streamed = [i for i, count in enumerate(self._bytes) if count]
        self.reader = Reader({i: layer for i, layer in enumerate(self.layers) if is_stored(layer)})
        self.bytes_moved = 0  # to each device
        self.seconds_waited = 0.0  # with the layer before computed and this one not here, or not read
        self._coming: tuple[int, Any] | None = None  # a copy that has been started, and for which layer
        self._arriving: Any = None  # the copy that the layer at work needs, which may not be here yet
        self._fence: Any = None

    def run(self, block: Block, state: Any) -> Any:
        """The state after all layers."""
        for i in range(len(self.layers)):
            state, fence = block(self._take(i), state)
            if self.streamed:
                self._advance(i, fence)
        return state

    def close(self) -> None:
        """Give up what is on its way, as after a step that was not finished."""
        self._coming = self._arriving = self._fence = None
        self.reader.close()

    def _take(self, i: int) -> Any:
        if i not in self.streamed:
            return self.layers[i]
        if self._coming is None or self._coming[0] != i:  # the first turn, or the first after an unfinished step
            self._coming = None
            self._coming = i, self._copy(i)
        _, layer = self._coming
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
        self.bytes_moved += self._bytes[i]
        layer = self._read(i) if i in self.reader.layers else self.layers[i]
        return jax.tree.map(to_device, layer)

    def _read(self, i: int) -> Any:
        layer = self.reader.take(i)
        while self._fence is not None and not (self._fence.is_ready() or layer.done()):
            wait([layer], timeout=POLL)
        start = time.perf_counter()
        layer.result()
        self.seconds_waited += time.perf_counter() - start
        return layer.result()


class Reader:
    """Layers that lie on disk, read in the background in the order of their turns; READ_AHEAD at most are here.

    layers: by the number of their turn, trees with `Stored` leaves.
    """

    def __init__(self, layers: dict[int, Any]):
        self.layers = layers
        self._order = list(layers)
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future]] = deque()

    def take(self, i: int) -> Future:
        """Layer `i` in host memory, when it is read; the next ones are then on their way."""
        if self._ahead and self._ahead[0][0] != i:
            self.close()
        if not self._ahead:
            self._request(i)
        _, layer = self._ahead.popleft()
        while len(self._ahead) < min(READ_AHEAD, len(self._order)):
            last = self._ahead[-1][0] if self._ahead else i
            self._request(self._order[(self._order.index(last) + 1) % len(self._order)])
        return layer

    def close(self) -> None:
        """Let go of what is read, once the layer that is being read is here."""
        self._ahead.clear()
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _request(self, i: int) -> None:
        self._pool = self._pool or ThreadPoolExecutor(1)  # one layer after the other
        self._ahead.append((i, self._pool.submit(read_layer, self.layers[i])))


def read_layer(layer: Any) -> Any:
    """A layer with what was stored in host memory."""
    leaves, structure = jax.tree.flatten(layer)
    with ThreadPoolExecutor(READERS) as pool:
        read = list(pool.map(lambda leaf: leaf.read() if isinstance(leaf, Stored) else leaf, leaves))
    for leaf in leaves:
        if isinstance(leaf, Stored):
            leaf.give_back()
    return jax.tree.unflatten(structure, read)


def is_stored(layer: Any) -> bool:
    return any(isinstance(leaf, Stored) for leaf in jax.tree.leaves(layer))


def to_device(x: jax.Array) -> jax.Array:
    """An array of pinned host memory on its devices, split as it is; the copy is only started."""
    return jax.device_put(x, x.sharding.with_memory_kind(DEVICE)) if on_host(x) else x


def on_host(x: jax.Array) -> bool:
    return x.sharding.memory_kind in (PINNED, UNPINNED)


def host_bytes(layer: Any) -> int:
    """What of a layer has to be copied to each device."""
    leaves = [x for x in jax.tree.leaves(layer) if isinstance(x, Stored) or on_host(x)]
    return sum(math.prod(place_of(x).shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def place_of(x: jax.Array | Stored) -> jax.sharding.Sharding:
    return x.place if isinstance(x, Stored) else x.sharding


def layers_apart(stack: Any, layers: int) -> list[Any]:
    """A stack loaded with `layer_sharding` as one tree for each layer."""
    leaves, structure = jax.tree.flatten(stack, is_leaf=lambda x: isinstance(x, Apart))
    return [jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(layers)]
