"""The text encoders T5 v1.1 (Raffel et al. 2020) and UMT5 (Chung et al. 2023), which differ in their position biases:
all layers of T5 share one table, each layer of UMT5 has its own.

Unusual about this network: attention scores are not scaled by the head size; there are no biases; padding is masked
as keys.

Source: transformers' T5EncoderModel and UMT5EncoderModel, and Wan-Video/Wan2.1, wan/modules/t5.py.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from vidax.nn import Embedding, Linear, RMSNorm, Spec, fan_in, module, stack, static
from vidax.ops.attention import attention
from vidax.parallel.rules import everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Architecture. Full-size UMT5-XXL values: official wan/modules/t5.py, umt5_xxl."""

    vocabulary: int = 256384
    dim: int = 4096
    head_size: int = 64
    heads: int = 64
    mlp_dim: int = 10240
    layers: int = 24
    buckets: int = 32
    max_distance: int = 128
    shared_bias: bool = False  # one table of position biases for all layers
    eps: float = 1e-6


# google/t5-v1_1-xxl, config.json
T5_XXL = T5Config(vocabulary=32128, shared_bias=True)


def bias_table(c: T5Config) -> Spec:
    """Position biases [buckets N]."""
    return Spec((c.buckets, c.heads), (None, ("tower", c.heads)), jnp.float32, fan_in(c.dim))


@module
class SelfAttention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    relative_attention_bias: Any  # [buckets N], float32, or None where the layers share one
    heads: int = static()

    @staticmethod
    def spec(c: T5Config, dtype):
        inner = c.heads * c.head_size
        heads = ("tower", c.heads)
        q, k, v = (Linear.spec(c.dim, inner, (None, heads), dtype, bias=False) for _ in range(3))
        o = Linear.spec(inner, c.dim, (heads, None), dtype, bias=False)
        return SelfAttention(q, k, v, o, None if c.shared_bias else bias_table(c), c.heads)

    def __call__(self, x: jax.Array, lengths: jax.Array, bias: jax.Array) -> jax.Array:
        """x [B S D]; keys at and beyond lengths [B] are masked; bias [N S S] is added to the scores."""
        dtype = self.q.weight.dtype
        heads = [
            rearrange(project(x), "b s (n k) -> b s n k", n=self.heads).astype(dtype)
            for project in (self.q, self.k, self.v)
        ]
        out = attention(*heads, kv_lengths=lengths, bias=bias, scale=1.0, split="heads")
        return self.o(rearrange(out, "b s n k -> b s (n k)"))


@module
class GatedMLP:
    gate: Linear
    up: Linear
    down: Linear

    @staticmethod
    def spec(c: T5Config, dtype):
        gate, up = (Linear.spec(c.dim, c.mlp_dim, (None, "tower"), dtype, bias=False) for _ in range(2))
        return GatedMLP(gate, up, Linear.spec(c.mlp_dim, c.dim, ("tower", None), dtype, bias=False))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(self.gate(x), approximate=True) * self.up(x)
        return self.down(hidden.astype(self.down.weight.dtype))


@module
class Block:
    norm1: RMSNorm
    attention: SelfAttention
    norm2: RMSNorm
    mlp: GatedMLP

    @staticmethod
    def spec(c: T5Config, dtype):
        norm1, norm2 = RMSNorm.spec(c.dim, c.eps), RMSNorm.spec(c.dim, c.eps)
        return Block(norm1, SelfAttention.spec(c, dtype), norm2, GatedMLP.spec(c, dtype))

    def __call__(self, x: jax.Array, lengths: jax.Array, bias: jax.Array) -> jax.Array:
        x = everywhere(x + self.attention(self.norm1(x), lengths, bias))
        return everywhere(x + self.mlp(self.norm2(x)))


@module
class T5Encoder:
    token_embedding: Any  # an Embedding; None in programs, for which its rows are looked up on the host
    blocks: Any  # a Block, every leaf with a leading layer axis; None where the layers are elsewhere
    norm: RMSNorm
    relative_attention_bias: Any  # [buckets N], float32, or None where each layer has its own
    config: T5Config = static()

    @staticmethod
    def spec(c: T5Config, dtype=jnp.bfloat16):
        """Parameter descriptions; `dtype` is that of the matrices and the embedding, norms and position biases are
        float32.
        """
        embedding = Embedding.spec(c.vocabulary, c.dim, dtype)
        blocks, norm = stack(Block.spec(c, dtype), c.layers), RMSNorm.spec(c.dim, c.eps)
        return T5Encoder(embedding, blocks, norm, bias_table(c) if c.shared_bias else None, c)

    def block(self, layer: Block, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """One layer on tokens [B S D]."""
        c = self.config
        table = self.relative_attention_bias if c.shared_bias else layer.attention.relative_attention_bias
        bias = table[jnp.asarray(relative_buckets(x.shape[1], c.buckets, c.max_distance))]
        return layer(x, lengths, rearrange(bias, "l s n -> n l s"))

    def finish(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Embeddings [B S D] float32 from what the last layer gives, zero past the lengths [B]."""
        real = jnp.arange(x.shape[1]) < lengths[:, None]
        return jnp.where(real[..., None], self.norm(x), 0.0)

    def encode(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Token embeddings [B S D], of which lengths [B] are real, to embeddings of the text [B S D] float32."""
        x, _ = jax.lax.scan(lambda x, layer: (self.block(layer, x, lengths), None), everywhere(x), self.blocks)
        return self.finish(x, lengths)

    def __call__(self, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        """Token ids [B S] in the place of their embeddings, which the engine looks up on the host."""
        return self.encode(self.token_embedding(ids), lengths)


def relative_buckets(length: int, buckets: int, max_distance: int) -> np.ndarray:
    """Bucket [length length] of each (query, key) distance: exact when near, logarithmic up to max_distance.

    The upper half of the buckets is for keys ahead of the query.
    """
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    half, exact = buckets // 2, buckets // 4
    near = np.abs(distance)
    # float32 as in the reference: at a bucket's edge the rounding decides
    ratio = np.log(np.maximum(near, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    far = exact + (ratio * np.float32(half - exact)).astype(np.int32)
    return (np.where(distance > 0, half, 0) + np.where(near < exact, near, np.minimum(far, half - 1))).astype(np.int32)
