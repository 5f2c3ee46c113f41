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
KERNELS = ("bounded", "running")


def pallas_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_lengths: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    scale: float,
    kernel: str | None = None,
    tiles: Tiles | tuple[int, ...] | None = None,
    chip: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `vidax.ops.attention.attention`. Arrays of one device: a caller with a mesh wraps it in shard_map.

    q [B L N K]; k, v [B S N K], bfloat16 or float32. q is scaled in float32 and rounded once to k's dtype.
    segments: (query segments [B L], key segments [B S]), int32: a query sees the keys of its own segment, of which
    there must be one. A row's sum and output are float32; returns v's dtype.
    kernel: "bounded" or "running"; None for "bounded". tiles: in the order of `Tiles`; None: as tiles.json says for
    `chip`, a device kind, by default the first device's.
    """
    if kernel not in (None, *KERNELS):
        raise ValueError(f"no TPU attention kernel is called {kernel!r}; there are 'bounded' and 'running'")
    batch, length, heads, size = q.shape
    keys = k.shape[1]
    chip = jax.devices()[0].device_kind if chip is None else chip
    if tiles is None:
        tiles, note = choose_tiles(chip, size, length, keys)
        if note:
            warnings.warn(note, stacklevel=2)
    tiles = tiles if isinstance(tiles, Tiles) else Tiles(*tiles)
    tiles = fit(tiles, length, keys, k.dtype.itemsize)

    lengths = _lengths(kv_lengths, k)
    mean = mean_key(k, lengths)
    q = scaled(q, scale, k.dtype)
    if kernel == "running" or segments is not None:
        running = jnp.ones((batch, heads), jnp.int32)
        shift = jnp.full((batch, heads, length), MASKED, jnp.float32)
    else:
        centre, gap = bounds(q, k, mean, lengths)
        guarded = (gap > MAXIMUM_GAP).any(-1)
        running = guarded.astype(jnp.int32)
        shift = jnp.where(guarded[..., None], MASKED, centre + gap / 2)

    if kv_lengths is not None:
        k = jnp.where(_valid(k, lengths), k, mean[:, None].astype(k.dtype))
        v = jnp.where(_valid(v, lengths), v, 0)
    padding = -keys % tiles.keys
    k = jnp.concatenate([k, jnp.broadcast_to(mean[:, None].astype(k.dtype), (batch, padding, heads, size))], 1)
    v = _pad(v, 1, tiles.keys)
    q, k, v = (_pad(x, 3, HEAD_SIZE_STEP) for x in (_pad(q, 1, tiles.queries), k, v))
    shift = _pad(shift, 2, tiles.queries).reshape(batch * heads, 1, -1)
    if segments is not None:
        query_segments, key_segments = (jnp.asarray(x, jnp.int32) for x in segments)
        query_segments = _pad(query_segments, 1, tiles.queries)[:, None, :]
        segments = query_segments, _pad(key_segments, 1, tiles.keys)[:, :, None]

    def laid_out(x, order):
        x = x.transpose(order)
        return x.reshape(batch * heads, *x.shape[2:])

    out = transposed_attention(
        laid_out(q, (0, 2, 3, 1)),
        laid_out(k, (0, 2, 1, 3)),
        laid_out(v, (0, 2, 3, 1)),
        shift,
        running.reshape(-1),
        segments,
        None if kv_lengths is None else jnp.repeat(lengths, heads),
        keys=keys,
        heads=heads,
        tiles=tiles,
        vmem_limit_bytes=VMEM_LIMIT_BYTES.get(chip, min(VMEM_LIMIT_BYTES.values())),
        interpret=interpret,
    )
    out = out.reshape(batch, heads, *out.shape[1:])[:, :, :size, :length]
    return out.transpose(0, 3, 1, 2)


def _pad(x: jax.Array, axis: int, step: int) -> jax.Array:
    """Zeros at the end of an axis, up to a multiple of `step`."""
    return jnp.pad(x, [(0, -n % step if i == axis else 0) for i, n in enumerate(x.shape)])


def _lengths(kv_lengths: jax.Array | None, k: jax.Array) -> jax.Array:
    batch, keys = k.shape[:2]
    return (
        jnp.full((batch,), keys, jnp.int32) if kv_lengths is None else jnp.clip(kv_lengths, 1, keys).astype(jnp.int32)
    )


def _valid(k: jax.Array, lengths: jax.Array) -> jax.Array:
    return (jnp.arange(k.shape[1]) < lengths[:, None])[:, :, None, None]


def scaled(q: jax.Array, scale: float, dtype) -> jax.Array:
    """Queries whose products with keys are scores in powers of two."""
    return (q.astype(jnp.float32) * (scale * LOG2_E)).astype(dtype)


def mean_key(k: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B N K], float32."""
    total = jnp.where(_valid(k, lengths), k.astype(jnp.float32), 0).sum(1)
    return total / lengths[:, None, None].astype(jnp.float32)


def bounds(q: jax.Array, k: jax.Array, mean: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q.kbar and r, both [B N L] in float32, for scaled queries; keys beyond the lengths do not count."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)  # converted inside the passes below, not stored
    distance = jnp.where(_valid(k, lengths), k - mean[:, None], 0)
    radius = jnp.sqrt(jnp.square(distance).sum(-1).max(1))
    # Products and sums in float32 on the vector unit: a matrix unit would gain nothing on one column.
    centre = (q * mean[:, None]).sum(-1)
    gap = jnp.sqrt(jnp.square(q).sum(-1)) * radius[:, None]
    return centre.transpose(0, 2, 1), gap.transpose(0, 2, 1)


def guarded_heads(q, k, *, kv_lengths: jax.Array | None = None, scale: float) -> jax.Array:
    """Which heads, [B N], the "bounded" kernel gives a running maximum: those whose scores may span too much."""
    lengths = _lengths(kv_lengths, k)
    _, gap = bounds(scaled(q, scale, k.dtype), k, mean_key(k, lengths), lengths)
    return (gap > MAXIMUM_GAP).any(-1)


@functools.cache
def _rows() -> list[dict]:
    file = resources.files("vidax.ops.attention") / "tiles.json"
    return [row for row in json.loads(file.read_text())["rows"] if row["kernel"] == "vidax"]


def choose_tiles(chip: str, head_size: int, queries: int, keys: int) -> tuple[Tiles, str | None]:
    """The measured tiles nearest to the case on this chip, and what a user should know about the choice."""
    rows = [row for row in _rows() if row["chip"] == chip]
    if not rows:
        known = ", ".join(sorted({row["chip"] for row in _rows()}))
        return CONSERVATIVE, f"attention tiles are not tuned for {chip!r}, only for {known}; using conservative ones"

    def distance(row):
        pairs = (row["head_size"], head_size), (row["keys"], keys), (row["tokens"], queries)
        return [abs(math.log(a / b)) for a, b in pairs]

    return Tiles(*min(rows, key=distance)["tiles"]), None


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
