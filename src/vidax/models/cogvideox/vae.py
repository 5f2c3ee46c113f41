"""The causal video autoencoder of CogVideoX (4 x 8 x 8 compression, 16 latent channels).

Unusual about this network:
- A video is coded in chunks, 8 frames or 2 latent frames at a time, the first chunk with what is over: 17 frames are 9
  and 8, 5 latent frames 3 and 2. Group norms are over all frames of a chunk, so the chunks are part of the definition.
- What a convolution over time needs of earlier chunks is an explicit cache that goes in and comes out. Before the
  first frame of a video there is that frame again, not zeros.
- Between levels frames are repeated and averaged in time, without weights; where their number is odd the first is left
  alone. Convolutions between levels are over space only.
- Norms of the decoder are scaled and shifted at each position by what two 1 x 1 x 1 convolutions make of the latents.
- The mean and the log-variance of the latents are encoded, and an image is a sample of them.
- Large videos are decoded by the official pipelines in tiles that overlap, which gives other frames: `decode_tiles`.
Everything is float32 at full precision.

Source: zai-org/CogVideo, sat/vae_modules/cp_enc_dec.py. Names of parameters follow diffusers' AutoencoderKLCogVideoX.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat

from vidax.models.autoencoder import Cache, CausalConv3d, Conv2d, chain, doubled, in_strips
from vidax.nn import Linear, Spec, module, ones, static, zeros
from vidax.parallel.rules import everywhere

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """Architecture, scale of the latents, and the size for which tiles are made. Full-size values: vae/config.json of
    THUDM/CogVideoX-2b, whose scaling factor the larger models have not.
    """

    channels: tuple[int, ...] = (128, 256, 256, 512)  # of each level
    latent_channels: int = 16
    blocks: int = 3  # residual blocks of an encoder level; a decoder level has one more
    groups: int = 32  # of channels, in norms
    time_factor: int = 4
    scaling_factor: float | None = 1.15258426  # None where nothing says it
    invert_scale_latents: bool = False  # latents of an image are divided by the scaling factor
    sample_height: int = 480
    sample_width: int = 720

    @property
    def time_levels(self) -> int:
        """How many levels, the encoder's first and the decoder's first, change the number of frames."""
        return self.time_factor.bit_length() - 1

    @property
    def space_factor(self) -> int:
        return 2 ** (len(self.channels) - 1)

    @property
    def image_scale(self) -> float:
        """What the latents of an image are multiplied by."""
        assert self.scaling_factor is not None
        return 1 / self.scaling_factor if self.invert_scale_latents else self.scaling_factor


LATENT_FRAMES = 2  # of a chunk


def chunks(frames: int, of: int) -> list[slice]:
    """A video's chunks `of` so many frames: 2 latent frames (`LATENT_FRAMES`), or 2 * `time_factor` frames."""
    ends = [0, *range(min(frames, of + frames % of), frames + 1, of)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


class Statistics(NamedTuple):
    """Of each channel's group, over a chunk: [B 1 1 1 C]."""

    mean: jax.Array
    inverse_std: jax.Array


@module
class GroupNorm:
    weight: Any  # [C]
    bias: Any  # [C]
    groups: int = static()

    @staticmethod
    def spec(dim: int, groups: int):
        return GroupNorm(Spec((dim,), (None,), jnp.float32, ones), Spec((dim,), (None,), jnp.float32, zeros), groups)

    def statistics(self, x: jax.Array) -> Statistics:
        mean = self.over_groups(x)
        return Statistics(mean, jax.lax.rsqrt(self.over_groups(jnp.square(x - mean)) + EPS))

    def over_groups(self, x: jax.Array) -> jax.Array:
        """The mean over frames, positions and the channels of a group. Channel by channel first: a device sums its own
        strip, and the channels, last in memory, are not taken apart.
        """
        means = rearrange(jnp.mean(x, (1, 2, 3)), "b (g c) -> b g c", g=self.groups)
        return repeat(jnp.mean(means, -1), "b g -> b 1 1 1 (g c)", c=means.shape[-1])

    def __call__(self, x: jax.Array, statistics: Statistics, z: jax.Array | None = None) -> jax.Array:
        return (x - statistics.mean) * (statistics.inverse_std * self.weight) + self.bias


@module
class SpatialNorm:
    """A group norm scaled and shifted by what is made of the latents at each position."""

    norm_layer: GroupNorm
    conv_y: Linear
    conv_b: Linear

    @staticmethod
    def spec(dim: int, groups: int, latents: int):
        conv = Linear.spec(latents, dim, (None, None), jnp.float32, kernel=(1, 1, 1))
        return SpatialNorm(GroupNorm.spec(dim, groups), conv, conv)

    def statistics(self, x: jax.Array) -> Statistics:
        return self.norm_layer.statistics(x)

    def __call__(self, x: jax.Array, statistics: Statistics, z: jax.Array | None) -> jax.Array:
        """z: latents [B F H' W' C'] of the frames x [B F H W C]. They are worked on before they are made larger."""
        assert z is not None
        size = x.shape[2] // z.shape[2]
        scale, shift = (
            repeat(conv(z), f"b f h w c -> b f (h {size}) (w {size}) c") for conv in (self.conv_y, self.conv_b)
        )
        return self.norm_layer(x, statistics) * scale + shift


def make_norm(dim: int, c: VAEConfig, decoder: bool) -> GroupNorm | SpatialNorm:
    return SpatialNorm.spec(dim, c.groups, c.latent_channels) if decoder else GroupNorm.spec(dim, c.groups)


def over_time(x: jax.Array, frames: int) -> jax.Array:
    """x [B F H W C] with its frames repeated to make so many; the first only once where their number is odd."""
    alone = frames % 2 if frames > 1 else 0
    rest = jnp.repeat(x[:, alone:], (frames - alone) // (x.shape[1] - alone), axis=1)
    return jnp.concatenate([x[:, :alone], rest], 1) if alone else rest


def each_frame(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`function` of one frame [B 1 H W C] after the other, so that what it needs of memory it needs for one."""
    frames = jax.lax.map(lambda frame: in_strips(function(frame[:, None]))[:, 0], jnp.moveaxis(x, 1, 0))
    return in_strips(jnp.moveaxis(frames, 0, 1))


@module
class Activated:
    """Norm, SiLU and a convolution."""

    norm: GroupNorm | SpatialNorm
    conv: CausalConv3d

    @staticmethod
    def spec(d_in: int, d_out: int, c: VAEConfig, decoder: bool):
        return Activated(make_norm(d_in, c, decoder), CausalConv3d.spec(d_in, d_out, repeats=True))

    def __call__(self, x: jax.Array, cache: Cache, z: jax.Array | None) -> tuple[jax.Array, Cache]:
        """x [B F H W C]; z: latents of the chunk, in the decoder. Statistics are of all frames; after that one frame
        is worked on at a time, with the frames before it in the cache: where frames are large, a chunk takes its
        input and its result and little beside.
        """
        statistics = self.norm.statistics(x)
        beside = None if z is None else over_time(z, x.shape[1])

        def activate(x: jax.Array, z: jax.Array | None) -> jax.Array:
            return in_strips(jax.nn.silu(self.norm(x, statistics, z)))

        def one(cache: Cache, frame: tuple[jax.Array, jax.Array | None]) -> tuple[Cache, jax.Array]:
            x, cache = self.conv(activate(*jax.tree.map(lambda f: f[:, None], frame)), cache)
            return in_strips(cache), in_strips(x)[:, 0]

        if cache is None:
            cache = in_strips(self.conv.before(activate(*jax.tree.map(lambda f: f[:, :1], (x, beside)))))
        cache, frames = jax.lax.scan(one, cache, jax.tree.map(lambda f: jnp.moveaxis(f, 1, 0), (x, beside)))
        return in_strips(jnp.moveaxis(frames, 0, 1)), cache


@module
class ResidualBlock:
    first: Activated
    second: Activated
    conv_shortcut: Linear | None

    @staticmethod
    def spec(d_in: int, d_out: int, c: VAEConfig, decoder: bool):
        shortcut = Linear.spec(d_in, d_out, (None, None), jnp.float32, kernel=(1, 1, 1)) if d_in != d_out else None
        first, second = (Activated.spec(d, d_out, c, decoder) for d in (d_in, d_out))
        return ResidualBlock(first, second, shortcut)

    def __call__(self, x: jax.Array, cache: Cache, z: jax.Array | None) -> tuple[jax.Array, Cache]:
        h, cache = chain((self.first, self.second), x, cache, z)
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x)), cache


@module
class Downsample:
    """Half the size in space, and with `time` the mean of two frames for each two."""

    conv: Conv2d
    time: bool = static()

    def __call__(self, x: jax.Array, cache: Cache, z: None) -> tuple[jax.Array, Cache]:
        if self.time:
            alone = x.shape[1] % 2
            pairs = rearrange(x[:, alone:], "b (f two) h w c -> b f two h w c", two=2)
            x = jnp.concatenate([x[:, :alone], jnp.mean(pairs, 2)], 1)
        # Of all frames at once: in a loop XLA divides a stride wrongly among devices that have one column each.
        return self.conv(x), None


@module
class Upsample:
    """Twice the size in space, and with `time` each frame twice."""

    conv: Conv2d
    time: bool = static()

    def __call__(self, x: jax.Array, cache: Cache, z: jax.Array) -> tuple[jax.Array, Cache]:
        frames = x.shape[1]
        x = each_frame(lambda frame: self.conv(doubled(frame)), x)
        return over_time(x, 2 * frames - frames % 2) if self.time else x, None


@module
class Level:
    """Residual blocks, and in a level but the last a change of size."""

    resnets: tuple[ResidualBlock, ...]
    downsamplers: tuple[Downsample, ...] = ()
    upsamplers: tuple[Upsample, ...] = ()

    def __call__(self, x: jax.Array, cache: Cache, z: jax.Array | None) -> tuple[jax.Array, Cache]:
        return chain((*self.resnets, *self.downsamplers, *self.upsamplers), x, cache, z)


def make_levels(c: VAEConfig, decoder: bool) -> tuple[Level, ...]:
    channels = c.channels[::-1] if decoder else c.channels
    levels = []
    for i, (d_in, d_out) in enumerate(itertools.pairwise((channels[0], *channels))):
        dims = (d_in, *(d_out,) * (c.blocks + decoder))
        resnets = tuple(ResidualBlock.spec(*pair, c, decoder) for pair in itertools.pairwise(dims))
        time, last = i < c.time_levels, i == len(channels) - 1
        if decoder:
            levels.append(Level(resnets, upsamplers=() if last else (Upsample(Conv2d.spec(d_out, d_out), time),)))
        else:
            down = Downsample(Conv2d.spec(d_out, d_out, stride=2), time)
            levels.append(Level(resnets, downsamplers=() if last else (down,)))
    return tuple(levels)


def make_middle(c: VAEConfig, decoder: bool) -> Level:
    return Level(tuple(ResidualBlock.spec(c.channels[-1], c.channels[-1], c, decoder) for _ in range(2)))


class Moments(NamedTuple):
    """Of unscaled latents [B F H W C]."""

    mean: jax.Array
    log_variance: jax.Array  # in [-30, 20]

    def sample(self, noise: np.ndarray) -> np.ndarray:
        """On the host."""
        return self.mean + np.exp(0.5 * np.asarray(self.log_variance)) * noise


@module
class Encoder:
    conv_in: CausalConv3d
    down_blocks: tuple[Level, ...]
    mid_block: Level
    out: Activated
    config: VAEConfig = static()

    @staticmethod
    def spec(c: VAEConfig):
        return Encoder(
            conv_in=CausalConv3d.spec(3, c.channels[0], repeats=True),
            down_blocks=make_levels(c, decoder=False),
            mid_block=make_middle(c, decoder=False),
            out=Activated.spec(c.channels[-1], 2 * c.latent_channels, c, decoder=False),
            config=c,
        )

    def __call__(self, frames: jax.Array, cache: Cache = None) -> tuple[Moments, Cache]:
        """A chunk of frames [B F H W 3] in [-1, 1] to latents [B F' H/8 W/8 C] before they are scaled; see `chunks`."""
        past, cache = cache or (None, None)
        x, past = self.conv_in(in_strips(frames), past)
        x, cache = chain((*self.down_blocks, self.mid_block, self.out), x, cache, None)
        mean, log_variance = jnp.split(x, 2, axis=-1)
        return Moments(mean, jnp.clip(log_variance, -30, 20)), (in_strips(past), cache)


@module
class Decoder:
    conv_in: CausalConv3d
    mid_block: Level
    up_blocks: tuple[Level, ...]
    out: Activated
    config: VAEConfig = static()

    @staticmethod
    def spec(c: VAEConfig):
        return Decoder(
            conv_in=CausalConv3d.spec(c.latent_channels, c.channels[-1], repeats=True),
            mid_block=make_middle(c, decoder=True),
            up_blocks=make_levels(c, decoder=True),
            out=Activated.spec(c.channels[0], 3, c, decoder=True),
            config=c,
        )

    def __call__(self, latents: jax.Array, cache: Cache = None) -> tuple[jax.Array, Cache]:
        """A chunk of scaled latents [B F H W C] to frames [B F' 8H 8W 3]; see `chunks`. 1 latent frame gives 1 frame,
        an odd number 4F - 3, an even number 4F. They are not clipped to [-1, 1]: tiles are blended before that.
        """
        assert self.config.scaling_factor is not None
        past, cache = cache or (None, None)
        # Whole on each device: the strips of one level are rows, those of another columns.
        z = everywhere(latents / self.config.scaling_factor)
        x, past = self.conv_in(in_strips(z), past)
        x, cache = chain((self.mid_block, *self.up_blocks, self.out), x, cache, z)
        return x, (in_strips(past), cache)


@module
class VAE:
    encoder: Encoder | None  # None where only decoding is needed
    decoder: Decoder | None

    @staticmethod
    def spec(c: VAEConfig):
        return VAE(Encoder.spec(c), Decoder.spec(c))


# Tiles

OVERLAP = (1 / 6, 1 / 5)  # of a tile, along height and width


class Tile(NamedTuple):
    """A part of latent frames."""

    top: int
    left: int
    height: int
    width: int


def tile_rows(height: int, width: int, c: VAEConfig) -> list[list[Tile]]:
    """Latent frames of a size in tiles that overlap, of half the height and width of the config's sample; those at the
    bottom and at the right are smaller. Latents no larger than a tile are one.
    """
    tall, wide = (side // 2 // c.space_factor for side in (c.sample_height, c.sample_width))
    if height <= tall and width <= wide:
        return [[Tile(0, 0, height, width)]]
    tops, lefts = (
        range(0, side, int(most * (1 - overlap)))
        for side, most, overlap in zip((height, width), (tall, wide), OVERLAP, strict=True)
    )
    return [[Tile(top, left, min(tall, height - top), min(wide, width - left)) for left in lefts] for top in tops]


def decode_tiles(
    decode: Callable[[np.ndarray, Cache], tuple[jax.Array, Cache]], latents: np.ndarray, c: VAEConfig
) -> np.ndarray:
    """Frames of whole scaled latents [B F H W C], decoded in tiles and blended where they overlap, as diffusers does
    with `enable_tiling()`.

    decode: a decoder's call, one program for each shape of a tile; there are up to four.
    """
    sides = c.sample_height // 2, c.sample_width // 2
    blended = [int(side * overlap) for side, overlap in zip(sides, OVERLAP, strict=True)]  # pixels
    height, width = (side - shared for side, shared in zip(sides, blended, strict=True))
    rows: list[np.ndarray] = []
    above: list[np.ndarray] = []
    tiles = tile_rows(latents.shape[2], latents.shape[3], c)
    for tiles_of_row in tiles:
        row: list[np.ndarray] = []
        for i, (top, left, tall, wide) in enumerate(tiles_of_row):
            frames = decode_tile(decode, latents[:, :, top : top + tall, left : left + wide])
            if above:
                blend(above[i], frames, blended[0], axis=2)
            if row:
                blend(row[-1], frames, blended[1], axis=3)
            row.append(frames)
        if len(tiles) == len(row) == 1:
            return row[0]
        rows.append(np.concatenate([frames[:, :, :height, :width] for frames in row], 3))
        above = row
    return np.concatenate(rows, 2)


def decode_tile(decode: Callable, latents: np.ndarray) -> np.ndarray:
    cache, parts = None, []
    for chunk in chunks(latents.shape[1], LATENT_FRAMES):
        frames, cache = decode(latents[:, chunk], cache)
        parts.append(np.asarray(frames))
    return np.concatenate(parts, 1)


def blend(before: np.ndarray, frames: np.ndarray, extent: int, axis: int) -> None:
    """Let `frames` begin as `before` ends, in place. `before` has itself been blended with what is before it."""
    extent = min(before.shape[axis], frames.shape[axis], extent)
    old, new = (np.moveaxis(x, axis, -1) for x in (before, frames))
    share = (np.arange(extent) / extent).astype(np.float32)
    new[..., :extent] = old[..., old.shape[-1] - extent :] * (1 - share) + new[..., :extent] * share
