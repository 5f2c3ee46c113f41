"""Rotary position embedding over a (frames, height, width) grid, pairs of adjacent channels (Su et al. 2021)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def axis_angles(positions: int | np.ndarray, channels: int, theta: float = 10000.0) -> np.ndarray:
    """Angles [positions, channels // 2] in float64: position times theta^(-2i/channels). `positions`: how many there
    are, counted from 0, or the positions themselves.
    """
    places = np.arange(positions) if isinstance(positions, int) else positions
    return np.outer(places, theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels))


def grid_table(grid: Sequence[int | np.ndarray], channels: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """cos and sin [L, K] in float32 for every token of a grid, frames slowest; `channels` of each axis add up to K. Of
    each axis `grid` has the number of positions, or the positions.

    Both are repeated for the two channels of a pair, and sin carries the sign of the rotation, so that `rotate` is
    two products and a sum. Angles are float64 on the host, one axis at a time; only the small per-axis tables become
    constants of the program.
    """
    cos, sin = [], []
    for positions, width in zip(grid, channels, strict=True):
        angles = np.repeat(axis_angles(positions, width), 2, axis=-1)
        cos.append(np.cos(angles))
        sin.append(np.sin(angles) * np.tile([-1.0, 1.0], width // 2))
    return over_grid(cos), over_grid(sin)


def over_grid(tables: Sequence[np.ndarray]) -> jax.Array:
    """[L, K] in float32 for every token of a grid, frames slowest, from a table [positions, channels] of each axis."""
    sizes = tuple(len(table) for table in tables)
    parts = []
    for axis, table in enumerate(tables):
        width = table.shape[1]
        shape = tuple(size if i == axis else 1 for i, size in enumerate(sizes))
        values = jnp.asarray(table.astype(np.float32)).reshape(*shape, width)
        parts.append(jnp.broadcast_to(values, (*sizes, width)).reshape(-1, width))
    return jnp.concatenate(parts, -1)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate adjacent channel pairs of x [B L N K] by the angles of `grid_table`, in float32."""
    x = x.astype(jnp.float32)
    partner = jax.lax.platform_dependent(x, tpu=_partners_by_product, default=_partners)
    return x * cos[:, None] + partner * sin[:, None]


def _partners(x: jax.Array) -> jax.Array:
    """The other channel of each pair."""
    even = jnp.arange(x.shape[-1]) % 2 == 0
    return jnp.where(even, jnp.roll(x, -1, -1), jnp.roll(x, 1, -1))


def _partners_by_product(x: jax.Array) -> jax.Array:
    """The same on the matrix unit, which a TPU does in a fifth of the time. Exact: each sum has one term, times 1."""
    swap = np.eye(x.shape[-1], dtype=np.float32)[np.arange(x.shape[-1]) ^ 1]
    return jnp.matmul(x, jnp.asarray(swap), precision=jax.lax.Precision.HIGHEST)
