"""Convolutions over channels-last video [B F H W C]; float32 operands are multiplied at full precision."""

import functools
import math

import jax
import jax.numpy as jnp
from einops import rearrange

from vidax.ops.precision import precision_of
from vidax.parallel.rules import cut_rows, in_force

Padding = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def conv3d(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int] = (1, 1, 1), padding: Padding) -> jax.Array:
    """x [B F H W C] with weight [kt kh kw C O]; `padding` is (before, after) for F, H and W.

    On a CPU the frames under the kernel are laid side by side as channels of a 2-D convolution, since XLA has no fast
    3-D one there. On a TPU large frames are worked through in strips.
    """
    direct = functools.partial(_direct, stride=stride, padding=padding)
    stripwise = functools.partial(_stripwise, stride=stride, padding=padding)
    folded = functools.partial(_folded, stride=stride, padding=padding)
    return jax.lax.platform_dependent(x, weight, cpu=folded, tpu=stripwise, default=direct)


def _direct(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int], padding: Padding) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, weight, stride, padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"), precision=precision_of(weight.dtype)
    )


STRIPS = 8
LARGE_FRAME = 32_768  # pixels from which on a frame is cut: below, what is copied is small beside everything else


def _stripwise(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int], padding: Padding) -> jax.Array:
    """Across the side that the mesh in force does not split, a strip after the other: the same products.

    XLA pads a convolution's operand and then copies it with pieces of the last spatial dimension as its batch, and
    both are several times a frame. Strips make them small. That last dimension is the side that is not split, for then
    the other stays the minor dimension in memory, where it lies in arguments as well, and no cache is laid out anew.
    An exception: arguments keep minor a side that is a multiple of 8, and where each device has 340 columns (1360x768
    on four) that is the rows, so that the caches, 4.7 GB in CogVideoX, are there twice. The other order of the
    convolution's dimensions would save half of that and take twice as long.
    """
    height, width = x.shape[2:4]
    if stride != (1, 1, 1):
        return _direct(x, weight, stride=stride, padding=padding)
    if not cut_rows(height, width, in_force()):  # the kernel's rows last
        weight, order, axis = weight.swapaxes(1, 2), "DWH", 2
        beyond, padding = padding[1], (padding[0], padding[2], (0, 0))
    else:
        order, axis = "DHW", 3
        beyond, padding = padding[2], (padding[0], padding[1], (0, 0))
    x = jnp.pad(x, [beyond if i == axis else (0, 0) for i in range(5)])
    numbers, precision = ("NDHWC", f"{order}IO", "NDHWC"), precision_of(weight.dtype)

    def convolve(x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, weight, stride, padding, dimension_numbers=numbers, precision=precision)

    halo = weight.shape[2] - 1
    side = x.shape[axis] - halo  # of the result
    strips = math.gcd(side, STRIPS) if height * width >= LARGE_FRAME else 1
    if strips == 1:
        return convolve(x)

    def strip(i: jax.Array) -> jax.Array:
        return convolve(jax.lax.dynamic_slice_in_dim(x, i * (side // strips), side // strips + halo, axis))

    parts = jax.lax.map(strip, jnp.arange(strips))
    into = "b f (n h) w c" if axis == 2 else "b f h (n w) c"
    return rearrange(parts, f"n b f h w c -> {into}")


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
