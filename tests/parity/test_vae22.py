"""The autoencoder of Wan 2.2 against diffusers and against the official module of the `wan22` package, in float32.

Weights come from tests/tiny.py; errors are the largest difference relative to the largest reference value. At the end:
mistakes that are easily made in a port, made on purpose, and by how much the tolerance catches them.
"""

import copy
import dataclasses
import functools
import importlib.util
from importlib.metadata import distribution

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from einops import rearrange, repeat
from goldens import record
from test_goldens import TOLERANCE, VAE22_GOLDENS

from parity import reference
from vidax.models.wan import mapping, vae
from vidax.models.wan.config import WAN22_VAE, vae_config
from vidax.models.wan.vae import VAE
from vidax.weights import checkpoint_names

pytestmark = pytest.mark.parity

CHUNK_ENDS = (1, 5, 9, 13)  # the first frame, then four by four
SIZES = {"landscape": (2, 3), "portrait": (3, 2)}  # latent rows and columns; batch 2
every_size = pytest.mark.parametrize("size", SIZES)


@jax.jit
def call(coder, chunk, cache):
    return coder(chunk, cache)


def in_chunks(coder, x: np.ndarray, ends, run=call) -> np.ndarray:
    """Code x [B F ...] chunk by chunk through the cache."""
    cache, parts = None, []
    for chunk in np.split(x, [end for end in ends if end < x.shape[1]], axis=1):
        part, cache = run(coder, jnp.asarray(chunk), cache)
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1)


def encode(model: VAE, frames: np.ndarray, run=call) -> np.ndarray:
    return in_chunks(model.encoder, frames, CHUNK_ENDS, run)


def decode(model: VAE, latents: np.ndarray, run=call) -> np.ndarray:
    return in_chunks(model.decoder, latents, range(1, latents.shape[1]), run)


def frames(count: int, size: str = "landscape") -> np.ndarray:
    height, width = SIZES[size]
    return np.tanh(tiny.normal(2, count, 16 * height, 16 * width, 3))


def latents(count: int, size: str = "landscape") -> np.ndarray:
    return tiny.normal(2, count, *SIZES[size], 48)


@functools.cache
def ours() -> VAE:
    return tiny.parameters(tiny.vae(tiny.VAE22_CONFIG))


@functools.cache
def theirs() -> diffusers.AutoencoderKLWan:
    return reference.vae(tiny.VAE22_CONFIG)


@every_size
@pytest.mark.parametrize("count", [1, 5, 9, 17])
def test_encode(count, size):
    """Measured: 7.0e-7."""
    wanted = reference.encode(theirs(), frames(count, size))
    assert tiny.relative_error(encode(ours(), frames(count, size)), wanted) < TOLERANCE


@every_size
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_decode(count, size):
    """Measured: 1.0e-6, for 1, 5, 9 and 17 frames. Values are in units of the largest, 1 where it is clipped."""
    wanted = reference.decode(theirs(), latents(count, size))
    assert (np.abs(wanted) >= 1).mean() < 0.05
    assert tiny.relative_error(decode(ours(), latents(count, size)), wanted) < TOLERANCE


def test_clipping():
    """Measured: 4.4e-6. Eight times the contrast, at which a part of the pixels leaves [-1, 1]."""
    model, decoder = copy.deepcopy(theirs()), ours().decoder
    model.decoder.conv_out.weight.mul_(8)
    conv = dataclasses.replace(decoder.out.conv, weight=8 * decoder.out.conv.weight)
    decoder = dataclasses.replace(decoder, out=dataclasses.replace(decoder.out, conv=conv))
    wanted = reference.decode(model, latents(2))
    assert 0.05 < (np.abs(wanted) == 1).mean() < 0.5 and np.abs(wanted).max() == 1
    assert tiny.relative_error(decode(VAE(None, decoder), latents(2)), wanted) < TOLERANCE


