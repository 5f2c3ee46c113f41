"""Which matmul precision a dtype means here."""

import jax
import jax.numpy as jnp


def precision_of(dtype) -> jax.lax.Precision | None:
    """Highest for float32 operands, which TPUs and GPUs otherwise round to bfloat16 or TF32; else the default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
