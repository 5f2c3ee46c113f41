"""Parameters described first, modules as plain pytrees.

A module is a frozen dataclass that JAX knows as a pytree. Its `spec` builds it with `Spec` leaves; the very same
class then holds `jax.ShapeDtypeStruct` leaves (`abstract`) or arrays (`init`, `vidax.weights.load`). Nothing else in
the package describes a parameter: placement, loading, plans and tests are derived from these leaves.

Numerics: `dot` is the only matrix product. Operands are in the weight's dtype, the sum and the result in float32,
    and a float32 weight asks for the highest precision, because TPUs and GPUs round float32 operands otherwise.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp

from vidax.ops.precision import precision_of
from vidax.parallel.rules import STORAGE, Axis, constrain, sharding

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

SMALL = 1 << 12  # bytes of a layer's parameter below which nothing is gained by keeping it in host memory


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a parameter is before it has a value.

    shape:  our shape; `axes` names the logical axis of each dimension (`vidax.parallel.rules`).
    dtype:  the dtype it is held in.
    init:   initialiser for training and tests.
    stored: the shape in a PyTorch checkpoint where it differs; `transpose` is applied to that, then a reshape to
        `shape`. For a stacked parameter (first axis "layers") both describe one layer.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    dtype: Any
    init: Initializer
    stored: tuple[int, ...] | None = None
    transpose: tuple[int, ...] | None = None

    @property
    def stacked(self) -> bool:
        return self.axes[:1] == ("layers",)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one checkpoint tensor of this parameter."""
        return self.stored if self.stored is not None else self.shape[self.stacked :]

    def layer(self) -> "Spec":
        """One layer of a stacked parameter."""
        assert self.stacked
        return dataclasses.replace(self, shape=self.shape[1:], axes=self.axes[1:])

    def held(self) -> "Spec":
        """This parameter in a file of ours, where it has the shape that it has here."""
        return dataclasses.replace(self, axes=(None,) * len(self.axes), stored=None, transpose=None)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def looked_up(self) -> bool:
        """Whether it is an embedding table, of which a text takes some rows: it stays in its file."""
        return "vocabulary" in self.axes

    @property
    def small(self) -> bool:
        """Of a layer's parameter: whether it stays on the device where the layer waits in host memory. So do biases,
        norms and what no mesh splits, as modulation tables.
        """
        return not any(self.axes) or len(self.shape) < 2 or self.nbytes < SMALL


@dataclass_transform(frozen_default=True)
def module(cls):
    """Class decorator: a frozen dataclass registered as a pytree. No `__post_init__`: unflattening calls the
    constructor.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


def static(**kw) -> Any:
    """A field that is not a leaf: part of the tree's structure."""
    return dataclasses.field(metadata={"static": True}, **kw)


def is_spec(x) -> bool:
    return isinstance(x, Spec)


def map_specs(fn: Callable[[Spec], Any], tree):
    return jax.tree.map(fn, tree, is_leaf=is_spec)


def stack(tree, layers: int):
    """Describe `layers` copies of a module held as one, for `jax.lax.scan`: every Spec gains a first axis "layers"."""

    def stacked(s: Spec) -> Spec:
        return dataclasses.replace(s, shape=(layers, *s.shape), axes=("layers", *s.axes), stored=s.stored_shape)

    return map_specs(stacked, tree)


def named_leaves(tree) -> Iterator[tuple[str, Any]]:
    """("blocks.self_attn.q.weight", leaf) for every leaf, in tree order."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def abstract(tree, sharding: Callable[[Spec], Any] | None = None):
    """Specs to `ShapeDtypeStruct`s: what `jit(...).lower` needs to compile a model that nobody has loaded."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding(s) if sharding else None), tree)


def init(tree, key: jax.Array):
    """Specs to arrays by each Spec's initialiser, every leaf with a key of its own."""
    keys = iter(jax.random.split(key, len(jax.tree.leaves(tree, is_leaf=is_spec))))
    return map_specs(lambda s: s.init(next(keys), s.shape, s.dtype), tree)


def placement(mesh: jax.sharding.Mesh) -> Callable[[Spec], jax.sharding.NamedSharding]:
    """Where a parameter lies on a mesh."""
    return lambda s: sharding(mesh, s.axes, s.shape)


def used(axis: Axis) -> Axis:
    """The axis by which a dimension is split where it is used: none if that is only for storage."""
    return None if axis in STORAGE else axis


def on_device(specs, layer):
    """In a traced program: one layer's weights in device memory, those that lie in host memory copied to it. `specs`
    describes the layer, unstacked.
    """

    def bring(s: Spec, weight: jax.Array) -> jax.Array:
        if jax.typeof(weight).memory_space != jax.memory.Space.Host:
            return weight
        # Without the constraint XLA gathers the layer on the host, and every device copies all of it.
        return constrain(jax.device_put(weight, jax.memory.Space.Device), *s.axes)

    return jax.tree.map(bring, specs, layer, is_leaf=is_spec)


