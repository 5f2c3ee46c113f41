"""CogVideoX through the engine: recipes, what requests may ask, every layout, meshes and streamed layers. No PyTorch.

tests/parity/test_cogvideox_runs.py has whole runs against diffusers.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tiny
import tiny_cogvideox
from published import hollow, manifest
from safetensors.numpy import load_file, save_file

import vidax
from vidax.cli import main
from vidax.engine.checkpoints import convert
from vidax.engine.request import resolve
from vidax.models.interface import Video
from vidax.models.locate import describe, locate
from vidax.models.towers import t5_files
from vidax.models.towers.t5 import T5_XXL, T5Encoder
from vidax.sampling.noise import Stream

SIZE = (96, 64)
FIELDS = {"size": SIZE, "frames": 9, "steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    made = {name: tiny.write_folder(path / name, folder) for name, folder in tiny_cogvideox.FOLDERS.items()}
    return made


@pytest.fixture(scope="module")
def engine(folders):
    made: dict[tuple, vidax.Engine] = {}

    def load(name: str, **options) -> vidax.Engine:
        key = (name, *options.items())
        if key not in made:
            made[key] = vidax.load(folders[name], **{"dtype": "float32", **options})
        return made[key]

    return load


def image_of(name: str) -> dict:
    return {"image": tiny.picture(*SIZE)} if "i2v" in name else {}


def video(engine: vidax.Engine, name: str, **changes) -> np.ndarray:
    return engine.generate(tiny.PROMPT, **{**FIELDS, **image_of(name), **changes}).frames


RECIPES = {  # size, frames, fps, guidance, SNR shift, solver, dynamic guidance; inference/cli_demo.py and README.md
    "cogvideox-2b": ((720, 480), 49, 8, 6.0, 3.0, "ddim", False),
    "cogvideox-5b": ((720, 480), 49, 8, 6.0, 1.0, "dpm", True),
    "cogvideox-5b-i2v": ((720, 480), 49, 8, 6.0, 1.0, "dpm", True),
    "cogvideox1.5-5b": ((1360, 768), 81, 16, 6.0, 1.0, "dpm", True),
    "cogvideox1.5-5b-i2v": ((1360, 768), 81, 16, 6.0, 1.0, "dpm", True),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_official_recipes(name):
    card, model = describe(name)
    image = {"image": np.zeros((480, 720, 3), np.uint8)} if "i2v" in name else {}
    request = resolve(card, model, "a cat", size=card.size, **image)
    found = request.guidance_scale, request.sampler.shift, request.sampler.solver.name, request.dynamic_guidance
    assert ((request.width, request.height), request.frames, request.fps, *found) == RECIPES[name]
    assert request.sampler.steps == 50 and request.negative_prompt == "" and request.sampler.grid == "cogvideox"
    assert model.images == card.images and request.settings()["vae_tiling"] is False
    scales = request.scales(request.stages[0])
    assert len(set(scales)) == (48 if request.dynamic_guidance else 1) or request.dynamic_guidance


# 1.0 makes its own size whatever the image; in 1.5 the shorter side is 768 and the longer a multiple of 16.
@pytest.mark.parametrize(
    ("name", "image", "size"),
    [
        ("cogvideox-5b-i2v", (300, 800), (720, 480)),
        ("cogvideox1.5-5b-i2v", (1360, 768), (1360, 768)),
        ("cogvideox1.5-5b-i2v", (768, 1360), (768, 1360)),
        ("cogvideox1.5-5b-i2v", (1920, 1080), (1360, 768)),  # 1365.3
        ("cogvideox1.5-5b-i2v", (500, 500), (768, 768)),
        ("cogvideox1.5-5b-i2v", (640, 480), (1024, 768)),
        ("cogvideox1.5-5b-i2v", (96, 100), (768, 800)),
    ],
)
def test_the_size_of_a_video_from_an_image(name, image, size):
    card, model = describe(name)
    request = resolve(card, model, "a cat", image=np.zeros((*image[::-1], 3), np.uint8))
    assert (request.width, request.height) == size and request.fit == "official"
    assert (request.origins["size"] == f"card {name}") == (size == card.size)


def test_latents_of_pairs_of_frames():
    """81 frames are 21 latent frames, denoised as 22; all others are odd in number too."""
    _, model = describe("cogvideox1.5-5b")
    assert model.latent_shape(1360, 768, 81) == (22, 96, 170, 16)
    assert model.latent_frames(81) == 21 and model.decoded_chunks(81) == [3] + 9 * [2]
    assert model.attention_shape(1360, 768, 81) == (11 * 48 * 85, 48, 64)
    _, model = describe("cogvideox-5b")
    assert model.latent_shape(720, 480, 49) == (13, 60, 90, 16) and model.decoded_chunks(49) == [3] + 5 * [2]
    tiled = Video(720, 480, 49, 2, tiled=True)
    assert model.tiling(tiled)[:2] == [(30, 45), (30, 45)] and model.decodings(tiled) == 9 * 6
    assert model.latents_to_decode(tiled) == [(1, 3, 30, 45, 16), (1, 2, 30, 45, 16)]


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("2b", {"frames": 13}, "13 frames: this model takes 8k+1; use 9 or 17"),
        ("2b", {"image": tiny.picture(8, 8)}, "takes no image"),
        ("2b", {"solver": "unipc"}, "solver 'unipc': choose ddim or dpm"),
        ("5b-i2v", {}, "makes a video from its first frame; give --image"),
        (
            "5b-i2v",
            {"image": tiny.picture(8, 8), "frames": 17},
            "96x64, 17 frames: 5b-i2v has learned positions for 96x64 and 9 frames alone; leave size and frames out",
        ),
        ("5b-i2v", {"image": tiny.picture(8, 8), "size": (64, 96), "frames": 9}, "64x96, 9 frames: 5b-i2v has learned"),
        ("1.5-5b", {"size": (100, 64)}, "size 100x64: width and height are multiples of 16 here"),
    ],
)
def test_refusals(name, fields, sentence, engine):
    with pytest.raises(vidax.UserError) as error:
        engine(name).request(tiny.PROMPT, **fields)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dynamic_guidance": False}, "dynamic guidance: demo knows none; leave it out"),
        ({"vae_tiling": True}, "vae tiling: the frames of demo are not decoded in tiles; leave it out"),
        ({"solver": "dpm"}, "solver 'dpm': choose unipc or euler"),
    ],
)
def test_what_is_of_cogvideox_alone(fields, sentence):
    with pytest.raises(vidax.UserError, match=sentence):
        resolve(*describe("demo"), "a cat", **fields)
    assert not {"dynamic_guidance", "vae_tiling"} & set(resolve(*describe("demo"), "a cat").settings())


def test_dynamic_guidance_goes_with_the_card_and_its_solver(engine, folders):
    """A folder's scheduler decides the solver: that of 2B is DDIM. A model that no card knows has none by default."""
    assert engine("5b").request(tiny.PROMPT).dynamic_guidance is False
    known = dataclasses.replace(engine("5b").card, dynamic_guidance=True)
    for solver, dynamic in (("dpm", True), ("ddim", False)):
        request = resolve(known, engine("5b").model, tiny.PROMPT, solver=solver)
        assert request.dynamic_guidance is dynamic
        assert (request.origins["dynamic_guidance"] == "solver ddim; with dpm the card has it") == (solver == "ddim")
    assert engine("2b").request(tiny.PROMPT).settings()["solver"] == "ddim"
    assert engine("2b").request(tiny.PROMPT, steps=3, dynamic_guidance=True).origins["dynamic_guidance"] == "given"


