"""A checkpoint to a tree of arrays: each device's slice is read, cast and stacked on the host, then handed to JAX.

Host memory stays near one parameter beyond the destination: files are memory maps, and a parameter's host copy is gone
before the next one is read.
"""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vidax.errors import UserError
from vidax.nn import Spec, is_spec, named_leaves, parameter_bytes
from vidax.weights.checkpoint import Checkpoint, Tensor, few
from vidax.weights.mapping import Mapping, Match, check_names

Index = tuple[slice, ...]

ROWS = 128  # copied at a time
ALIGNMENT = 64  # bytes, of XLA's CPU buffers
PIECES = 8  # of a tensor that is not one of many layers, copied side by side


def load(
    spec_tree: Any,
    checkpoint: Checkpoint,
    mapping: Mapping,
    *,
    sharding: Callable[[Spec], jax.sharding.Sharding] | None = None,
    layer_sharding: Callable[[Spec, int], jax.sharding.Sharding] | None = None,
    stored: Callable[[Spec, int | None], bool] = lambda spec, layer: False,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The parameters of `spec_tree` as arrays of their Spec's shape and dtype.

    sharding: where a parameter is to lie, memory kind included; without it all are on the first device.
    layer_sharding: where one layer of a stacked parameter is to lie. With it each is a `Apart` of arrays of one layer,
        whose Spec it is asked for.
    stored: whether one layer of a parameter stays in the checkpoint, as a `Stored`, or (layer None) an embedding table,
        as a `Table`.
    progress: called with (bytes done, bytes in all) after each parameter.

    Raises UserError before any weight is read if the checkpoint's names, shapes or dtypes are not those of the model.
    """
    # In a sharded checkpoint the message names the shard; otherwise `source` already is the file.
    files = {name: tensor.file.name for name, tensor in checkpoint.items() if tensor.file != checkpoint.path}
    shapes = {name: tensor.shape for name, tensor in checkpoint.items()}
    match = check_names(spec_tree, mapping, shapes, source=str(checkpoint.path), files=files)
    check_dtypes(match, checkpoint)
    check_twins(match, checkpoint)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    done, total = 0, parameter_bytes(spec_tree)
    arrays: list[Any] = []
    for leaf, (_, spec) in zip(match.leaves, named_leaves(spec_tree), strict=True):
        tensors = leaf.tensors(checkpoint)
        if not spec.stacked and stored(spec, None):
            arrays.append(Table(leaf.spec, tensors[0]))
        elif spec.stacked and layer_sharding:
            layer = spec.layer()
            apart = (Stored(layer, layer_sharding(layer, i), leaf.spec, tensors, i) for i in range(spec.shape[0]))
            arrays.append(Apart(one if stored(layer, one.layer) else one.read() for one in apart))
        else:
            arrays.append(make(spec, sharding(spec) if sharding else first, reader(leaf.spec, tensors)))
        for tensor in tensors:
            tensor.give_back()
        done += spec.nbytes
        if progress:
            progress(done, total)
    return jax.tree.unflatten(jax.tree.structure(spec_tree, is_leaf=is_spec), arrays)


class Apart(tuple):
    """The layers of a stacked parameter, each an array of its own, or a `Stored`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """One layer of a stacked parameter, in the checkpoint.

    spec: what it is to be; place: where it is to lie; stack: the whole parameter as it is stored; tensors: its own.
    """

    spec: Spec
    place: jax.sharding.Sharding
    stack: Spec
    tensors: list[Tensor]
    layer: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.spec.dtype)

    def read(self) -> jax.Array:
        return make(self.spec, self.place, reader(self.stack, self.tensors, layer=self.layer))

    def give_back(self) -> None:
        for tensor in self.tensors:
            tensor.give_back()


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An embedding table [rows D] that stays in the checkpoint. A text takes some of its rows: no device holds it."""

    spec: Spec
    tensor: Tensor

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        """The rows [... D] of ids [...], in the dtype of the model."""
        rows = in_our_shape(self.spec, self.tensor.view())[ids].astype(self.spec.dtype)
        self.tensor.give_back()
        return rows


def make(spec: Spec, place: jax.sharding.Sharding, read: Callable[[Index | None], np.ndarray]) -> jax.Array:
    """An array, ready: else the host copies of many parameters would wait for the device together."""
    return jax.make_array_from_callback(spec.shape, place, read, dtype=spec.dtype).block_until_ready()


def reader(spec: Spec, tensors: list[Tensor], layer: int | None = None) -> Callable[[Index | None], np.ndarray]:
    """The callback of `jax.make_array_from_callback`. It is asked for each device; equal slices are read once.

    layer: of a stacked parameter, that the array is of this layer alone.
    """
    slices: dict[tuple[range, ...], np.ndarray] = {}

    def read(index: Index | None) -> np.ndarray:
        assert index is not None  # None would stand for an opaque dtype, which no Spec has
        shape = spec.shape if layer is None else spec.shape[1:]
        ranges = tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))
        if ranges not in slices:
            slices[ranges] = (
                read_slice(spec, tensors, ranges)
                if layer is None
                else read_slice(spec, tensors, (range(layer, layer + 1), *ranges))[0]
            )
        return slices[ranges]

    return read


def read_slice(spec: Spec, tensors: list[Tensor], ranges: tuple[range, ...]) -> np.ndarray:
    """The part of a parameter that `ranges` (one per axis of our shape) covers; other layers are not touched.

    Layers are copied side by side: numpy lets go of the interpreter meanwhile, and one thread would wait for each page.
    What is not stacked is cut along its first axis for that.
    """
    out = empty([len(part) for part in ranges], np.dtype(spec.dtype))
    inner = tuple(slice(part.start, part.stop) for part in ranges[spec.stacked :])
    if spec.stacked:
        values = [in_our_shape(spec, tensors[layer].view())[inner] for layer in ranges[0]]
        jobs = list(zip((out[row, ...] for row in range(len(values))), values, strict=True))
    else:
        whole = np.atleast_1d(in_our_shape(spec, tensors[0].view())[inner])
        pieces = min(len(whole), PIECES)
        jobs = list(zip(np.array_split(np.atleast_1d(out), pieces), np.array_split(whole, pieces), strict=True))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: copy(*job), jobs))  # the list is for exceptions
    return out


def empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of ALIGNMENT, which a CPU device takes as it is where it would copy any other array."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def in_our_shape(spec: Spec, stored: np.ndarray) -> np.ndarray:
    """One layer as `spec` shapes it: a view wherever the reshape allows one, as it does for every layer of `nn`."""
    if spec.transpose is not None:
        stored = stored.transpose(spec.transpose)
    return stored.reshape(spec.shape[spec.stacked :])


def copy(out: np.ndarray, values: np.ndarray) -> None:
    """`out[...] = values` with a cast (to nearest, ties to even), by blocks that stay in cache.

    Blocks follow the order in which `values` lies in memory: what is transposed is read and cast in that order, and
    only then turned. For a float32 matrix of 8960 x 1536 that is three times as fast as to follow `out`.
    """
    out, values = np.atleast_1d(out), np.atleast_1d(values)
    axis = int(np.argmax(values.strides))
    for start in range(0, values.shape[axis], ROWS):
        block = (slice(None),) * axis + (slice(start, start + ROWS),)
        out[block] = values[block].astype(out.dtype)


def check_dtypes(match: Match, checkpoint: Checkpoint) -> None:
    """Floating-point tensors are cast to what the model wants; anything else must already be it."""

    def fits(stored: np.dtype, wanted: Any) -> bool:
        return stored == wanted or (jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating))

    wrong = [
        f"{name} in {tensor.file.name} is {tensor.dtype} where the model has {jnp.dtype(leaf.spec.dtype)}"
        for leaf in match.leaves
        for name, tensor in zip(leaf.names, leaf.tensors(checkpoint), strict=True)
        if not fits(tensor.dtype, leaf.spec.dtype)
    ]
    if wrong:
        raise UserError(
            f"{checkpoint.path}: {len(wrong)} tensors cannot be converted: {few(wrong)}; "
            "quantized checkpoints are not read, use the bfloat16 or float32 one"
        )


def check_twins(match: Match, checkpoint: Checkpoint) -> None:
    """A tensor stored under two names must be the same twice, since only one of them is loaded."""
    for name, other in match.twins:
        a, b = np.atleast_1d(checkpoint[name].view()), np.atleast_1d(checkpoint[other].view())
        if not all(np.array_equal(a[row : row + ROWS], b[row : row + ROWS]) for row in range(0, len(a), ROWS)):
            raise UserError(f"{checkpoint.path}: {name} and {other} should be one tensor but differ; download it again")
