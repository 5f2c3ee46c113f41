"""Full-size programs compiled for a TPU topology from descriptions alone: no weights, no TPU."""

import os

import jax
import jax.numpy as jnp
import pytest

from vidax.models.wan.config import WAN21_14B, WAN21_VAE
from vidax.models.wan.dit import DiT
from vidax.models.wan.pipeline import decode_chunk, denoise_step
from vidax.models.wan.vae import Decoder
from vidax.nn import abstract, parameter_bytes
from vidax.sampling.sampler import Sampler
from vidax.sampling.solvers import SolverState, UniPC

pytestmark = pytest.mark.tpu_compile

V5P_CHIP_BYTES = 95e9
LATENTS_720P_81 = (1, 21, 90, 160, 16)


@pytest.fixture(scope="module")
def on_chip():
    """Shape and dtype to an abstract array on one v5p chip."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server is asked where there is no TPU
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def device_bytes(compiled) -> int:
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return used - memory.alias_size_in_bytes


def test_denoise_step_14b_720p_81_frames(on_chip):
    """Both guidance branches, 75,600 tokens, bfloat16 weights: 58.8 GB with libtpu 0.0.42."""
    spec = DiT.spec(WAN21_14B, jnp.bfloat16)
    dit = abstract(spec, lambda s: on_chip(s.shape).sharding)
    table = Sampler(solver=UniPC(), grid="official", steps=50, shift=5.0).table()
    table = jax.tree.map(lambda column: on_chip(column.shape), table)
    latents = on_chip(LATENTS_720P_81)
    state = SolverState(latents, latents, (latents, latents))
    context = on_chip((2, 512, WAN21_14B.dim), jnp.bfloat16)
    compiled = denoise_step.lower(dit, table, on_chip((), jnp.int32), state, context, on_chip(())).compile()
    assert parameter_bytes(spec) < device_bytes(compiled) < V5P_CHIP_BYTES


def test_decode_chunk_720p(on_chip):
    """Four frames of 1280x720 in float32 with the caches of the frames before them: 28.8 GB with libtpu 0.0.42."""
    decoder = abstract(Decoder.spec(WAN21_VAE), lambda s: on_chip(s.shape).sharding)
    latents = on_chip((1, 1, *LATENTS_720P_81[2:]))
    _, cache = jax.eval_shape(lambda model, z: model(z, None), decoder, latents)
    cache = jax.tree.map(lambda frames: on_chip(frames.shape), cache)
    compiled = decode_chunk.lower(decoder, latents, cache, "uint8").compile()
    assert device_bytes(compiled) < V5P_CHIP_BYTES
