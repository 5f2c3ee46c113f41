"""Which mesh axes split which logical axis, and the functions that apply it.

Parameters and activations name their dimensions by logical axes; this table alone knows the mesh. A dimension that its
mesh axes do not divide is split by fewer of them, down to none.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vidax.parallel.mesh import AXES

# A dimension's logical axis; None where it is never split; with a number where it consists of that many units, such as
# heads, that stay whole.
Axis = str | tuple[str, int] | None

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("data",),
    "tokens": ("seq",),
    "attention_heads": ("tensor", "seq"),  # within attention: all tokens of some heads
    "space": AXES,  # rows or columns of pictures
    # parameters
    "layers": (),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("seq",),  # of matrices only, and only in storage: `nn.gathered` makes a layer whole before it is used
    "spread": AXES,  # of matrices outside the layers, which work on few rows
    # Towers read few tokens once: their width is split over all devices.
    "tower": AXES,
    "vocabulary": AXES,
}

STORAGE = ("embed",)


def partition(axes: Sequence[Axis], shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """The partition of an array over mesh axes of these sizes. Raises ValueError if two dimensions want one of them."""
    assert len(axes) == len(shape), (axes, shape)
    named = [axis if isinstance(axis, tuple) else (axis, size) for axis, size in zip(axes, shape, strict=True)]
    rules = [RULES[name] if name is not None else () for name, _ in named]
    used = list(itertools.chain(*rules))
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        raise ValueError(f"axes {tuple(axes)} want mesh axis {', '.join(twice)} twice; it can split only one dimension")
    return P(*(fitting(rule, units, sizes) or None for rule, (_, units) in zip(rules, named, strict=True)))


def fitting(rule: tuple[str, ...], units: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes of a rule, or as many of them as `units` divides by; those of size 1 are left out."""
    present = [axis for axis in rule if sizes[axis] > 1]
    subsets = itertools.chain(*(itertools.combinations(present, n) for n in range(len(present) + 1)))

    return max((s for s in subsets if units % product(s, sizes) == 0), key=lambda s: product(s, sizes))


def product(axes: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> int:
    """Into how many parts one entry of a partition splits."""
    return math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def in_force() -> Mapping[str, int]:
    """Sizes of the mesh axes that `jax.set_mesh` has set, for code under jit; all 1 where none is."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict.fromkeys(AXES, 1) if mesh.empty else dict(mesh.shape)


def kind_in_force() -> tuple[str, str]:
    """Platform ("cpu", "gpu", "tpu") and kind ("TPU v4") of the devices of the mesh in force, which may be those of a
    topology that is not here; without a mesh, of JAX's default device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None:
        device = jax.devices()[0]
    return device.platform, device.device_kind


def parts(axis: str) -> int:
    """Into how many parts the mesh in force splits a logical axis that is long enough."""
    return product(RULES[axis], in_force())


def alone() -> bool:
    """Whether the mesh in force is one device."""
    return product(AXES, in_force()) == 1


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """`x`, lying on the mesh in force as its logical axes say."""
    return constrain_to(x, partition(axes, x.shape, in_force()))


def cut_rows(height: int, width: int, sizes: Mapping[str, int]) -> bool:
    """Whether devices have rows of a picture of this size, or else columns: of the side that more of them divide, the
    longer one where as many do.
    """
    rows, columns = (product(fitting(RULES["space"], side, sizes), sizes) for side in (height, width))
    return (rows, height) > (columns, width)


def everywhere(x: jax.Array) -> jax.Array:
    """`x`, whole on every device of the mesh in force."""
    return constrain(x, *(None,) * x.ndim)


def constrain_to(x: jax.Array, spec: P) -> jax.Array:
    return x if alone() else jax.lax.with_sharding_constraint(x, spec)


def sharding(mesh: Mesh, axes: Sequence[Axis], shape: Sequence[int]) -> NamedSharding:
    """Where an array with these logical axes lies."""
    return NamedSharding(mesh, partition(axes, shape, mesh.shape))


def whole(tree):
    """Host arrays as arrays that every device of the mesh in force has whole; every process gives the same values."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.tree.map(jax.numpy.asarray, tree)
    place = NamedSharding(mesh, P())

    def put(x) -> jax.Array:
        x = np.asarray(x)
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)  # token ids are int64, which JAX has not
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index], dtype=x.dtype)

    return jax.tree.map(put, tree)
