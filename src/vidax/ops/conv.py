"""Convolutions over channels-last video [B F H W C]; float32 operands are multiplied at full precision."""

import functools

import jax
import jax.numpy as jnp

from vidax.ops.precision import precision_of

Padding = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def conv3d(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int] = (1, 1, 1), padding: Padding) -> jax.Array:
    """x [B F H W C] with weight [kt kh kw C O]; `padding` is (before, after) for F, H and W.

    On a CPU the frames under the kernel are laid side by side as channels of a 2-D convolution, since XLA has no fast
    3-D one there.
    """
    direct = functools.partial(_direct, stride=stride, padding=padding)
    folded = functools.partial(_folded, stride=stride, padding=padding)
    return jax.lax.platform_dependent(x, weight, cpu=folded, default=direct)


def _direct(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int], padding: Padding) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, weight, stride, padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"), precision=precision_of(weight.dtype)
    )


def _folded(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int], padding: Padding) -> jax.Array:
    kt, kh, kw, d_in, d_out = weight.shape
    x = jnp.pad(x, ((0, 0), padding[0], (0, 0), (0, 0), (0, 0)))
    frames = (x.shape[1] - kt) // stride[0] + 1
    taps = [x[:, i : i + stride[0] * (frames - 1) + 1 : stride[0]] for i in range(kt)]
    x = jnp.concatenate(taps, -1) if kt > 1 else taps[0]
    y = jax.lax.conv_general_dilated(
        x.reshape(-1, *x.shape[2:]),
        weight.transpose(1, 2, 0, 3, 4).reshape(kh, kw, kt * d_in, d_out),
        stride[1:],
        padding[1:],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision_of(weight.dtype),
    )
    return y.reshape(x.shape[0], frames, *y.shape[1:])
