"""Attention on TPUs by our own Pallas kernel: padding, layouts, the bound on the scores, and the choice of tiles.

A softmax needs a number to subtract from a row of scores before the exponential. It need not be the maximum: anything
near enough keeps the exponentials inside float32's range, and it cancels out. With the mean key kbar of a head,

    q.kbar <= max_j q.k_j <= q.kbar + r,    r = |q| max_j |k_j - kbar|

(a mean is at most its maximum; Cauchy-Schwarz). So the row maximum lies within r / 2 of q.kbar + r / 2, and that is
what the kernel subtracts ("bounded"). A running maximum costs vector work in every tile; this costs two passes over
queries and keys. Where r of any query exceeds MAXIMUM_GAP the head takes a running maximum instead, decided on the
device for each batch row and head (`guarded_heads`).
"""

import functools
import json
import math
import warnings
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

from vidax.ops.attention.pallas_tpu_kernel import LANES, Tiles, transposed_attention
from vidax.ops.attention.reference import MASKED

LOG2_E = math.log2(math.e)
HEAD_SIZE_STEP = 64  # head sizes are padded to a multiple of it

# r in powers of two. Largest weight 2^80 and smallest largest weight 2^-80: sums of 2^20 of them times values up to
# 2^20 stay below float32's 2^127, and what falls below its 2^-126 is less than 2^-46 of its row's largest.
MAXIMUM_GAP = 160.0

CONSERVATIVE = Tiles(queries=512, keys=1024, inner_queries=256, inner_keys=128, value_keys=128, running_keys=128)
MIB = 1 << 20
# What the kernel may take of a core's VMEM, which is 16 MiB on v4 and 64 or 128 on the others.
VMEM_LIMIT_BYTES = {"TPU v4": 14 * MIB, "TPU v5 lite": 48 * MIB, "TPU v5": 48 * MIB, "TPU v6 lite": 48 * MIB}
VMEM_LIMIT_BYTES |= {"TPU7x": 48 * MIB}
ORDERS = (0, 2, 3, 1), (0, 2, 1, 3), (0, 2, 3, 1)  # of q (and the result), k and v in `attend`, from [B L N K]
KERNELS = ("bounded", "running")


