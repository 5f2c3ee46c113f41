"""The compiled programs of a model's phases, whatever its family, and how they are compiled without weights.

The jitted functions are shared by every model and every request, so a shape compiles once in a process. `lower_*` takes
them from descriptions alone, for the devices of the mesh in force, which need not be here.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from vidax.models.autoencoder import strips
from vidax.models.condition import Given
from vidax.models.interface import Footprint
from vidax.models.towers.clip_vision import CLIPVision
from vidax.models.towers.t5 import Block as T5Block
from vidax.models.towers.t5 import T5Encoder
from vidax.models.transformer import Context, DiffusionTransformer, Tokens
from vidax.nn import Spec, abstract, map_specs, placement
from vidax.parallel.rules import everywhere, sharding
from vidax.sampling.guidance import guide
from vidax.sampling.solvers import SolverState, SolverTable, initial_state, step
from vidax.weights.memory import program_bytes, split_bytes
from vidax.weights.residency import DEVICE, PINNED


class Known(NamedTuple):
    """Shapes of what a video is made from: its text (S, text_dim), states of an image encoder (I, image_dim), and how
    many clean latent frames.
    """

    text: tuple[int, int]
    states: tuple[int, int] | None = None
    frames: int = 0


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
def encode_chunk(encoder: Any, frames: jax.Array, cache: Any) -> tuple[Any, Any]:
    """One chunk of frames to what the encoder makes of it, and the cache for the next chunk."""
    encoded, cache = encoder(frames, cache)
    return jax.tree.map(everywhere, encoded), cache


@jax.jit
def prepare(dit: DiffusionTransformer, text: jax.Array, image: jax.Array | None) -> Context:
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
    dit: DiffusionTransformer,
    table: SolverTable,
    index: jax.Array,
    state: SolverState,
    context: Context,
    given: Given,
    scale: jax.Array | None,
    noise: jax.Array | None,
) -> SolverState:
    """One step of the solver. With a guidance scale, [conditional, unconditional] is one batch in one pass. noise: what
    a solver that adds some is given.
    """
    row = table.row(index)
    latents, timesteps = batch(row, state, given, scale)
    return solve(row, state, dit(latents, timesteps, context, given.count), scale, noise)


def batch(row: SolverTable, state: SolverState, given: Given, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Latents and timesteps for the network."""
    latents = given.beside(state.sample)
    latents = latents if scale is None else jnp.concatenate([latents, latents])
    return latents, jnp.full(latents.shape[0], row.timestep)


def solve(
    row: SolverTable, state: SolverState, output: jax.Array, scale: jax.Array | None, noise: jax.Array | None
) -> SolverState:
    return jax.tree.map(everywhere, step(row, state, output if scale is None else guide(output, scale), noise))


# A step in three programs, where layers are streamed: `ends` is the network without its layers.


@jax.jit
def enter(
    ends: DiffusionTransformer,
    table: SolverTable,
    index: jax.Array,
    state: SolverState,
    context: Context,
    given: Given,
    scale: jax.Array | None,
) -> Tokens:
    latents, timesteps = batch(table.row(index), state, given, scale)
    return ends.embed(latents, timesteps, context, given.count)


@functools.partial(jax.jit, donate_argnames="tokens")
def through(ends: DiffusionTransformer, layer: Any, tokens: Tokens, context: Context) -> tuple[Tokens, jax.Array]:
    """One layer; the second result is ready when it has computed."""
    tokens = ends.block(layer, tokens, context)
    return tokens, everywhere(tokens.x[:1, 0, 0])


