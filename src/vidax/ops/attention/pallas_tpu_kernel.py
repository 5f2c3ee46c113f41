"""The body of the TPU attention kernel: one head at a time, scores kept transposed (keys x queries).

Transposed scores put the softmax statistics in rows (one number per query, along the lanes), so that subtracting them
is a broadcast over sublanes, which is free, and the sum over keys adds whole registers. Queries and values come
transposed too, [K L] and [K S], and the output leaves as [K L].

Letters beyond ARCHITECTURE.md's: `G` batch times heads.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vidax.ops.attention.reference import MASKED
from vidax.ops.precision import precision_of

SUBLANES = 8  # rows of a float32 register: partial sums and maxima are kept that many rows high, and reduced once
LANES = 128
RUNNING_QUERIES = 256  # at most, in one product of a running maximum: 512 took 1.7 times as long on v6e


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work; all multiples of 128.

    queries, keys: what one grid step holds in VMEM. inner_queries, inner_keys: one product of keys and queries.
    value_keys: the depth of one product with the values; up to `keys`, which lets a 256-deep matrix unit fill.
    running_keys: the depth of both products between two looks at the maximum, for heads that need a running one.
    inner_queries divides queries, inner_keys divides value_keys, value_keys and running_keys divide keys.
    """

    queries: int
    keys: int
    inner_queries: int
    inner_keys: int
    value_keys: int
    running_keys: int

    def __post_init__(self) -> None:
        parts = [(self.queries, self.inner_queries), (self.keys, self.value_keys), (self.value_keys, self.inner_keys)]
        parts += [(self.keys, self.running_keys)]
        parts += [(size, LANES) for size in (self.inner_queries, self.inner_keys, self.running_keys)]
        if any(whole % part for whole, part in parts):
            raise ValueError(f"{self}: each inner tile must be a multiple of {LANES} and divide the tile that it cuts")


