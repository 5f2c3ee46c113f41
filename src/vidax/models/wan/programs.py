"""The compiled programs of a Wan model's phases, and how they are compiled without weights.

The jitted functions are shared by every model and every request, so a shape compiles once in a process. `lower_*` takes
them from descriptions alone, for the devices of the mesh in force, which need not be here.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from vidax.models.autoencoder import strips
from vidax.models.interface import Footprint
from vidax.models.towers.clip_vision import CLIPVision, CLIPVisionConfig
from vidax.models.towers.t5 import Block as T5Block
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan.condition import Given
from vidax.models.wan.config import TEXT_TOKENS
from vidax.models.wan.dit import Block, Context, DiT, DiTConfig, Tokens
from vidax.models.wan.vae import Decoder, Encoder, VAEConfig
from vidax.nn import Spec, abstract, map_specs, placement
from vidax.parallel.rules import everywhere, sharding
from vidax.sampling.guidance import guide
from vidax.sampling.solvers import SolverState, SolverTable, initial_state, step
from vidax.weights.memory import program_bytes, split_bytes
from vidax.weights.residency import DEVICE, PINNED


class Known(NamedTuple):
    """Sizes of what a video is made from beside its text: states of an image encoder, and clean latent frames."""

    states: int = 0
    frames: int = 0


UNKNOWN = Known()


@jax.jit
def encode(encoder: T5Encoder, lengths: jax.Array, tokens: jax.Array) -> jax.Array:
    """Embeddings of a text [B S D] from those of its tokens [B S D], of which lengths [B] are real."""
    return everywhere(encoder.encode(tokens, lengths))


# The same in two programs, where layers are streamed: `ends` is the encoder without its layers.


@functools.partial(jax.jit, donate_argnames="tokens")
def encode_through(
    ends: T5Encoder, lengths: jax.Array, layer: T5Block, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One layer; the second result is ready when it has computed."""
    tokens = everywhere(ends.block(layer, tokens, lengths))
    return tokens, everywhere(tokens[:1, 0, 0])


@jax.jit
def encode_leave(ends: T5Encoder, lengths: jax.Array, tokens: jax.Array) -> jax.Array:
    return everywhere(ends.finish(tokens, lengths))


@jax.jit
def encode_image(tower: CLIPVision, pixels: jax.Array) -> jax.Array:
    """States [1 I image_dim] of pictures [n image image 3], those of one after those of the other."""
    states = tower(pixels)
    return everywhere(states.reshape(1, -1, states.shape[-1]))