@functools.partial(jax.jit, donate_argnames="state")
def leave(
    ends: DiffusionTransformer,
    table: SolverTable,
    index: jax.Array,
    state: SolverState,
    tokens: Tokens,
    scale: jax.Array | None,
    noise: jax.Array | None,
) -> SolverState:
    return solve(table.row(index), state, ends.finish(tokens, state.sample), scale, noise)


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="cache")
def decode_chunk(decoder: Any, latents: jax.Array, cache: Any, dtype: str | None) -> tuple[jax.Array, Any]:
    """One chunk of latent frames to frames as `Model.decode` gives them, and the cache for the next chunk. Without a
    dtype the frames are about [-1, 1], as the decoder makes them.
    """
    frames, cache = decoder(latents, cache)
    if dtype is not None:
        frames = jnp.clip(frames, -1, 1)
        frames = jnp.round((frames + 1) * 127.5).astype(jnp.uint8) if dtype == "uint8" else frames / 2 + 0.5
    return everywhere(frames), cache


# Lowered from described networks (`Spec`s).


def lower_text(encoder: T5Encoder, length: int, mesh: Mesh):
    """`encode` for one text of so many tokens, all layers resident."""
    place = Places(mesh)
    model = abstract(dataclasses.replace(encoder, token_embedding=None), place.parameter)
    with jax.set_mesh(mesh):
        return encode.lower(model, place((1,), jnp.int32), place((1, length, encoder.config.dim)))


def lower_text_layer(encoder: T5Encoder, length: int, mesh: Mesh):
    """`encode_through` for one text of so many tokens."""
    place = Places(mesh)
    ends, layer = (abstract(specs, place.parameter) for specs in ends_and_layer(encoder))
    with jax.set_mesh(mesh):
        return encode_through.lower(ends, place((1,), jnp.int32), layer, place((1, length, encoder.config.dim)))


def lower_step(
    dit: DiffusionTransformer,
    latents: tuple[int, ...],
    branches: int,
    known: Known,
    mesh: Mesh,
    *,
    past: int,
    noisy: bool = False,
    streamed: bool = False,
):
    """`denoise_step` for latents [1 F H W C] and a solver that keeps `past` predictions and perhaps adds noise, all
    layers resident or, with `streamed`, in pinned host memory.
    """
    place = Places(mesh)
    state = SolverState(place(latents), place(latents), (place(latents),) * past)
    scale, noise = place(()) if branches == 2 else None, place(latents) if noisy else None
    model = abstract(dit, place.streamed if streamed else place.parameter)
    table, index = place.table(past, noisy), place((), jnp.int32)
    with jax.set_mesh(mesh):
        context, given = place.context(dit, branches, known), place.given(dit.config, latents, known)
        return denoise_step.lower(model, table, index, state, context, given, scale, noise)


def lower_layer(dit: DiffusionTransformer, latents: tuple[int, ...], branches: int, known: Known, mesh: Mesh):
    """`through` for latents [1 F H W C]."""
    place = Places(mesh)
    ends, layer = (abstract(specs, place.parameter) for specs in ends_and_layer(dit))
    seen = place((branches, *latents[1:4], dit.config.in_channels))
    with jax.set_mesh(mesh):
        context = place.context(dit, branches, known)
        tokens = jax.eval_shape(
            lambda ends, *inputs: ends.embed(*inputs, known.frames), ends, seen, place((branches,)), context
        )
        return through.lower(ends, layer, place.tokens(tokens), context)


def lower_look(tower: CLIPVision, images: int, mesh: Mesh):
    """`encode_image` for so many pictures."""
    place, side = Places(mesh), tower.config.image
    with jax.set_mesh(mesh):
        return encode_image.lower(abstract(tower, place.parameter), place((images, side, side, 3)))


def lower_encode(encoder: Any, chunks: Sequence[tuple[int, ...]], mesh: Mesh):
    """`encode_chunk` for the last of these chunks [1 F H W 3]; the caches are those of the first."""
    return _lower_chunk(encode_chunk, encoder, chunks, mesh)


def lower_decode(decoder: Any, chunks: Sequence[tuple[int, ...]], mesh: Mesh):
    """`decode_chunk` for the last of these chunks of latents [1 F H W C]; the caches are those of the first."""
    return _lower_chunk(decode_chunk, decoder, chunks, mesh, "uint8")


