"""Attention: one public call over named implementations.

`attention` picks the implementation that suits the case; `choose` says which and why. A named one runs or raises with
the reason. Masks are lengths and segments, never a dense L x S boolean.

On a mesh, sharding constraints place the operands (`placement`), and the implementation works on what each device then
has, in the package's only `shard_map`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from vidax.ops.attention import pallas_tpu as pallas
from vidax.ops.attention.chunked import chunked
from vidax.ops.attention.cudnn import cudnn
from vidax.ops.attention.placement import Placement, Split, place
from vidax.ops.attention.reference import reference
from vidax.parallel.mesh import AXES
from vidax.parallel.rules import alone, constrain_to, in_force, kind_in_force, product

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "pallas_tpu": pallas.pallas_tpu,
    "cudnn": cudnn,
    "chunked": chunked,
    "reference": reference,
}

Run = Callable[..., jax.Array]

STANDARD = ((0, 1, 2, 3),) * 3  # of q, k and v: [B L N K]

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
    if platform == "tpu" and dtype == jnp.bfloat16:
        limit = f"2^{pallas.MAXIMUM_GAP:.0f}"
        return Choice(
            name="pallas_tpu", reason=f"{why}; heads whose weights may span more than {limit} take a running maximum"
        )
    if platform in ("gpu", "cuda") and dtype in HALF and size <= CUDNN_HEAD_SIZE and not segments:
        return Choice(name="cudnn", reason=why)
    return Choice(name="chunked", reason=why)


def local_shape(shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """What one device has of an array; of a length that does not divide, the most that one has."""
    return tuple(-(-size // product(axes, sizes)) for size, axes in zip(shape, spec, strict=True))


def token_step(tokens: int) -> int:
    """Of how many tokens each device should have a multiple, so that what devices exchange are whole tiles."""
    return 128 if kind_in_force()[0] == "tpu" and tokens >= 8192 else 1


def describe(shape: tuple[int, int, int, int], dtype: Any) -> str:
    """What self-attention of [B L N K] does on the mesh in force, in words."""
    placement, sizes = place("tokens", *shape[:3]), in_force()
    choice = choose(local_shape(shape, placement.queries, sizes), local_shape(shape, placement.keys, sizes), dtype)
    return f"{choice.name} ({choice.reason})" + (f"; {placement.words}" if placement.words else "")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kv_lengths: jax.Array | None = None,
    real_keys: int | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    split: Split = "tokens",
    impl: str | None = None,
) -> jax.Array:
    """Softmax(q k^T * scale + bias) v, with scores and statistics in float32.

    q [B L N K]; k, v [B S N K]; bias [N L S]; scale: 1/sqrt(K) if None. q may be float32 where k is not: whoever
        scales it first rounds it once.
    kv_lengths [B], at least 1: keys at and beyond it are ignored. real_keys: the same for all rows, known beforehand.
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
    if impl is None:
        sizes = in_force()
        shapes = local_shape(q.shape, placement.queries, sizes), local_shape(k.shape, placement.keys, sizes)
        impl = choose(*shapes, v.dtype, biased=bias is not None, segments=segments is not None).name
    if bias is not None and impl != "reference":
        raise ValueError(f"{impl} attention takes no additive bias; use impl='reference'")
    if real_keys is not None and (segments is not None or bias is not None):
        raise ValueError("real_keys goes with neither segments nor a bias; use kv_lengths")
    if impl == "pallas_tpu":
        # The kernel's own layouts come first: then whoever makes q, k and v writes them so, and what devices exchange
        # are whole tiles.
        orders, q = pallas.ORDERS, pallas.scaled(q, scale, k.dtype)
        run: Run = functools.partial(pallas.attend, real_keys=real_keys, chip=kind_in_force()[1])
    else:
        orders, q = STANDARD, q.astype(k.dtype)
        run = functools.partial(IMPLEMENTATIONS[impl], scale=scale)
        if real_keys is not None:
            run = first_keys(run, real_keys)
    operands = tuple(x.transpose(order) for x, order in zip((q, k, v), orders, strict=True))
    if alone():
        out = run(*operands, **given)
    else:
        out = over_mesh(run, operands, given, orders, placement, keys_split=split == "tokens")
    return out.transpose([orders[0].index(i) for i in range(4)])


def first_keys(run: Run, count: int) -> Run:
    """`run` without the keys beyond `count`."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **given: Any) -> jax.Array:
        return run(q, k[:, :count], v[:, :count], **given)

    return attend


def over_mesh(
    run: Run,
    operands: tuple[jax.Array, ...],
    given: Mapping[str, Any],
    orders: tuple[tuple[int, ...], ...],
    placement: Placement,
    *,
    keys_split: bool,
) -> jax.Array:
    """`run` on what each device has of q, k and v, whose dimensions have been put in `orders`.

    keys_split: keys and values come split over their tokens as queries do.
    """
    queries, keys = placement.queries, placement.keys
    within = [P(*(spec[i] for i in order)) for spec, order in zip((queries, keys, keys), orders, strict=True)]
    outside = [P(*(placement.outside[i] for i in order)) for order in orders]
    come = outside if keys_split else [outside[0], *within[1:]]
    # Both constraints: from one to the other is what the devices exchange.
    operands = tuple(constrain_to(constrain_to(x, a), b) for x, a, b in zip(operands, come, within, strict=True))
    specs = {
        "kv_lengths": P(queries[0]),
        "segments": (P(queries[0], queries[1]), P(queries[0], keys[1])),
        "bias": P(queries[2], queries[1], keys[1]),
    }
    local: Run = lambda q, k, v, given: run(q, k, v, **given)  # noqa: E731
    out = jax.shard_map(
        local,
        in_specs=(*within, {name: specs[name] for name in given}),
        out_specs=within[0],
        axis_names=set(AXES),
        check_vma=False,
    )(*operands, given)
    return constrain_to(constrain_to(out, within[0]), outside[0])
