"""Attention by NVIDIA's cuDNN, for bfloat16 and float16 on GPUs."""

import jax
import jax.numpy as jnp


def cudnn(q, k, v, *, kv_lengths=None, segments=None, scale: float) -> jax.Array:
    """See `vidax.ops.attention.attention`. Statistics are float32 inside; no segments."""
    if segments is not None:
        raise ValueError("cuDNN attention takes no segments; use impl='chunked'")
    if v.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"cuDNN attention takes bfloat16 or float16, not {v.dtype}; use impl='chunked'")
    lengths = None if kv_lengths is None else kv_lengths.astype(jnp.int32)
    return jax.nn.dot_product_attention(
        q.astype(k.dtype), k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn"
    )
