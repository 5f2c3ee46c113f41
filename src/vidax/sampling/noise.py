"""Seeded normal noise, made on the host, so that it does not depend on device, mesh or placement."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from vidax.errors import UserError

Kind = Literal["torch", "jax"]

SEEDS = 2**64


def normal(shape: Sequence[int], seed: int, kind: Kind = "torch") -> np.ndarray:
    """Standard normal noise, float32, of this shape.

    kind: "torch" is what `torch.randn` gives with a CPU generator of this seed, within 1e-6, and so what diffusers starts from. "jax"
          is `jax.random.normal` of this seed's key.
    seed: 0 to 2**64 - 1. Both generators use its lower 32 bits only: seeds that agree in them give the same noise.

    Raises `UserError` for another kind or seed.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < SEEDS:
        raise UserError(
            f"seed {seed!r}: a seed is a whole number from 0 to {SEEDS - 1}; PyTorch reads a negative seed as seed + 2**64, give that number to repeat it"
        )
    shape, seed = tuple(shape), int(seed) % 2**32
    if kind == "torch":
        return _torch_normal(math.prod(shape), seed).reshape(shape)
    if kind == "jax":
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(jax.random.normal(jax.random.key(seed, impl="threefry2x32"), shape, np.float32))
    raise UserError(f"noise of kind {kind!r} is unknown: choose torch or jax")


def _torch_normal(size: int, seed: int) -> np.ndarray:
    """The flat result of PyTorch's CPU `normal_` (ATen/native/cpu/DistributionTemplates.h, `normal_fill`).

    Both generators are the Mersenne Twister with the same seeding; NumPy promises that `RandomState` keeps its stream.
    """
    bits = np.random.RandomState(seed)

    def draw(count: int) -> np.ndarray:
        return bits.randint(0, 2**32, count, dtype=np.uint32)

    if size < 16:
        return _normal_pairs(draw(4 * (size + size % 2)).reshape(-1, 4)[: (size + 1) // 2])[:size]
    uniform = _uniform(draw(size))
    values = _normal_blocks(uniform[: size - size % 16])
    if size % 16:
        # PyTorch redraws the last 16 values, which overlap the last full block.
        values = np.concatenate([values[: size - 16], _normal_blocks(_uniform(draw(16)))])
    return values


def _uniform(words: np.ndarray) -> np.ndarray:
    """The lower 24 bits of 32-bit words as float32 in [0, 1)."""
    return (words & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


def _normal_blocks(uniform: np.ndarray) -> np.ndarray:
    """Box-Muller on blocks of 16: value j and value j + 8 of a block come from the uniforms j and j + 8.

    The angle is rounded to float32 as in PyTorch's vector code. The rest is in float64, so that the result does not depend on the
    accuracy of this machine's float32 functions.
    """
    radial, angular = uniform.reshape(-1, 2, 8).swapaxes(0, 1)
    radius = np.sqrt(-2 * np.log((1 - radial).astype(np.float64)))
    angle = (np.float32(2 * np.pi) * angular).astype(np.float64)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32).ravel()


def _normal_pairs(words: np.ndarray) -> np.ndarray:
    """Box-Muller in float64, as PyTorch does for fewer than 16 values: four words [pairs, 4] make two uniforms of 53 bits, then a pair."""
    high, low = words.astype(np.uint64).reshape(-1, 2, 2).transpose(2, 0, 1)
    uniform = (((high << np.uint64(32)) | low) & np.uint64(2**53 - 1)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-uniform[:, 1]))
    angle = 2 * np.pi * uniform[:, 0]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32).ravel()