@pytest.mark.parametrize(("name", "mesh"), [("5b", "data=2,seq=2,tensor=2"), ("1.5-5b-i2v", "seq=4"), ("2b", "seq=8")])
def test_on_a_mesh(name, mesh, engine):
    """3 heads on 2, 4 and 8 devices; frames of 96x64 in strips."""
    wanted = video(engine(name), name)
    assert np.std(wanted) > 0.1
    np.testing.assert_allclose(video(engine(name, mesh=mesh), name), wanted, atol=2e-4)


@pytest.mark.parametrize("name", ["5b", "1.5-5b-i2v"])
def test_streamed_layers_make_the_same_bits(name, engine, folders, tmp_path):
    wanted = video(engine(name, residency="streamed"), name)
    np.testing.assert_allclose(video(engine(name), name), wanted, atol=1e-5)
    ready = convert(engine(name).model, tmp_path / "ready", dtype="float32")
    for path, options in ((folders[name], {"residency": "mixed:1/2"}), (ready, {"stream_from": "disk"})):
        streamed = vidax.load(path, dtype="float32", **{"residency": "streamed", **options})
        np.testing.assert_array_equal(video(streamed, name), wanted)


def test_bfloat16(engine):
    """Text stays float32; a mean difference of a pixel from float32 of 0.2 %."""
    rounded = engine("5b", dtype="bfloat16")
    kinds = {leaf.dtype for leaf in (rounded.model.text_encoder("bfloat16").spec.blocks.mlp.up.weight,)}
    assert {np.dtype(kind).name for kind in kinds} == {"float32"}
    assert np.abs(video(rounded, "5b") - video(engine("5b"), "5b")).mean() < 0.02


