"""CogVideoX's autoencoder without PyTorch: on a mesh, in chunks, and how its config and its names are read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_cogvideox
from test_mesh import largest_error, on, random_parameters

from vidax.errors import UserError
from vidax.models.cogvideox.config import vae_config
from vidax.models.cogvideox.layouts import vae_numbers
from vidax.models.cogvideox.mapping import VAE_DIFFUSERS
from vidax.models.cogvideox.vae import LATENT_FRAMES, VAE, GroupNorm, Moments, VAEConfig, blend, chunks, decode_tiles
from vidax.nn import init
from vidax.weights import Checkpoint, Tensor
from vidax.weights.layouts import Shapes

TOLERANCE = 2e-5  # of the largest value


def in_chunks(coder, x, of: int):
    cache, parts = None, []
    for chunk in chunks(x.shape[1], of):
        y, cache = coder(x[:, chunk], cache)
        parts.append(y)
    return jnp.concatenate(parts, 1)


def decode(model: VAE, latents):
    return in_chunks(model.decoder, latents, LATENT_FRAMES)


def encode(model: VAE, frames):
    """Means of the latents, before they are scaled."""

    def means(chunk, cache):
        moments, cache = model.encoder(chunk, cache)
        return moments.mean, cache

    return in_chunks(means, frames, 8)


def test_chunks():
    """Those of diffusers' `_encode` and `_decode`, which count them so."""
    for of in (2, 8):
        for frames in range(1, 40):
            over, starts, ends = frames % of, [], []
            for i in range(max(frames // of, 1)):
                starts.append(of * i + (0 if i == 0 else over))
                ends.append(min(of * (i + 1) + over, frames))
            assert [(chunk.start, chunk.stop) for chunk in chunks(frames, of)] == list(zip(starts, ends, strict=True))
    assert [chunk.stop for chunk in chunks(13, 2)] == [3, 5, 7, 9, 11, 13]


@functools.cache
def case(height: int, width: int):
    spec, rng = tiny_cogvideox.vae().spec, np.random.default_rng(3)
    latents = rng.standard_normal((1, 5, height, width, 4)).astype(np.float32)
    frames = rng.uniform(-1, 1, (1, 17, 8 * height, 8 * width, 3)).astype(np.float32)
    values = random_parameters(spec, 7)

    def run(model, latents, frames):
        return decode(model, latents), encode(model, frames)

    return spec, values, run, (latents, frames), on("seq=1", spec, values, run, latents, frames)


@pytest.mark.parametrize(
    ("height", "width", "mesh"),
    [(2, 4, "seq=8"), (6, 2, "data=2,seq=2"), (8, 10, "seq=8"), (6, 4, "data=2,seq=2")],
)
def test_on_a_mesh(height, width, mesh):
    """Two chunks each way; norms are over whole frames. Strips are of the longer side, or, where more devices divide
    the shorter one, of that: of 8 x 10 latents rows, of 32 x 40 positions after two levels columns.
    """
    spec, values, run, inputs, wanted = case(height, width)
    for got, alone in zip(on(mesh, spec, values, run, *inputs), wanted, strict=True):
        assert np.std(alone) > 0.01
        assert largest_error(got, alone) < TOLERANCE


def test_sizes_of_a_full_size_model():
    """Without values: 49 frames of 480x720 to 13 latent frames and back."""
    model = jax.eval_shape(lambda: init(VAE.spec(VAEConfig()), jax.random.key(0)))
    latents = jax.eval_shape(encode, model, jax.ShapeDtypeStruct((1, 49, 480, 720, 3), jnp.float32))
    assert latents.shape == (1, 13, 60, 90, 16)
    assert jax.eval_shape(decode, model, latents).shape == (1, 49, 480, 720, 3)


def test_a_norm_is_over_the_chunk():
    x, norm = tiny.normal(2, 3, 4, 5, 6), GroupNorm(np.float32([1, 2, 3, 4, 5, 6]), np.ones(6, np.float32), 2)
    groups = x.reshape(2, -1, 2, 3)
    mean, std = groups.mean((1, 3), keepdims=True), groups.std((1, 3), keepdims=True)
    wanted = ((groups - mean) / std).reshape(x.shape) * norm.weight + 1
    assert largest_error(norm(jnp.asarray(x), norm.statistics(jnp.asarray(x))), wanted) < 1e-5


def test_samples():
    moments = Moments(np.float32([1, 2]), np.float32([0, np.log(4)]))
    np.testing.assert_allclose(moments.sample(np.float32([0.5, 0.5])), [1.5, 3], rtol=1e-6)


def test_blending():
    """From what is before to what comes, the first column wholly what is before."""
    frames = np.zeros((1, 1, 1, 6, 1), np.float32)
    blend(np.ones_like(frames), frames, 4, axis=3)
    np.testing.assert_allclose(frames.ravel(), [1, 0.75, 0.5, 0.25, 0, 0])


def test_tiles():
    """Latents of 12 x 9 in tiles of 6 x 5 that begin each 5 and 4; the last are what is left. A tile takes one program
    for each shape.
    """
    seen = []

    def double(latents, cache):
        seen.append((latents.shape, cache is None))
        return np.repeat(np.repeat(latents[..., :3], 8, 2), 8, 3), True

    latents, c = tiny.normal(1, 3, 12, 9, 4), vae_config(tiny_cogvideox.VAE_CONFIG, "tiny")
    assert decode_tiles(double, latents, c).shape == (1, 3, 96, 72, 3)
    sizes = [(h, w) for h in (6, 6, 2) for w in (5, 5, 1)]
    assert seen == [((1, 3, h, w, 4), True) for h, w in sizes]
    smooth = np.ones_like(latents)
    assert (decode_tiles(double, smooth, c) == 1).all()
    seen.clear()
    decode_tiles(double, latents[:, :, :6, :5], c)
    assert seen == [((1, 3, 6, 5, 4), True)]


def test_the_config():
    read = vae_config(tiny_cogvideox.VAE_CONFIG, "tiny")
    assert (read.channels, read.blocks, read.groups, read.scaling_factor) == ((8, 16, 16, 24), 1, 4, 0.7)
    assert (read.space_factor, read.time_levels, read.image_scale) == (8, 2, 0.7)
    assert vae_config({**tiny_cogvideox.VAE_CONFIG, "invert_scale_latents": True}, "tiny").image_scale == 1 / 0.7
    assert vae_config({}, "none") == VAEConfig(scaling_factor=None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_quant_conv": True}, "x.json: use_quant_conv is True; the autoencoder of CogVideoX needs False"),
        ({"norm_eps": 1e-5}, "norm_eps is 1e-05; the autoencoder of CogVideoX needs 1e-06"),
        ({"norm_num_groups": 3}, r"block_out_channels \[8, 16, 16, 24\] in norm_num_groups 3; the groups must"),
        (
            {"temporal_compression_ratio": 3},
            r"temporal_compression_ratio is 3; these levels take one of \(1, 2, 4, 8\)",
        ),
        ({"latent_channels": 5}, "latent_channels is 5, but the tensors beside it have 4"),
    ],
)
def test_a_config_that_does_not_fit(change, sentence):
    with pytest.raises(UserError, match=sentence):
        vae_config({**tiny_cogvideox.VAE_CONFIG, **change}, "x.json", {"latent_channels": 4})


def test_what_shapes_say():
    shapes = tiny_cogvideox.vae().shapes
    tensors = {name: Tensor("x", np.dtype("float32"), shape, b"", 0) for name, shape in shapes.items()}
    numbers = vae_numbers(Shapes(Checkpoint("x", tensors, {}), VAE_DIFFUSERS))
    assert numbers == {"channels": (8, 16, 16, 24), "latent_channels": 4, "blocks": 1}
