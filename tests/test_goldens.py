"""The tiny Wan model against outputs of diffusers and transformers, recorded by tests/goldens/record.py. No PyTorch.

Weights and inputs follow from names and seeds (tests/tiny.py). tests/parity/test_wan.py compares live, in more cases.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vidax.cli import main
from vidax.models.programs import decode_chunk

GOLDENS = Path(__file__).parent / "goldens" / "wan.npz"
VAE22_GOLDENS = GOLDENS.with_name("wan22_vae.npz")
TOLERANCE = 1e-5  # of the largest value
PIXEL_TOLERANCE = 2e-4  # of a whole run, in [0, 1]


@functools.cache
def golden(name: str, path: Path = GOLDENS) -> np.ndarray:
    with np.load(path) as file:
        return file[name]


@pytest.fixture(autouse=True, scope="module")
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def token_ids() -> tuple[np.ndarray, np.ndarray]:
    """Ids [2 160] and lengths [2]: distances beyond 128 tokens, and a short row."""
    return np.random.RandomState(0).randint(3, 256, (2, 160)).astype(np.int32), np.array([160, 37], np.int32)


@dataclasses.dataclass(frozen=True)
class DiTCase:
    """Inputs of the transformer: latent frames, height and width, text tokens, and a timestep for each sample."""

    config: dict[str, Any]
    latent_size: tuple[int, int, int]
    text_tokens: int
    timesteps: tuple[float, float] = (999.0, 3.7)

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        text = tiny.normal(2, self.text_tokens, 32, seed=1)
        return tiny.normal(2, *self.latent_size, 16), np.array(self.timesteps, np.float32), text


DIT_CASES = {
    "landscape": DiTCase(tiny.TRANSFORMER_CONFIG, (3, 6, 10), 20),
    "portrait": DiTCase(tiny.UNEVEN_TRANSFORMER_CONFIG, (5, 6, 2), 7, (500.0, 999.0)),
}


def latents() -> np.ndarray:
    """Normalised latents [1 3 4 2 16] of 9 frames of 16x32."""
    return tiny.normal(1, 3, 4, 2, 16)


def frames() -> np.ndarray:
    """Frames [2 9 16 24 3] in [-1, 1]."""
    return np.tanh(tiny.normal(2, 9, 16, 24, 3))


def vae22_latents() -> np.ndarray:
    """Normalised latents [1 3 2 1 48] of 9 frames of 16x32."""
    return tiny.normal(1, 3, 2, 1, 48)


def vae22_frames() -> np.ndarray:
    """Frames [2 9 16 32 3] in [-1, 1]."""
    return np.tanh(tiny.normal(2, 9, 16, 32, 3))


RUNS = {
    "unipc, guided": (tiny.UNIPC, {"size": (16, 32), "steps": 3, "guidance_scale": 5}),
    "euler, not guided": (tiny.EULER, {"size": (16, 32), "steps": 4, "guidance_scale": 1}),
}


def test_umt5():
    """Measured: 2.4e-6."""
    ids, lengths = token_ids()
    embeddings = np.asarray(jax.jit(lambda encoder: encoder(ids, lengths))(tiny.parameters(tiny.text_encoder())))
    real = np.arange(ids.shape[1]) < lengths[:, None]
    assert not embeddings[~real].any()
    assert tiny.relative_error(embeddings[real], golden("umt5")) < TOLERANCE


@pytest.mark.parametrize("name", DIT_CASES)
def test_dit(name):
    """Measured: 5.3e-7."""
    case = DIT_CASES[name]
    latents, timesteps, text = map(jnp.asarray, case.inputs())
    predict = jax.jit(lambda dit: dit(latents, timesteps, dit.prepare(text)))
    velocity = predict(tiny.parameters(tiny.transformer(case.config)))
    assert tiny.relative_error(velocity, golden(f"dit, {name}")) < TOLERANCE


def encoded(encoder, frames: np.ndarray) -> np.ndarray:
    encode, cache, parts = jax.jit(lambda encoder, chunk, cache: encoder(chunk, cache)), None, []
    for chunk in np.split(frames, (1, 5), axis=1):
        part, cache = encode(encoder, chunk, cache)
        parts.append(part)
    return np.concatenate(parts, 1)


def decoded(decoder, latents: np.ndarray) -> np.ndarray:
    cache, parts = None, []
    for chunk in np.split(latents, 3, axis=1):
        part, cache = decode_chunk(decoder, chunk, cache, "float32")  # in [0, 1]
        parts.append(2 * np.asarray(part) - 1)
    return np.concatenate(parts, 1)


def test_vae_encode():
    """Measured: 6.1e-7."""
    ours = encoded(tiny.parameters(tiny.vae()).encoder, frames())
    assert tiny.relative_error(ours, golden("vae encode")) < TOLERANCE


def test_vae_decode():
    """Measured: 1.1e-6."""
    ours = decoded(tiny.parameters(tiny.vae()).decoder, latents())
    assert tiny.relative_error(ours, golden("vae decode")) < TOLERANCE


def test_vae22_encode():
    """Measured: 2.8e-7."""
    ours = encoded(tiny.parameters(tiny.vae(tiny.VAE22_CONFIG)).encoder, vae22_frames())
    assert tiny.relative_error(ours, golden("encode", VAE22_GOLDENS)) < TOLERANCE


def test_vae22_decode():
    """Measured: 7.3e-7."""
    ours = decoded(tiny.parameters(tiny.vae(tiny.VAE22_CONFIG)).decoder, vae22_latents())
    assert tiny.relative_error(ours, golden("decode", VAE22_GOLDENS)) < TOLERANCE


@pytest.mark.parametrize("name", RUNS)
def test_a_prompt_to_frames(name, tmp_path):
    """Measured: 1.3e-6."""
    scheduler, run = RUNS[name]
    folder = tiny.write_folder(tmp_path / "model", scheduler=scheduler)
    assert main(tiny.command(folder, tmp_path / "x.npy", **run)) == 0
    assert tiny.pixel_error(tmp_path / "x.npy", golden(f"run, {name}")) < PIXEL_TOLERANCE


def test_the_file_is_small():
    assert GOLDENS.stat().st_size < 300_000
    assert VAE22_GOLDENS.stat().st_size < 100_000
