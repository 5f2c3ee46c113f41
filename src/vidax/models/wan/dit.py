"""The Wan 2.1 diffusion transformer.

Unusual about this network: queries and keys are RMS-normalised over all heads together, not per head; the six
modulation vectors of a block are a learned table plus one projection of the timestep that all blocks share; cross-
attention reads the text without a mask, the padding being zero vectors; the timestep path, the modulation and the
head stay in float32, as in the official code.

Source: Wan-Video/Wan2.1, wan/modules/model.py. Names of parameters follow that file where it has names.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from vidax.nn import LayerNorm, Linear, RMSNorm, Spec, fan_in, gathered, module, on_device, stack, standardize, static
from vidax.ops.attention import attention, token_step
from vidax.ops.rope import grid_table, rotate
from vidax.parallel.rules import Axis, constrain, everywhere, parts

Rope = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Architecture. Full-size values: official wan/configs, and tests/manifests for every tensor."""

    dim: int
    layers: int
    heads: int
    mlp_dim: int
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    frequency_dim: int = 256  # width of the sinusoidal timestep embedding
    patch: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    @property
    def rope_channels(self) -> tuple[int, int, int]:
        """Channels of a head that carry the frame, row and column position."""
        spatial = 2 * (self.head_size // 6)
        return self.head_size - 2 * spatial, spatial, spatial


@module
class MLP:
    fc1: Linear
    fc2: Linear
    activation: str = static()

    @staticmethod
    def spec(
        d_in: int,
        hidden: int,
        d_out: int,
        dtype,
        activation: str,
        axes: tuple[Axis, Axis] = ("embed", "mlp"),
    ):
        fc1 = Linear.spec(d_in, hidden, axes, dtype)
        return MLP(fc1, Linear.spec(hidden, d_out, axes[::-1], dtype), activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.fc1(x)
        hidden = jax.nn.gelu(hidden, approximate=True) if self.activation == "gelu_tanh" else jax.nn.silu(hidden)
        # Without the barrier XLA keeps it in float32 on v6e and computes the activation again for each tile of fc2.
        return self.fc2(jax.lax.optimization_barrier(hidden.astype(self.fc2.weight.dtype)))


@module
class Attention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norm_q: RMSNorm
    norm_k: RMSNorm
    heads: int = static()

    @staticmethod
    def spec(c: DiTConfig, dtype):
        heads = ("heads", c.heads)

        def project():
            return Linear.spec(c.dim, c.dim, ("embed", heads), dtype)

        def norm():
            return RMSNorm.spec(c.dim, c.eps, heads)

        o = Linear.spec(c.dim, c.dim, (heads, "embed"), dtype)
        return Attention(project(), project(), project(), o, norm(), norm(), c.heads)

    def __call__(
        self, x: jax.Array, context: jax.Array, rope: Rope | None = None, real: int | None = None
    ) -> jax.Array:
        """x [B L D] attends to context [B S D]. Self-attention has a `rope` table, and sees its first `real` tokens."""
        split = lambda t: rearrange(t, "b l (n k) -> b l n k", n=self.heads)  # noqa: E731
        q, k, v = split(self.norm_q(self.q(x))), split(self.norm_k(self.k(context))), split(self.v(context))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        dtype = self.q.weight.dtype
        out = attention(
            q, k.astype(dtype), v.astype(dtype), real_keys=real, split="queries" if rope is None else "tokens"
        )
        return self.o(rearrange(out, "b l n k -> b l (n k)"))


@module
class Block:
    modulation: Any  # [1 6 D]
    self_attn: Attention
    norm3: LayerNorm
    cross_attn: Attention
    ffn: MLP
    eps: float = static()

    @staticmethod
    def spec(c: DiTConfig, dtype):
        return Block(
            modulation=Spec((1, 6, c.dim), (None, None, None), jnp.float32, fan_in(c.dim)),
            self_attn=Attention.spec(c, dtype),
            norm3=LayerNorm.spec(c.dim, c.eps),
            cross_attn=Attention.spec(c, dtype),
            ffn=MLP.spec(c.dim, c.mlp_dim, c.dim, dtype, "gelu_tanh"),
            eps=c.eps,
        )

    def __call__(
        self, x: jax.Array, modulation: jax.Array, context: jax.Array, rope: Rope, real: int | None = None
    ) -> jax.Array:
        """x [B L D] float32 (the residual stream), modulation [B 6 D] float32, context [B S D]; of the tokens of x the
        first `real` are no padding.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(self.modulation + modulation, 6, axis=1)
        dtype = self.self_attn.q.weight.dtype
        h = (standardize(x, self.eps) * (1 + scale1) + shift1).astype(dtype)
        x = residual(x + self.self_attn(h, h, rope, real) * gate1)
        x = residual(x + self.cross_attn(self.norm3(x).astype(dtype), context))
        h = (standardize(x, self.eps) * (1 + scale2) + shift2).astype(dtype)
        return residual(x + self.ffn(h) * gate2)


@module
class Head:
    modulation: Any  # [1 2 D]
    head: Linear
    eps: float = static()

    @staticmethod
    def spec(c: DiTConfig):
        return Head(
            modulation=Spec((1, 2, c.dim), (None, None, None), jnp.float32, fan_in(c.dim)),
            head=Linear.spec(c.dim, math.prod(c.patch) * c.out_channels, (None, None), jnp.float32),
            eps=c.eps,
        )

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        shift, scale = jnp.split(self.modulation + time[:, None], 2, axis=1)
        return self.head(standardize(x, self.eps) * (1 + scale) + shift)


@module
class DiT:
    patch_embedding: Linear
    text_embedding: MLP
    time_embedding: MLP
    time_projection: Linear
    blocks: Any  # a Block, every leaf with a leading layer axis; None where the layers are elsewhere
    head: Head
    config: DiTConfig = static()

    @staticmethod
    def spec(c: DiTConfig, dtype=jnp.bfloat16):
        """Parameter descriptions; `dtype` is that of the large matrices, the rest is float32."""
        return DiT(
            patch_embedding=Linear.spec(math.prod(c.patch) * c.in_channels, c.dim, (None, None), dtype, kernel=c.patch),
            text_embedding=MLP.spec(c.text_dim, c.dim, c.dim, dtype, "gelu_tanh", (None, "spread")),
            time_embedding=MLP.spec(c.frequency_dim, c.dim, c.dim, jnp.float32, "silu", (None, "spread")),
            time_projection=Linear.spec(c.dim, 6 * c.dim, (None, "spread"), jnp.float32),
            blocks=stack(Block.spec(c, dtype), c.layers),
            head=Head.spec(c),
            config=c,
        )

    def prepare(self, text: jax.Array) -> jax.Array:
        """Text embeddings [B S text_dim] to context [B S D]: the same at every step of a sampling run."""
        return constrain(self.text_embedding(text).astype(self.text_embedding.fc2.weight.dtype), "batch", None, None)

    def embed(self, latents: jax.Array, timesteps: jax.Array) -> "Tokens":
        """What the layers work on, from latents [B F H W C] and timesteps [B] in 0..1000. Zeros are added to the tokens
        where devices would not get the same number of them.
        """
        c = self.config
        pt, ph, pw = c.patch
        patches = rearrange(latents, "b (f pt) (h ph) (w pw) c -> b f h w (c pt ph pw)", pt=pt, ph=ph, pw=pw)
        x = rearrange(patches, "b f h w c -> b (f h w) c")
        cos, sin = grid_table(patches.shape[1:4], c.rope_channels)
        real = x.shape[1]
        padding = -real % (parts("tokens") * token_step(real))
        x = constrain(jnp.pad(x, ((0, 0), (0, padding), (0, 0))), "batch", "tokens", None)
        cos, sin = (constrain(jnp.pad(table, ((0, padding), (0, 0))), "tokens", None) for table in (cos, sin))
        time = constrain(self.time_embedding(sinusoid(timesteps, c.frequency_dim)), "batch", None)
        modulation = constrain(self.time_projection(jax.nn.silu(time)), "batch", None)
        modulation = rearrange(modulation, "b (six d) -> b six d", six=6)
        return Tokens(residual(self.patch_embedding(x)), time, modulation, (cos, sin), real)

    def block(self, layer: Block, tokens: "Tokens", context: jax.Array) -> "Tokens":
        """One layer, whose weights lie as they are stored."""
        layer = gathered(Block.spec(self.config, None), layer)
        x = layer(tokens.x, tokens.modulation, context, tokens.rope, tokens.real)
        return dataclasses.replace(tokens, x=x)

    def decode(self, patches: jax.Array, grid: tuple[int, ...]) -> jax.Array:
        """Head outputs [B L pt*ph*pw*C] back to latents [B F H W C], whole on every device."""
        (f, h, w), (pt, ph, pw) = grid, self.config.patch
        patches = everywhere(patches)[:, : math.prod(grid)]
        return rearrange(
            patches, "b (f h w) (pt ph pw c) -> b (f pt) (h ph) (w pw) c", f=f, h=h, w=w, pt=pt, ph=ph, pw=pw
        )

    def finish(self, tokens: "Tokens", latents: jax.Array) -> jax.Array:
        """Predicted velocity [B F H W C] float32 from what the last layer gives, for latents of that shape."""
        grid = tuple(size // patch for size, patch in zip(latents.shape[1:4], self.config.patch, strict=True))
        return self.decode(self.head(tokens.x, tokens.time), grid)

    def __call__(self, latents: jax.Array, timesteps: jax.Array, context: jax.Array) -> jax.Array:
        """Predicted velocity [B F H W C] float32 for latents [B F H W C], timesteps [B] and context from `prepare`. A
        layer that lies in host memory is copied to the device for its turn.
        """
        tokens = self.embed(latents, timesteps)

        def step(x: jax.Array, layer: Block) -> tuple[jax.Array, None]:
            layer = on_device(Block.spec(self.config, None), layer)
            return self.block(layer, dataclasses.replace(tokens, x=x), context).x, None

        x, _ = jax.lax.scan(step, tokens.x, self.blocks)
        return self.finish(dataclasses.replace(tokens, x=x), latents)


@module
class Tokens:
    """A video between the layers, and what each layer takes beside it."""

    x: Any  # [B L D], float32
    time: Any  # [B D]
    modulation: Any  # [B 6 D]
    rope: Any  # cos and sin [L K]
    real: int = static()  # how many tokens are no padding


def residual(x: jax.Array) -> jax.Array:
    """Tokens [B L D] as they lie between the layers."""
    return constrain(x, "batch", "tokens", None)


def sinusoid(timesteps: jax.Array, dim: int) -> jax.Array:
    """Sinusoidal embedding [B dim] of timesteps [B], cosines first (Vaswani et al. 2017)."""
    frequencies = jnp.exp(-math.log(10000.0) * jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def step_flops(c: DiTConfig, tokens: int, text_tokens: int = 512) -> float:
    """Floating-point operations of one pass over one sample: 2 per multiply-add of every matrix product, attention
    included.
    """
    per_block = 2 * tokens * (6 * c.dim**2 + 2 * c.dim * c.mlp_dim)  # q k v o, cross q o, MLP
    per_block += 2 * text_tokens * 2 * c.dim**2  # cross k v
    per_block += 4 * tokens * (tokens + text_tokens) * c.dim  # scores and weighted sums
    ends = 2 * tokens * c.dim * math.prod(c.patch) * (c.in_channels + c.out_channels)
    return c.layers * per_block + ends + 2 * text_tokens * (c.text_dim + c.dim) * c.dim
