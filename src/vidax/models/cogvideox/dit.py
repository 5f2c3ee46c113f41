"""The diffusion transformer of CogVideoX 1.0 and 1.5.

Unusual about this network: text and video are one sequence in one attention and one MLP, and only the modulation tells
them apart, for which each norm of each layer projects the timestep by itself; queries and keys are layer-normalised
per head; there are two norms before the output. Padding of the text is attended to as any text. Positions are
sinusoids added to the tokens (2B) or rotations of the video's queries and keys (5B), which are scaled to the grid that
the model was trained on in 1.0 and plain in 1.5; 5B image-to-video adds a learned table to its rotations, and so has
one size. 1.5 joins two latent frames in a token, and its image-to-video model is told of a constant beside the
timestep.

Source: diffusers' cogvideox_transformer_3d.py and zai-org/CogVideo, sat/dit_video_concat.py.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from vidax.models.transformer import DiffusionTransformer, residual
from vidax.nn import (
    MLP,
    LayerNorm,
    Linear,
    Spec,
    fan_in,
    module,
    sinusoid,
    stack,
    static,
)
from vidax.ops.attention import attention, token_step
from vidax.ops.rope import axis_angles, grid_table, over_grid, rotate
from vidax.parallel.rules import constrain, everywhere, parts

Rope = tuple[jax.Array, jax.Array]

QK_EPS = 1e-6  # of the norms of queries and keys, in diffusers and the official code
OFS = 2.0  # what the image-to-video pipeline of 1.5 gives as `ofs`


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Architecture. Full-size values: `vidax.models.cogvideox.config`, and tests/manifests for every tensor."""

    layers: int
    heads: int
    head_size: int = 64
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    text_tokens: int = 226
    time_dim: int = 512
    ofs_dim: int | None = None  # width of the sinusoid of `OFS`; None where there is none
    patch: tuple[int, int, int] = (1, 2, 2)
    sample: tuple[int, int, int] = (13, 60, 90)  # latent frames, height and width that positions are made for
    rotary: bool = True  # positions by rotation, or else by sinusoids that are added
    learned: bool = False  # a learned table of positions is added
    spatial_scale: float = 1.875  # by which added sinusoids divide rows and columns
    temporal_scale: float = 1.0
    eps: float = 1e-5

    @property
    def dim(self) -> int:
        return self.heads * self.head_size

    @property
    def mlp_dim(self) -> int:
        return 4 * self.dim

    @property
    def rope_channels(self) -> tuple[int, int, int]:
        """Channels of a head that carry the frame, row and column position."""
        spatial = self.head_size // 8 * 3
        return self.head_size // 4, spatial, spatial

    @property
    def sample_grid(self) -> tuple[int, int, int]:
        """`sample` in patches."""
        f, h, w = (size // patch for size, patch in zip(self.sample, self.patch, strict=True))
        return f, h, w

    @property
    def only_size(self) -> tuple[int, int, int] | None:
        """The latent frames, height and width that a learned table of positions has; None where any size will do."""
        return self.sample if self.learned else None


@module
class Attention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norm_q: LayerNorm  # of each head
    norm_k: LayerNorm
    heads: int = static()

    @staticmethod
    def spec(c: DiTConfig, dtype):
        heads = ("heads", c.heads)
        q, k, v = (Linear.spec(c.dim, c.dim, ("embed", heads), dtype) for _ in range(3))
        o = Linear.spec(c.dim, c.dim, (heads, "embed"), dtype)
        return Attention(q, k, v, o, LayerNorm.spec(c.head_size, QK_EPS), LayerNorm.spec(c.head_size, QK_EPS), c.heads)

    def __call__(self, x: jax.Array, rope: Rope | None, real: int) -> jax.Array:
        """Self-attention of x [B S+L D], which sees its first `real` tokens."""
        q, k, v = (rearrange(p(x), "b l (n k) -> b l n k", n=self.heads) for p in (self.q, self.k, self.v))
        q, k = self.norm_q(q), self.norm_k(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        dtype = self.v.weight.dtype
        out = attention(q, k.astype(dtype), v.astype(dtype), real_keys=real, split="tokens")
        return self.o(rearrange(out, "b l n k -> b l (n k)"))


@module
class ExpertNorm:
    """A layer norm that video and text share, and the modulation of each: shift, scale and gate from the time."""

    norm: LayerNorm
    video: Linear
    text: Linear

    @staticmethod
    def spec(c: DiTConfig, dtype):
        video, text = (Linear.spec(c.time_dim, 3 * c.dim, (None, "spread"), dtype) for _ in range(2))
        return ExpertNorm(LayerNorm.spec(c.dim, c.eps), video, text)

    def __call__(self, tokens: "Tokens") -> tuple[jax.Array, jax.Array]:
        """The tokens normed and modulated [B S+L D] float32, and the gate of what is made of them."""
        text, video = (modulation(linear, tokens.time, 3) for linear in (self.text, self.video))
        shift, scale, gate = tokens.each(text, video)
        return self.norm(tokens.x) * (1 + scale) + shift, gate


@module
class Block:
    norm1: ExpertNorm
    attn: Attention
    norm2: ExpertNorm
    ffn: MLP

    @staticmethod
    def spec(c: DiTConfig, dtype):
        return Block(
            norm1=ExpertNorm.spec(c, dtype),
            attn=Attention.spec(c, dtype),
            norm2=ExpertNorm.spec(c, dtype),
            ffn=MLP.spec(c.dim, c.mlp_dim, c.dim, dtype, "gelu_tanh"),
        )

    def __call__(self, tokens: "Tokens", context: "Context") -> jax.Array:
        """The residual stream [B S+L D] float32 after this block. The context is among the tokens."""
        dtype = self.attn.q.weight.dtype
        h, gate = self.norm1(tokens)
        tokens = tokens.with_x(tokens.x + self.attn(h.astype(dtype), tokens.rope, tokens.real) * gate)
        h, gate = self.norm2(tokens)
        return tokens.with_x(tokens.x + self.ffn(h.astype(dtype)) * gate).x


@module
class Head:
    norm_final: LayerNorm
    modulation: Linear  # to shift and scale
    norm_out: LayerNorm
    head: Linear

    @staticmethod
    def spec(c: DiTConfig):
        return Head(
            norm_final=LayerNorm.spec(c.dim, c.eps),
            modulation=Linear.spec(c.time_dim, 2 * c.dim, (None, "spread"), jnp.float32),
            norm_out=LayerNorm.spec(c.dim, c.eps),
            head=Linear.spec(c.dim, math.prod(c.patch) * c.out_channels, (None, None), jnp.float32),
        )

    def __call__(self, tokens: "Tokens") -> jax.Array:
        shift, scale = (vector[:, None] for vector in modulation(self.modulation, tokens.time, 2))
        return self.head(self.norm_out(self.norm_final(tokens.x)) * (1 + scale) + shift)


@module
class DiT(DiffusionTransformer):
    patch_embedding: Linear
    text_embedding: Linear
    positions: Any  # [S+L D], or None
    time_embedding: MLP
    ofs_embedding: MLP | None
    blocks: Any  # a Block, every leaf with a leading layer axis; None where the layers are elsewhere
    head: Head
    config: DiTConfig = static()

    layer: ClassVar = Block

    @staticmethod
    def spec(c: DiTConfig, dtype=jnp.bfloat16):
        """Parameter descriptions; `dtype` is that of the large matrices and the learned positions, the rest is
        float32.
        """
        kernel = c.patch[1:] if c.patch[0] == 1 else ()  # of 1.5 the checkpoint holds a matrix
        count = c.text_tokens + math.prod(c.sample_grid)
        table = Spec((count, c.dim), ("tokens", None), dtype, fan_in(c.dim), stored=(1, count, c.dim))
        return DiT(
            patch_embedding=Linear.spec(math.prod(c.patch) * c.in_channels, c.dim, (None, None), dtype, kernel=kernel),
            text_embedding=Linear.spec(c.text_dim, c.dim, (None, "spread"), dtype),
            positions=table if c.learned else None,
            time_embedding=MLP.spec(c.dim, c.time_dim, c.time_dim, jnp.float32, "silu", (None, "spread")),
            ofs_embedding=MLP.spec(c.ofs_dim, c.ofs_dim, c.time_dim, jnp.float32, "silu", (None, "spread"))
            if c.ofs_dim
            else None,
            blocks=stack(Block.spec(c, dtype), c.layers),
            head=Head.spec(c),
            config=c,
        )

    def prepare(self, text: jax.Array, image: jax.Array | None = None) -> "Context":
        """Text embeddings [B S text_dim], padding included, to the tokens that every step begins with. No CogVideoX has
        an image encoder.
        """
        assert image is None
        return Context(constrain(self.text_embedding(text), "batch", None, None))

    def embed(self, latents: jax.Array, timesteps: jax.Array, context: "Context", given: int = 0) -> "Tokens":
        """What the layers work on, from latents [B F H W C] and timesteps [B] in 0..999: the text, the video, and zeros
        where devices would not get the same number of tokens. What is known of a video is in its channels, so that no
        frame is `given`.
        """
        assert given == 0, given
        c, text = self.config, context.text
        pt, ph, pw = c.patch
        patches = rearrange(latents, "b (f pt) (h ph) (w pw) c -> b f h w (c pt ph pw)", pt=pt, ph=ph, pw=pw)
        f, h, w = patches.shape[1:4]
        words, real = text.shape[1], text.shape[1] + f * h * w
        padding = -real % (parts("tokens") * token_step(real))

        def along(values: jax.Array, before: int = words) -> jax.Array:
            """Values [... n D] of tokens that `before` others precede, at their place in the whole sequence."""
            after = real + padding - before - values.shape[-2]
            return jnp.pad(values, (*((0, 0),) * (values.ndim - 2), (before, after), (0, 0)))

        x = residual(along(rearrange(patches, "b f h w c -> b (f h w) c")))
        is_text = jnp.arange(real + padding)[:, None] < words
        x = jnp.where(is_text, residual(along(text, 0)), self.patch_embedding(x))
        if self.positions is not None:
            assert latents.shape[1:4] == c.only_size and words == c.text_tokens, (latents.shape, words)
            x = x + constrain(along(self.positions, 0), "tokens", None).astype(jnp.float32)
        if c.rotary:
            cos, sin = grid_table(rope_positions(c, (f, h, w)), c.rope_channels)
            cos = jnp.where(is_text, 1.0, constrain(along(cos), "tokens", None))
            rope: Rope | None = (cos, constrain(along(sin), "tokens", None))
        else:
            x, rope = x + constrain(along(sinusoid_positions(c, (f, h, w))), "tokens", None), None
        time = self.time_embedding(sinusoid(timesteps, c.dim))
        if self.ofs_embedding is not None:
            assert c.ofs_dim
            time = time + self.ofs_embedding(sinusoid(jnp.full((1,), OFS), c.ofs_dim))
        return Tokens(residual(x), constrain(time, "batch", None), rope, real, words)

    def finish(self, tokens: "Tokens", latents: jax.Array) -> jax.Array:
        """What the model predicts, [B F H W out_channels] float32 and whole on every device, from what the last layer
        gives, for latents [B F H W C].
        """
        pt, ph, pw = self.config.patch
        f, h, w = (size // patch for size, patch in zip(latents.shape[1:4], self.config.patch, strict=True))
        patches = everywhere(self.head(tokens))[:, tokens.text : tokens.real]
        return rearrange(
            patches, "b (f h w) (c pt ph pw) -> b (f pt) (h ph) (w pw) c", f=f, h=h, w=w, pt=pt, ph=ph, pw=pw
        )


@module
class Context:
    """What the video is to show."""

    text: Any  # [B S D], float32: the first tokens of every step


@module
class Tokens:
    """Text and video between the layers, and what each layer takes beside them."""

    x: Any  # [B S+L D], float32: text, video, padding
    time: Any  # [B time_dim]
    rope: Any  # cos and sin [S+L K], which leave text as it is, or None
    real: int = static()  # how many tokens are no padding
    text: int = static()  # how many of them, the first, are text

    axes: ClassVar = {"x": ("batch", "tokens", None), "time": ("batch", None), "rope": ("tokens", None)}

    def with_x(self, x: jax.Array) -> "Tokens":
        return dataclasses.replace(self, x=residual(x))

    def each(self, text: list[jax.Array], video: list[jax.Array]) -> list[jax.Array]:
        """Vectors [B D] of text and of video for all tokens: [B S+L D], which nothing holds in memory because what it
        is multiplied with or added to comes at once.
        """
        is_text = jnp.arange(self.x.shape[1])[:, None] < self.text
        return [jnp.where(is_text, a[:, None], b[:, None]) for a, b in zip(text, video, strict=True)]


def modulation(linear: Linear, time: jax.Array, vectors: int) -> list[jax.Array]:
    """That many vectors [B D] of the time [B time_dim], in float32 whatever the weight is held in."""
    y = jnp.matmul(jax.nn.silu(time), linear.weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return jnp.split(constrain(y + linear.bias, "batch", None), vectors, -1)


def rope_positions(c: DiTConfig, grid: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    """Positions of a grid of patches: in 1.5 those of the grid; in 1.0 rows and columns lie within the region of the
    sample's grid that the video takes if it is scaled to fit into its middle.
    """
    f, h, w = grid
    if c.patch[0] > 1:
        return np.arange(f), np.arange(h), np.arange(w)
    _, tall, wide = c.sample_grid
    # Python's rounding, to even, as in the pipeline
    height, width = (tall, round(tall / h * w)) if h / w > tall / wide else (round(wide / w * h), wide)
    top, left = round((tall - height) / 2), round((wide - width) / 2)

    def between(start: int, size: int, count: int) -> np.ndarray:
        # The end shrinks though the start does not: what is in the middle is not evenly scaled.
        return np.linspace(start, (start + size) * (count - 1) / count, count)

    return np.arange(f), between(top, height, h), between(left, width, w)


def sinusoid_positions(c: DiTConfig, grid: tuple[int, int, int]) -> jax.Array:
    """Vectors [L D] that say where a token is: a quarter of the channels its frame, then its column and its row, each
    sines first.
    """
    f, h, w = grid

    def table(count: int, scale: float, channels: int) -> np.ndarray:
        # Positions are rounded to float32 before their angles are made in float64, as in diffusers.
        angles = axis_angles((np.arange(count, dtype=np.float32) / np.float32(scale)).astype(np.float64), channels)
        return np.concatenate([np.sin(angles), np.cos(angles)], -1)

    spatial = 3 * c.dim // 8
    frames, rows = table(f, c.temporal_scale, c.dim // 4), table(h, c.spatial_scale, spatial)
    columns = table(w, c.spatial_scale, spatial)
    vectors = over_grid((frames, rows, columns))
    at = c.dim // 4
    return jnp.concatenate([vectors[:, :at], vectors[:, at + spatial :], vectors[:, at : at + spatial]], -1)


def step_flops(c: DiTConfig, tokens: int, text_tokens: int = 226) -> float:
    """Floating-point operations of one pass over one sample of that many video tokens: 2 per multiply-add of every
    matrix product, attention included.
    """
    joint = tokens + text_tokens
    per_block = 2 * joint * (4 * c.dim**2 + 2 * c.dim * c.mlp_dim)  # q k v o, MLP
    per_block += 4 * joint**2 * c.dim  # scores and weighted sums
    per_block += 2 * 12 * c.time_dim * c.dim  # modulation
    ends = 2 * tokens * c.dim * math.prod(c.patch) * (c.in_channels + c.out_channels)
    return c.layers * per_block + ends + 2 * text_tokens * c.text_dim * c.dim
