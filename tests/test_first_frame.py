"""A clean first frame has a timestep of its own, for which nothing of the size of all tokens is made six times."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from vidax.models.programs import Known, lower_step
from vidax.models.wan.dit import DiT, DiTConfig
from vidax.parallel import mesh as meshes


def test_two_timesteps_that_are_one():
    """At timestep 0 a clean frame is as any other; above it is not."""
    dit, latents = tiny.parameters(tiny.transformer(tiny.TI2V_CONFIG)), tiny.normal(1, 3, 4, 6, 48)
    context = dit.prepare(tiny.normal(1, 512, 32, seed=1))
    run = jax.jit(lambda dit, time, given: dit(latents, time, context, given), static_argnums=2)
    for time, same in ((0.0, True), (731.0, False)):
        plain, clean = (run(dit, jnp.array([time]), given) for given in (0, 1))
        assert (tiny.relative_error(clean, plain) < 1e-6) == same


def test_no_modulation_for_each_token():
    """A CPU makes each of the six where it is used, at most five of them at a time in a step; a TPU none."""
    dim, frames, side = 96, 4, 32
    config = DiTConfig(
        dim=dim, layers=2, heads=2, mlp_dim=64, in_channels=8, out_channels=8, text_dim=16, frequency_dim=32
    )
    dit = DiT.spec(config, jnp.float32)
    mesh, tokens = meshes.make(meshes.parse("seq=1")), frames * side * side
    programs = [
        lower_step(dit, (1, frames, 2 * side, 2 * side, 8), 2, known, mesh, past=2).compile()
        for known in (Known((512, 16)), Known((512, 16), frames=1))
    ]
    one, two = (program.memory_analysis().temp_size_in_bytes for program in programs)
    vector = 2 * tokens * dim * np.dtype(np.float32).itemsize  # [B L D]
    assert two - one < 5.5 * vector
    shapes = re.findall(r"f32\[([\d,]+)\]", programs[1].as_text())
    sizes = {int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes}
    assert 2 * tokens * 6 * dim not in sizes and 2 * tokens * dim in sizes
