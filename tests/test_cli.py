"""The command line as a user meets it: what it writes, what it refuses and how it says so."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pytest
import tiny
from PIL import Image

from vidax import cli
from vidax.engine import tasks
from vidax.engine.engine import Engine
from vidax.models import model
from vidax.models.wan.pipeline import WanModel

SMALL = ["--size", "32x32", "--frames", "5", "--steps", "2", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("tiny") / "wan")


@pytest.fixture
def broken(folder, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folder, tmp_path / "wan"))


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; returns its sentence."""

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) if "exits" in words else _returns() as caught:
            code = cli.main([w for w in words if w != "exits"])
        code = caught.value.code if "exits" in words else code
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out == ""
        assert err.startswith("vidax: ") and err.count("Traceback") == 0
        return err

    return run


class _returns:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_writes_a_video_its_record_and_a_contact_sheet(folder, tmp_path, capsys):
    out = tmp_path / "clip.mp4"
    words = ["generate", "a red cat", "--model", str(folder), "--output", str(out), *SMALL, "--contact-sheet", "--json"]
    assert cli.main(words) == 0
    metadata = json.loads(capsys.readouterr().out)
    with av.open(str(out)) as video:
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, sum(1 for _ in video.decode(stream))) == (32, 32, 5)
    assert json.loads((tmp_path / "clip.json").read_text()) == metadata
    assert (metadata["prompt"], metadata["size"], metadata["frames"], metadata["steps"]) == ("a red cat", "32x32", 5, 2)
    assert metadata["origins"]["steps"] == "given" and metadata["origins"]["flow_shift"] == "scheduler_config.json"
    assert metadata["sigma_grid"] == "diffusers" and metadata["seed"] == 42
    assert set(metadata["timings_seconds"]) >= {"encode text", "denoise", "decode"}
    with Image.open(tmp_path / "clip-frames.png") as sheet:
        assert sheet.size == (4 * 36 - 4, 2 * 36 - 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clip-frames.png", "clip.json", "clip.mp4"]


def test_npy_holds_what_the_video_shows(folder, tmp_path):
    words = ["generate", "a red cat", "--model", str(folder), *SMALL]
    assert cli.main([*words, "--output", str(tmp_path / "x.npy")]) == 0
    frames = np.load(tmp_path / "x.npy")
    assert frames.dtype == np.float32 and frames.shape == (5, 32, 32, 3)
    assert frames.min() >= 0 and frames.max() <= 1


def test_one_frame_is_a_picture_with_a_free_name(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["generate", "A red cat!", "--model", str(folder), "--size", "32x32", "--frames", "1", "--steps", "1"]
    assert cli.main(words) == 0
    assert cli.main(words) == 0
    assert capsys.readouterr().out.split() == ["a-red-cat-42.png", "a-red-cat-42-0002.png"]
    with Image.open("a-red-cat-42.png") as picture:
        assert picture.size == (32, 32)


def test_every_default_is_printed_with_its_origin(folder, tmp_path, capsys):
    words = ["generate", "a red cat", "--model", str(folder), "--size", "32x32", "--frames", "1", "--steps", "1"]
    assert cli.main([*words, "--output", str(tmp_path / "x.png")]) == 0
    lines = capsys.readouterr().err
    for text in ("attention", "bfloat16", "guidance scale   5.0  (card wan)", "seed             42  (default)"):
        assert text in lines


def test_underscores_are_dashes(folder, tmp_path):
    words = ["generate", "cat", "--model", str(folder), *SMALL, "--guidance_scale=1", "--flow_shift", "2", "--json"]
    assert cli.main([*words, "--output", str(tmp_path / "x.npy")]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["guidance_scale"] == 1.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--height", "32", "--width=48", "--num-frames", "5", "--num_inference_steps=2"], ("48x32", 5, 2)),
        (["--size", "48*32", "--frames", "5", "--steps", "2"], ("48x32", 5, 2)),
        (["--size", "48X32", "--num_frames=5", "--steps", "2"], ("48x32", 5, 2)),
        (["--height", "64", "--frames", "5", "--steps", "2"], ("832x64", 5, 2)),  # the width is the card's
    ],
)
def test_names_of_diffusers_and_the_official_code_are_taken(folder, monkeypatch, capsys, words, expected):
    """Up to the settings: nothing is generated."""
    monkeypatch.setattr(Engine, "run", lambda *_: iter(()))
    with pytest.raises(ValueError, match="zip"):
        cli.main(["generate", "cat", "--model", str(folder), "--output", "/tmp/", *words])
    lines = capsys.readouterr().err
    for name, value in zip(("size", "frames", "steps"), expected, strict=True):
        assert f"  {name:16} {value}  (given)\n" in lines


def test_random_seed_is_recorded_and_repeats(folder, tmp_path, capsys):
    words = ["generate", "cat", "--model", str(folder), *SMALL, "--output", str(tmp_path / "a.npy")]
    assert cli.main([*words, "--seed", "-1"]) == 0
    seed = json.loads((tmp_path / "a.json").read_text())["seed"]
    words[-1] = str(tmp_path / "b.npy")
    assert cli.main([*words, "--seed", str(seed)]) == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


def test_models_lists_every_card(capsys):
    assert cli.main(["models", "--json"]) == 0
    cards = {card["name"]: card for card in json.loads(capsys.readouterr().out)}
    assert set(cards) >= {"demo", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b"}
    assert cards["wan2.1-t2v-14b"]["size"] == [1280, 720]
    assert cli.main(["models"]) == 0
    assert "wan2.1-t2v-14b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--frames", "80"], "80 frames: this model takes 4k+1; use 77 or 81"),
        (["--frames", "0"], "0 frames: this model takes 4k+1; use 1"),
        (["--frames", "2"], "2 frames: this model takes 4k+1; use 1 or 5"),
        (["--size", "100x65"], "size 100x65: width and height are multiples of 16 here; the nearest is 96x64"),
        (["--size", "8x32"], "size 8x32: width and height are multiples of 16 here; the nearest is 16x32"),
        (["--steps", "0"], "0 steps: the number of steps is a whole number, 1 or more"),
        (["--flow-shift", "0"], "flow shift 0.0: the shift is a number above 0"),
        (["--guidance-scale", "-1"], "guidance scale -1.0: a number of 0 or more"),
        (["--guidance-scale", "nan"], "guidance scale nan: a number of 0 or more"),
        (["--solver", "ddim"], "solver 'ddim': choose unipc or euler"),
        (["--noise", "numpy"], "noise 'numpy': choose torch or jax"),
        (["--dtype", "float16"], "dtype 'float16': choose bfloat16 or float32"),
        (["--seed", "-2"], "seed -2: a whole number from 0 to 2**64 - 1, or -1"),
        (["--fps", "0"], "0 frames per second: at least 1"),
        (["--output", "clip.gif"], "the suffix '.gif' is not an output format; use .mp4"),
        (["--output", "clip.png"], "17 frames: a .png holds one"),
        (["--output", "no/such/clip.mp4"], "there is no folder no/such; create it first"),
    ],
)
def test_refuses_settings(refused, folder, flags, sentence):
    frames = [] if "--frames" in flags else ["--frames", "17"]
    assert sentence in refused("generate", "a cat", "--model", str(folder), "--size", "32x32", *frames, *flags)


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_refuses_an_empty_prompt(refused, folder, prompt):
    assert "the prompt is empty: say what the video shows" in refused("generate", prompt, "--model", str(folder))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generate", "cat", "--step", "3"], "unknown flag --step; did you mean --steps?"),
        (["generate", "cat", "--negative_promt=x"], "unknown flag --negative-promt; did you mean --negative-prompt?"),
        (["generate", "cat", "runs"], "'runs' is one argument too many; put the prompt in quotes"),
        (["generate", "cat", "--size", "big"], "'big' is not a size; write width x height, for example 832x480"),
        (["generate", "cat", "--frames", "many"], "argument --frames/--num-frames: invalid int value: 'many'"),
        (["generate", "cat", "--seed", "1,b"], "'1,b' is neither a seed nor several; write 7, or 1,2,3 for three"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_refuses_the_command(refused, words, sentence):
    assert sentence in refused("exits", *words)


def test_unknown_command_names_the_nearest(refused):
    assert (
        "unknown command 'generat'; did you mean 'generate'? there are generate, plan, models, check, convert, cache"
        in refused("generat")
    )


def test_unknown_model_names_the_nearest(refused):
    assert "did you mean 'wan2.1-t2v-14b'?" in refused("generate", "cat", "--model", "wan2.1-t2v-14")
    sentence = refused("generate", "cat", "--model", "/no/such/folder")
    assert "neither a model's name nor a folder, nor OWNER/NAME of a Hugging Face repository; known models" in sentence


def test_model_without_weights_says_where_to_get_them(refused):
    sentence = refused("generate", "cat", "--model", "wan2.1-t2v-14b")
    assert "Wan-AI/Wan2.1-T2V-14B: no such folder, not in the Hugging Face cache " in sentence
    assert "run `hf download Wan-AI/Wan2.1-T2V-14B --local-dir DIR` and give DIR as the model" in sentence


def test_an_official_folder_and_parts_of_it(folder, tmp_path):
    official = tiny.write_official_folder(tmp_path / "official")
    parts = [f"--{name.replace('_', '-')}={official / file}" for name, file in tiny.OFFICIAL_FILES.items()]
    tokenizer = ["--tokenizer", str(folder / "tokenizer")]
    words = ["generate", tiny.PROMPT, *SMALL, "--output"]
    assert cli.main([*words, str(tmp_path / "a.npy"), "--model", str(official)]) == 0
    assert cli.main([*words, str(tmp_path / "b.npy"), *parts, *tokenizer]) == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
    record = json.loads((tmp_path / "b.json").read_text())
    assert record["weights"]["vae"] == str(official / "Wan2.1_VAE.pth")
    assert record["weights"]["tokenizer"] == str(folder / "tokenizer")
    assert record["origins"]["flow_shift"] == record["origins"]["solver"] == f"card {record['model']}"


def test_a_wrong_part_is_refused_by_its_name(refused, folder):
    vae, transformer = folder / "vae", folder / "transformer"
    assert "safetensors: is the autoencoder, not the text encoder" in refused(
        "generate", "cat", "--model", str(folder), "--text-encoder", str(vae)
    )
    assert "safetensors: is the transformer, not the autoencoder" in refused(
        "generate", "cat", "--model", str(folder), "--vae", str(transformer)
    )


def test_refuses_an_existing_file(refused, folder, tmp_path):
    out = tmp_path / "x.mp4"
    out.write_text("mine")
    assert f"{out} exists" in refused("generate", "cat", "--model", str(folder), *SMALL, "--output", str(out))
    assert out.read_text() == "mine"
    assert cli.main(["generate", "cat", "--model", str(folder), *SMALL, "--output", str(out), "--overwrite"]) == 0
    assert out.read_bytes() != b"mine"


# ---- damaged checkpoints: one sentence each, before or while loading, nothing written


def damage_truncated(folder: Path) -> str:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "diffusion_pytorch_model.safetensors: "


def damage_header(folder: Path) -> str:
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{not json      !" + file.read_bytes()[24:])
    return "diffusion_pytorch_model.safetensors: "


def damage_missing_shard(folder: Path) -> str:
    part = folder / "text_encoder"
    index = {"metadata": {}, "weight_map": {"shared.weight": "model-00001-of-00002.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    (part / "model.safetensors").unlink()
    return "model-00001-of-00002.safetensors"


def edit_tensors(change):
    def damage(folder: Path) -> str:
        from safetensors.numpy import load_file, save_file

        file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        expected = change(tensors)
        save_file(tensors, file)
        return expected

    return damage


def drop_tensor(tensors: dict) -> str:
    del tensors["blocks.1.attn2.to_q.weight"]
    return "1 missing: blocks.1.attn2.to_q.weight"


def add_tensor(tensors: dict) -> str:
    tensors["blocks.0.attn1.extra"] = np.zeros(3, np.float32)
    return "1 unexpected: blocks.0.attn1.extra"


def reshape_tensor(tensors: dict) -> str:
    tensors["proj_out.bias"] = np.zeros(7, np.float32)
    return "proj_out.bias is [7] where the model has [64]"


def damage_config(folder: Path) -> str:
    (folder / "transformer" / "config.json").write_text("{")
    return "config.json: "


def damage_tokenizer(folder: Path) -> str:
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return "tokenizer.json: not a readable tokenizer.json"


def damage_scheduler(folder: Path) -> str:
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_karras_sigmas": True}))
    return "use_karras_sigmas = True is not supported"


def damage_variant(folder: Path) -> str:
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"boundary_ratio": 0.875}))
    return "one of two experts (boundary_ratio 0.875), and there is no other"


def damage_pipeline(folder: Path) -> str:
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": "FluxPipeline"}))
    return "holds a FluxPipeline; vidax runs WanPipeline"


def damage_text_width(folder: Path) -> str:
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_dim": 48}))
    return "config.json: text_dim is 48, but the tensors beside it have 32; take both from one model"


def damage_part_missing(folder: Path) -> str:
    shutil.rmtree(folder / "vae")
    return "model_index.json names vae, but there is no such sub-folder"


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncated,
        damage_header,
        damage_missing_shard,
        edit_tensors(drop_tensor),
        edit_tensors(add_tensor),
        edit_tensors(reshape_tensor),
        damage_config,
        damage_tokenizer,
        damage_scheduler,
        damage_variant,
        damage_pipeline,
        damage_text_width,
        damage_part_missing,
    ],
    ids=lambda damage: damage.__name__,
)
def test_refuses_a_damaged_folder(refused, broken, tmp_path, damage):
    sentence = damage(broken)
    out = tmp_path / "out"
    out.mkdir()
    assert sentence in refused("generate", "cat", "--model", str(broken), *SMALL, "--output", str(out))
    assert list(out.iterdir()) == []


