"""Pictures as input, against PyTorch, diffusers and the official code of the `wan22` package, live."""

import ast
import math
import types
from importlib.metadata import distribution

import numpy as np
import pytest
import test_image as cases
from PIL import Image

from vidax.media.image import area_size, cover, fitting_size, stretch, stretch_bicubic

torch = pytest.importorskip("torch")
video_processor = pytest.importorskip("diffusers.video_processor")
pytestmark = pytest.mark.parity

SHAPES = [(480, 832), (100, 37), (60, 100), (1, 3), (1080, 1920), (63, 65)]  # height and width
TARGETS = [(832, 480), (96, 64), (65, 63), (64, 160)]  # width and height


class Seen(Exception):
    """Ends the official code where it has made what is compared."""


def end(value):
    raise Seen(value)


def to_tensor(image):
    """torchvision's, of 8 bits."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)


def official(file, name, **names):
    """One function of an official file, which itself imports what only GPUs have."""
    tree = ast.parse(distribution("wan22").locate_file(file).read_text())
    (function,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    exec(compile(ast.Module([function], []), file, "exec"), names)
    return names[name]


best_output_size = official("wan/utils/utils.py", "best_output_size")


def official_first_frame(pixels: np.ndarray, area: int) -> np.ndarray:
    """What the autoencoder of 14B is given for the first frame, [H W 3] in [-1, 1]."""
    names = {"np": np, "torch": torch, "math": math, "TF": types.SimpleNamespace(to_tensor=to_tensor)}
    model = types.SimpleNamespace(
        device="cpu",
        vae_stride=(4, 8, 8),
        patch_size=(1, 2, 2),
        sp_size=1,
        t5_cpu=True,
        text_encoder=lambda texts, device: [],
        sample_neg_prompt="",
        vae=types.SimpleNamespace(encode=lambda videos: end(videos[0])),
    )
    generate = official("wan/image2video.py", "generate", **names)
    with pytest.raises(Seen) as seen:
        generate(model, "", Image.fromarray(pixels), max_area=area, frame_num=5, seed=0)
    (video,) = seen.value.args
    return video[:, 0].permute(1, 2, 0).numpy()


def official_cut(pixels: np.ndarray, area: int) -> Image.Image:
    """What the picture is for the 5B."""
    names = {"Image": Image, "best_output_size": best_output_size, "TF": types.SimpleNamespace(to_tensor=end)}
    model = types.SimpleNamespace(vae_stride=(4, 16, 16), patch_size=(1, 2, 2))
    with pytest.raises(Seen) as seen:
        official("wan/textimage2video.py", "i2v", **names)(model, "", Image.fromarray(pixels), max_area=area)
    return seen.value.args[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("area", [64 * 96, 480 * 832])
def test_the_first_frame_of_14b(shape, area):
    """Its size too. Noise of 8 bits. Measured: 3.0e-6."""
    pixels = cases.noise(*shape)
    theirs = official_first_frame(pixels, area)
    ours = stretch_bicubic(pixels, area_size(*shape[::-1], area, 16))
    assert ours.shape == theirs.shape
    assert np.abs(ours * 2 - 1 - theirs).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("area", [64 * 96, 704 * 1280])
def test_the_picture_of_5b(shape, area):
    pixels = cases.noise(*shape)
    theirs = official_cut(pixels, area)
    ours = cover(pixels, fitting_size(*shape[::-1], area, 32))
    np.testing.assert_array_equal(ours, to_tensor(theirs).permute(1, 2, 0).numpy())


def test_sizes():
    """Of the table, and of any pictures."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(100, 5000, (5000, 2)).tolist()
    areas = ((cases.P480, 16), (cases.P720, 16), (cases.P704, 32))
    for width, height, area, multiple in [*cases.SIZES, *((*size, *area) for size in pictures for area in areas)]:
        half = multiple // 2  # the patches of both autoencoders are 2x2
        theirs = (np.sqrt(area / (height / width)), np.sqrt(area * (height / width)))
        theirs = tuple(round(side // half // 2 * 2) * half for side in theirs)
        assert area_size(width, height, area, multiple) == theirs
        assert fitting_size(width, height, area, multiple) == best_output_size(width, height, multiple, multiple, area)


@pytest.mark.parametrize("case", cases.EXTREME)
def test_the_official_code_fails_where_a_side_is_nothing(case):
    width, height, area, multiple = case
    with pytest.raises(ZeroDivisionError):
        best_output_size(width, height, multiple, multiple, area)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", TARGETS)
def test_bicubic(shape, size):
    """Measured: 2.0e-6, of values in [0, 1]."""
    pixels = cases.noise(*shape)
    values = torch.from_numpy(pixels).permute(2, 0, 1)[None].float().div(255)
    theirs = torch.nn.functional.interpolate(values, size=size[::-1], mode="bicubic", align_corners=False)
    assert np.abs(stretch_bicubic(pixels, size) - theirs[0].permute(1, 2, 0).numpy()).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", TARGETS[:2])
def test_stretch_is_what_diffusers_does(shape, size):
    pixels = cases.noise(*shape)
    processor = video_processor.VideoProcessor(vae_scale_factor=8)
    theirs = processor.preprocess(Image.fromarray(pixels), height=size[1], width=size[0])[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(stretch(pixels, size) * 2 - 1, theirs)