def _lower_chunk(program: Any, coder: Any, chunks: Sequence[tuple[int, ...]], mesh: Mesh, *more: Any):
    place, cache = Places(mesh), None
    model, first, last = abstract(coder, place.parameter), place(chunks[0]), place(chunks[-1])
    with jax.set_mesh(mesh):
        if len(chunks) > 1:
            _, cache = jax.eval_shape(lambda model, x: model(x, None), model, first)
            cache = place.strips(cache)
        return program.lower(model, last, cache, *more)


def ends_and_layer(network: Any) -> tuple[Any, Any]:
    """The described ends of a network, without the table that stays in its file, and one of its layers."""
    table = {"token_embedding": None} if isinstance(network, T5Encoder) else {}
    return dataclasses.replace(network, blocks=None, **table), map_specs(Spec.layer, network.blocks)


def footprint(
    dit: DiffusionTransformer,
    latents: tuple[int, ...],
    branches: int,
    known: Known,
    mesh: Mesh,
    program: Compiled | None,
) -> Footprint:
    """What denoising latents [1 F H W C] takes; without the compiled `program` of a layer, activations are left out."""
    config = dit.config
    # float32 latents, those of the last step and two predictions; a text of each branch.
    kept = 4 * 4 * math.prod(latents) + 4 * branches * known.text[0] * config.dim
    kept += 4 * math.prod(latents[:4]) * (config.in_channels - config.out_channels)
    tokens = math.prod(latents[1:4]) // math.prod(config.patch)
    stream = 4 * branches * tokens * config.dim // (mesh.shape["seq"] * mesh.shape["data"])
    return _footprint(dit, mesh, program, kept, stream)


def text_footprint(encoder: T5Encoder, length: int, mesh: Mesh, program: Compiled | None) -> Footprint:
    """What encoding a text of so many tokens takes, in the same way."""
    return _footprint(encoder, mesh, program, 0, 4 * length * encoder.config.dim)


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
        return jax.tree.map(lambda x: self(x.shape, x.dtype, *strips(x.shape, self.mesh.shape)), cache)

    def context(self, dit: DiffusionTransformer, branches: int, known: Known) -> Context:
        """What `prepare` makes. To be called with the mesh in force."""
        states = known.states and jax.ShapeDtypeStruct((1, *known.states), jnp.float32)
        text = jax.ShapeDtypeStruct((branches, *known.text), jnp.float32)
        made = jax.eval_shape(lambda dit, *inputs: dit.prepare(*inputs), abstract(dit), text, states)
        return jax.tree.map(lambda x: self(x.shape, x.dtype, "batch", None, None), made)

    def tokens(self, tokens: Any) -> Any:
        """What `embed` makes (`Tokens`), from its shapes."""
        fields = {
            name: jax.tree.map(lambda x, axes=axes: self(x.shape, x.dtype, *axes), getattr(tokens, name))
            for name, axes in tokens.axes.items()
        }
        return dataclasses.replace(tokens, **fields)

    def given(self, config: Any, latents: tuple[int, ...], known: Known) -> Given:
        more = config.in_channels - config.out_channels
        return Given(
            self((*latents[:4], more)) if more else None,
            self((1, known.frames, *latents[2:])) if known.frames else None,
        )

    def streamed(self, spec: Spec) -> NamedSharding:
        """Where a parameter lies if the layers wait in host memory."""
        waits = spec.stacked and not spec.layer().small
        return self.parameter(spec).with_memory_kind(PINNED if waits else DEVICE)

    def table(self, past: int, noisy: bool) -> SolverTable:
        """Of any number of steps: the program takes a row of it."""
        steps = 50
        columns = ((steps,), (steps, 2), (steps, 3 + past), (steps, 2 + past), *([(steps,)] if noisy else []))
        return SolverTable(*(self(shape) for shape in columns))
