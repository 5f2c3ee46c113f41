"""The CLIP image tower: the published tensors, outputs that transformers gave, and pictures. No PyTorch.

tests/parity/test_clip_vision.py compares live, and records tests/goldens/clip.npz.
"""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from pth_files import Ordered, write_pth
from published import manifest
from safetensors.numpy import save_file

from vidax.errors import UserError
from vidax.models.towers.clip_vision import MEAN, STD, CLIPVision, preprocess
from vidax.models.wan import mapping
from vidax.models.wan.config import CLIP_VIT_H, clip_config
from vidax.nn import abstract, named_leaves
from vidax.weights import check_names, checkpoint_names, load, open_checkpoint
from vidax.weights.held import HELD, write

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens" / "clip.npz"
TOLERANCE = 1e-5  # of the largest hidden state
PIXELS = 1e-5  # of a normalised pixel

TOWERS = {"even": tiny.IMAGE_ENCODER_CONFIG, "uneven": tiny.UNEVEN_IMAGE_ENCODER_CONFIG}
PICTURES = ((480, 832), (832, 480), (100, 37), (60, 100))  # height and width
SOME = (slice(3, None, 17), slice(0, None, 13))  # of the pixels of a golden

# As published with Wan 2.1 image to video in diffusers' layout.
PROCESSOR = {
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": list(MEAN),
    "image_processor_type": "CLIPImageProcessor",
    "image_std": list(STD),
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 224},
}


def pixels(name: str) -> np.ndarray:
    size = TOWERS[name]["image_size"]
    return tiny.normal(2, size, size, 3)


def picture(size: tuple[int, int]) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (*size, 3)).astype(np.uint8)


@functools.cache
def golden(name: str) -> np.ndarray:
    with np.load(GOLDENS) as file:
        return file[name]


@pytest.fixture(autouse=True, scope="module")
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


# The network


@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states(name):
    """Measured: 3.8e-7."""
    tower = tiny.parameters(tiny.image_encoder(TOWERS[name]))
    states = jax.jit(lambda tower, pixels: tower(pixels))(tower, pixels(name))
    assert states.dtype == jnp.float32
    assert tiny.relative_error(states, golden(f"hidden states, {name}")) < TOLERANCE


def test_the_full_size():
    tower = abstract(CLIPVision.spec(CLIP_VIT_H))
    pictures = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    states = jax.eval_shape(lambda tower, pixels: tower(pixels), tower, pictures)
    assert (states.shape, states.dtype) == ((2, 257, 1280), jnp.float32)


# The published tensors

# Official to transformers' names, independent of vidax.models.wan.mapping. None: transformers has no such tensor.
ENDS = r"(weight|bias)"
LAYER = r"visual\.transformer\.(\d+)"
RENAMES = (
    (r"visual\.cls_embedding", "embeddings.class_embedding"),
    (r"visual\.pos_embedding", "embeddings.position_embedding.weight"),
    (r"visual\.patch_embedding\.weight", "embeddings.patch_embedding.weight"),
    (rf"visual\.pre_norm\.{ENDS}", r"pre_layrnorm.\1"),
    (rf"visual\.post_norm\.{ENDS}", r"post_layernorm.\1"),
    (rf"{LAYER}\.norm([12])\.{ENDS}", r"encoder.layers.\1.layer_norm\2.\3"),
    *((rf"{LAYER}\.attn\.to_qkv\.{ENDS}", rf"encoder.layers.\1.self_attn.{part}_proj.\2") for part in "qkv"),
    (rf"{LAYER}\.attn\.proj\.{ENDS}", r"encoder.layers.\1.self_attn.out_proj.\2"),
    (rf"{LAYER}\.mlp\.0\.{ENDS}", r"encoder.layers.\1.mlp.fc1.\2"),
    (rf"{LAYER}\.mlp\.2\.{ENDS}", r"encoder.layers.\1.mlp.fc2.\2"),
)


def renamed(name: str) -> list[str]:
    """transformers' names of an official tensor: three where it is three in one, none where it is not of the tower."""
    found = [match.expand(to) for pattern, to in RENAMES if (match := re.fullmatch(pattern, name))]
    assert len(found) == (3 if "to_qkv" in name else name.startswith("visual.") and name != "visual.head"), name
    return found


