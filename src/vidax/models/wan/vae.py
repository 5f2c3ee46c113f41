"""The causal video autoencoders of Wan: 2.1 (4 x 8 x 8 compression, 16 latent channels) and 2.2 (4 x 16 x 16, 48).

Unusual about this network: every convolution over time is causal, so a video is coded frame chunk by frame chunk,
and what a convolution needs of the past is an explicit cache that goes in and comes out. The first frame is coded
alone (1 + 4k frames give 1 + k latent frames): for it the temporal up- and downsampling does nothing, and their
convolutions see zeros in its place afterwards. Norms are RMS over channels. Everything is float32 at full precision,
as in the official code.

2.2 is 2.1 with patches of 2 x 2 pixels as the channels of its outermost frames, a decoder wider than the encoder, and a
shortcut without parameters around each level that changes the size: `Average` down, `Duplicate` up.

Source: Wan-Video/Wan2.1, wan/modules/vae.py; Wan-Video/Wan2.2, wan/modules/vae2_2.py. Names of parameters follow
diffusers' AutoencoderKLWan, whose layout is the readable one.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, repeat

from vidax.models.autoencoder import Cache, CausalConv3d, Conv2d, chain, doubled, in_strips
from vidax.nn import Linear, Spec, module, ones, static
from vidax.ops.attention import attention
from vidax.ops.conv import conv3d


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """Architecture and latent statistics. Full-size values, of 2.1: official wan/modules/vae.py."""

    base_dim: int = 96
    decoder_base_dim: int | None = None  # that of the encoder
    latent_channels: int = 16
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2  # residual blocks of an encoder level; a decoder level has one more
    time_downsample: tuple[bool, ...] = (False, True, True)
    residual: bool = False  # shortcuts around levels
    patch: int = 1  # side of the squares of pixels that are one position of the network's frames
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def time_factor(self) -> int:
        return 2 ** sum(self.time_downsample)

    @property
    def full_rate_levels(self) -> int:
        """How many levels have as many frames as the video: all before the first downsampling over time."""
        return (*self.time_downsample, True).index(True) + 1

    @property
    def space_factor(self) -> int:
        return self.patch * 2 ** (len(self.multipliers) - 1)


@module
class Norm:
    """RMS norm over channels; the epsilon guards the norm itself, not its square."""

    gamma: Any  # [C]

    @staticmethod
    def spec(dim: int, trailing: int = 3):
        return Norm(Spec((dim,), (None,), jnp.float32, ones, stored=(dim, *(1,) * trailing)))

    def __call__(self, x: jax.Array) -> jax.Array:
        length = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
        return x / jnp.maximum(length, 1e-12) * (x.shape[-1] ** 0.5 * self.gamma)


@module
class ResidualBlock:
    norm1: Norm
    conv1: CausalConv3d
    norm2: Norm
    conv2: CausalConv3d
    conv_shortcut: Linear | None

    @staticmethod
    def spec(d_in: int, d_out: int):
        shortcut = Linear.spec(d_in, d_out, (None, None), jnp.float32, kernel=(1, 1, 1)) if d_in != d_out else None
        conv1, conv2 = CausalConv3d.spec(d_in, d_out), CausalConv3d.spec(d_out, d_out)
        return ResidualBlock(Norm.spec(d_in), conv1, Norm.spec(d_out), conv2, shortcut)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        past1, past2 = cache or (None, None)
        h, past1 = self.conv1(jax.nn.silu(self.norm1(x)), past1)
        h, past2 = self.conv2(jax.nn.silu(self.norm2(h)), past2)
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x)), (past1, past2)


@module
class AttentionBlock:
    """Single-head attention among the pixels of one frame."""

    norm: Norm
    to_qkv: Linear
    proj: Linear

    @staticmethod
    def spec(dim: int):
        qkv = Linear.spec(dim, 3 * dim, (None, None), jnp.float32, kernel=(1, 1))
        return AttentionBlock(Norm.spec(dim, 2), qkv, Linear.spec(dim, dim, (None, None), jnp.float32, kernel=(1, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        b, f, h, w, _ = x.shape
        qkv = rearrange(self.to_qkv(self.norm(x)), "b f h w (three c) -> three (b f) (h w) 1 c", three=3)
        out = rearrange(attention(*qkv, split="pixels"), "(b f) (h w) 1 c -> b f h w c", b=b, f=f, h=h, w=w)
        return x + self.proj(out)


@module
class Downsample:
    """Half the size in space, and with `time_conv` half the frames (all but the first of a video)."""

    conv: Conv2d
    time_conv: CausalConv3d | None

    @staticmethod
    def spec(dim: int, time: bool):
        return Downsample(Conv2d.spec(dim, dim, stride=2), CausalConv3d.spec(dim, dim, (3, 1, 1)) if time else None)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        x = self.conv(x)
        if self.time_conv is None:
            return x, None
        if cache is None:
            return x, x[:, -1:]
        y = conv3d(jnp.concatenate([cache, x], 1), self.time_conv.weight, stride=(2, 1, 1), padding=((0, 0),) * 3)
        return y + self.time_conv.bias, x[:, -1:]


@module
class Upsample:
    """Twice the size in space, and with `time_conv` twice the frames (all but the first of a video)."""

    conv: Conv2d
    time_conv: CausalConv3d | None

    @staticmethod
    def spec(d_in: int, d_out: int, time: bool):
        return Upsample(Conv2d.spec(d_in, d_out), CausalConv3d.spec(d_in, 2 * d_in, (3, 1, 1)) if time else None)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if self.time_conv is not None:
            if cache is None:  # the first frame: no new frames, and none that later ones could see
                cache = jnp.zeros((x.shape[0], 2, *x.shape[2:]), x.dtype)
            else:
                x, cache = self.time_conv(x, cache)
                x = rearrange(x, "b f h w (two c) -> b (f two) h w c", two=2)
        return self.conv(doubled(x)), cache


@module
class MidBlock:
    resnets: tuple[ResidualBlock, ResidualBlock]
    attentions: tuple[AttentionBlock]

    @staticmethod
    def spec(dim: int):
        return MidBlock((ResidualBlock.spec(dim, dim), ResidualBlock.spec(dim, dim)), (AttentionBlock.spec(dim),))

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        past1, past2 = cache or (None, None)
        x, past1 = self.resnets[0](x, past1)
        # Between the two, because from pixels in a row XLA divides what a convolution takes wrongly.
        x, past2 = self.resnets[1](in_strips(self.attentions[0](x)), past2)
        return x, (past1, past2)


def _frame_by_frame(layers, x: jax.Array, caches: Cache) -> tuple[jax.Array, Cache]:
    """`chain` for layers that give a frame for a frame, one frame of the chunk after the other.

    It is the same computation, since all that frames know of each other is in the caches, which the scan carries along;
    but what lies between the layers is held for one frame instead of all, and where frames are large that is most of
    the memory a chunk takes beside its caches.
    """
    if x.shape[1] == 1:
        return chain(layers, x, caches)

    def one(caches: Cache, frame: jax.Array) -> tuple[Cache, jax.Array]:
        frame, caches = chain(layers, frame[:, None], caches)
        return caches, frame[:, 0]

    caches, frames = jax.lax.scan(one, caches, rearrange(x, "b f h w c -> f b h w c"))
    return in_strips(rearrange(frames, "f b h w c -> b f h w c")), caches


@module
class Average:
    """The shortcut around a level that makes frames smaller. What becomes one position, in the order of channels,
    frames, rows and columns, is cut into as many equal runs as there are channels to make, and each run into its mean.
    """

    channels: int = static()
    time: int = static()  # frames that become one; the first of a video has zeros before it
    space: int = static()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (-x.shape[1] % self.time, 0), (0, 0), (0, 0), (0, 0)))
        fold = "b (f t) (h p) (w q) c -> b f h w (c t p q)"
        x = rearrange(x, fold, t=self.time, p=self.space, q=self.space)
        return jnp.mean(rearrange(x, "b f h w (c run) -> b f h w c run", c=self.channels), -1)


@module
class Duplicate:
    """The shortcut around a level that makes frames larger: each channel as often as it takes to fill, in the order of
    channels, frames, rows and columns, the positions that one becomes.
    """

    channels: int = static()
    time: int = static()  # frames that one becomes; of the first of a video the last of them alone
    space: int = static()

    def __call__(self, x: jax.Array, first: bool) -> jax.Array:
        run = self.channels * self.time * self.space**2 // x.shape[-1]
        x = repeat(x, "b f h w c -> b f h w (c run)", run=run)
        unfold = "b f h w (c t p q) -> b (f t) (h p) (w q) c"
        x = rearrange(x, unfold, t=self.time, p=self.space, q=self.space)
        return x[:, self.time - 1 :] if first else x


@module
class DownBlock:
    """A level of the encoder of 2.2. That of 2.1 has the same layers in one list, without shortcuts."""

    resnets: tuple[ResidualBlock, ...]
    downsamplers: tuple[Downsample, ...]  # one or none
    shortcut: Average

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        y, cache = chain((*self.resnets, *self.downsamplers), x, cache)
        return y + self.shortcut(x), cache


@module
class UpBlock:
    resnets: tuple[ResidualBlock, ...]
    upsamplers: tuple[Upsample, ...]  # one or none
    shortcut: Duplicate | None  # in 2.2, around an upsampling

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        y, after = chain((*self.resnets, *self.upsamplers), x, cache)
        return y if self.shortcut is None else y + self.shortcut(x, first=cache is None), after


def patchify(frames: jax.Array, side: int) -> jax.Array:
    """[B F H W C] to [B F H/side W/side C*side*side], columns of a patch before its rows."""
    if side == 1:
        return frames
    return rearrange(frames, "b f (h q) (w r) c -> b f h w (c r q)", q=side, r=side)


def unpatchify(x: jax.Array, side: int) -> jax.Array:
    """The inverse of `patchify`."""
    if side == 1:
        return x
    return in_strips(rearrange(x, "b f h w (c r q) -> b f (h q) (w r) c", q=side, r=side))


@module
class Out:
    """Norm, SiLU and the last convolution."""

    norm: Norm
    conv: CausalConv3d

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return self.conv(jax.nn.silu(self.norm(x)), cache)


@module
class Encoder:
    conv_in: CausalConv3d
    down_blocks: tuple[ResidualBlock | Downsample, ...] | tuple[DownBlock, ...]
    mid_block: MidBlock
    out: Out
    quant_conv: Linear
    config: VAEConfig = static()

    @staticmethod
    def spec(c: VAEConfig):
        dims = [c.base_dim * m for m in (1, *c.multipliers)]
        layers: list = []
        for level, (d_in, d_out) in enumerate(itertools.pairwise(dims)):
            resnets = tuple(ResidualBlock.spec(d_out if i else d_in, d_out) for i in range(c.blocks))
            time = c.time_downsample[level : level + 1]
            down = tuple(Downsample.spec(d_out, t) for t in time)
            shortcut = Average(d_out, 1 + any(time), 1 + len(time))
            layers += [DownBlock(resnets, down, shortcut)] if c.residual else [*resnets, *down]
        twice = 2 * c.latent_channels  # mean and log-variance
        return Encoder(
            conv_in=CausalConv3d.spec(3 * c.patch**2, dims[0]),
            down_blocks=tuple(layers),
            mid_block=MidBlock.spec(dims[-1]),
            out=Out(Norm.spec(dims[-1]), CausalConv3d.spec(dims[-1], twice)),
            quant_conv=Linear.spec(twice, twice, (None, None), jnp.float32, kernel=(1, 1, 1)),
            config=c,
        )

    def __call__(self, frames: jax.Array, cache: Cache = None) -> tuple[jax.Array, Cache]:
        """Frames [B F H W 3] in [-1, 1] to normalised latent means [B F' H/8 W/8 C], or in 2.2 [B F' H/16 W/16 C].

        The first chunk (no cache) is the first frame alone; every later one has a multiple of 4 frames.
        """
        layers = 1 if self.config.residual else self.config.blocks + 1  # of `down_blocks`, in a level
        full = self.config.full_rate_levels * layers - 1  # up to the first that halves the frames
        past1, past2 = cache or (None, None)
        x = patchify(frames, self.config.patch)
        x, past1 = _frame_by_frame((self.conv_in, *self.down_blocks[:full]), x, past1)
        x, past2 = chain((*self.down_blocks[full:], self.mid_block, self.out), x, past2)
        mean = self.quant_conv(x)[..., : self.config.latent_channels]
        return (mean - jnp.asarray(self.config.latents_mean)) / jnp.asarray(self.config.latents_std), (past1, past2)


@module
class Decoder:
    post_quant_conv: Linear
    conv_in: CausalConv3d
    mid_block: MidBlock
    up_blocks: tuple[UpBlock, ...]
    out: Out
    config: VAEConfig = static()

    @staticmethod
    def spec(c: VAEConfig):
        dims = [(c.decoder_base_dim or c.base_dim) * m for m in (c.multipliers[-1], *reversed(c.multipliers))]
        time_upsample = c.time_downsample[::-1]
        halves = 1 if c.residual else 2  # in 2.1 an upsampling halves the channels
        blocks = []
        for level, (d_in, d_out) in enumerate(itertools.pairwise(dims)):
            d_in = d_in // halves if level else d_in
            resnets = tuple(ResidualBlock.spec(d_out if i else d_in, d_out) for i in range(c.blocks + 1))
            time = time_upsample[level : level + 1]
            up = tuple(Upsample.spec(d_out, d_out // halves, t) for t in time)
            shortcut = Duplicate(d_out, 1 + any(time), 2) if c.residual and up else None
            blocks.append(UpBlock(resnets, up, shortcut))
        z = c.latent_channels
        return Decoder(
            post_quant_conv=Linear.spec(z, z, (None, None), jnp.float32, kernel=(1, 1, 1)),
            conv_in=CausalConv3d.spec(z, dims[0]),
            mid_block=MidBlock.spec(dims[0]),
            up_blocks=tuple(blocks),
            out=Out(Norm.spec(dims[-1]), CausalConv3d.spec(dims[-1], 3 * c.patch**2)),
            config=c,
        )

    def __call__(self, latents: jax.Array, cache: Cache = None) -> tuple[jax.Array, Cache]:
        """Normalised latents [B F H W C] to frames [B F' 8H 8W 3] in [-1, 1], or in 2.2 [B F' 16H 16W 3].

        The first chunk (no cache) is one latent frame and gives one frame; every later latent frame gives four.
        """
        z = latents * jnp.asarray(self.config.latents_std) + jnp.asarray(self.config.latents_mean)
        slow = len(self.up_blocks) - self.config.full_rate_levels
        past1, past2 = cache or (None, None)
        x, past1 = chain((self.conv_in, self.mid_block, *self.up_blocks[:slow]), self.post_quant_conv(z), past1)
        x, past2 = _frame_by_frame((*self.up_blocks[slow:], self.out), x, past2)
        return jnp.clip(unpatchify(x, self.config.patch), -1.0, 1.0), (past1, past2)


@module
class VAE:
    encoder: Encoder | None  # None where only decoding is needed
    decoder: Decoder | None

    @staticmethod
    def spec(c: VAEConfig):
        return VAE(Encoder.spec(c), Decoder.spec(c))