def test_seeds_draw_an_image_of_their_own(engine):
    """Latents of an image are a sample: drawn before the noise, so that a seed decides both."""
    model, shape = engine("1.5-5b-i2v").model, (1, 1, 8, 12, 4)
    encoded = type("Encoded", (), {"mean": np.zeros(shape, np.float32), "sample": lambda self, noise: noise})()
    one, two = (model.given(Video(96, 64, 9, 2, 1), encoded, Stream(seed, order=model.noise_order)) for seed in (1, 2))
    assert one.channels.shape == (1, 4, 8, 12, 4) and one.frames is None
    assert np.abs(one.channels[:, :1]).min() > 0 and not one.channels[:, 1:].any()
    assert np.abs(one.channels - two.channels).max() > 1


def test_many_jobs_are_as_each_alone(engine):
    name, made = "5b-i2v", engine("5b-i2v")
    requests = [made.request(tiny.PROMPT, **{**FIELDS, **image_of(name), "seed": seed}) for seed in (3, 4)]
    one, two = (result.frames for result in made.generate_many(requests))
    np.testing.assert_array_equal(one, video(made, name))
    assert np.abs(one - two).max() > 0.1


def test_tiles(engine):
    """Of 96 x 64 pixels, six tiles; blended, they are other frames, and those of uint8 are rounded."""
    made = engine("5b")
    tiled = made.generate(tiny.PROMPT, **FIELDS, vae_tiling=True)
    assert np.abs(video(made, "5b") - tiled.frames).max() > 0.001
    assert tiled.metadata["vae_tiling"] is True
    rounded = made.generate(tiny.PROMPT, **FIELDS, vae_tiling=True, frames_dtype="uint8").frames
    np.testing.assert_array_equal(rounded, np.round(tiled.frames * 255).astype(np.uint8))


