"""What a network computes on a mesh equals what it computes on one device, for every way to split it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan.dit import DiT, DiTConfig
from vidax.models.wan.vae import VAE, VAEConfig
from vidax.nn import is_spec, map_specs
from vidax.parallel import mesh as meshes
from vidax.parallel.rules import sharding, whole

MESHES = (
    *(f"{axis}={size}" for axis in meshes.AXES for size in (2, 4, 8)),
    "data=2,seq=4",
    "data=2,tensor=2",
    "seq=2,tensor=4",
    "seq=4,tensor=2",
    "data=2,seq=2,tensor=2",
)
TOLERANCE = 2e-5  # of the largest value, after 8 blocks


def random_parameters(spec, seed: int):
    """Values of every parameter, on the host; scales around 1 and biases that are not zero."""
    rng = np.random.default_rng(seed)

    def draw(s):
        last = s.shape[-2] if len(s.shape) > 1 + s.stacked else 10.0
        values = rng.standard_normal(s.shape) / np.sqrt(last)
        return (values + (len(s.shape) == 1 + s.stacked)).astype(np.float32)

    return map_specs(draw, spec)


def placed(spec, values, mesh: Mesh):
    def place(s, value):
        return jax.device_put(value, sharding(mesh, s.axes, s.shape))

    return jax.tree.map(place, spec, values, is_leaf=is_spec)


def largest_error(got, wanted) -> float:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape and np.isfinite(got).all()
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def on(mesh: str, spec, values, function, *inputs):
    """`function(model, *inputs)` under jit with the model placed on a mesh."""
    made = meshes.make(meshes.parse(mesh))
    with jax.set_mesh(made):
        return jax.jit(function)(placed(spec, values, made), *whole(inputs))


@functools.cache
def dit_case(heads: int, grid: tuple[int, int, int], batch: int):
    config = DiTConfig(dim=24 * heads, layers=8, heads=heads, mlp_dim=64, text_dim=24, frequency_dim=32)
    spec = DiT.spec(config, jnp.float32)
    values, rng = random_parameters(spec, heads), np.random.default_rng(1)
    f, h, w = grid
    latents = rng.standard_normal((batch, f, 2 * h, 2 * w, 16)).astype(np.float32)
    text = rng.standard_normal((batch, 9, 24)).astype(np.float32)
    timesteps = np.linspace(987, 123, batch, dtype=np.float32)

    def run(dit: DiT, latents, timesteps, text):
        return dit(latents, timesteps, dit.prepare(text))

    inputs = latents, timesteps, text
    return spec, values, run, inputs, np.asarray(on("seq=1", spec, values, run, *inputs))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("heads", "grid"), [(12, (2, 4, 4)), (5, (3, 3, 5)), (3, (1, 3, 3))], ids=["12", "5", "3"])
def test_dit(heads, grid, mesh):
    """Heads that the devices divide, and that they do not; 32, 45 and 9 tokens."""
    spec, values, run, inputs, wanted = dit_case(heads, grid, max(2, meshes.parse(mesh).data))
    assert largest_error(on(mesh, spec, values, run, *inputs), wanted) < TOLERANCE


@functools.cache
def text_case(heads: int):
    config = T5Config(vocabulary=52, dim=32, head_size=8, heads=heads, mlp_dim=40, layers=8)
    spec = T5Encoder.spec(config, jnp.float32)
    values, rng = random_parameters(spec, heads), np.random.default_rng(2)
    inputs = rng.integers(0, 52, (2, 13)), np.array([13, 4], np.int32)

    def run(encoder: T5Encoder, ids, lengths):
        return encoder(ids, lengths)

    return spec, values, run, inputs, np.asarray(on("seq=1", spec, values, run, *inputs))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("heads", [12, 5])
def test_text_encoder(heads, mesh):
    spec, values, run, inputs, wanted = text_case(heads)
    assert largest_error(on(mesh, spec, values, run, *inputs), wanted) < TOLERANCE


@functools.cache
def vae_case(height: int, width: int):
    config = VAEConfig(
        base_dim=4, blocks=1, latent_channels=4, latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.5, 0.5, 2.0, 1.0)
    )
    spec = VAE.spec(config)
    values, rng = random_parameters(spec, 7), np.random.default_rng(3)
    latents = rng.standard_normal((1, 3, height, width, 4)).astype(np.float32)
    frames = rng.uniform(-1, 1, (1, 9, 8 * height, 8 * width, 3)).astype(np.float32)
    return spec, values, latents, frames


def decode(vae: VAE, latents):
    first, cache = vae.decoder(latents[:, :1])
    second, cache = vae.decoder(latents[:, 1:2], cache)
    third, _ = vae.decoder(latents[:, 2:], cache)
    return jnp.concatenate([first, second, third], 1)


def encode(vae: VAE, frames):
    first, cache = vae.encoder(frames[:, :1])
    second, cache = vae.encoder(frames[:, 1:5], cache)
    third, _ = vae.encoder(frames[:, 5:], cache)
    return jnp.concatenate([first, second, third], 1)


@functools.cache
def vae_alone(height: int, width: int):
    spec, values, latents, frames = vae_case(height, width)
    return (
        np.asarray(on("seq=1", spec, values, decode, latents)),
        np.asarray(on("seq=1", spec, values, encode, frames)),
    )


@pytest.mark.parametrize(
    ("height", "width", "mesh"),
    [
        (4, 8, "seq=8"),
        (4, 8, "data=2"),
        (12, 2, "tensor=4"),
        (12, 2, "data=2,seq=2,tensor=2"),
        (3, 5, "seq=4,tensor=2"),
    ],
)
def test_vae(height, width, mesh):
    """Strips of the longer side, three chunks each way; 12 divides by 4 only, 5 by nothing until it is upsampled."""
    spec, values, latents, frames = vae_case(height, width)
    decoded, encoded = vae_alone(height, width)
    assert np.std(decoded) > 0.1
    assert largest_error(on(mesh, spec, values, decode, latents), decoded) < TOLERANCE
    assert largest_error(on(mesh, spec, values, encode, frames), encoded) < TOLERANCE
