"""`CASES` is the one list of attention cases that every implementation runs; the expected results are in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

# Of the largest value. Measured, largest of all implementations: 1.7e-6 and 6e-3.
TOLERANCE = {"float32": 4e-6, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of 2 samples and 2 heads.

    magnitude: standard deviation of queries and keys. key_norm: that of every key of the second head.
    key_offset: a vector of this norm is added to all keys of a head, as trained models have it.
    segments: lengths of the query segments and of the key segments.
    """

    queries: int
    keys: int
    head_size: int = 64
    dtype: str = "float32"
    kv_lengths: tuple[int, int] | None = None
    magnitude: float = 1.0
    key_norm: float | None = None
    key_offset: float = 0.0
    segments: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        lengths = f" of {self.kv_lengths[0]} and {self.kv_lengths[1]}" if self.kv_lengths else ""
        words = {
            "magnitude": self.magnitude != 1 and f"{self.magnitude:g}",
            "key norm": self.key_norm and f"{self.key_norm:g}",
            "key offset": self.key_offset and f"{self.key_offset:g}",
            "segments": self.segments and f"{self.segments[0]} and {self.segments[1]}",
        }
        rest = "".join(f", {name} {word}" for name, word in words.items() if word)
        return f"{self.queries} to {self.keys}{lengths}, {self.head_size}, {self.dtype}{rest}"

    @functools.cached_property
    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        random = np.random.RandomState(0)
        q, k, v = (random.standard_normal((2, s, 2, self.head_size)) for s in (self.queries, self.keys, self.keys))
        q, k = q * self.magnitude, k * self.magnitude
        if self.key_norm:
            k[:, :, 1] *= self.key_norm / np.linalg.norm(k[:, :, 1], axis=-1, keepdims=True)
        if self.key_offset:
            offset = random.standard_normal((2, 1, 2, self.head_size))
            k += offset * self.key_offset / np.linalg.norm(offset, axis=-1, keepdims=True)
        return tuple(jnp.asarray(x, self.dtype) for x in (q, k, v))

    @property
    def options(self) -> dict:
        """Keyword arguments beside the scale."""
        options: dict = {}
        if self.kv_lengths is not None:
            options["kv_lengths"] = jnp.asarray(self.kv_lengths)
        if self.segments is not None:
            options["segments"] = tuple(jnp.asarray(ids) for ids in self.segment_ids)
        return options

    @property
    def lengths(self) -> jax.Array | None:
        return self.options.get("kv_lengths")

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def segment_ids(self) -> tuple[np.ndarray, ...] | None:
        if self.segments is None:
            return None
        return tuple(np.repeat(np.arange(len(s), dtype=np.int32), s)[None].repeat(2, 0) for s in self.segments)

    @functools.cached_property
    def expected(self) -> np.ndarray:
        return attention_in_float64(
            *self.inputs, lengths=self.kv_lengths, segments=self.segment_ids, scale=self.head_size**-0.5
        )

    @property
    def tolerance(self) -> float:
        """Scores are rounded relative to their size, and the exponential makes of it a relative error."""
        largest = max(self.magnitude**2, self.magnitude * ((self.key_norm or 0) + self.key_offset) / 8)
        return TOLERANCE[self.dtype] + 5e-7 * largest  # measured: 8e-8, and 3e-7 for the TPU kernel


CASES = [
    *(Case(length, length) for length in (1, 127, 128, 129, 257, 1000)),
    *(Case(length, length, 128) for length in (129, 1000)),
    *(Case(length, 512, 128) for length in (1, 257, 1000)),  # cross-attention
    Case(129, 257, 96),
    Case(1000, 1000, 128, "bfloat16"),
    Case(257, 512, 128, "bfloat16"),
    Case(129, 129, 64, "bfloat16"),
    Case(257, 257, kv_lengths=(1, 129)),
    Case(257, 512, 128, kv_lengths=(512, 37)),
    Case(1000, 1000, kv_lengths=(999, 512)),
    Case(127, 512, 128, "bfloat16", (511, 3)),
    # scores of hundreds: only a subtracted maximum keeps the exponentials finite
    Case(257, 257, magnitude=10),
    Case(257, 257, 128, "bfloat16", magnitude=30),
    # of two heads, one has scores that span more than float32's exponents
    Case(257, 300, 128, magnitude=2, key_norm=120),
    Case(257, 300, 128, "bfloat16", magnitude=2, key_norm=120),
    Case(257, 300, 64, "bfloat16", (300, 140), key_offset=60),
    Case(129, 300, 128, key_offset=60),
    Case(257, 300, segments=((100, 1, 156), (200, 37, 63))),
    Case(257, 300, 128, "bfloat16", (300, 270), segments=((128, 129), (256, 44))),
]


def attention_in_float64(q, k, v, *, lengths=None, segments=None, bias=0.0, scale: float) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("blnk,bsnk->bnls", q, k) * scale + bias
    if lengths is not None:
        scores[np.broadcast_to(np.arange(k.shape[1]) >= np.reshape(lengths, (-1, 1, 1, 1)), scores.shape)] = -np.inf
    if segments is not None:
        other = segments[0][:, None, :, None] != segments[1][:, None, None, :]
        scores[np.broadcast_to(other, scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnls,bsnk->blnk", weights / weights.sum(-1, keepdims=True), v)


def relative_error(ours, expected: np.ndarray) -> float:
    assert ours.shape == expected.shape
    return float(np.abs(np.asarray(ours, np.float64) - expected).max() / np.abs(expected).max())