def pallas_tpu(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, **options: Any) -> jax.Array:
    """See `vidax.ops.attention.attention`, on one device: q [B L N K]; k, v [B S N K], bfloat16 or float32. q is scaled
    in float32 and rounded once to k's dtype. Options as in `attend`. Returns v's dtype.
    """
    q, k, v = (x.transpose(order) for x, order in zip((scaled(q, scale, k.dtype), k, v), ORDERS, strict=True))
    return attend(q, k, v, **options).transpose(0, 3, 1, 2)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_lengths: jax.Array | None = None,
    real_keys: int | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    kernel: str | None = None,
    tiles: Tiles | tuple[int, ...] | None = None,
    chip: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention in the kernel's layouts: q [B N K L], `scaled`; k [B N S K]; v [B N K S]. Returns [B N K L].

    kv_lengths [B]: keys at and beyond it are ignored; real_keys: the same for all rows.
    segments: (query segments [B L], key segments [B S]), int32: a query sees the keys of its own segment, of which
    there must be one. A row's sum and output are float32.
    kernel: "bounded" or "running"; None for "bounded". tiles: in the order of `Tiles`; None: as tiles.json says for
    `chip`, a device kind, by default the first device's.
    """
    if kernel not in (None, *KERNELS):
        raise ValueError(f"no TPU attention kernel is called {kernel!r}; there are 'bounded' and 'running'")
    batch, heads, size, length = q.shape
    stored = k.shape[2]
    keys = min(real_keys or stored, stored)
    chip = jax.devices()[0].device_kind if chip is None else chip
    if tiles is None:
        tiles, note = choose_tiles(chip, size, length, keys)
        if note:
            warnings.warn(note, stacklevel=2)
    tiles = tiles if isinstance(tiles, Tiles) else Tiles(*tiles)
    tiles = fit(tiles, length, stored, k.dtype.itemsize)

    lengths = _lengths(kv_lengths, batch, keys)
    mean = mean_key(k, lengths)
    if kernel == "running" or segments is not None:
        running = jnp.ones((batch, heads), jnp.int32)
        shift = jnp.full((batch, heads, length), MASKED, jnp.float32)
    else:
        centre, gap = bounds(q, k, mean, lengths)
        guarded = (gap > MAXIMUM_GAP).any(-1)
        running = guarded.astype(jnp.int32)
        shift = jnp.where(guarded[..., None], MASKED, centre + gap / 2)

    filling = mean[:, :, None].astype(k.dtype)
    if kv_lengths is not None:
        valid = _valid(k, lengths)
        k, v = jnp.where(valid, k, filling), jnp.where(valid.swapaxes(2, 3), v, 0)
    elif stored > keys:
        tail = jnp.broadcast_to(filling, (batch, heads, stored - keys, size))
        k = jax.lax.dynamic_update_slice(k, tail, (0, 0, keys, 0))
        v = jax.lax.dynamic_update_slice(v, jnp.zeros_like(tail).swapaxes(2, 3), (0, 0, 0, keys))
    if padding := -stored % tiles.keys:
        k = jnp.concatenate([k, jnp.broadcast_to(filling, (batch, heads, padding, size))], 2)
    k, v = _pad(k, 3, HEAD_SIZE_STEP), _pad(_pad(v, 3, tiles.keys), 2, HEAD_SIZE_STEP)
    q = _pad(q, 2, HEAD_SIZE_STEP)
    if segments is not None:
        query_segments, key_segments = (jnp.asarray(x, jnp.int32) for x in segments)
        segments = query_segments[:, None, :], _pad(key_segments, 1, tiles.keys)[:, :, None]

    out = transposed_attention(
        q.reshape(batch * heads, *q.shape[2:]),
        k.reshape(batch * heads, *k.shape[2:]),
        v.reshape(batch * heads, *v.shape[2:]),
        shift.reshape(batch * heads, 1, -1),
        running.reshape(-1),
        segments,
        None if kv_lengths is None else jnp.repeat(lengths, heads),
        keys=keys,
        heads=heads,
        tiles=tiles,
        vmem_limit_bytes=VMEM_LIMIT_BYTES.get(chip, min(VMEM_LIMIT_BYTES.values())),
        interpret=interpret,
    )
    return out.reshape(batch, heads, *out.shape[1:])[:, :, :size]


def _pad(x: jax.Array, axis: int, step: int) -> jax.Array:
    """Zeros at the end of an axis, up to a multiple of `step`."""
    return jnp.pad(x, [(0, -n % step if i == axis else 0) for i, n in enumerate(x.shape)])


def _lengths(kv_lengths: jax.Array | None, batch: int, keys: int) -> jax.Array:
    """[B], int32."""
    if kv_lengths is None:
        return jnp.full((batch,), keys, jnp.int32)
    return jnp.clip(kv_lengths.astype(jnp.int32), 1, keys)


def scaled(q: jax.Array, scale: float, dtype) -> jax.Array:
    """Queries whose products with keys are scores in powers of two."""
    return (q.astype(jnp.float32) * (scale * LOG2_E)).astype(dtype)


def _valid(k: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B 1 S 1], of keys [B N S K]: which are before the lengths."""
    return (jnp.arange(k.shape[2]) < lengths[:, None])[:, None, :, None]


