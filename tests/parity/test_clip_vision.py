"""The CLIP image tower against transformers and PyTorch, live, in float32, and what the tolerances catch.

`python tests/parity/test_clip_vision.py` records what the references give into tests/goldens/clip.npz, for
tests/test_clip_vision.py. Errors are the largest difference, of hidden states relative to the largest value.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("transformers")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import test_clip_vision as cases
import tiny
import torch
import transformers
from PIL import Image
from test_goldens import TOLERANCE

from parity import reference
from vidax import nn
from vidax.models.towers.clip_vision import CLIPVision, preprocess
from vidax.weights import open_checkpoint

pytestmark = pytest.mark.parity

BFLOAT16 = 3e-2  # of the largest value


def encode(part: tiny.Part, pixels: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda tower, pixels: tower(pixels))(tiny.parameters(part), pixels))


@pytest.mark.parametrize("name", cases.TOWERS)
def test_hidden_states(name):
    """Measured: 3.8e-7."""
    config, pixels = cases.TOWERS[name], cases.pixels(name)
    theirs = reference.encode_picture(reference.image_encoder(config), pixels)
    assert tiny.relative_error(encode(tiny.image_encoder(config), pixels), theirs) < TOLERANCE


def test_intermediates():
    """Measured: 3.3e-7, in the worst of all: what the layers work on, and what each of them gives."""
    config, pixels = cases.TOWERS["uneven"], cases.pixels("uneven")
    model, tower = reference.image_encoder(config), tiny.parameters(tiny.image_encoder(config))
    x = jax.jit(lambda tower: tower.embed(pixels))(tower)
    seen = [x]
    for layer in range(config["num_hidden_layers"] - 1):
        seen.append(x := jax.jit(lambda block, x: block(x))(tiny.block(tower.blocks, layer), x))
    theirs = [reference.encode_picture(model, pixels, states) for states in range(len(seen))]
    errors = [tiny.relative_error(ours, other) for ours, other in zip(seen, theirs, strict=True)]
    assert max(errors) < TOLERANCE, errors


def test_bfloat16():
    """Measured: 3.5e-3 of the largest value. Matrices and their operands are bfloat16, the rest is float32."""
    pixels = cases.pixels("even")
    exact, rounded = (encode(tiny.image_encoder(dtype=dtype), pixels) for dtype in (np.float32, jnp.bfloat16))
    assert TOLERANCE < tiny.relative_error(rounded, exact) < BFLOAT16


@pytest.mark.parametrize("name", cases.TOWERS)
def test_the_names_that_transformers_saves(name, tmp_path):
    """Also those that it does not need, which are skipped."""
    config = cases.TOWERS[name]
    model = reference.image_encoder(config)
    model.save_pretrained(tmp_path)
    part, checkpoint = tiny.image_encoder(config), open_checkpoint(tmp_path)
    assert set(checkpoint) > set(part.shapes)
    for tensor, value in tiny.weights(part.shapes).items():
        np.testing.assert_array_equal(checkpoint[tensor].view(), value, err_msg=tensor)
    unread = set(checkpoint) - set(part.shapes)
    assert unread == {tensor for tensor in checkpoint if part.mapping.skip(tensor)}


# Mistakes that are easily made, made on purpose; by what factor they exceed the tolerance


@pytest.mark.parametrize("name", cases.TOWERS)
def test_a_layer_more(name):
    """The last hidden states for those before: from 44,000 times."""
    config, pixels = cases.TOWERS[name], cases.pixels(name)
    theirs = reference.encode_picture(reference.image_encoder(config), pixels, states=-1)
    assert tiny.relative_error(encode(tiny.image_encoder(config), pixels), theirs) > 1000 * TOLERANCE


def mutated(name: str, **changes) -> float:
    """The error with other fields of the config."""
    config, pixels = cases.TOWERS[name], cases.pixels(name)
    part = tiny.image_encoder(config)
    spec = CLIPVision.spec(dataclasses.replace(part.spec.config, **changes), np.float32)
    theirs = reference.encode_picture(reference.image_encoder(config), pixels)
    return tiny.relative_error(encode(dataclasses.replace(part, spec=spec), pixels), theirs)


@pytest.mark.parametrize("name", cases.TOWERS)
def test_config_mutations(name, monkeypatch):
    """A layer less: from 40,000 times; epsilon 1e-6 for 1e-5: from 9 times; the tanh form of GELU: from 11 times."""
    assert mutated(name) < TOLERANCE
    assert mutated(name, layers=cases.TOWERS[name]["num_hidden_layers"] - 1) > 1000 * TOLERANCE
    assert mutated(name, eps=1e-6) > TOLERANCE
    monkeypatch.setitem(nn.ACTIVATIONS, "gelu", nn.ACTIVATIONS["gelu_tanh"])
    assert mutated(name) > TOLERANCE


@pytest.mark.parametrize(
    ("first", "second"), [("norm1", "norm2"), (r"attention\.q", r"attention\.k"), (r"attention\.v", r"attention\.o")]
)
def test_swapped_names(first, second):
    """Two parameters of one shape, each under the other's name: from 41,000 times."""
    part, pixels = tiny.image_encoder(), cases.pixels("even")
    swap = ((first, "SWAPPED"), (second, first.replace("\\", "")), ("SWAPPED", second.replace("\\", "")))
    mapping = dataclasses.replace(part.mapping, renames=(*swap, *part.mapping.renames))
    theirs = reference.encode_picture(reference.image_encoder(), pixels)
    assert tiny.relative_error(encode(dataclasses.replace(part, mapping=mapping), pixels), theirs) > 1000 * TOLERANCE


