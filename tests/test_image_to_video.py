"""Images as input: which a model takes, what becomes of them, and what is said of those that are wrong. No PyTorch.

tests/test_image.py has the reading of pictures, tests/parity/test_image_to_video.py whole runs against diffusers.
"""

import dataclasses
import json

import numpy as np
import pytest
import tiny
from PIL import Image

import vidax
from vidax.cli import main
from vidax.engine.request import resolve
from vidax.media.image import cover, open_picture, stretch_bicubic
from vidax.models.condition import Given
from vidax.models.locate import describe
from vidax.models.registry import CARDS
from vidax.models.wan.condition import chunks, mask


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """An engine for each folder of `tiny.FOLDERS`, made when it is asked for."""
    made: dict[str, vidax.Engine] = {}

    def engine(name: str) -> vidax.Engine:
        if name not in made:
            folder = tiny.write_folder(tmp_path_factory.mktemp("tiny") / name.replace(" ", "-"), tiny.FOLDERS[name])
            made[name] = vidax.load(folder, dtype="float32")
        return made[name]

    return engine


def refusal(engine: vidax.Engine, **fields) -> str:
    with pytest.raises(vidax.UserError) as error:
        engine.request(tiny.PROMPT, **fields)
    return str(error.value)


# Which images a model takes

ONE, TWO = {"image": tiny.picture(48, 32)}, {"image": tiny.picture(48, 32), "last_image": tiny.picture(48, 32, 1)}
TAKES = {"i2v 2.1": (1, 1), "flf2v": (2, 2), "t2v 2.2": (0, 0), "i2v 2.2": (1, 2), "5b": (0, 1)}


@pytest.mark.parametrize("name", TAKES)
def test_images_that_a_model_takes(name, engines):
    engine = engines(name)
    assert engine.model.images == TAKES[name]
    for count, given in enumerate(({}, ONE, TWO)):
        if TAKES[name][0] <= count <= TAKES[name][1]:
            assert engine.request(tiny.PROMPT, **given).video.images == count
        else:
            with pytest.raises(vidax.UserError):
                engine.request(tiny.PROMPT, **given)


def test_what_is_said_of_too_many_and_too_few(engines):
    card = engines("i2v 2.1").card.name
    assert refusal(engines("i2v 2.1")) == f"{card} makes a video from its first frame; give --image"
    assert refusal(engines("flf2v"), **ONE) == (
        "flf2v makes a video from its first and its last frame; give --image and --last-image"
    )
    assert refusal(engines("i2v 2.1"), image="a.png", last_image="b.png") == (
        f"last image b.png: {card} takes a first frame only; leave it out, or use a model that takes one: "
        "wan2.1-flf2v-14b, wan2.2-i2v-a14b"
    )
    sentence = refusal(engines("t2v 2.2"), **ONE)
    assert sentence.startswith(
        "image (array): t2v-2.2 takes no image; leave it out, or use a model that takes one: demo-i2v, wan"
    )
    assert refusal(engines("flf2v"), **TWO, frames=1) == "1 frame: a first and a last one take 5 at least"
    assert refusal(engines("flf2v"), last_image="b.png") == "a last image without a first; give that too, with --image"