def test_interrupt_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(WanModel, "decode", interrupted)
    words = ["generate", "cat", "--model", str(folder), *SMALL, "--output", str(tmp_path / "x.mp4")]
    assert cli.main(words) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quiet", [["--quiet"], []])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_waits_for_the_end_of_a_step(folder, tmp_path, monkeypatch, capfd, quiet, times):
    """Once: the text is still encoded. Twice: it is not."""
    run, encoded = model.encode_leave, []

    def interrupted(*inputs):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        encoded.append(run(*inputs))
        return encoded[-1]

    monkeypatch.setattr(model, "encode_leave", interrupted)
    before = signal.getsignal(signal.SIGINT)
    words = ["generate", "cat", "--model", str(folder), *SMALL[:-1], *quiet, "--output", str(tmp_path / "x.mp4")]
    assert cli.main(words) == 130
    assert len(encoded) == 2 - times
    told = capfd.readouterr().err
    assert "interrupted; nothing was written" in told
    assert told.count("stopping after this step; Ctrl-C again does not wait") == (0 if quiet else 1)
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_after_the_last_video_comes_too_late(folder, tmp_path, monkeypatch, capsys):
    write = tasks.write

    def interrupted(*inputs, **options):
        files = write(*inputs, **options)
        signal.raise_signal(signal.SIGINT)
        return files

    monkeypatch.setattr(tasks, "write", interrupted)
    assert cli.main(["generate", "cat", "--model", str(folder), *SMALL, "--output", str(tmp_path / "x.npy")]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.npy"]


def test_ctrl_c_of_a_real_process(folder, tmp_path):
    words = ["generate", "cat", "--model", str(folder), "--size", "32x32", "--frames", "5", "--steps", "100000"]
    command = [sys.executable, "-m", "vidax.cli", *words, "--output", str(tmp_path / "x.mp4")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, text=True)
    assert process.stderr is not None
    while "negative prompt" not in process.stderr.readline():  # the last of the settings; then the work begins
        assert process.poll() is None
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == "" and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "vidax", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("vidax ")
