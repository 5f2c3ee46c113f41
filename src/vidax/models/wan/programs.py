"""The compiled programs of a Wan model's phases, and how they are compiled without weights.

The jitted functions are shared by every model and every request, so a shape compiles once in a process. `lower_*` takes
them from descriptions alone, for the devices of the mesh in force, which need not be here.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from vidax.models.interface import Footprint
from vidax.models.towers.t5 import Block as T5Block
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan.config import TEXT_TOKENS
from vidax.models.wan.dit import Block, DiT, DiTConfig, Tokens
from vidax.models.wan.vae import Decoder, VAEConfig, strips
from vidax.nn import Spec, abstract, map_specs, placement
from vidax.parallel.rules import everywhere, sharding
from vidax.sampling.guidance import guide
from vidax.sampling.solvers import SolverState, SolverTable, initial_state, step
from vidax.weights.memory import program_bytes, split_bytes
from vidax.weights.residency import DEVICE, PINNED


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
def prepare(dit: DiT, text: jax.Array) -> jax.Array:
    return dit.prepare(text)


@jax.jit
def start(table: SolverTable, noise: jax.Array) -> SolverState:
    return jax.tree.map(everywhere, initial_state(table, noise))


@functools.partial(jax.jit, donate_argnames="state")
def denoise_step(
    dit: DiT, table: SolverTable, index: jax.Array, state: SolverState, context: jax.Array, scale: jax.Array | None
) -> SolverState:
    """One step of the solver. With a guidance scale, [conditional, unconditional] is one batch in one pass."""
    row = table.row(index)
    latents, timesteps = batch(row, state, scale)
    return solve(row, state, dit(latents, timesteps, context), scale)


def batch(row: SolverTable, state: SolverState, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Latents and timesteps for the network."""
    latents = state.sample if scale is None else jnp.concatenate([state.sample, state.sample])
    return latents, jnp.full(latents.shape[0], row.timestep)


def solve(row: SolverTable, state: SolverState, velocity: jax.Array, scale: jax.Array | None) -> SolverState:
    return jax.tree.map(everywhere, step(row, state, velocity if scale is None else guide(velocity, scale)))


# A step in three programs, where layers are streamed: `ends` is the network without its layers.


@jax.jit
def enter(ends: DiT, table: SolverTable, index: jax.Array, state: SolverState, scale: jax.Array | None) -> Tokens:
    return ends.embed(*batch(table.row(index), state, scale))


@functools.partial(jax.jit, donate_argnames="tokens")
def through(ends: DiT, layer: Block, tokens: Tokens, context: jax.Array) -> tuple[Tokens, jax.Array]:
    """One layer; the second result is ready when it has computed."""
    tokens = ends.block(layer, tokens, context)
    return tokens, everywhere(tokens.x[:1, 0, 0])


@functools.partial(jax.jit, donate_argnames="state")
def leave(
    ends: DiT, table: SolverTable, index: jax.Array, state: SolverState, tokens: Tokens, scale: jax.Array | None
) -> SolverState:
    latents, _ = batch(row := table.row(index), state, scale)
    return solve(row, state, ends.finish(tokens, latents), scale)


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
    streamed: bool = False,
):
    """`denoise_step` for latents [1 F H W C] and a solver that keeps `past` predictions, all layers resident or, with
    `streamed`, in pinned host memory.
    """
    place = Places(mesh)
    state = SolverState(place(latents), place(latents), (place(latents),) * past)
    context = place((branches, TEXT_TOKENS, config.dim), dtype, "batch", None, None)
    scale = place(()) if branches == 2 else None
    dit = abstract(DiT.spec(config, dtype), place.streamed if streamed else place.parameter)
    with jax.set_mesh(mesh):
        return denoise_step.lower(dit, place.table(past), place((), jnp.int32), state, context, scale)


def lower_layer(config: DiTConfig, latents: tuple[int, ...], branches: int, mesh: Mesh, dtype=jnp.bfloat16):
    """`through` for latents [1 F H W C]."""
    place = Places(mesh)
    ends, layer = (abstract(specs, place.parameter) for specs in ends_and_layer(DiT.spec(config, dtype)))
    context = place((branches, TEXT_TOKENS, config.dim), dtype, "batch", None, None)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(
            lambda ends, *inputs: ends.embed(*inputs), ends, place((branches, *latents[1:])), place((branches,))
        )
        tokens = Tokens(
            place(shapes.x.shape, jnp.float32, "batch", "tokens", None),
            place(shapes.time.shape, jnp.float32, "batch", None),
            place(shapes.modulation.shape, jnp.float32, "batch", None, None),
            tuple(place(table.shape, jnp.float32, "tokens", None) for table in shapes.rope),
            shapes.real,
        )
        return through.lower(ends, layer, tokens, context)


def lower_decode(config: VAEConfig, size: tuple[int, int], mesh: Mesh):
    """`decode_chunk` for a latent frame of (H, W) after the first."""
    place = Places(mesh)
    decoder = abstract(Decoder.spec(config), place.parameter)
    latents = place((1, 1, *size, config.latent_channels))
    with jax.set_mesh(mesh):
        _, cache = jax.eval_shape(lambda model, z: model(z, None), decoder, latents)
        cache = jax.tree.map(lambda frames: place(frames.shape, frames.dtype, *strips(*frames.shape[2:4])), cache)
        return decode_chunk.lower(decoder, latents, cache, "uint8")


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

    def streamed(self, spec: Spec) -> NamedSharding:
        """Where a parameter lies if the layers wait in host memory."""
        waits = spec.stacked and not spec.layer().small
        return self.parameter(spec).with_memory_kind(PINNED if waits else DEVICE)

    def table(self, past: int) -> SolverTable:
        """Of any number of steps: the program takes a row of it."""
        steps = 50
        return SolverTable(*(self(shape) for shape in ((steps,), (steps, 2), (steps, 3 + past), (steps, 2 + past))))