def test_in_longer_chunks():
    """Measured: 4.5e-7. Sixteen frames, or four latent frames, at once."""
    for coder, x, ends in ((ours().encoder, frames(17), CHUNK_ENDS), (ours().decoder, latents(5), range(1, 5))):
        assert tiny.relative_error(in_chunks(coder, x, (1,)), in_chunks(coder, x, ends)) < TOLERANCE


def test_the_full_size_in_diffusers():
    """Every name and shape; the class without values. Its config is what `WAN22_VAE` stands for."""
    statistics = {key: list(getattr(WAN22_VAE, key)) for key in ("latents_mean", "latents_std")}
    config = tiny.VAE22_CONFIG | statistics | {"base_dim": 160, "decoder_base_dim": 256, "num_res_blocks": 2}
    assert vae_config(config, "full size") == WAN22_VAE
    with torch.device("meta"):
        model = diffusers.AutoencoderKLWan.from_config(config)
    leaves = checkpoint_names(VAE.spec(WAN22_VAE), mapping.VAE22_DIFFUSERS)
    shapes = {name: leaf.spec.stored_shape for leaf in leaves for name in leaf.names}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# The official module


@pytest.fixture(scope="module")
def module():
    """wan/modules/vae2_2.py of the package, without the package's other imports."""
    file = distribution("wan22").locate_file("wan/modules/vae2_2.py")
    spec = importlib.util.spec_from_file_location("official_vae2_2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def official(module):
    """The class at the size of tests/tiny.py, with its weights under their official names."""
    config = tiny.VAE22_CONFIG
    model = module.WanVAE_(
        dim=config["base_dim"],
        dec_dim=config["decoder_base_dim"],
        z_dim=config["z_dim"],
        dim_mult=config["dim_mult"],
        num_res_blocks=config["num_res_blocks"],
        temperal_downsample=config["temperal_downsample"],
    )
    part = tiny.vae(tiny.VAE22_CONFIG)
    names = mapping.vae_official(vae_config(config, "tiny"))
    pairs = zip(checkpoint_names(part.spec, names), checkpoint_names(part.spec, part.mapping), strict=True)
    state = {
        official: torch.from_numpy(tiny.weight(name, part.shapes[name]))
        for a, b in pairs
        for official, name in zip(a.names, b.names, strict=True)
    }
    model.load_state_dict(state, strict=True)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def scale():
    """What the official code calls so: the means, and one over the standard deviations."""
    return [torch.tensor(tiny.VAE22_CONFIG["latents_mean"]), 1.0 / torch.tensor(tiny.VAE22_CONFIG["latents_std"])]


@every_size
def test_encode_officially(official, scale, size):
    """Measured: 6.0e-7."""
    wanted = reference.channels_last(official.encode(reference.channels_first(frames(9, size)), scale))
    assert tiny.relative_error(encode(ours(), frames(9, size)), wanted) < TOLERANCE


@every_size
def test_decode_officially(official, scale, size):
    """Measured: 9.4e-7. The official wrapper clips what the module gives."""
    wanted = official.decode(reference.channels_first(latents(3, size)), scale).clamp(-1, 1)
    assert tiny.relative_error(decode(ours(), latents(3, size)), reference.channels_last(wanted)) < TOLERANCE


def test_the_published_numbers(module, monkeypatch):
    """Equal: the sizes and latent statistics that the official wrapper builds with."""
    seen = {}

    def build(**sizes):
        seen.update(sizes)
        return torch.nn.Identity()

    monkeypatch.setattr(module, "_video_vae", build)
    mean, inverse_std = module.Wan2_2_VAE(device="cpu").scale
    assert torch.equal(mean, torch.tensor(WAN22_VAE.latents_mean))
    assert torch.equal(inverse_std, 1.0 / torch.tensor(WAN22_VAE.latents_std))
    c = WAN22_VAE
    ours = (c.latent_channels, c.base_dim, list(c.multipliers), list(c.time_downsample))
    assert tuple(seen[key] for key in ("z_dim", "dim", "dim_mult", "temperal_downsample")) == ours
    assert (c.time_factor, c.space_factor) == (4, 16)


def test_the_recorded_goldens_are_current():
    live = record.vae22_goldens()
    with np.load(VAE22_GOLDENS) as recorded:
        assert sorted(recorded) == sorted(live)
        for name, value in live.items():
            assert tiny.relative_error(recorded[name], value) < 2e-6, name


# What the tolerance catches


def error_of(part) -> float:
    """That of encoding or decoding nine frames, op by op: mutations share what is compiled for an op."""
    x, wanted = (frames(9), reference.encode) if part is encode else (latents(3), reference.decode)
    with jax.disable_jit():
        return tiny.relative_error(part(ours(), x, lambda coder, *rest: coder(*rest)), wanted(theirs(), x))


def nothing(self, x, first=None):
    return 0.0


def zeros_after_the_first(self, x):
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.time), (0, 0), (0, 0), (0, 0)))
    return AVERAGE(self, x)