def transposed_attention(
    q, k, v, shift, running, segments, lengths, *, keys: int, heads: int, tiles: Tiles, vmem_limit_bytes: int, interpret
) -> jax.Array:
    """Softmax over keys of exp2(scores), times values. Queries are already scaled.

    q [G K L], k [G S K], v [G K S], S a multiple of the tile: of queries, what the last block has too many is
    computed and not written. keys: how many of the S are keys, not padding.
    shift [G 1 L], float32: subtracted from the scores of heads whose `running` [G] is 0; MASKED for the others, which
    find their maximum as they go. lengths: None, or [G] int32, at least 1: keys at and beyond it are ignored.
    Those and the padding must be the mean of the others, and their values 0: unless the keys are float32, no score is
    masked. The mean key's weight is at most the mean weight, so that the sum of weights, less that of the padding,
    loses few bits to cancellation: those of padding / length.
    segments: None, or (query segments [B 1 L], key segments [B S 1]); then every head is taken as running.
    Returns [G K L] in v's dtype.
    """
    groups, size, length = q.shape
    scalars = [running]
    if lengths is not None:
        scalars += [lengths, (lengths - 1) // tiles.keys]

    def key_block(g, j, *scalar_refs):  # blocks wholly beyond a length are not fetched: the last one stays
        return j if lengths is None else jnp.minimum(j, scalar_refs[2][g])

    in_specs = [
        pl.BlockSpec((None, size, tiles.queries), lambda g, i, j, *_: (g, 0, i)),
        pl.BlockSpec((None, tiles.keys, size), lambda g, i, j, *refs: (g, key_block(g, j, *refs), 0)),
        pl.BlockSpec((None, size, tiles.keys), lambda g, i, j, *refs: (g, 0, key_block(g, j, *refs))),
        pl.BlockSpec((None, 1, tiles.queries), lambda g, i, j, *_: (g, 0, i)),
    ]
    operands = [q, k, v, shift]
    if segments is not None:
        in_specs += [
            pl.BlockSpec((None, 1, tiles.queries), lambda g, i, j, *_: (g // heads, 0, i)),
            pl.BlockSpec((None, tiles.keys, 1), lambda g, i, j, *refs: (g // heads, key_block(g, j, *refs), 0)),
        ]
        operands += segments
    body = functools.partial(
        _kernel,
        keys=keys,
        padding=k.shape[1] - keys,
        ragged=lengths is not None,
        segmented=segments is not None,
        tiles=tiles,
    )
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(groups, pl.cdiv(length, tiles.queries), k.shape[1] // tiles.keys),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((None, size, tiles.queries), lambda g, i, j, *_: (g, 0, i)),
            scratch_shapes=[
                pltpu.VMEM((1, tiles.queries), jnp.float32),
                pltpu.VMEM((SUBLANES, tiles.queries), jnp.float32),
                pltpu.VMEM((size, tiles.queries), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, v.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=interpret,
        name="vidax_attention",
    )(*scalars, *operands)


def _kernel(*refs, keys: int, padding: int, ragged: bool, segmented: bool, tiles: Tiles):
    """One grid step: a block of queries against a block of keys."""
    running_ref = refs[0]
    q_ref, k_ref, v_ref, shift_ref, *segment_refs, out_ref, maximum_ref, total_ref, acc_ref = refs[3 if ragged else 1 :]
    statistics = maximum_ref, total_ref, acc_ref
    group, block = pl.program_id(0), pl.program_id(2)

    @pl.when(block == 0)
    def begin():
        maximum_ref[...] = shift_ref[...]
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    length = refs[1][group] if ragged else keys  # refs[2] is for the index maps
    valid = length - block * tiles.keys  # of this block's keys, if not more
    if segmented:
        _masked(valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles)
    else:
        masked = k_ref.dtype == jnp.float32 and (ragged or padding > 0)
        # Otherwise padded keys take part, as means of the keys, and the end takes them out.
        run = (valid >= tiles.keys) if masked else (valid > 0) if ragged else True
        running = running_ref[group] != 0
        pl.when(run & jnp.logical_not(running))(lambda: _bounded(q_ref, k_ref, v_ref, statistics, tiles))
        pl.when(run & running)(lambda: _running(q_ref, k_ref, v_ref, statistics, tiles))
        if masked:
            pl.when(valid < tiles.keys)(lambda: _masked(valid, q_ref, k_ref, v_ref, (), statistics, tiles))

    @pl.when(block == pl.num_programs(2) - 1)
    def finish():
        total = total_ref[...].sum(0, keepdims=True)
        # Blocks wholly beyond a length are not run; where none is given, all are.
        means = -length % tiles.keys if ragged else padding
        if not segmented and k_ref.dtype != jnp.float32 and (ragged or padding):
            last = tiles.keys - 2 * SUBLANES
            weight = jnp.exp2(_product(k_ref[last:], q_ref[...])[-1:] - maximum_ref[...])
            total -= jnp.asarray(means, jnp.float32) * weight
        out_ref[...] = (acc_ref[...] / total).astype(out_ref.dtype)


def _product(a, b):
    return lax.dot(a, b, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)


def _by_registers(x, reduce):
    """[S Q] to [8 Q]: rows reduced register by register, without a shuffle inside a register."""
    return reduce(x.reshape(-1, SUBLANES, x.shape[1]), axis=0)


def _bounded(q_ref, k_ref, v_ref, statistics, tiles):
    """Heads with an a-priori bound: the shift is in `maximum_ref` and stays."""
    maximum_ref, total_ref, acc_ref = statistics
    for query in range(0, tiles.queries, tiles.inner_queries):
        columns = slice(query, query + tiles.inner_queries)
        q, shift = q_ref[:, columns], maximum_ref[:, columns]
        total, acc = total_ref[:, columns], acc_ref[:, columns]
        for start in range(0, tiles.keys, tiles.value_keys):
            weights = []
            for key in range(start, start + tiles.value_keys, tiles.inner_keys):
                part = jnp.exp2(_product(k_ref[key : key + tiles.inner_keys], q) - shift)
                total += _by_registers(part, jnp.sum)
                weights.append(part.astype(v_ref.dtype))
            acc += _product(v_ref[:, start : start + tiles.value_keys], jnp.concatenate(weights))
        total_ref[:, columns], acc_ref[:, columns] = total, acc


def _running(q_ref, k_ref, v_ref, statistics, tiles):
    """Heads without a bound: the maximum so far is raised by every `running_keys` keys.

    Queries are looped over, not unrolled as above, to halve the program and its compile time for what should be rare.
    """
    maximum_ref, total_ref, acc_ref = statistics
    width = math.gcd(tiles.inner_queries, RUNNING_QUERIES)
    at_once = math.gcd(tiles.queries // width, 2)

    def some(index, carry):
        for part in range(at_once):
            some_queries(pl.ds(pl.multiple_of((index * at_once + part) * width, width), width))
        return carry

    def some_queries(columns):
        q, maximum = q_ref[:, columns], maximum_ref[:, columns]
        total, acc = total_ref[:, columns], acc_ref[:, columns]
        for key in range(0, tiles.keys, tiles.running_keys):
            rows = slice(key, key + tiles.running_keys)
            scores = _product(k_ref[rows], q)
            new_maximum = jnp.maximum(maximum, _by_registers(scores, jnp.max).max(0, keepdims=True))
            decay = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(scores - new_maximum)
            total = total * decay + _by_registers(weights, jnp.sum)
            acc = acc * decay + _product(v_ref[:, rows], weights.astype(v_ref.dtype))
            maximum = new_maximum
        maximum_ref[:, columns], total_ref[:, columns], acc_ref[:, columns] = maximum, total, acc

    lax.fori_loop(0, tiles.queries // (width * at_once), some, 0)


def _masked(valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles):
    """A block with keys to leave out, one by one. Compact rather than fast.

    Raises the maximum, which is right for both kinds of heads: a shift is a first maximum as good as any.
    """
    maximum_ref, total_ref, acc_ref = statistics
    depth, width = tiles.inner_keys, tiles.inner_queries
    chunks = jnp.minimum((valid + depth - 1) // depth, tiles.keys // depth)  # none if the length is before the block

    def one(index, carry):
        chunk, query = index % chunks, index // chunks  # keys fastest
        columns = pl.ds(pl.multiple_of(query * width, width), width)
        rows = pl.ds(pl.multiple_of(chunk * depth, depth), depth)
        scores = _product(k_ref[rows, :], q_ref[:, columns])
        seen = chunk * depth + lax.broadcasted_iota(jnp.int32, (depth, 1), 0) < valid
        if segment_refs:
            query_segments, key_segments = segment_refs
            seen = seen & (key_segments[rows, :] == query_segments[:, columns])
        scores = jnp.where(seen, scores, MASKED)
        maximum = maximum_ref[:, columns]
        new_maximum = jnp.maximum(maximum, scores.max(0, keepdims=True))
        decay = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - new_maximum)
        maximum_ref[:, columns] = new_maximum
        total_ref[:, columns] = total_ref[:, columns] * decay + _by_registers(weights, jnp.sum)
        update = _product(v_ref[:, rows], weights.astype(v_ref.dtype))
        acc_ref[:, columns] = acc_ref[:, columns] * decay + update
        return carry

    lax.fori_loop(0, chunks * (tiles.queries // width), one, 0)
