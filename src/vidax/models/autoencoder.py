"""What causal video autoencoders share: convolutions, their explicit caches, and frames in strips on a mesh.

Frames are channels last [B F H W C], float32. A video is coded chunk by chunk; what a convolution over time needs of
the past is a cache that goes in and comes out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import repeat

from vidax.nn import Spec, fan_in, module, static, zeros
from vidax.ops.conv import conv3d
from vidax.parallel.rules import Axis, constrain, cut_rows, in_force

Cache = Any  # a pytree of past frames; None before the first chunk


def conv_weight(d_in: int, d_out: int, kernel: tuple[int, ...]) -> Spec:
    """A convolution weight, channels last; PyTorch stores [out, in, *kernel]."""
    rank, size = len(kernel), d_in
    for k in kernel:
        size *= k
    shape, order = (*kernel, d_in, d_out), (*range(2, 2 + rank), 1, 0)
    return Spec(shape, (None,) * (rank + 2), jnp.float32, fan_in(size), stored=(d_out, d_in, *kernel), transpose=order)


@module
class CausalConv3d:
    weight: Any  # [kt kh kw in out]
    bias: Any  # [out]
    repeats: bool = static()  # before the first frame there is that frame again, instead of zeros

    @staticmethod
    def spec(d_in: int, d_out: int, kernel: tuple[int, int, int] = (3, 3, 3), *, repeats: bool = False):
        return CausalConv3d(conv_weight(d_in, d_out, kernel), Spec((d_out,), (None,), jnp.float32, zeros), repeats)

    def before(self, x: jax.Array) -> jax.Array:
        """The cache for a video that begins with x [B F H W C]."""
        shape = (x.shape[0], self.weight.shape[0] - 1, *x.shape[2:])
        return jnp.broadcast_to(x[:, :1], shape) if self.repeats else jnp.zeros(shape, x.dtype)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """x [B F H W C] with the frames before it in `cache`, or None; returns the result and the next cache."""
        _, kh, kw = self.weight.shape[:3]
        past = self.before(x) if cache is None else cache
        y = conv3d(
            jnp.concatenate([past, x], axis=1), self.weight, padding=((0, 0), (kh // 2, kh // 2), (kw // 2, kw // 2))
        )
        # The next cache waits for the result, so that it can be written over this one instead of beside it.
        past, x, y = jax.lax.optimization_barrier((past, x, y))
        return y + self.bias, _latest(past, x)


def _latest(past: jax.Array, x: jax.Array) -> jax.Array:
    """The last frames of `past` and then `x`, as many as `past` has."""
    keep = past.shape[1] - x.shape[1]
    if keep <= 0:
        return x[:, -keep:]
    past = jax.lax.dynamic_update_slice_in_dim(past, past[:, x.shape[1] :], 0, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(past, x, keep, axis=1)


@module
class Conv2d:
    weight: Any  # [kh kw in out]
    bias: Any  # [out]
    stride: int = static()

    @staticmethod
    def spec(d_in: int, d_out: int, stride: int = 1):
        return Conv2d(conv_weight(d_in, d_out, (3, 3)), Spec((d_out,), (None,), jnp.float32, zeros), stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Frame by frame. At stride 2 the padding is on the bottom and right only."""
        pad = (1, 1) if self.stride == 1 else (0, 1)
        stride = (1, self.stride, self.stride)
        return conv3d(x, self.weight[None], stride=stride, padding=((0, 0), pad, pad)) + self.bias


def chain(layers, x: jax.Array, caches: Cache, *given: Any) -> tuple[jax.Array, Cache]:
    """Run layers of the form (x, cache, *given) -> (x, cache) one after the other."""
    after = []
    for layer, cache in zip(layers, caches or (None,) * len(layers), strict=True):
        x, cache = layer(in_strips(x), cache, *given)
        after.append(jax.tree.map(in_strips, cache))
    return in_strips(x), tuple(after)


def in_strips(x: jax.Array) -> jax.Array:
    """Frames [B F H W C] in strips of rows or columns, one for each device."""
    return constrain(x, *strips(x.shape, in_force()))


def doubled(x: jax.Array) -> jax.Array:
    """Frames [B F H W C] of twice the height and width, each position four times, in strips of the new size."""
    return in_strips(repeat(x, "b f h w c -> b f (h 2) (w 2) c"))


def strips(shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The logical axes of frames [B F H W C] of this shape, on mesh axes of these sizes."""
    rows = cut_rows(shape[2], shape[3], sizes)
    return (None, None, "space", None, None) if rows else (None, None, None, "space", None)