def through_layers(step: Callable[[Any, jax.Array], jax.Array], specs, layers, x: jax.Array) -> jax.Array:
    """`x` after `step(layer, x)` for each layer of a stack. One that lies in host memory comes to the device for its
    turn. `specs` describes a layer, unstacked.
    """

    def turn(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return step(on_device(specs, layer), x), None

    return jax.lax.scan(turn, x, layers)[0]


def gathered(specs, layer):
    """One layer's weights whole along the dimensions that are split for storage, so that devices gather a layer when
    they come to it. `specs` describes the layer, unstacked.
    """

    def gather(s: Spec, weight: jax.Array) -> jax.Array:
        return constrain(weight, *map(used, s.axes)) if set(STORAGE) & set(s.axes) else weight

    return jax.tree.map(gather, specs, layer, is_leaf=is_spec)


def parameter_bytes(tree) -> int:
    return sum(leaf.nbytes for _, leaf in named_leaves(tree))


def fan_in(fan: int) -> Initializer:
    """Normal with standard deviation 1/sqrt(fan)."""
    return jax.nn.initializers.normal(fan**-0.5)


zeros: Initializer = jax.nn.initializers.zeros
ones: Initializer = jax.nn.initializers.ones


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight` with operands in the weight's dtype and a float32 result."""
    precision = precision_of(weight.dtype)
    return jnp.matmul(x.astype(weight.dtype), weight, precision=precision, preferred_element_type=jnp.float32)


def standardize(x: jax.Array, eps: float) -> jax.Array:
    """Zero mean and unit variance over the last axis, in float32 (a layer norm without parameters)."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


@module
class Linear:
    weight: Any  # [in, out]
    bias: Any  # [out], float32, or None

    @staticmethod
    def spec(
        d_in: int,
        d_out: int,
        axes: tuple[Axis, Axis],
        dtype,
        *,
        bias: bool = True,
        kernel: tuple[int, ...] = (),
    ):
        """`kernel` says that the checkpoint holds a convolution with this kernel, whose inputs we flatten as (channels,
        *kernel).
        """
        order = (*range(1, 2 + len(kernel)), 0)
        stored = (d_out, d_in // math.prod(kernel), *kernel)
        return Linear(
            Spec((d_in, d_out), axes, dtype, fan_in(d_in), stored=stored, transpose=order),
            Spec((d_out,), (used(axes[1]),), jnp.float32, zeros) if bias else None,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = dot(x, self.weight)
        return y if self.bias is None else y + self.bias


@module
class RMSNorm:
    weight: Any  # [D], float32
    eps: float = static()

    @staticmethod
    def spec(dim: int, eps: float, axis: Axis = None):
        return RMSNorm(Spec((dim,), (axis,), jnp.float32, ones), eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * self.weight


@module
class LayerNorm:
    weight: Any  # [D], float32
    bias: Any  # [D], float32
    eps: float = static()

    @staticmethod
    def spec(dim: int, eps: float):
        return LayerNorm(Spec((dim,), (None,), jnp.float32, ones), Spec((dim,), (None,), jnp.float32, zeros), eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return standardize(x, self.eps) * self.weight + self.bias


@module
class Embedding:
    weight: Any  # [vocabulary, D], or a `vidax.weights.load.Table` of the host

    @staticmethod
    def spec(vocabulary: int, dim: int, dtype):
        return Embedding(Spec((vocabulary, dim), ("vocabulary", None), dtype, jax.nn.initializers.normal(1.0)))

    def __call__(self, ids: Any) -> Any:
        """Rows float32 [... D] of ids [...]: a host array where the table is the host's."""
        return self.weight[ids].astype(jnp.float32)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@module
class MLP:
    fc1: Linear
    fc2: Linear
    activation: str = static()

    @staticmethod
    def spec(
        d_in: int,
        hidden: int,
        d_out: int,
        dtype,
        activation: str,
        axes: tuple[Axis, Axis] = ("embed", "mlp"),
    ):
        fc1 = Linear.spec(d_in, hidden, axes, dtype)
        return MLP(fc1, Linear.spec(hidden, d_out, axes[::-1], dtype), activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = ACTIVATIONS[self.activation](self.fc1(x))
        # Without the barrier XLA keeps it in float32 on v6e and computes the activation again for each tile of fc2.
        return self.fc2(jax.lax.optimization_barrier(hidden.astype(self.fc2.weight.dtype)))


def sinusoid(timesteps: jax.Array, dim: int) -> jax.Array:
    """Sinusoidal embedding [... dim] of timesteps [...], cosines first (Vaswani et al. 2017)."""
    frequencies = jnp.exp(-math.log(10000.0) * jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angles = timesteps.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
