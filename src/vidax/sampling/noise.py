"""Seeded normal noise, made on the host, so that it does not depend on device, mesh or placement of the weights."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from vidax.errors import UserError

Kind = Literal["torch", "jax"]

SEEDS = 2**64


class Stream:
    """Successive draws of standard normal noise, float32, from one seed.

    seed: 0 to 2**64 - 1. Both kinds use its lower 32 bits only: seeds that agree in them give the same noise.
    kind: "torch" is `torch.randn` with one CPU generator, which diffusers draws from, within 1e-6; "jax" is
          `jax.random.normal` with the seed's key, into which later draws fold their number.
    order: the axes of an array in the order in which its numbers are drawn; that of the array if empty.

    Raises `UserError` for other seeds and kinds.
    """

    def __init__(self, seed: int, kind: Kind = "torch", order: Sequence[int] = ()):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
            raise UserError(
                f"seed {seed!r}: a seed is a whole number from 0 to {SEEDS - 1}; "
                "PyTorch takes a negative seed as seed + 2**64, so give that number to repeat its noise"
            )
        if kind not in KINDS:
            raise UserError(f"noise kind {kind!r} is unknown: choose torch or jax")
        self._source, self._order = KINDS[kind](seed % 2**32), tuple(order)

    def normal(self, shape: Sequence[int]) -> np.ndarray:
        """The next draw."""
        if not self._order:
            return self._source.normal(tuple(shape))
        drawn = self._source.normal(tuple(shape[axis] for axis in self._order))
        return drawn.transpose(np.argsort(self._order))

    def skip(self, shape: Sequence[int]) -> None:
        """Pass over the next draw, at a fraction of its cost."""
        self._source.skip(tuple(shape))


def normal(shape: Sequence[int], seed: int, kind: Kind = "torch") -> np.ndarray:
    """The first draw of a stream."""
    return Stream(seed, kind).normal(shape)


def fresh_noise(stream: Stream, shape: Sequence[int], steps: range) -> Iterator[np.ndarray]:
    """Noise for each of these steps of the solver `DPM`, from the stream that made the initial noise.

    As diffusers' `CogVideoXDPMScheduler` draws it: every step but the first draws twice, and the second draw is the one
    that counts. (Its last step may draw once, where noise has no weight.)
    """
    for _ in range(max(0, 2 * steps.start - 1)):  # of the steps before them
        stream.skip(shape)
    for i in steps:
        if i > 0:
            stream.skip(shape)
        yield stream.normal(shape)


class _Jax:
    """Draws by number: each has its own key."""

    def __init__(self, seed: int):
        self.seed, self.draws = seed, 0

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            key = jax.random.key(self.seed, impl="threefry2x32")
            key = jax.random.fold_in(key, self.draws) if self.draws else key
            self.draws += 1
            return np.asarray(jax.random.normal(key, shape, np.float32))

    def skip(self, shape: tuple[int, ...]) -> None:
        self.draws += 1


class _Torch:
    """What PyTorch's `normal_` writes to contiguous CPU tensors (aten/src/ATen/native/cpu/DistributionTemplates.h).

    NumPy's `RandomState` has the same generator, seeded alike, and promises to keep its stream.
    """

    def __init__(self, seed: int):
        self.generator = np.random.RandomState(seed)
        self.spare = np.empty(0, np.float32)  # the second value of a pair, kept for the next draw of fewer than 16

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        if size < 16:
            return self._few(size).reshape(shape)
        uniform = _uniform(self._words(size))
        if size % 16 == 0:
            return _normal_blocks(uniform).reshape(shape)
        blocks = _normal_blocks(uniform[: size // 16 * 16])
        last = _normal_blocks(_uniform(self._words(16)))  # drawn again, over the end of the last whole block
        return np.concatenate([blocks[: size - 16], last]).reshape(shape)

    def skip(self, shape: tuple[int, ...]) -> None:
        size = math.prod(shape)
        if size < 16:
            self._few(size)
        else:
            self._words(size if size % 16 == 0 else size + 16)

    def _few(self, size: int) -> np.ndarray:
        pairs = max(0, size - len(self.spare) + 1) // 2
        values = np.concatenate([self.spare, _normal_pairs(self._words(pairs, 4))])
        self.spare = values[size:]
        return values[:size]

    def _words(self, *shape: int) -> np.ndarray:
        return self.generator.randint(0, 2**32, shape, dtype=np.uint32)


KINDS: dict[Kind, type[_Torch] | type[_Jax]] = {"torch": _Torch, "jax": _Jax}


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
