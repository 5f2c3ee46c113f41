"""Attention by blocks of queries and keys in plain XLA: no L x S matrix, any platform.

The softmax is accumulated online (Milakov and Gimelshein 2018; Rabe and Staats 2021): per query row a running
maximum, a running sum and an unnormalised output, in float32.
"""

import jax
import jax.numpy as jnp

from vidax.ops.attention.reference import MASKED
from vidax.ops.precision import precision_of

QUERY_BLOCK = 512
KEY_BLOCK = 1024


def chunked(
    q,
    k,
    v,
    *,
    kv_lengths=None,
    segments=None,
    scale: float,
    query_block: int = QUERY_BLOCK,
    key_block: int = KEY_BLOCK,
) -> jax.Array:
    """See `vidax.ops.attention.attention`. Memory grows with query_block * key_block, not with L * S.

    segments: as for `reference`.
    """
    batch, length, heads, size = q.shape
    keys = k.shape[1]
    precision = precision_of(q.dtype)
    query_block, key_block = min(query_block, length), min(key_block, keys)
    limit = jnp.full((batch,), keys) if kv_lengths is None else jnp.minimum(kv_lengths, keys)
    k_blocks, v_blocks = _blocks(k, key_block), _blocks(v, key_block)
    starts = jnp.arange(k_blocks.shape[0]) * key_block
    query_segments, key_segments = segments or (jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k))
    query_segments, key_segments = _rows(query_segments, query_block), _rows(key_segments, key_block)

    def attend(inputs):
        block, own = inputs  # [B N query_block K], [B query_block]

        def accumulate(carry, inputs):
            maximum, total, out = carry
            start, k_block, v_block, others = inputs
            scores = jnp.einsum(
                "bnqk,bnsk->bnqs", block, k_block, precision=precision, preferred_element_type=jnp.float32
            )
            valid = (start + jnp.arange(key_block) < limit[:, None])[:, None, :]
            if segments is not None:
                valid = valid & (own[:, :, None] == others[:, None, :])
            scores = jnp.where(valid[:, None], scores * scale, MASKED)
            new_maximum = jnp.maximum(maximum, scores.max(-1))
            weights = jnp.exp(scores - new_maximum[..., None])
            decay = jnp.exp(maximum - new_maximum)
            update = jnp.einsum(
                "bnqs,bnsk->bnqk",
                weights.astype(v.dtype),
                v_block,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return (new_maximum, total * decay + weights.sum(-1), out * decay[..., None] + update), None

        rows = (batch, heads, query_block)
        empty = (jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, size)))
        (_, total, out), _ = jax.lax.scan(accumulate, empty, (starts, k_blocks, v_blocks, key_segments))
        return (out / total[..., None]).astype(v.dtype)

    out = jax.lax.map(attend, (_blocks(q, query_block), query_segments))  # [blocks B N query_block K]
    out = out.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, size)
    return out[:, :length]


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """[B L N K] to [blocks, B, N, block, K], zero-padded at the end."""
    batch, length, heads, size = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    return x.reshape(batch, -1, block, heads, size).transpose(1, 0, 3, 2, 4)


def _rows(x: jax.Array, block: int) -> jax.Array:
    """[B L] to [blocks, B, block], zero-padded at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)))
    return x.reshape(x.shape[0], -1, block).transpose(1, 0, 2)
