"""Convolutions over channels-last video [B F H W C], in float32 at full precision."""

import jax

from vidax.ops.precision import precision_of


def conv3d(x: jax.Array, weight: jax.Array, *, stride: tuple[int, int, int] = (1, 1, 1), padding) -> jax.Array:
    """x [B F H W C] with weight [kt kh kw C O]; `padding` is ((before, after), ...) for F, H and W."""
    return jax.lax.conv_general_dilated(
        x, weight, stride, padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"), precision=precision_of(weight.dtype)
    )