def first_repeated(self, x):
    """Instead of zeros before it."""
    return AVERAGE(self, repeat(x, "b f h w c -> b (f two) h w c", two=2) if x.shape[1] < self.time else x)


def frames_before_channels(self, x):
    if x.shape[1] < self.time:
        return AVERAGE(self, x)
    order = rearrange(x, "b (f t) h w c -> b f h w (t c)", t=self.time)
    return AVERAGE(self, rearrange(order, "b f h w (c t) -> b (f t) h w c", t=self.time))


def nothing_for_the_first(self, x, first):
    """As the convolution over time, which the first frame passes by."""
    return 0.0 if first and self.time > 1 else DUPLICATE(self, x, first)


def nearest(self, x, first):
    """The first row and column for both, as if a run never ended inside a position."""
    y = DUPLICATE(self, x, first)
    return repeat(y[:, :, ::2, ::2], "b f h w c -> b f (h 2) (w 2) c")


AVERAGE, DUPLICATE = vae.Average.__call__, vae.Duplicate.__call__


@pytest.mark.parametrize("part", [encode, decode])
def test_nothing_is_caught_without_a_mutation(part):
    assert error_of(part) < TOLERANCE


@pytest.mark.parametrize(
    ("part", "module", "call"),
    [
        (encode, vae.Average, nothing),
        (encode, vae.Average, zeros_after_the_first),
        (encode, vae.Average, first_repeated),
        (encode, vae.Average, frames_before_channels),
        (decode, vae.Duplicate, nothing),
        (decode, vae.Duplicate, nothing_for_the_first),
        (decode, vae.Duplicate, nearest),
    ],
)
def test_another_shortcut(part, module, call, monkeypatch):
    """From 35,000 times the tolerance."""
    monkeypatch.setattr(module, "__call__", call)
    assert error_of(part) > TOLERANCE


def test_the_first_like_the_others(monkeypatch):
    """The shortcut around an upsampling makes two frames of it, for one of the convolutions: they do not add up."""
    monkeypatch.setattr(vae.Duplicate, "__call__", lambda self, x, first: DUPLICATE(self, x, False))
    with pytest.raises(TypeError, match="incompatible shapes"):
        error_of(decode)


@pytest.mark.parametrize("part", [encode, decode])
def test_rows_of_a_patch_before_its_columns(part, monkeypatch):
    """From 41,000 times the tolerance."""
    monkeypatch.setattr(
        vae, "patchify", lambda x, side: rearrange(x, "b f (h q) (w r) c -> b f h w (c q r)", q=side, r=side)
    )
    monkeypatch.setattr(
        vae, "unpatchify", lambda x, side: rearrange(x, "b f h w (c q r) -> b f (h q) (w r) c", q=side, r=side)
    )
    assert error_of(part) > TOLERANCE