def test_float16_files_are_cast(engine, tmp_path):
    """As 2B is published: the same video as with weights that float16 has rounded before, to what it rounds."""
    folder = tiny.write_folder(tmp_path / "half", tiny_cogvideox.FOLDERS["2b"])
    for file in folder.glob("*/*.safetensors"):
        tensors = {name: tensor.astype(np.float16) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    half = video(vidax.load(folder, dtype="float32"), "2b")
    assert 0 < np.abs(half - video(engine("2b"), "2b")).max() < 0.05


# Layouts


@pytest.mark.parametrize("name", tiny_cogvideox.FOLDERS)
def test_every_layout_makes_the_same_video(name, engine, tmp_path):
    folder = tiny_cogvideox.FOLDERS[name]
    official = vidax.load(tiny_cogvideox.write_official_folder(tmp_path / "official", folder), dtype="float32")
    layouts = {part: component.layout for part, component in official.model.parts.items()}
    assert layouts == {"transformer": "official", "vae": "official", "text_encoder": "diffusers"}
    official.model = dataclasses.replace(official.model, scheduler=folder.scheduler)
    np.testing.assert_array_equal(video(official, name), video(engine(name), name))
    ready = vidax.load(convert(official.model, tmp_path / "ready", dtype="float32"), dtype="float32")
    assert {part.layout for part in ready.model.parts.values()} == {"vidax"}
    assert ready.model.vae == engine(name).model.vae
    np.testing.assert_array_equal(video(ready, name), video(engine(name), name))


def test_parts_are_known_by_their_tensors(folders):
    """Without a model_index.json, and as single files whatever their folder."""
    parts = {part: folders["5b"] / part for part in ("transformer", "vae", "text_encoder", "tokenizer")}
    made = vidax.load(**parts, dtype="float32")
    assert made.model.family == "cogvideox" and made.card.grid == "cogvideox"
    mixed = vidax.load(folders["5b"] / "vae" / "diffusion_pytorch_model.safetensors", **{**parts, "vae": None})
    assert mixed.model.files["vae"].endswith("vae/diffusion_pytorch_model.safetensors")


def test_nothing_says_how_latents_are_scaled(tmp_path):
    """Of a published transformer it is known; of another the config.json must say it, in any layout."""
    coder = {**tiny_cogvideox.VAE_CONFIG, "block_out_channels": [32] * 4, "norm_num_groups": 32}
    folder = tiny.write_folder(tmp_path / "model", tiny_cogvideox.FOLDERS["5b"], vae=coder)
    assert vidax.load(folder).model.vae.scaling_factor == 0.7
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(vidax.UserError, match=r"nothing says how latents are scaled.*put the autoencoder's config"):
        vidax.load(folder)
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(vidax.UserError, match=r"of no published size, and nothing says how positions are made"):
        vidax.load(folder)


@pytest.mark.parametrize(
    ("part", "key", "value", "sentence"),
    [
        ("transformer", "text_embed_dim", 40, "text_embed_dim is 40, but the tensors beside it have 32"),
        ("scheduler", "_class_name", "UniPCMultistepScheduler", "is not for"),
        ("scheduler", "prediction_type", "epsilon", "prediction_type = 'epsilon' is not supported"),
        ("scheduler", "timestep_spacing", "leading", "timestep_spacing = 'leading' is not supported"),
    ],
)
def test_a_folder_that_is_not_whole_or_not_ours(part, key, value, sentence, folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["5b"], folder)
    file = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    config = json.loads(file.read_text()) | {key: value}
    if value == "UniPCMultistepScheduler":
        config = tiny.UNIPC
    file.write_text(json.dumps(config))
    with pytest.raises(vidax.UserError) as error:
        vidax.load(folder).request(tiny.PROMPT)
    assert sentence in str(error.value)


def test_components_of_the_other_family(folders, tmp_path):
    """Each is refused by its name."""
    wan = tiny.write_folder(tmp_path / "wan")
    for part in ("transformer", "vae", "text_encoder"):
        with pytest.raises(vidax.UserError) as error:
            vidax.load(folders["5b"], **{part: wan / part})
        assert str(wan / part) in str(error.value) and "CogVideoX" in str(error.value)
        with pytest.raises(vidax.UserError) as error:
            vidax.load(wan, **{part: folders["5b"] / part})
        assert str(folders["5b"] / part) in str(error.value) and "Wan" in str(error.value)


def test_parts_that_are_not_of_this_family(folders, tmp_path):
    wan, own = tiny.write_folder(tmp_path / "wan"), folders["5b"]
    parts = {part: own / part for part in ("transformer", "vae", "text_encoder", "tokenizer")}
    with pytest.raises(vidax.UserError, match=r"not wan2.1-t2v-1.3b: a transformer of CogVideoX$"):
        vidax.load("wan2.1-t2v-1.3b", **parts)
    with pytest.raises(vidax.UserError, match=r"given as the image encoder, and CogVideoX has none; leave --image-enc"):
        vidax.load(own, image_encoder=wan / "vae")


def test_the_command_line(folders, tmp_path, capsys):
    """check accounts for every tensor; a video, its record, and a plan where nothing compiles."""
    assert main(["check", str(folders["1.5-5b-i2v"]), "--json"]) == 0
    accounts = {account["component"]: account for account in json.loads(capsys.readouterr().out)}
    assert set(accounts) == {"transformer", "vae", "text_encoder"} and not any(a["skipped"] for a in accounts.values())
    words = tiny.command(folders["2b"], tmp_path / "x.mp4", size=SIZE, more=["--vae-tiling", "--dynamic-guidance"])
    assert main(words) == 0
    record = json.loads((tmp_path / "x.json").read_text())
    assert (record["solver"], record["sigma_grid"], record["flow_shift"]) == ("ddim", "cogvideox", 3.0)
    assert record["dynamic_guidance"] is True and record["vae_tiling"] is True and record["fps"] == 8


@pytest.mark.parametrize("name", RECIPES)
def test_published_files_find_their_card(name, tmp_path):
    """Full-size files in the official layout, which tell nothing of positions or of how latents are scaled, but for
    their weights.
    """
    card, architecture = describe(name)
    stem = name.replace("cogvideox1.5-", "1.5-").replace("cogvideox-", "").replace("-", "_")
    text = tiny.Part(T5Encoder.spec(T5_XXL), t5_files.TRANSFORMERS, "")
    shapes = {
        "transformer": manifest(f"cogvideox_{stem}_sat_DERIVED"),
        "vae": manifest("cogvideox_vae_sat_DERIVED"),
        "text_encoder": text.shapes,
    }
    parts = {part: hollow(tmp_path / f"{part}.safetensors", of) for part, of in shapes.items()}
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    found, model = locate(None, parts)
    assert found == card and (model.dit, model.vae, model.text) == (card.dit, architecture.vae, T5_XXL)
    assert locate(tmp_path, {})[0] == card == locate(name, {**parts, "tokenizer": tmp_path / "tokenizer.json"})[0]
    assert card.parts == ("transformer", "vae", "text_encoder", "tokenizer")