def test_an_image_on_the_command_line(engines, tmp_path, capsys):
    """Wrong ones end with 2, a sentence and no file."""
    model = engines("i2v 2.1").model.parts["transformer"].path.parents[1]
    whole = tmp_path / "whole.png"
    Image.fromarray(tiny.picture(48, 32)).save(whole)
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[:-200])
    output = tmp_path / "x.npy"
    for more, sentence in (
        ([], "makes a video from its first frame; give --image"),
        (["--image", str(tmp_path / "no.png")], f"{tmp_path / 'no.png'}: no such file; give the path of a picture"),
        (["--image", str(cut)], f"{cut}: cannot be read ("),
        (["--image", str(tmp_path)], f"{tmp_path} is a folder; name a picture in it"),
        (["--image", str(whole), "--fit", "zoom"], "fit 'zoom': choose crop, pad, stretch"),
        (["--image", str(whole), "--last-image", str(whole)], "takes a first frame only"),
    ):
        assert main(tiny.command(model, output, size=(48, 32), more=more)) == 2
        assert sentence in capsys.readouterr().err
        assert not output.exists()
    with Image.open(whole) as image:
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.jpg", exif=turned(6))
    arguments = tiny.command(model, output, size=(48, 32), frames=5, more=["--image", str(tmp_path / "turned.jpg")])
    assert main(arguments) == 0
    record = json.loads(output.with_suffix(".json").read_text())
    assert record["image"] == f"{tmp_path / 'turned.jpg'}, 48x32, turned by its EXIF orientation"
    assert len(record["image_sha256"]) == 64 and record["fit"] == "crop"


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_an_image_in_a_file_of_jobs(engines, tmp_path, capsys):
    """Each job has its own; a finished one is known by the picture, not by its name."""
    model = engines("5b").model.parts["transformer"].path.parents[1]
    for seed in range(2):
        Image.fromarray(tiny.picture(64, 32, seed)).save(tmp_path / f"{seed}.png")
    jobs = tmp_path / "jobs"
    lines = [{"prompt": "a cat", "image": str(tmp_path / f"{seed}.png"), "output": f"{seed}.npy"} for seed in range(2)]
    jobs.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "a cat", "output": "text.npy"}])))
    arguments = ["generate", "--prompts", str(jobs), "--model", str(model), "--output", f"{tmp_path}/"]
    arguments += ["--size", "64x32", "--frames", "5", "--steps", "2"]
    assert main(arguments) == 0
    made = [np.load(tmp_path / f"{name}.npy") for name in ("0", "1", "text")]
    assert all(np.abs(a - b).max() > 0.01 for a, b in ((made[0], made[1]), (made[0], made[2])))
    capsys.readouterr()
    Image.fromarray(tiny.picture(64, 32, 5)).save(tmp_path / "1.png")
    assert main(arguments) in (1, 2), "1.npy is there, of another picture"
    assert "exists" in capsys.readouterr().err


# Sizes


def test_the_size_of_an_image(engines):
    """Without a size that of the image's aspect at the card's area, by each model's rule; what was done is told."""
    for name, size in (("i2v 2.1", (768, 512)), ("5b", (768, 512))):
        request = engines(name).request(tiny.PROMPT, image=tiny.picture(300, 200))
        assert (request.width, request.height, request.fit) == (*size, "official")
        assert request.origins["size"].startswith("the aspect of array, scaled to card ")
        assert request.settings()["image"] == "array, 300x200"
    given = engines("5b").request(tiny.PROMPT, image=tiny.picture(300, 200), size=(64, 96))
    assert (given.width, given.height, given.fit) == (64, 96, "crop")
    assert given.origins["fit"] == "default for a given size"
    assert engines("5b").request(tiny.PROMPT, image=tiny.picture(300, 200), fit="pad").fit == "pad"
    assert "size 300x200" in refusal(engines("5b"), image=tiny.picture(300, 200), size=(300, 200))


def test_an_extreme_aspect(engines):
    """It is made, and told before it is; where nothing would be left it is refused with the size that would result."""
    engine = engines("i2v 2.1")
    request = engine.request(tiny.PROMPT, image=tiny.picture(60, 2000))
    assert (request.width, request.height) == (96, 3648)
    assert engine.describe(request)["warnings"] == [
        "image 60x2000: the video is 96x3648, far from what models are trained for; crop the image, or give a size"
    ]
    sentence = refusal(engine, image=np.zeros((1, 4000, 3), np.uint8))
    assert sentence.startswith(
        "a picture of 4000x1: a video of its shape with 399360 pixels, in multiples of 16, would"
    )
    assert sentence.endswith("crop it, or give --size")


