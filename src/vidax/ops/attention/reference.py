"""The plain form of attention that every other implementation is tested against."""

import jax
import jax.numpy as jnp

from vidax.ops.precision import precision_of

MASKED = -1e30  # finite, so that a block of keys that are all masked gives no NaN


def reference(q, k, v, *, kv_lengths=None, segments=None, bias=None, scale: float) -> jax.Array:
    """See `vidax.ops.attention.attention`. Makes the whole [B N L S] score matrix.

    segments: (query segments [B L], key segments [B S]), int32: a query sees the keys of its own segment, of which
    there must be one.
    """
    precision = precision_of(q.dtype)
    scores = jnp.einsum("blnk,bsnk->bnls", q, k, precision=precision, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    if kv_lengths is not None:
        scores = jnp.where(jnp.arange(k.shape[1]) < kv_lengths[:, None, None, None], scores, MASKED)
    if segments is not None:
        query_segments, key_segments = segments
        scores = jnp.where(query_segments[:, None, :, None] == key_segments[:, None, None, :], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bnls,bsnk->blnk", weights, v, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(v.dtype)
