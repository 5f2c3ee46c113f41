"""Attention: one public call over named implementations.

`attention` picks the implementation that suits the case; `choose` says which and why. A named one runs or raises with
the reason. Masks are lengths and segments, never a dense L x S boolean.

On a mesh, sharding constraints place the operands (`placement`), and the implementation works on what each device then
has, in the package's only `shard_map`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from vidax.ops.attention.chunked import chunked
from vidax.ops.attention.cudnn import cudnn
from vidax.ops.attention.placement import Split, parts, place
from vidax.ops.attention.reference import reference
from vidax.parallel.mesh import AXES
from vidax.parallel.rules import constrain_to, in_force, kind_in_force

IMPLEMENTATIONS = {"cudnn": cudnn, "chunked": chunked, "reference": reference}

# The largest float32 score matrix that `reference` may make unasked; beyond it the chunked form is as fast and stays
# small.
REFERENCE_SCORE_BYTES = 1 << 27

HALF = (jnp.bfloat16, jnp.float16)
CUDNN_HEAD_SIZE = 128  # at most, on every GPU that it supports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which implementation runs a case, and the reason in words."""

    name: str
    reason: str


def choose(
    query_shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    dtype: Any = jnp.bfloat16,
    *,
    biased: bool = False,
    segments: bool = False,
) -> Choice:
    """The implementation that `attention(impl=None)` uses on one device of the mesh in force, or on JAX's default one,
    for [B L N K] queries and [B S N K] keys that the device has.
    """
    batch, length, heads, size = query_shape
    score_bytes = 4 * math.prod((batch, heads, length, key_shape[1]))
    if biased:
        return Choice(name="reference", reason="only the reference takes an additive bias")
    if score_bytes <= REFERENCE_SCORE_BYTES:
        return Choice(name="reference", reason=f"scores take {score_bytes / 1e6:.1f} MB")
    why = f"scores would take {score_bytes / 1e9:.2f} GB at once"
    platform, _ = kind_in_force()
    if platform in ("gpu", "cuda") and dtype in HALF and size <= CUDNN_HEAD_SIZE and not segments:
        return Choice(name="cudnn", reason=why)
    return Choice(name="chunked", reason=why)


def describe(shape: tuple[int, int, int, int], dtype: Any) -> str:
    """What self-attention of [B L N K] does on the mesh in force, in words."""
    placement, sizes = place("tokens", *shape[:3]), in_force()

    def local(spec: P) -> tuple[int, ...]:
        return tuple(-(-size // parts(axes, sizes)) for size, axes in zip(shape, spec, strict=True))

    choice = choose(local(placement.queries), local(placement.keys), dtype)
    return f"{choice.name} ({choice.reason})" + (f"; {placement.words}" if placement.words else "")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_lengths: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    split: Split = "tokens",
    impl: str | None = None,
) -> jax.Array:
    """Softmax(q k^T * scale + bias) v, with scores and statistics in float32.

    q [B L N K]; k, v [B S N K]; bias [N L S]; scale: 1/sqrt(K) if None.
    kv_lengths [B], at least 1: keys at and beyond it are ignored.
    segments ([B L], [B S]), integers: a query sees the keys of its own segment, of which there is at least one.
    split: what a mesh splits, see `placement.place`.
    impl: a name of `IMPLEMENTATIONS`; None for the automatic choice. Returns [B L N K] in v's dtype.

    Raises ValueError where the named implementation cannot do it.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if impl is not None and impl not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"no attention implementation is called {impl!r}; there are {names}")
    placement = place(split, *q.shape[:3])
    given = {"kv_lengths": kv_lengths, "segments": segments, "bias": bias}
    given = {name: value for name, value in given.items() if value is not None}

    def attend(q, k, v, given):
        name = impl or choose(q.shape, k.shape, v.dtype, biased="bias" in given, segments="segments" in given).name
        if "bias" in given and name != "reference":
            raise ValueError(f"{name} attention takes no additive bias; use impl='reference'")
        return IMPLEMENTATIONS[name](q, k, v, scale=scale, **given)

    if all(size == 1 for size in in_force().values()):
        return attend(q, k, v, given)

    batch, tokens, heads, _ = placement.queries
    keys = placement.keys[1]
    specs = {"kv_lengths": P(batch), "segments": (P(batch, tokens), P(batch, keys)), "bias": P(heads, tokens, keys)}
    outside = placement.outside
    if split == "tokens":
        k, v = constrain_to(k, outside), constrain_to(v, outside)
    q, k, v = (
        constrain_to(constrain_to(q, outside), placement.queries),
        constrain_to(k, placement.keys),
        constrain_to(v, placement.keys),
    )
    out = jax.shard_map(
        attend,
        in_specs=(placement.queries, placement.keys, placement.keys, {name: specs[name] for name in given}),
        out_specs=placement.queries,
        axis_names=set(AXES),
        check_vma=False,
    )(q, k, v, given)
    return constrain_to(constrain_to(out, placement.queries), outside)
