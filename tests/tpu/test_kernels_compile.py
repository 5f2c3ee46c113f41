"""The attention kernel, with the tiles of each chip's table, compiled for every TPU generation: no TPU is needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vidax.ops.attention.pallas_tpu import choose_tiles, pallas_tpu
from vidax.planner.chips import chips, devices, parse_topology

pytestmark = pytest.mark.tpu_compile

TOPOLOGIES = tuple(f"{name}:{chip.smallest}" for name, chip in chips().items())
HEADS = 2


def compile_for(topology: str, queries: int, keys: int, head_size: int, dtype=jnp.bfloat16, **arguments):
    device = devices(parse_topology(topology))[0]
    _, note = choose_tiles(device.device_kind, head_size, queries, keys)
    assert note is None
    mesh, spec = jax.sharding.Mesh(np.array([device]), ("device",)), jax.sharding.PartitionSpec()
    everywhere = jax.sharding.NamedSharding(mesh, spec)

    def on_chip(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    call = functools.partial(pallas_tpu, scale=head_size**-0.5, chip=device.device_kind)
    lengths = [on_chip((1,), jnp.int32)] if arguments.pop("ragged", False) else []
    segments = arguments.pop("segmented", False)
    operands = [on_chip((1, n, HEADS, head_size), dtype) for n in (queries, keys, keys)]
    operands += [on_chip((1, n), jnp.int32) for n in (queries, keys) if segments] + lengths

    def attend(q, k, v, *rest):
        options = {"segments": rest[:2]} if segments else {}
        options |= {"kv_lengths": rest[-1]} if lengths else {}
        return call(q, k, v, **options, **arguments)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * len(operands), out_specs=spec, check_vma=False)
    return jax.jit(sharded).lower(*operands).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_720p_81_frames(topology):
    """75,600 tokens, which no tile divides."""
    compiled = compile_for(topology, 75_600, 75_600, 128)
    assert "vidax_attention" in compiled.as_text()


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("queries", "keys", "head_size", "dtype", "options"),
    [
        (32_760, 512, 128, jnp.bfloat16, {"ragged": True}),
        (32_760, 300, 64, jnp.float32, {"ragged": True}),
        (4_001, 4_001, 128, jnp.float32, {}),
        (4_001, 4_001, 64, jnp.bfloat16, {"segmented": True}),
    ],
)
def test_other_forms(topology, queries, keys, head_size, dtype, options):
    compile_for(topology, queries, keys, head_size, dtype, **options)
