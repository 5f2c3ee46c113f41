"""Classifier-free guidance (arXiv:2207.12598)."""

import jax
import jax.numpy as jnp


def guide(prediction: jax.Array, scale: jax.Array | float) -> jax.Array:
    """Push the conditional prediction away from the unconditional one: unconditional + scale * (conditional - unconditional).

    prediction: [2B ...], first the B conditional predictions, then the B unconditional ones. The result is [B ...], float32.
    scale: 1 gives the conditional prediction; it may be traced, because models with two experts change it on the way.
    """
    conditional, unconditional = jnp.split(prediction.astype(jnp.float32), 2)
    return unconditional + scale * (conditional - unconditional)