# Pictures


def squashed(image: np.ndarray, size: int = 224) -> np.ndarray:
    """Pixels [size size 3] by the lines of wan/image2video.py and wan/modules/clip.py; PyTorch does the resizing."""
    values = torch.from_numpy(image).permute(2, 0, 1)[None].float().div(255).sub(0.5).div(0.5)
    values = torch.nn.functional.interpolate(values, size=(size, size), mode="bicubic", align_corners=False)
    mean, std = (torch.tensor(channels).view(3, 1, 1) for channels in (cases.MEAN, cases.STD))
    return ((values.mul(0.5).add(0.5) - mean) / std)[0].permute(1, 2, 0).numpy()


def cut(image: np.ndarray, config: dict) -> np.ndarray:
    processor = transformers.CLIPImageProcessorPil(**config)
    return np.moveaxis(processor(Image.fromarray(image), return_tensors="np")["pixel_values"][0], 0, -1)


@pytest.mark.parametrize("size", [*cases.PICTURES, (1080, 1920), (1920, 1080), (224, 224), (223, 225), (1, 3)])
def test_pictures(size):
    """Noise of 8 bits. Measured: 5.7e-6 squashed, 4.8e-7 cut."""
    image = cases.picture(size)
    assert np.abs(preprocess(image) - squashed(image)).max() < cases.PIXELS
    assert np.abs(preprocess(image / 255) - squashed(image)).max() < cases.PIXELS
    for config in ({}, cases.PROCESSOR):
        assert np.abs(preprocess(image, config) - cut(image, config)).max() < cases.PIXELS


def test_the_two_ways_differ():
    image = cases.picture((60, 100))
    assert np.abs(preprocess(image) - preprocess(image, {})).max() > 0.1


# What the tests without PyTorch rest on


def goldens() -> dict[str, np.ndarray]:
    arrays = {}
    for name, config in cases.TOWERS.items():
        arrays[f"hidden states, {name}"] = reference.encode_picture(reference.image_encoder(config), cases.pixels(name))
    for size in cases.PICTURES:
        image = cases.picture(size)
        arrays[f"squashed, {size}"] = squashed(image)[cases.SOME]
        arrays[f"cut, {size}"] = cut(image, cases.PROCESSOR)[cases.SOME]
    return arrays


def test_the_recorded_goldens_are_current():
    live = goldens()
    with np.load(cases.GOLDENS) as recorded:
        assert sorted(recorded) == sorted(live)
        for name, value in live.items():
            assert tiny.relative_error(recorded[name], value) < 2e-6, name


if __name__ == "__main__":
    np.savez_compressed(cases.GOLDENS, **goldens())