def test_every_way_to_fit_makes_another_first_frame(engines):
    """Of a picture of another shape; one of the right size stays as it is, whatever the way."""
    engine, picture = engines("5b"), tiny.picture(96, 40)
    shape = {"size": (64, 32), "frames": 5, "steps": 1}
    requests = [engine.request(tiny.PROMPT, image=picture, fit=fit, **shape) for fit in ("crop", "pad", "stretch")]
    frames = [engine.frame(request, request.images[0]) for request in requests]
    assert all(frame.shape == (32, 64, 3) and frame.dtype == np.float32 for frame in frames)
    assert min(np.abs(a - b).max() for a, b in zip(frames, [*frames[1:], frames[0]], strict=True)) > 0.1
    right = tiny.picture(64, 32)
    for request in requests:
        np.testing.assert_array_equal(engine.frame(request, open_picture(right)), np.float32(right) / np.float32(255))


def test_a_last_image_of_another_size(engines):
    """Cut to the video's shape, where one of the first one's size comes to it as the first does."""
    engine, (first, same, other) = engines("flf2v"), (tiny.picture(*size) for size in ((90, 60), (90, 60), (64, 90)))
    for last, wanted in ((same, stretch_bicubic), (other, cover)):
        request = engine.request(tiny.PROMPT, image=first, last_image=last)
        size = request.width, request.height
        np.testing.assert_array_equal(engine.frame(request, request.images[1]), wanted(last, size))


# What the network is given


def test_the_mask_of_known_frames():
    """[latent frames, 4]: the first frame stands for all that its latent frame could hold, the last for itself."""
    ones = [1, 1, 1, 1]
    np.testing.assert_array_equal(mask(9, False, 4), [ones, [0] * 4, [0] * 4])
    np.testing.assert_array_equal(mask(9, True, 4), [ones, [0] * 4, [0, 0, 0, 1]])
    np.testing.assert_array_equal(mask(1, False, 4), [ones])


def test_the_frames_that_are_encoded():
    """The picture, then grey four by four, and the last picture at the very end; all in [-1, 1]."""
    first, last = (np.full((2, 3, 3), value, np.float32) for value in (1.0, 0.0))
    video = np.concatenate(list(chunks([first, last], 9, 4)), 1)
    assert video.shape == (1, 9, 2, 3, 3)
    assert [float(frame[0, 0, 0]) for frame in video[0]] == [1, 0, 0, 0, 0, 0, 0, 0, -1]
    assert [chunk.shape[1] for chunk in chunks([first], 9, 4)] == [1, 4, 4]
    assert [chunk.shape[1] for chunk in chunks([first], 1, 4)] == [1]


def test_what_is_given_stays(engines):
    """The first latent frame of TI2V-5B is that of the picture, at the end too."""
    sample = np.arange(24, dtype=np.float32).reshape(1, 3, 2, 2, 2)
    given = Given(None, np.zeros((1, 1, 2, 2, 2), np.float32))
    np.testing.assert_array_equal(given.first(sample)[:, 1:], sample[:, 1:])
    assert not given.first(sample)[:, 0].any() and given.count == 1
    beside = Given(np.ones((1, 3, 2, 2, 5), np.float32), None)
    assert beside.beside(sample).shape == (1, 3, 2, 2, 7) and beside.count == 0


# Recipes


def test_the_steps_of_two_experts():
    """The first has those at and above the boundary, in timesteps as the network gets them."""
    card, model = describe("wan2.2-t2v-a14b")
    request = resolve(card, model, "a cat")
    times = request.sampler.table().timestep
    high, low = request.stages
    assert (high.guidance_scale, low.guidance_scale, request.boundary_ratio) == (4.0, 3.0, 0.875)
    assert (times[high.steps.stop - 1] >= 875) and (times[low.steps.start] < 875)
    assert (high.steps.start, high.steps.stop, low.steps.stop) == (0, low.steps.start, 40)
    both = resolve(card, model, "a cat", guidance_scale=6.0)
    assert [stage.guidance_scale for stage in both.stages] == [6.0, 6.0], "one value is for both, as in diffusers"
    assert both.origins["guidance_scale_2"] == "guidance_scale"
    for ratio, steps in ((0.0, [40, 0]), (1.0, [0, 40])):
        assert [len(stage.steps) for stage in resolve(card, model, "a cat", boundary_ratio=ratio).stages] == steps
    half = resolve(card, model, "a cat", guidance_scale=4.0, guidance_scale_2=1.0)
    assert [stage.guided for stage in half.stages] == [True, False] and half.branches == 2