def transformers_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, shape in manifest("wan2.1_clip_xlm_roberta_vit_h14").items():
        names = renamed(name)
        if "to_qkv" in name:
            shape = (shape[0] // 3, *shape[1:])
        elif name in ("visual.cls_embedding", "visual.pos_embedding"):
            shape = tuple(size for size in shape if size != 1)
        shapes |= dict.fromkeys((prefix + new for new in names), shape)
    return shapes


READ = 5 + 31 * 16  # tensors that transformers has of the parameters: embeddings and the first norm, and the layers


def test_the_official_file():
    shapes = manifest("wan2.1_clip_xlm_roberta_vit_h14")
    spec, names = CLIPVision.spec(CLIP_VIT_H), mapping.clip_official(CLIP_VIT_H)
    match = check_names(spec, names, shapes)
    assert sum(len(leaf.names) for leaf in match.leaves) == READ
    last = {name for name in shapes if name.startswith("visual.transformer.31.")}
    assert len(last) == 12
    whole = {name for name in shapes if name.startswith("visual.")} - last
    unread = {"visual.post_norm.weight", "visual.post_norm.bias", "visual.head", "log_scale"}
    text = {name for name in shapes if name.startswith("textual.")}
    assert set(match.skipped) == last | unread | text
    assert {re.sub(r"\[\d/3\]$", "", name) for leaf in match.leaves for name in leaf.names} == whole - unread
    assert len(shapes) == 784 and len(text) == 784 - 1 - len(whole) - len(last)
    assert set(match.skipped.values()) == {reason for _, reason in names.skips}


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_the_files_of_transformers(prefix):
    shapes = transformers_shapes(prefix)
    assert len(shapes) == 519
    names = mapping.clip_diffusers(CLIP_VIT_H, prefix)
    more = {f"{prefix}embeddings.position_ids": (1, 257), "visual_projection.weight": (1024, 1280)}
    match = check_names(CLIPVision.spec(CLIP_VIT_H), names, shapes | more)
    assert sum(len(leaf.names) for leaf in match.leaves) == READ == len(set(shapes) - set(match.skipped))
    last = {name for name in shapes if name.startswith(f"{prefix}encoder.layers.31.")}
    norm = {f"{prefix}post_layernorm.{end}" for end in ("weight", "bias")}
    assert len(last) == 16 and set(match.skipped) == last | norm | set(more)


def test_the_layouts_have_the_same_parameters():
    """Each of our parameters is the same tensor of both, by the table above."""
    spec = CLIPVision.spec(CLIP_VIT_H)
    layouts = mapping.clip_official(CLIP_VIT_H), mapping.clip_diffusers(CLIP_VIT_H, "")
    for official, other in zip(*(checkpoint_names(spec, names) for names in layouts), strict=True):
        for name, theirs in zip(official.names, other.names, strict=True):
            part = re.fullmatch(r"(.+)\[(\d)/3\]", name)
            assert theirs == (renamed(part[1])[int(part[2])] if part else renamed(name)[0])


def test_the_number_of_parameters():
    """transformers' 630,766,080 without the last layer and the norm after it."""
    layer = 4 * (1280 + 1) * 1280 + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280
    values = sum(math.prod(leaf.shape) for _, leaf in named_leaves(CLIPVision.spec(CLIP_VIT_H)))
    assert values == 630_766_080 - layer - 2 * 1280


def test_every_layout_makes_the_same_arrays(tmp_path):
    """From transformers' names with either prefix, from an official .pth with one matrix for queries, keys and values,
    and from a file of ours."""
    config = clip_config(TOWERS["uneven"], "tiny")
    part = tiny.image_encoder(TOWERS["uneven"])
    wanted = tiny.parameters(part)
    theirs = tiny.weights(part.shapes)
    save_file({f"vision_model.{name}": value for name, value in theirs.items()}, tmp_path / "published.safetensors")
    write_pth(tmp_path / "official.pth", Ordered(tiny.official_image_encoder(TOWERS["uneven"])))
    layouts = {
        "published.safetensors": mapping.clip_diffusers(config),
        "official.pth": mapping.clip_official(config),
        "ours.safetensors": HELD,
    }
    pth = open_checkpoint(tmp_path / "official.pth")
    write(part.spec, pth, layouts["official.pth"], config, tmp_path / "ours.safetensors", lambda done: None)
    for file, names in layouts.items():
        loaded = load(part.spec, open_checkpoint(tmp_path / file), names)
        for (path, ours), (_, value) in zip(named_leaves(loaded), named_leaves(wanted), strict=True):
            np.testing.assert_array_equal(ours, value, err_msg=f"{path} of {file}")


def test_another_activation_is_refused():
    with pytest.raises(UserError, match="hidden_act is 'quick_gelu'"):
        clip_config(TOWERS["even"] | {"hidden_act": "quick_gelu"}, "config.json")


# Pictures


@pytest.mark.parametrize("size", PICTURES)
def test_pictures(size):
    """Smaller and larger, landscape and portrait. Measured: 4.8e-6 squashed, 4.8e-7 cut."""
    image = picture(size)
    for ours in (preprocess(image), preprocess(image / 255)):
        assert ours.shape == (224, 224, 3) and ours.dtype == np.float32
        assert np.abs(ours[SOME] - golden(f"squashed, {size}")).max() < PIXELS
    for ours in (preprocess(image, PROCESSOR), preprocess(image / 255, PROCESSOR)):
        assert ours.shape == (224, 224, 3) and ours.dtype == np.float32
        assert np.abs(ours[SOME] - golden(f"cut, {size}")).max() < PIXELS


def test_a_picture_of_one_colour():
    """Stays it, whatever its size."""
    ours = preprocess(np.full((30, 500, 3), 51, np.uint8))
    np.testing.assert_allclose(ours, np.broadcast_to((0.2 - np.array(MEAN)) / STD, ours.shape), atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"do_center_crop": False}, "do_center_crop is false; only true is supported"),
        ({"size": {"height": 224, "width": 224}}, "size .*'height': 224.* with crop_size .*; only a shortest_edge"),
        ({"size": {"shortest_edge": 256}}, "size {'shortest_edge': 256} with crop_size"),
    ],
)
def test_another_image_processor_is_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        preprocess(picture((20, 20)), PROCESSOR | changes)


def test_the_file_is_small():
    assert GOLDENS.stat().st_size < 100_000
