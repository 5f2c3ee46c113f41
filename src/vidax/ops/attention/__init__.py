"""Attention: one public call over named implementations.

`attention` picks the implementation that suits the case; `choose` says which and why. A named one runs or raises with
the reason. Masks are lengths, never a dense L x S boolean.
"""

import dataclasses
import math

import jax

from vidax.ops.attention.chunked import chunked
from vidax.ops.attention.reference import reference

# The largest float32 score matrix that `reference` may make unasked; beyond it the chunked form is as fast and stays
# small.
REFERENCE_SCORE_BYTES = 1 << 27


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which implementation runs a case, and the reason in words."""

    name: str
    reason: str


def choose(query_shape: tuple[int, ...], key_shape: tuple[int, ...], *, biased: bool = False) -> Choice:
    """The implementation that `attention(impl=None)` uses for [B L N K] queries and [B S N K] keys."""
    batch, length, heads, _ = query_shape
    score_bytes = 4 * math.prod((batch, heads, length, key_shape[1]))
    if biased:
        return Choice(name="reference", reason="only the reference takes an additive bias")
    if score_bytes <= REFERENCE_SCORE_BYTES:
        return Choice(name="reference", reason=f"scores take {score_bytes / 1e6:.1f} MB")
    return Choice(name="chunked", reason=f"scores would take {score_bytes / 1e9:.2f} GB at once")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_lengths: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> jax.Array:
    """Softmax(q k^T * scale + bias) v, with scores and statistics in float32.

    q [B L N K]; k, v [B S N K]; bias [N L S]; scale: 1/sqrt(K) if None.
    kv_lengths [B], at least 1: keys at and beyond it are ignored.
    impl: "reference" or "chunked"; None for the automatic choice. Returns [B L N K] in v's dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = impl or choose(q.shape, k.shape, biased=bias is not None).name
    if name == "reference":
        return reference(q, k, v, kv_lengths=kv_lengths, bias=bias, scale=scale)
    if name == "chunked":
        if bias is not None:
            raise ValueError("chunked attention takes no additive bias; use impl='reference'")
        return chunked(q, k, v, kv_lengths=kv_lengths, scale=scale)
    raise ValueError(f"no attention implementation is called {name!r}; there are 'reference' and 'chunked'")
