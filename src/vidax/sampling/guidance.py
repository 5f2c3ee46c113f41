"""Classifier-free guidance (arXiv:2207.12598)."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np


def guide(prediction: jax.Array, scale: jax.Array | float) -> jax.Array:
    """Guided prediction [B ...], float32: unconditional + scale * (conditional - unconditional).

    prediction: [2B ...], first the B conditional predictions, then the B unconditional ones.
    scale:      1 gives the conditional prediction. It may be traced: models with two experts change it on the way.
    """
    conditional, unconditional = jnp.split(prediction.astype(jnp.float32), 2)
    return unconditional + scale * (conditional - unconditional)


def dynamic(scale: float, timesteps: Iterable[float], steps: int) -> np.ndarray:
    """The guidance scale of each step [steps], float32, of diffusers' CogVideoX pipelines with `use_dynamic_cfg`.

    It looks like a rise from 1 to 1 + scale. But timesteps begin at 999 whatever the number of steps is, so that with
    50 steps the scale swings between these two values for most of the run and ends near 1. Kept, because it decides
    what the models make by default. Computed in Python's floats, as there.

    Whether there are two branches to guide is for `scale` to say (above 1), not for a step's own value.
    """
    rise = (((steps - float(t)) / steps) ** 5.0 for t in timesteps)
    return np.array([1 + scale * ((1 - math.cos(math.pi * value)) / 2) for value in rise], np.float32)
