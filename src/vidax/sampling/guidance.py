"""Classifier-free guidance (arXiv:2207.12598)."""

import jax
import jax.numpy as jnp


def guide(prediction: jax.Array, scale: jax.Array | float) -> jax.Array:
    """Guided prediction [B ...], float32: unconditional + scale * (conditional - unconditional).

    prediction: [2B ...], first the B conditional predictions, then the B unconditional ones.
    scale:      1 gives the conditional prediction. It may be traced: models with two experts change it on the way.
    """
    conditional, unconditional = jnp.split(prediction.astype(jnp.float32), 2)
    return unconditional + scale * (conditional - unconditional)
