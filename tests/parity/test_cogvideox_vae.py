"""The autoencoder of CogVideoX against diffusers in float32. Weights come from tests/tiny.py; errors are the largest
difference relative to the largest reference value.
"""

import dataclasses
import functools
from collections.abc import Callable

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_cogvideox
import torch
from test_cogvideox_vae import decode, encode
from tiny_cogvideox import VAE_CONFIG

from parity import reference
from vidax.models.cogvideox import vae
from vidax.models.cogvideox.config import vae_config
from vidax.models.cogvideox.mapping import VAE_DIFFUSERS
from vidax.models.cogvideox.vae import VAE, VAEConfig, decode_tiles
from vidax.weights import checkpoint_names

pytestmark = pytest.mark.parity

TOLERANCE = 5e-6
SIZES = {"landscape": (2, 3), "portrait": (3, 2)}  # latent rows and columns; batch 2
every_size = pytest.mark.parametrize("size", SIZES)
SCALE = VAE_CONFIG["scaling_factor"]


@jax.jit
def call(coder, chunk, cache):
    return coder(chunk, cache)


@functools.cache
def ours() -> VAE:
    """With each half compiled chunk by chunk, as a run does it."""
    model = tiny.parameters(tiny_cogvideox.vae())
    return VAE(functools.partial(call, model.encoder), functools.partial(call, model.decoder))


@functools.cache
def theirs() -> diffusers.AutoencoderKLCogVideoX:
    return reference.fill(diffusers.AutoencoderKLCogVideoX.from_config(dict(VAE_CONFIG)))


def frames(count: int, size: str = "landscape") -> np.ndarray:
    height, width = SIZES[size]
    return np.tanh(tiny.normal(2, count, 8 * height, 8 * width, 3))


def latents(count: int, size: str = "landscape") -> np.ndarray:
    return tiny.normal(2, count, *SIZES[size], 4)


def decoded(model, z: np.ndarray) -> np.ndarray:
    """Frames of scaled latents, by the line of CogVideoXPipeline.decode_latents."""
    return reference.channels_last(model.decode(1 / SCALE * reference.channels_first(z)).sample)


def encoded(x: np.ndarray) -> np.ndarray:
    """Latent means."""
    return reference.channels_last(theirs().encode(reference.channels_first(x)).latent_dist.mode())


@every_size
@pytest.mark.parametrize("count", [1, 9, 17])
def test_encode(count, size):
    """Measured: 1.4e-6."""
    x = frames(count, size)
    assert tiny.relative_error(encode(ours(), jnp.asarray(x)), encoded(x)) < TOLERANCE


@pytest.mark.parametrize("count", [4, 13])
def test_encode_another_number_of_frames(count):
    """Measured: 1.4e-6. An even number, and a first chunk of 13."""
    assert tiny.relative_error(encode(ours(), jnp.asarray(frames(count))), encoded(frames(count))) < TOLERANCE


def test_a_sample():
    """Measured: 2.5e-6. Of one image, as CogVideoXImageToVideoPipeline.prepare_latents takes it; once with
    log-variances at their bounds.
    """
    image, noise = frames(1), tiny.normal(2, 1, 2, 3, 4, seed=5)
    coder = tiny.parameters(tiny_cogvideox.vae()).encoder
    conv = coder.out.conv
    for gain in (1, 100):
        louder = dataclasses.replace(conv, weight=gain * conv.weight)
        encoder = dataclasses.replace(coder, out=dataclasses.replace(coder.out, conv=louder))
        model = reference.fill(diffusers.AutoencoderKLCogVideoX.from_config(dict(VAE_CONFIG)))
        model.encoder.conv_out.conv.weight.mul_(gain)
        posterior = model.encode(reference.channels_first(image)).latent_dist
        got, _ = call(encoder, jnp.asarray(image), None)
        assert tiny.relative_error(got.mean, reference.channels_last(posterior.mean)) < TOLERANCE
        assert tiny.relative_error(got.log_variance, reference.channels_last(posterior.logvar)) < TOLERANCE
        assert (np.abs(got.log_variance + 5) == 25).any() == (gain == 100)
        if gain == 1:
            wanted = reference.channels_last(posterior.mean + posterior.std * reference.channels_first(noise))
            assert tiny.relative_error(got.sample(noise), wanted) < TOLERANCE


@every_size
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_decode(count, size):
    """Measured: 1.2e-6, for 1, 8, 9 and 17 frames."""
    got = decode(ours(), jnp.asarray(latents(count, size)))
    assert tiny.relative_error(got, decoded(theirs(), latents(count, size))) < TOLERANCE


@pytest.mark.parametrize(("height", "width"), [(12, 9), (4, 11)])
def test_tiles(height, width):
    """Measured: 1.2e-6. Three tiles each way, and where only the width is larger than a tile."""
    z = tiny.normal(1, 3, height, width, 4)
    tiled = reference.fill(diffusers.AutoencoderKLCogVideoX.from_config(dict(VAE_CONFIG)))
    tiled.enable_tiling()
    wanted = decoded(tiled, z)
    assert tiny.relative_error(decode_tiles(ours().decoder, z, vae_config(VAE_CONFIG, "tiny")), wanted) < TOLERANCE
    assert tiny.relative_error(decoded(theirs(), z), wanted) > 1e-2  # other frames than without tiles


def test_the_full_size_in_diffusers():
    """Every name and shape, and the size of tiles; the class without values, made by its defaults."""
    with torch.device("meta"):
        model = diffusers.AutoencoderKLCogVideoX()
    assert vae_config(model.config, "full size") == VAEConfig()
    leaves = checkpoint_names(VAE.spec(VAEConfig()), VAE_DIFFUSERS)
    shapes = {name: leaf.spec.stored_shape for leaf in leaves for name in leaf.names}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert (model.tile_overlap_factor_height, model.tile_overlap_factor_width) == vae.OVERLAP


# What the tolerance catches: mistakes that are easily made in a port, made on purpose


def error_of(coding: Callable) -> float:
    """That of encoding 17 frames or decoding 5 latent frames, with what is compiled here alone."""
    x = frames(17) if coding is encode else latents(5)
    model = tiny.parameters(tiny_cogvideox.vae())
    got = jax.jit(lambda model, x: coding(model, x))(model, jnp.asarray(x))
    if coding is decode:
        return tiny.relative_error(got, decoded(theirs(), x))
    return tiny.relative_error(got, encoded(x))


def zeros_before(self, x):
    return jnp.zeros((x.shape[0], 2, *x.shape[2:]))


def each_alike(x, frames):
    """The first frame as often as the others, as far as there is room."""
    return jnp.repeat(x, -(-frames // x.shape[1]), axis=1)[:, :frames]


@pytest.mark.parametrize(
    ("coding", "owner", "name", "mistake"),
    [
        (encode, vae.CausalConv3d, "before", zeros_before),
        (decode, vae.CausalConv3d, "before", zeros_before),
        (decode, vae, "over_time", each_alike),
    ],
)
def test_mistakes_are_caught(coding, owner, name, mistake, monkeypatch):
    """From 170,000 times the tolerance."""
    monkeypatch.setattr(owner, name, mistake)
    assert error_of(coding) > TOLERANCE
