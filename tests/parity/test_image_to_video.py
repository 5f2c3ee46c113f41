"""Image to video, first and last frame, two experts and TI2V-5B against diffusers: networks, and whole runs of the
command line on folders that its pipelines saved. float32, errors in units of the largest value or per pixel.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny
from PIL import Image
from test_goldens import PIXEL_TOLERANCE, TOLERANCE

from parity import reference
from vidax.cli import main
from vidax.weights import open_checkpoint

pytestmark = pytest.mark.parity

# The transformer, batch 2. The reference's attention takes what is more than 512 tokens for the image's.

BOTH = {"image": (tiny.I2V_CONFIG, 5), "first and last image": (tiny.FLF2V_CONFIG, 10)}


def inputs(shape: tuple[int, int, int], channels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    timesteps = np.array([731.0, 12.0], np.float32)
    return tiny.normal(2, *shape, channels), timesteps, tiny.normal(2, 512, 32, seed=1)


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 6, 10)])
@pytest.mark.parametrize("name", BOTH)
def test_attention_to_images(name, shape):
    """Measured: 6.2e-7."""
    config, tokens = BOTH[name]
    latents, timesteps, text = inputs(shape, 36)
    states = tiny.normal(1, tokens, 32, seed=2)
    dit = tiny.parameters(tiny.transformer(config))
    ours = jax.jit(lambda dit, *x: dit(x[0], x[1], dit.prepare(x[2], x[3])))(dit, latents, timesteps, text, states)
    # Of two images the reference has two rows, which it joins; the same in both samples here.
    rows = np.concatenate([states.reshape(tokens // 5, 5, 32)] * 2)
    theirs = reference.predict(reference.transformer(config), latents, timesteps, text, rows)
    assert tiny.relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 6, 10)])
def test_a_clean_first_frame(shape):
    """Measured: 9.1e-7. Its tokens have timestep 0."""
    f, h, w = shape
    latents, timesteps, text = inputs(shape, 48)
    dit = tiny.parameters(tiny.transformer(tiny.TI2V_CONFIG))
    ours = jax.jit(lambda dit, *x: dit(x[0], x[1], dit.prepare(x[2]), 1))(dit, latents, timesteps, text)
    each = np.repeat(timesteps[:, None], f * h * w // 4, 1)
    each[:, : h * w // 4] = 0
    theirs = reference.predict(reference.transformer(tiny.TI2V_CONFIG), latents, each, text)
    assert tiny.relative_error(ours, theirs) < TOLERANCE


def test_one_timestep_is_one_for_each_token():
    """Measured: 8.8e-7. A uniform timestep, as text to video of TI2V-5B has it."""
    latents, timesteps, text = inputs((3, 4, 6), 48)
    dit = tiny.parameters(tiny.transformer(tiny.TI2V_CONFIG))
    ours = jax.jit(lambda dit, *x: dit(x[0], x[1], dit.prepare(x[2])))(dit, latents, timesteps, text)
    each = np.repeat(timesteps[:, None], 3 * 2 * 3, 1)
    theirs = reference.predict(reference.transformer(tiny.TI2V_CONFIG), latents, each, text)
    assert tiny.relative_error(ours, theirs) < TOLERANCE


# Whole runs

LANDSCAPE, PORTRAIT = (64, 32), (32, 64)
IMAGE, LAST = "image", "last_image"
I2V_5B = dataclasses.replace(tiny.FOLDERS["5b"], pipeline="WanImageToVideoPipeline")

MODELS = {
    **{name: (folder, (IMAGE,) if "i2v" in name else ()) for name, folder in tiny.FOLDERS.items()},
    "flf2v": (tiny.FOLDERS["flf2v"], (IMAGE, LAST)),
    "i2v 2.2, last image": (tiny.FOLDERS["i2v 2.2"], (IMAGE, LAST)),
    "5b, image": (I2V_5B, (IMAGE,)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return reference.saver(tmp_path_factory, lambda name: reference.pipeline(folder=MODELS[name][0]))


def run(name: str, saved, tmp_path: Path, size: tuple[int, int], more: dict[str, float], **settings) -> float:
    """The largest difference of a pixel."""
    folder, pipe = saved(name)
    pictures = {key: tiny.picture(*size, seed) for seed, key in enumerate(MODELS[name][1])}
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in more.items()]
    for key, picture in pictures.items():
        Image.fromarray(picture).save(tmp_path / f"{key}.png")
        arguments += [f"--{key.replace('_', '-')}", str(tmp_path / f"{key}.png")]
    assert main(tiny.command(folder, tmp_path / "x.npy", size=size, more=arguments, **settings)) == 0
    more = {key: value for key, value in more.items() if key != "boundary_ratio"}
    images = {key: Image.fromarray(picture) for key, picture in pictures.items()}
    theirs = reference.generate(pipe, size=size, **images, **more, **settings)
    assert ((theirs <= 0) | (theirs >= 1)).mean() < 0.2
    return tiny.pixel_error(tmp_path / "x.npy", theirs)


@pytest.mark.parametrize(("size", "steps"), [(LANDSCAPE, 3), (PORTRAIT, 10)])
@pytest.mark.parametrize("name", MODELS)
def test_runs(name, size, steps, saved, tmp_path):
    """Measured: 1.7e-6, with 3 and 10 steps of either size."""
    more = {"guidance_scale_2": 3.0} if MODELS[name][0].experts == 2 else {}
    assert run(name, saved, tmp_path, size, more, steps=steps) < PIXEL_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_runs_without_guidance(name, saved, tmp_path):
    """Measured: 1.7e-6."""
    assert run(name, saved, tmp_path, LANDSCAPE, {}, guidance_scale=1) < PIXEL_TOLERANCE


def test_guidance_with_the_first_expert_alone(saved, tmp_path):
    """Measured: 1.7e-6. Below the boundary one branch is run, where diffusers runs two and weighs one with nothing."""
    assert run("i2v 2.2", saved, tmp_path, LANDSCAPE, {"guidance_scale_2": 1.0}, steps=10) < PIXEL_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_the_written_folder_is_the_saved_one(name, saved, tmp_path):
    """`tiny.write_folder` against `save_pretrained`: the same tensors."""
    (other, _), written = saved(name), tiny.write_folder(tmp_path / "model", MODELS[name][0])
    parts = [file.parent.name for file in written.glob("*/*.safetensors")]
    assert set(parts) == {file.parent.name for file in other.glob("*/*.safetensors")}
    for part in parts:
        ours, theirs = open_checkpoint(written / part), open_checkpoint(other / part)
        for tensor_name, tensor in ours.items():
            stem = tensor_name if tensor_name in theirs else f"vision_model.{tensor_name}"
            np.testing.assert_array_equal(tensor.view(), theirs[stem].view(), err_msg=tensor_name)