def test_experts_that_are_not_there(engines):
    with pytest.raises(vidax.UserError, match=r"boundary ratio 1\.5: from 0, all steps with the first expert, to 1"):
        engines("t2v 2.2").request(tiny.PROMPT, boundary_ratio=1.5)
    engine = engines("5b")
    for fields, sentence in (
        ({"boundary_ratio": 0.9}, "boundary ratio 0.9: 5b has one transformer; leave it out, it is for two experts"),
        (
            {"guidance_scale_2": 3.0},
            "guidance scale 2 3.0: 5b has one transformer; leave it out, it is for two experts",
        ),
    ):
        assert refusal(engine, **fields) == sentence
    nothing = dataclasses.replace(engines("t2v 2.2").model, boundary_ratio=None)
    with pytest.raises(
        vidax.UserError, match="nothing says at which noise the second expert takes over; give --boundary"
    ):
        resolve(engines("t2v 2.2").card, nothing, tiny.PROMPT)


RECIPES = {  # size, frames, fps, steps, guidance, second guidance, shift, boundary; wan/configs and generate.py
    "wan2.1-t2v-1.3b": ((832, 480), 81, 16, 50, 6.0, None, 8.0, None),
    "wan2.1-t2v-14b": ((1280, 720), 81, 16, 50, 5.0, None, 5.0, None),
    "wan2.1-i2v-14b-480p": ((832, 480), 81, 16, 40, 5.0, None, 3.0, None),
    "wan2.1-i2v-14b-720p": ((1280, 720), 81, 16, 40, 5.0, None, 5.0, None),
    "wan2.1-flf2v-14b": ((1280, 720), 81, 16, 50, 5.0, None, 16.0, None),
    "wan2.2-t2v-a14b": ((1280, 720), 81, 16, 40, 4.0, 3.0, 12.0, 0.875),
    "wan2.2-i2v-a14b": ((1280, 720), 81, 16, 40, 3.5, 3.5, 5.0, 0.9),
    "wan2.2-ti2v-5b": ((1280, 704), 121, 24, 50, 5.0, None, 5.0, None),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_official_recipes(name):
    card, model = describe(name)
    width, height = card.size
    pictures = dict(
        zip(("image", "last_image"), [np.zeros((height, width, 3), np.uint8)] * card.images[0], strict=False)
    )
    request = resolve(card, model, "a cat", size=card.size, **pictures)
    found = request.guidance_scale, request.guidance_scale_2, request.sampler.shift, request.boundary_ratio
    assert ((width, height), request.frames, request.fps, request.sampler.steps, *found) == RECIPES[name]
    assert model.images == card.images and request.sampler.grid == "official"
    shake, cuts = "镜头晃动，", "镜头切换，"
    prefix = {"wan2.1-i2v": shake, "wan2.1-flf": cuts + shake}.get(name[:10], "")
    assert request.negative_prompt.startswith(prefix + "色调艳丽")


def test_the_shift_of_small_sizes():
    """generate.py has 3 for 480p with either of the checkpoints of image to video."""
    card, model = describe("wan2.1-i2v-14b-720p")
    request = resolve(card, model, "a cat", size=(480, 832), image=np.zeros((832, 480, 3), np.uint8))
    assert request.sampler.shift == 3.0
    assert request.origins["flow_shift"] == "card wan2.1-i2v-14b-720p, for sizes up to that of 832x480"


def test_cards_say_what_their_models_are():
    for card in CARDS.values():
        _, model = describe(card.name)
        assert (model.images, model.experts) == (card.images, card.experts)


def test_paths_are_paths(engines, tmp_path):
    Image.fromarray(tiny.picture(64, 32)).save(tmp_path / "a.png")
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(tmp_path / "a.png"), tiny.picture(64, 32)):
        request = engines("5b").request(tiny.PROMPT, image=image, size=(64, 32))
        np.testing.assert_array_equal(request.images[0].pixels, tiny.picture(64, 32))