def mean_key(k: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B N K] in float32, of keys [B N S K]."""
    total = jnp.where(_valid(k, lengths), k.astype(jnp.float32), 0).sum(2)
    return total / lengths[:, None, None].astype(jnp.float32)


def bounds(q: jax.Array, k: jax.Array, mean: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q.kbar and r, both [B N L] in float32, for q and k of `attend`; keys beyond the lengths do not count."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)  # converted inside the passes below, not stored
    distance = jnp.where(_valid(k, lengths), k - mean[:, :, None], 0)
    radius = jnp.sqrt(jnp.square(distance).sum(-1).max(-1))
    # Products and sums in float32 on the vector unit: a matrix unit would gain nothing on one column.
    centre = (q * mean[..., None]).sum(2)
    gap = jnp.sqrt(jnp.square(q).sum(2)) * radius[..., None]
    return centre, gap


def guarded_heads(q, k, *, kv_lengths: jax.Array | None = None, scale: float) -> jax.Array:
    """Which heads, [B N], the "bounded" kernel gives a running maximum: those whose scores may span too much. q and k
    as in `pallas_tpu`.
    """
    q, k = (x.transpose(order) for x, order in zip((scaled(q, scale, k.dtype), k), ORDERS, strict=False))
    lengths = _lengths(kv_lengths, k.shape[0], k.shape[2])
    _, gap = bounds(q, k, mean_key(k, lengths), lengths)
    return (gap > MAXIMUM_GAP).any(-1)


@functools.cache
def _rows() -> list[dict]:
    file = resources.files("vidax.ops.attention") / "tiles.json"
    return [row for row in json.loads(file.read_text())["rows"] if row["kernel"] == "vidax"]


def choose_tiles(chip: str, head_size: int, queries: int, keys: int) -> tuple[Tiles, str | None]:
    """The measured tiles nearest to the case on this chip, and what a user should know about the choice."""
    row = nearest(chip, head_size, queries, keys)
    if row is None:
        known = ", ".join(sorted({row["chip"] for row in _rows()}))
        return CONSERVATIVE, f"attention tiles are not tuned for {chip!r}, only for {known}; using conservative ones"
    return Tiles(*row["tiles"]), None


def nearest(chip: str, head_size: int, queries: int, keys: int) -> dict | None:
    """The measured case nearest to this one on this chip; None for a chip that is not in the table."""

    def distance(row):
        pairs = (row["head_size"], head_size), (row["keys"], keys), (row["tokens"], queries)
        return [abs(math.log(a / b)) for a, b in pairs]

    return min((row for row in _rows() if row["chip"] == chip), key=distance, default=None)


def measured_cycles(chip: str, head_size: int, queries: int, keys: int) -> float:
    """Cycles of a chip for one head and one batch row: the nearest measured row, scaled by queries x keys."""
    row = nearest(chip, head_size, queries, keys)
    assert row is not None, chip
    return row["cycles"] * queries * keys / (row["tokens"] * row["keys"])


def fit(tiles: Tiles, queries: int, keys: int, itemsize: int = 2) -> Tiles:
    """The tiles cut down to the lengths and to the operands' size.

    Blocks are made equal, so that the last one is not mostly padding: 2,100 keys in tiles of 2,048 are two of 1,152.
    """
    shrink = itemsize // 2  # float32 operands take twice the memory, and six times the program
    query, inner_queries = _even(queries, max(tiles.queries // shrink, tiles.inner_queries), tiles.inner_queries)
    key, inner_keys = _even(keys, max(tiles.keys // shrink, tiles.inner_keys), tiles.inner_keys)
    value = key if tiles.value_keys >= tiles.keys or key % tiles.value_keys else tiles.value_keys
    running = inner_keys if key % tiles.running_keys else tiles.running_keys
    return Tiles(query, key, inner_queries, inner_keys, value, running)


def _even(length: int, tile: int, inner: int) -> tuple[int, int]:
    """The tile, at most as given, that covers the length in equal blocks of whole inner tiles; and the inner tile."""
    inner = min(inner, -(-length // LANES) * LANES)
    blocks = -(-length // tile)
    return -(-length // (blocks * inner)) * inner, inner