@functools.partial(jax.jit, donate_argnames="cache")
def encode_chunk(encoder: Encoder, frames: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """One chunk of frames to latents, and the cache for the next chunk."""
    latents, cache = encoder(frames, cache)
    return everywhere(latents), cache


@jax.jit
def prepare(dit: DiT, text: jax.Array, image: jax.Array | None) -> Context:
    return dit.prepare(text, image)


@jax.jit
def start(table: SolverTable, noise: jax.Array) -> SolverState:
    return jax.tree.map(everywhere, initial_state(table, noise))


@functools.partial(jax.jit, donate_argnames="state")
def resume(state: SolverState) -> SolverState:
    """A state that has been on the host, placed as a step leaves it."""
    return jax.tree.map(everywhere, state)


@functools.partial(jax.jit, donate_argnames="state")
def denoise_step(
    dit: DiT,
    table: SolverTable,
    index: jax.Array,
    state: SolverState,
    context: Context,
    given: Given,
    scale: jax.Array | None,
) -> SolverState:
    """One step of the solver. With a guidance scale, [conditional, unconditional] is one batch in one pass."""
    row = table.row(index)
    latents, timesteps = batch(row, state, given, scale)
    return solve(row, state, dit(latents, timesteps, context, given.count), scale)


def batch(row: SolverTable, state: SolverState, given: Given, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Latents and timesteps for the network."""
    latents = given.beside(state.sample)
    latents = latents if scale is None else jnp.concatenate([latents, latents])
    return latents, jnp.full(latents.shape[0], row.timestep)


def solve(row: SolverTable, state: SolverState, velocity: jax.Array, scale: jax.Array | None) -> SolverState:
    return jax.tree.map(everywhere, step(row, state, velocity if scale is None else guide(velocity, scale)))


# A step in three programs, where layers are streamed: `ends` is the network without its layers.


@jax.jit
def enter(
    ends: DiT, table: SolverTable, index: jax.Array, state: SolverState, given: Given, scale: jax.Array | None
) -> Tokens:
    return ends.embed(*batch(table.row(index), state, given, scale), given.count)


@functools.partial(jax.jit, donate_argnames="tokens")
def through(ends: DiT, layer: Block, tokens: Tokens, context: Context) -> tuple[Tokens, jax.Array]:
    """One layer; the second result is ready when it has computed."""
    tokens = ends.block(layer, tokens, context)
    return tokens, everywhere(tokens.x[:1, 0, 0])


@functools.partial(jax.jit, donate_argnames="state")
def leave(
    ends: DiT, table: SolverTable, index: jax.Array, state: SolverState, tokens: Tokens, scale: jax.Array | None
) -> SolverState:
    return solve(table.row(index), state, ends.finish(tokens, state.sample), scale)


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="cache")
def decode_chunk(decoder: Decoder, latents: jax.Array, cache: Any, dtype: str) -> tuple[jax.Array, Any]:
    """One chunk of latent frames to frames as `WanModel.decode` gives them, and the cache for the next chunk."""
    frames, cache = decoder(latents, cache)
    frames = jnp.round((frames + 1) * 127.5).astype(jnp.uint8) if dtype == "uint8" else frames / 2 + 0.5
    return everywhere(frames), cache


def lower_text(config: T5Config, dtype, mesh: Mesh):
    """`encode` for one text, all layers resident."""
    place = Places(mesh)
    encoder = abstract(dataclasses.replace(T5Encoder.spec(config, dtype), token_embedding=None), place.parameter)
    with jax.set_mesh(mesh):
        return encode.lower(encoder, place((1,), jnp.int32), place((1, TEXT_TOKENS, config.dim)))


def lower_step(
    config: DiTConfig,
    latents: tuple[int, ...],
    branches: int,
    past: int,
    mesh: Mesh,
    dtype=jnp.bfloat16,
    *,
    known: Known = UNKNOWN,
    streamed: bool = False,
):
    """`denoise_step` for latents [1 F H W C] and a solver that keeps `past` predictions, all layers resident or, with
    `streamed`, in pinned host memory.
    """
    place = Places(mesh)
    state = SolverState(place(latents), place(latents), (place(latents),) * past)
    scale = place(()) if branches == 2 else None
    dit = abstract(DiT.spec(config, dtype), place.streamed if streamed else place.parameter)
    context, given = place.context(config, branches, known, dtype), place.given(config, latents, known)
    with jax.set_mesh(mesh):
        return denoise_step.lower(dit, place.table(past), place((), jnp.int32), state, context, given, scale)


def lower_layer(
    config: DiTConfig,
    latents: tuple[int, ...],
    branches: int,
    mesh: Mesh,
    dtype=jnp.bfloat16,
    *,
    known: Known = UNKNOWN,
):
    """`through` for latents [1 F H W C]."""
    place = Places(mesh)
    ends, layer = (abstract(specs, place.parameter) for specs in ends_and_layer(DiT.spec(config, dtype)))
    context = place.context(config, branches, known, dtype)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(
            lambda ends, *inputs: ends.embed(*inputs, known.frames),
            ends,
            place((branches, *latents[1:4], config.in_channels)),
            place((branches,)),
        )
        tokens = dataclasses.replace(
            shapes,
            x=place(shapes.x.shape, jnp.float32, "batch", "tokens", None),
            time=place(shapes.time.shape, jnp.float32, "batch", None, None),
            modulation=place(shapes.modulation.shape, jnp.float32, "batch", None, None, None),
            rope=tuple(place(table.shape, jnp.float32, "tokens", None) for table in shapes.rope),
        )
        return through.lower(ends, layer, tokens, context)


def lower_look(config: CLIPVisionConfig, images: int, dtype, mesh: Mesh):
    """`encode_image` for so many pictures."""
    place = Places(mesh)
    with jax.set_mesh(mesh):
        tower = abstract(CLIPVision.spec(config, dtype), place.parameter)
        return encode_image.lower(tower, place((images, config.image, config.image, 3)))


def lower_encode(config: VAEConfig, size: tuple[int, int], mesh: Mesh, *, first: bool = False):
    """`encode_chunk` for the first frame, or for frames after it, of (height, width) pixels."""
    place = Places(mesh)
    encoder = abstract(Encoder.spec(config), place.parameter)
    one, frames = (place((1, count, *size, 3)) for count in (1, config.time_factor))
    with jax.set_mesh(mesh):
        if first:
            return encode_chunk.lower(encoder, one, None)
        _, cache = jax.eval_shape(lambda model, x: model(x, None), encoder, one)
        return encode_chunk.lower(encoder, frames, place.strips(cache))


def lower_decode(config: VAEConfig, size: tuple[int, int], mesh: Mesh):
    """`decode_chunk` for a latent frame of (H, W) after the first."""
    place = Places(mesh)
    decoder = abstract(Decoder.spec(config), place.parameter)
    latents = place((1, 1, *size, config.latent_channels))
    with jax.set_mesh(mesh):
        _, cache = jax.eval_shape(lambda model, z: model(z, None), decoder, latents)
        return decode_chunk.lower(decoder, latents, place.strips(cache), "uint8")


def lower_text_layer(config: T5Config, dtype, mesh: Mesh):
    """`encode_through` for one text."""
    place = Places(mesh)
    ends, layer = (abstract(specs, place.parameter) for specs in ends_and_layer(T5Encoder.spec(config, dtype)))
    with jax.set_mesh(mesh):
        return encode_through.lower(ends, place((1,), jnp.int32), layer, place((1, TEXT_TOKENS, config.dim)))


def ends_and_layer(network: Any) -> tuple[Any, Any]:
    """The described ends of a network, without the table that stays in its file, and one of its layers."""
    table = {"token_embedding": None} if isinstance(network, T5Encoder) else {}
    return dataclasses.replace(network, blocks=None, **table), map_specs(Spec.layer, network.blocks)


def footprint(
    config: DiTConfig, latents: tuple[int, ...], branches: int, dtype, mesh: Mesh, program: Compiled | None
) -> Footprint:
    """What denoising latents [1 F H W C] takes; without the compiled `program` of a layer, activations are left out."""
    # float32 latents, those of the last step and two predictions; a text of each branch.
    kept = 4 * 4 * math.prod(latents) + 4 * branches * TEXT_TOKENS * config.dim
    kept += 4 * math.prod(latents[:4]) * (config.in_channels - config.out_channels)
    tokens = math.prod(latents[1:4]) // math.prod(config.patch)
    stream = 4 * branches * tokens * config.dim // (mesh.shape["seq"] * mesh.shape["data"])
    return _footprint(DiT.spec(config, dtype), mesh, program, kept, stream)


def text_footprint(config: T5Config, dtype, mesh: Mesh, program: Compiled | None) -> Footprint:
    """What encoding a text takes, in the same way."""
    return _footprint(T5Encoder.spec(config, dtype), mesh, program, 0, 4 * TEXT_TOKENS * config.dim)


def _footprint(network: Any, mesh: Mesh, program: Compiled | None, kept: int, stream: int) -> Footprint:
    ends, layer = (split_bytes(specs, placement(mesh)) for specs in ends_and_layer(network))
    used = 0 if program is None else program_bytes(program) - layer
    return Footprint(fixed=ends + kept + used, stream=stream, layer=layer, layers=network.config.layers)


class Places:
    """Abstract arrays as they lie on a mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.parameter = mesh, placement(mesh)

    def __call__(self, shape: tuple[int, ...], dtype: Any = jnp.float32, *axes: Any) -> jax.ShapeDtypeStruct:
        place = sharding(self.mesh, axes, shape) if axes else NamedSharding(self.mesh, P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def strips(self, cache: Any) -> Any:
        """Past frames of an autoencoder."""
        return jax.tree.map(lambda frames: self(frames.shape, frames.dtype, *strips(*frames.shape[2:4])), cache)

    def context(self, config: DiTConfig, branches: int, known: Known, dtype: Any) -> Context:
        """What `prepare` makes."""

        def tokens(count: int) -> jax.ShapeDtypeStruct:
            return self((branches, count, config.dim), dtype, "batch", None, None)

        return Context(tokens(TEXT_TOKENS), tokens(known.states) if known.states else None)

    def given(self, config: DiTConfig, latents: tuple[int, ...], known: Known) -> Given:
        more = config.in_channels - config.out_channels
        return Given(
            self((*latents[:4], more)) if more else None,
            self((1, known.frames, *latents[2:])) if known.frames else None,
        )

    def streamed(self, spec: Spec) -> NamedSharding:
        """Where a parameter lies if the layers wait in host memory."""
        waits = spec.stacked and not spec.layer().small
        return self.parameter(spec).with_memory_kind(PINNED if waits else DEVICE)

    def table(self, past: int) -> SolverTable:
        """Of any number of steps: the program takes a row of it."""
        steps = 50
        return SolverTable(*(self(shape) for shape in ((steps,), (steps, 2), (steps, 3 + past), (steps, 2 + past))))
