"""Seeded normal noise, made on the host, so that it does not depend on device, mesh or placement of the weights."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from vidax.errors import UserError

Kind = Literal["torch", "jax"]

SEEDS = 2**64


def normal(shape: Sequence[int], seed: int, kind: Kind = "torch") -> np.ndarray:
    """Standard normal noise of this shape, float32.

    seed: 0 to 2**64 - 1. Both kinds use its lower 32 bits only: seeds that agree in them give the same noise.
    kind: "torch" is `torch.randn` with a CPU generator, which diffusers starts from, within 1e-6; "jax" is
          `jax.random.normal` with the seed's key.

    Raises `UserError` for other seeds and kinds.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise UserError(
            f"seed {seed!r}: a seed is a whole number from 0 to {SEEDS - 1}; "
            "PyTorch takes a negative seed as seed + 2**64, so give that number to repeat its noise"
        )
    shape, seed = tuple(shape), seed % 2**32
    if kind == "torch":
        return _torch_normal(math.prod(shape), seed).reshape(shape)
    if kind == "jax":
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(jax.random.normal(jax.random.key(seed, impl="threefry2x32"), shape, np.float32))
    raise UserError(f"noise kind {kind!r} is unknown: choose torch or jax")


def _torch_normal(size: int, seed: int) -> np.ndarray:
    """What PyTorch's `normal_` writes to a contiguous CPU tensor (aten/src/ATen/native/cpu/DistributionTemplates.h).

    NumPy's `RandomState` has the same generator, seeded alike, and promises to keep its stream.
    """
    generator = np.random.RandomState(seed)

    def words(*shape: int) -> np.ndarray:
        return generator.randint(0, 2**32, shape, dtype=np.uint32)

    if size < 16:
        return _normal_pairs(words((size + 1) // 2, 4))[:size]
    uniform = _uniform(words(size))
    if size % 16 == 0:
        return _normal_blocks(uniform)
    blocks = _normal_blocks(uniform[: size // 16 * 16])
    last = _normal_blocks(_uniform(words(16)))  # drawn again, over the end of the last whole block
    return np.concatenate([blocks[: size - 16], last])


def _uniform(words: np.ndarray) -> np.ndarray:
    """The lower 24 bits of 32-bit words as float32 in [0, 1)."""
    return (words & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2**-24)


def _normal_blocks(uniform: np.ndarray) -> np.ndarray:
    """Box-Muller in blocks of 16: values k and k + 8 of a block come from its uniforms k (radius) and k + 8 (angle).

    The angle is rounded to float32, as in PyTorch's vector code. The rest is float64, so that the result does not
    depend on the accuracy of this machine's float32 functions.
    """
    radial, angular = uniform.reshape(-1, 2, 8).swapaxes(0, 1)
    radius = np.sqrt(-2 * np.log((1 - radial).astype(np.float64)))
    angle = (np.float32(2 * np.pi) * angular).astype(np.float64)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32).ravel()


def _normal_pairs(words: np.ndarray) -> np.ndarray:
    """Box-Muller in float64, PyTorch's way for fewer than 16 values: [pairs, 4] words to two values a pair.

    Two words make a uniform of 53 bits, the first of a pair gives the angle, the second the radius.
    """
    high, low = words.astype(np.uint64).reshape(-1, 2, 2).transpose(2, 0, 1)
    bits = (high << np.uint64(32) | low) & np.uint64(2**53 - 1)
    angular, radial = (bits.astype(np.float64) * 2.0**-53).T
    radius, angle = np.sqrt(-2 * np.log1p(-radial)), 2 * np.pi * angular
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32).ravel()
