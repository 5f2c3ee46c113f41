"""The diffusion transformer of Wan 2.1 and 2.2.

Unusual about this network: queries and keys are RMS-normalised over all heads together, not per head; the six
modulation vectors of a block are a learned table plus one projection of the timestep that all blocks share; cross-
attention reads the text without a mask, the padding being zero vectors; the timestep path, the modulation and the
head stay in float32, as in the official code. Where the first frames are given, as in TI2V-5B, their tokens have a
timestep of their own. Image-to-video models of 2.1 attend to an image beside the text, with the same queries.

Source: Wan-Video/Wan2.1 and Wan2.2, wan/modules/model.py. Names of parameters follow those files where they have names.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange

from vidax.models.transformer import DiffusionTransformer, residual
from vidax.nn import (
    MLP,
    LayerNorm,
    Linear,
    RMSNorm,
    Spec,
    fan_in,
    module,
    sinusoid,
    stack,
    standardize,
    static,
)
from vidax.ops.attention import attention, token_step
from vidax.ops.rope import grid_table, rotate
from vidax.parallel.rules import constrain, everywhere, parts

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
    image_dim: int | None = None  # of the image encoder; without one, no attention to images
    image_positions: int | None = None  # learned positions of image tokens: those of a first and a last frame
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
class Attention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norm_q: RMSNorm
    norm_k: RMSNorm
    k_img: Linear | None  # keys and values of an image, in cross-attention
    v_img: Linear | None
    norm_k_img: RMSNorm | None
    heads: int = static()

    @staticmethod
    def spec(c: DiTConfig, dtype, *, image: bool = False):
        heads = ("heads", c.heads)

        def project():
            return Linear.spec(c.dim, c.dim, ("embed", heads), dtype)

        def norm():
            return RMSNorm.spec(c.dim, c.eps, heads)

        o = Linear.spec(c.dim, c.dim, (heads, "embed"), dtype)
        q, k, v = project(), project(), project()
        k_img, v_img, norm_k_img = (project(), project(), norm()) if image else (None, None, None)
        return Attention(q, k, v, o, norm(), norm(), k_img, v_img, norm_k_img, c.heads)

    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        image: jax.Array | None = None,
        rope: Rope | None = None,
        real: int | None = None,
    ) -> jax.Array:
        """x [B L D] attends to context [B S D], and by itself to image [B I D]: both results are added. Self-attention
        has a `rope` table, and sees its first `real` tokens.
        """
        split = lambda t: rearrange(t, "b l (n k) -> b l n k", n=self.heads)  # noqa: E731
        q, k, v = split(self.norm_q(self.q(x))), split(self.norm_k(self.k(context))), split(self.v(context))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        dtype = self.q.weight.dtype
        out = attention(
            q, k.astype(dtype), v.astype(dtype), real_keys=real, split="queries" if rope is None else "tokens"
        )
        if image is not None:
            assert self.k_img and self.v_img and self.norm_k_img
            k, v = split(self.norm_k_img(self.k_img(image))), split(self.v_img(image))
            out = out + attention(q, k.astype(dtype), v.astype(dtype), split="queries")
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
            cross_attn=Attention.spec(c, dtype, image=c.image_dim is not None),
            ffn=MLP.spec(c.dim, c.mlp_dim, c.dim, dtype, "gelu_tanh"),
            eps=c.eps,
        )

    def __call__(self, tokens: "Tokens", context: "Context") -> jax.Array:
        """The residual stream [B L D] float32 after this block."""
        x, dtype = tokens.x, self.self_attn.q.weight.dtype
        shift1, scale1, gate1, shift2, scale2, gate2 = tokens.each(self.modulation + tokens.modulation)
        h = (standardize(x, self.eps) * (1 + scale1) + shift1).astype(dtype)
        x = residual(x + self.self_attn(h, h, rope=tokens.rope, real=tokens.real) * gate1)
        x = residual(x + self.cross_attn(self.norm3(x).astype(dtype), context.text, context.image))
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

    def __call__(self, tokens: "Tokens") -> jax.Array:
        shift, scale = tokens.each(self.modulation + tokens.time[:, :, None])
        return self.head(standardize(tokens.x, self.eps) * (1 + scale) + shift)


@module
class ImageEmbedding:
    """States of the image encoder to what the layers attend to."""

    positions: Any  # [I image_dim], float32, or None
    norm1: LayerNorm
    mlp: MLP
    norm2: LayerNorm

    @staticmethod
    def spec(c: DiTConfig, dtype):
        dim, count, eps = c.image_dim, c.image_positions, 1e-5
        assert dim is not None
        positions = count and Spec((count, dim), (None, None), jnp.float32, fan_in(dim), stored=(1, count, dim))
        mlp = MLP.spec(dim, dim, c.dim, dtype, "gelu", (None, "spread"))
        return ImageEmbedding(positions, LayerNorm.spec(dim, eps), mlp, LayerNorm.spec(c.dim, eps))

    def __call__(self, states: jax.Array) -> jax.Array:
        """[B I D] from states [B I image_dim]."""
        x = states if self.positions is None else states + self.positions
        return self.norm2(self.mlp(self.norm1(x)))


@module
class DiT(DiffusionTransformer):
    patch_embedding: Linear
    text_embedding: MLP
    image_embedding: ImageEmbedding | None
    time_embedding: MLP
    time_projection: Linear
    blocks: Any  # a Block, every leaf with a leading layer axis; None where the layers are elsewhere
    head: Head
    config: DiTConfig = static()

    layer: ClassVar = Block

    @staticmethod
    def spec(c: DiTConfig, dtype=jnp.bfloat16):
        """Parameter descriptions; `dtype` is that of the large matrices, the rest is float32."""
        return DiT(
            patch_embedding=Linear.spec(math.prod(c.patch) * c.in_channels, c.dim, (None, None), dtype, kernel=c.patch),
            text_embedding=MLP.spec(c.text_dim, c.dim, c.dim, dtype, "gelu_tanh", (None, "spread")),
            image_embedding=None if c.image_dim is None else ImageEmbedding.spec(c, dtype),
            time_embedding=MLP.spec(c.frequency_dim, c.dim, c.dim, jnp.float32, "silu", (None, "spread")),
            time_projection=Linear.spec(c.dim, 6 * c.dim, (None, "spread"), jnp.float32),
            blocks=stack(Block.spec(c, dtype), c.layers),
            head=Head.spec(c),
            config=c,
        )

    def prepare(self, text: jax.Array, image: jax.Array | None = None) -> "Context":
        """Text embeddings [B S text_dim] and states of the image encoder [1 I image_dim] to what the layers attend to:
        the same at every step of a sampling run.
        """
        dtype = self.text_embedding.fc2.weight.dtype
        texts = constrain(self.text_embedding(text).astype(dtype), "batch", None, None)
        if self.image_embedding is None or image is None:
            return Context(texts, None)
        image = self.image_embedding(image).astype(dtype)
        images = jnp.broadcast_to(image, (len(texts), *image.shape[1:]))
        return Context(texts, constrain(images, "batch", None, None))

    def embed(self, latents: jax.Array, timesteps: jax.Array, context: "Context", given: int = 0) -> "Tokens":
        """What the layers work on, from latents [B F H W C] and timesteps [B] in 0..1000. The first `given` frames are
        clean: their timestep is 0. Zeros are added to the tokens where devices would not get the same number of them.
        """
        c = self.config
        pt, ph, pw = c.patch
        assert given % pt == 0, (given, pt)
        patches = rearrange(latents, "b (f pt) (h ph) (w pw) c -> b f h w (c pt ph pw)", pt=pt, ph=ph, pw=pw)
        grid = patches.shape[1:4]
        x = rearrange(patches, "b f h w c -> b (f h w) c")
        cos, sin = grid_table(grid, c.rope_channels)
        real = x.shape[1]
        padding = -real % (parts("tokens") * token_step(real))
        x = constrain(jnp.pad(x, ((0, 0), (0, padding), (0, 0))), "batch", "tokens", None)
        cos, sin = (constrain(jnp.pad(table, ((0, padding), (0, 0))), "tokens", None) for table in (cos, sin))
        times = jnp.stack([jnp.zeros_like(timesteps), timesteps] if given else [timesteps], 1)
        time = constrain(self.time_embedding(sinusoid(times, c.frequency_dim)), "batch", None, None)
        modulation = constrain(self.time_projection(jax.nn.silu(time)), "batch", None, None)
        modulation = rearrange(modulation, "b v (six d) -> b v six d", six=6)
        clean = given // pt * math.prod(grid[1:])
        return Tokens(residual(self.patch_embedding(x)), time, modulation, (cos, sin), real, clean)

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
        return self.decode(self.head(tokens), grid)


@module
class Context:
    """What the layers attend to beside the video."""

    text: Any  # [B S D]
    image: Any  # [B I D], or None


@module
class Tokens:
    """A video between the layers, and what each layer takes beside it. There are V timesteps: one, or 0 and another."""

    x: Any  # [B L D], float32
    time: Any  # [B V D]
    modulation: Any  # [B V 6 D]
    rope: Any  # cos and sin [L K]
    real: int = static()  # how many tokens are no padding
    clean: int = static()  # how many of them, the first, have timestep 0

    axes: ClassVar = {
        "x": ("batch", "tokens", None),
        "time": ("batch", None, None),
        "modulation": ("batch", None, None, None),
        "rope": ("tokens", None),
    }

    def each(self, vectors: jax.Array) -> list[jax.Array]:
        """Of vectors [B V n D], each of the n for all tokens: [B 1 D], or with two timesteps [B L D]. These a program
        for TPUs does not hold, because what they are multiplied with or added to comes at once; one for CPUs may.
        """
        if vectors.shape[1] == 1:
            return [vectors[:, :, i] for i in range(vectors.shape[2])]
        clean = jnp.arange(self.x.shape[1])[:, None] < self.clean
        return [jnp.where(clean, vectors[:, :1, i], vectors[:, 1:, i]) for i in range(vectors.shape[2])]


def step_flops(c: DiTConfig, tokens: int, text_tokens: int = 512, image_tokens: int = 0) -> float:
    """Floating-point operations of one pass over one sample: 2 per multiply-add of every matrix product, attention
    included.
    """
    per_block = 2 * tokens * (6 * c.dim**2 + 2 * c.dim * c.mlp_dim)  # q k v o, cross q o, MLP
    seen = text_tokens + image_tokens
    per_block += 2 * seen * 2 * c.dim**2  # cross k v
    per_block += 4 * tokens * (tokens + seen) * c.dim  # scores and weighted sums
    ends = 2 * tokens * c.dim * math.prod(c.patch) * (c.in_channels + c.out_channels)
    image_dim = c.image_dim or 0
    ends += 2 * image_tokens * (image_dim + c.dim) * image_dim
    return c.layers * per_block + ends + 2 * text_tokens * (c.text_dim + c.dim) * c.dim
