"""The body of the TPU attention kernel: one head at a time, scores kept transposed (keys x queries).

Transposed scores put the softmax statistics in rows (one number per query, along the lanes), so that subtracting them
is a broadcast over sublanes, which is free, and the sum over keys adds whole registers. Queries and values come
transposed too, [K L] and [K S], and the output leaves as [K L].

Letters beyond ARCHITECTURE.md's: `G` batch times heads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vidax.ops.attention.reference import MASKED
from vidax.ops.precision import precision_of

SUBLANES = 8  # rows of a float32 register: partial sums and maxima are kept that many rows high, and reduced once
LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work; all multiples of 128.

    queries, keys: what one grid step holds in VMEM. inner_queries, inner_keys: one product of keys and queries.
    value_keys: the depth of one product with the values; up to `keys`, which lets a 256-deep matrix unit fill.
    Each of them divides the one that it cuts: `queries`; `keys`, `value_keys`; `keys`.
    """

    queries: int
    keys: int
    inner_queries: int
    inner_keys: int
    value_keys: int

    def __post_init__(self) -> None:
        pairs = ((self.queries, self.inner_queries), (self.keys, self.value_keys), (self.value_keys, self.inner_keys))
        if any(whole % part for whole, part in pairs) or self.inner_queries % LANES or self.inner_keys % LANES:
            raise ValueError(f"{self}: each inner tile must be a multiple of {LANES} and divide the tile that it cuts")


def transposed_attention(
    q, k, v, shift, running, lengths, segments, *, heads: int, tiles: Tiles, vmem_limit_bytes: int, interpret=False
) -> jax.Array:
    """Softmax over keys of exp2(scores), times values. Queries are already scaled.

    q [G K L], k [G S K], v [G K S], L and S multiples of the tiles. shift [G 1 L], float32: subtracted from the
    scores of heads whose `running` is 0; MASKED for the others, which find their maximum as they go.
    running [G] int32. lengths [B] int32, at least 1: keys at and beyond it are ignored.
    segments: None, or (query segments [B 1 L], key segments [B S 1]); then every head is taken as running.
    Returns [G K L] in v's dtype.
    """
    (groups, size, length), keys = q.shape, k.shape[1]
    step = _masked_step if segments is not None else _step
    body = functools.partial(_kernel, step=step, heads=heads, tiles=tiles)

    def key_block(g, j, lengths_ref):  # blocks wholly beyond the length are not fetched: the last one is kept
        return jnp.minimum(j, (lengths_ref[g // heads] - 1) // tiles.keys)

    in_specs = [
        pl.BlockSpec((None, size, tiles.queries), lambda g, i, j, *_: (g, 0, i)),
        pl.BlockSpec((None, tiles.keys, size), lambda g, i, j, lengths, _: (g, key_block(g, j, lengths), 0)),
        pl.BlockSpec((None, size, tiles.keys), lambda g, i, j, lengths, _: (g, 0, key_block(g, j, lengths))),
        pl.BlockSpec((None, 1, tiles.queries), lambda g, i, j, *_: (g, 0, i)),
    ]
    operands = [q, k, v, shift]
    if segments is not None:
        in_specs += [
            pl.BlockSpec((None, 1, tiles.queries), lambda g, i, j, *_: (g // heads, 0, i)),
            pl.BlockSpec((None, tiles.keys, 1), lambda g, i, j, lengths, _: (g // heads, key_block(g, j, lengths), 0)),
        ]
        operands += segments
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, length // tiles.queries, keys // tiles.keys),
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
    )(lengths, running, *operands)


def _kernel(lengths_ref, running_ref, *refs, step, heads, tiles):
    """One grid step: a block of queries against a block of keys."""
    *inputs, out_ref, maximum_ref, total_ref, acc_ref = refs
    q_ref, k_ref, v_ref, shift_ref, *segment_refs = inputs
    statistics = maximum_ref, total_ref, acc_ref
    group, block = pl.program_id(0), pl.program_id(2)

    @pl.when(block == 0)
    def _():
        maximum_ref[...] = shift_ref[...]
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    valid = lengths_ref[group // heads] - block * tiles.keys  # keys from the block's start up to the length
    step(running_ref[group], valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles)

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        total = total_ref[...].sum(0, keepdims=True)
        out_ref[...] = (acc_ref[...] / total).astype(out_ref.dtype)


def _step(running, valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles):
    full = valid >= tiles.keys

    @pl.when(full & (running == 0))
    def _():
        _bounded(q_ref, k_ref, v_ref, statistics, tiles)

    @pl.when(full & (running != 0))
    def _():
        _running(q_ref, k_ref, v_ref, statistics, tiles)

    @pl.when(jnp.logical_not(full))
    def _():
        _masked(valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles)


def _masked_step(running, valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles):
    _masked(valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles)


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
    """Heads without a bound: the maximum so far is raised by every `value_keys` keys."""
    maximum_ref, total_ref, acc_ref = statistics
    for query in range(0, tiles.queries, tiles.inner_queries):
        columns = slice(query, query + tiles.inner_queries)
        q, maximum = q_ref[:, columns], maximum_ref[:, columns]
        total, acc = total_ref[:, columns], acc_ref[:, columns]
        for start in range(0, tiles.keys, tiles.value_keys):
            scores = [
                _product(k_ref[key : key + tiles.inner_keys], q)
                for key in range(start, start + tiles.value_keys, tiles.inner_keys)
            ]
            highest = functools.reduce(jnp.maximum, (_by_registers(part, jnp.max) for part in scores))
            new_maximum = jnp.maximum(maximum, highest.max(0, keepdims=True))
            decay = jnp.exp2(maximum - new_maximum)
            total, maximum, weights = total * decay, new_maximum, []
            for scored in scores:
                part = jnp.exp2(scored - new_maximum)
                total += _by_registers(part, jnp.sum)
                weights.append(part.astype(v_ref.dtype))
            acc = acc * decay + _product(v_ref[:, start : start + tiles.value_keys], jnp.concatenate(weights))
        maximum_ref[:, columns], total_ref[:, columns], acc_ref[:, columns] = maximum, total, acc


def _masked(valid, q_ref, k_ref, v_ref, segment_refs, statistics, tiles):
    """A block with keys to leave out. Compact rather than fast: it runs once per block of queries.

    Raises the maximum, which is right for both kinds of heads: a shift is a first maximum as good as any.
    """
    maximum_ref, total_ref, acc_ref = statistics
    depth, width = tiles.inner_keys, tiles.inner_queries
    chunks = jnp.clip((valid + depth - 1) // depth, 0, tiles.keys // depth)

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
