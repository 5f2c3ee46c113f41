"""`vidax check` and `vidax convert`: every tensor accounted for, hashes compared, a form that loads as it is."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

import vidax
from vidax import cli
from vidax.engine import checkpoints
from vidax.models.locate import locate
from vidax.weights import load

FIELDS = {"size": (32, 48), "frames": 5, "steps": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("source") / "wan")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "wan"
    assert cli.main(["convert", str(source), "--output", str(out), "--dtype", "float32", "--quiet"]) == 0
    return out


@pytest.fixture
def frames():
    def generate(folder):
        return vidax.load(folder, dtype="float32").generate("a red cat", **FIELDS).frames

    return generate


def test_converted_model_makes_the_same_video(source, converted, frames):
    assert np.array_equal(frames(source), frames(converted))


def test_official_files_convert_to_the_same(converted, tmp_path, frames):
    official = tiny.write_official_folder(tmp_path / "official")
    assert cli.main(["convert", str(official), "--output", str(tmp_path / "out"), "--dtype", "float32", "--quiet"]) == 0
    for part in ("transformer", "vae", "text_encoder"):
        ours, theirs = (load_file(folder / part / "model.safetensors") for folder in (tmp_path / "out", converted))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert frames(tmp_path / "out").shape == (5, 48, 32, 3)


@pytest.mark.parametrize("layout", ["diffusers", "official"])
@pytest.mark.parametrize("name", tiny.FOLDERS)
def test_every_model_converts_whole(name, layout, tmp_path, capsys):
    """What comes with it stays: experts and image encoder, where one takes over, how steps and pictures are made."""
    folder = tiny.publishable(tiny.FOLDERS[name])
    write = tiny.write_folder if layout == "diffusers" else tiny.write_official_folder
    source, out = write(tmp_path / "source", folder), tmp_path / "out"
    assert cli.main(["convert", str(source), "--output", str(out), "--dtype", "float32", "--quiet"]) == 0
    one, other = vidax.load(source, dtype="float32"), vidax.load(out, dtype="float32")
    assert {part.layout for part in other.model.parts.values()} == {"vidax"}
    for field in ("dit", "vae", "text", "image", "experts", "images", "options", "scheduler", "image_processor"):
        assert getattr(one.model, field) == getattr(other.model, field), field
    assert (out / "model_index.json").exists() == (layout == "diffusers")
    if layout == "diffusers":
        index = json.loads((out / "model_index.json").read_text())
        assert {key: index[key] for key in ("_class_name", *one.model.options)} == {
            "_class_name": folder.pipeline,
            "boundary_ratio": folder.boundary_ratio,
            "expand_timesteps": folder.expand_timesteps,
        }
        assert other.model.image_processor == (tiny.PROCESSOR_CONFIG if folder.image_encoder else None)
    fields = tiny.short_run(folder)
    assert np.array_equal(one.generate(**fields).frames, other.generate(**fields).frames)

    parts = {"vae", "text_encoder", "transformer"} | ({"transformer_2"} if folder.experts == 2 else set())
    parts |= {"image_encoder"} if folder.image_encoder else set()
    for path, kept in ((source, layout), (out, "vidax")):
        assert cli.main(["check", str(path), "--json"]) == 0
        accounts = {account["component"]: account for account in json.loads(capsys.readouterr().out)}
        assert accounts.keys() == parts and {account["layout"] for account in accounts.values()} == {kept}
        unread = set() if kept == "vidax" else {"image_encoder"} & parts  # the last layer of CLIP, and its text half
        assert {part for part in parts if accounts[part]["skipped"]} == unread
    assert cli.main(["check", str(out), "--verify", "--quiet"]) == 0


def test_converted_parameters_are_ours(source, converted):
    """Names, stacks and shapes of the file are those of the tree, and so are the values."""
    (part, _, layout), (same, _, _) = (
        locate(folder, {})[1].components(jnp.float32)["transformer"] for folder in (converted, source)
    )
    assert layout == "vidax"
    assert part.checkpoint["blocks.self_attn.q.weight"].shape == (2, 48, 48)
    ours, theirs = load(*part), load(*same)
    assert np.array_equal(ours.blocks.self_attn.q.weight, theirs.blocks.self_attn.q.weight)
    assert np.array_equal(ours.patch_embedding.weight, theirs.patch_embedding.weight)


def test_convert_casts_matrices_and_keeps_float32_islands(source, tmp_path):
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    model = locate(tmp_path / "out", {})[1]
    dtypes = {
        name: tensor.dtype for name, tensor in model.components(jnp.bfloat16)["transformer"][0].checkpoint.items()
    }
    assert dtypes["blocks.ffn.fc1.weight"] == jnp.bfloat16
    assert dtypes["blocks.modulation"] == dtypes["time_projection.weight"] == np.float32


def test_convert_refuses_what_is_there_and_leaves_nothing_behind(source, tmp_path, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "there")]) == 2
    assert "there exists; name a folder that does not" in capsys.readouterr().err

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_tokenizer", full)
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "out"), "--quiet"]) == 2
    assert "no space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_convert_refuses_a_disk_that_is_too_small(source, small_disk, capsys):
    assert cli.main(["convert", str(source), "--output", str(small_disk / "out"), "--quiet"]) == 2
    assert "needs 0.0 GB" in capsys.readouterr().err
    assert list(small_disk.iterdir()) == []


def test_check_accounts_for_every_tensor(source, capsys):
    assert cli.main(["check", str(source), "--json"]) == 0
    accounts = {account["component"]: account for account in json.loads(capsys.readouterr().out)}
    assert set(accounts) == {"transformer", "vae", "text_encoder"}
    stored = load_file(source / "transformer" / "diffusion_pytorch_model.safetensors")
    assert accounts["transformer"]["tensors"] == len(stored)
    assert accounts["transformer"]["values"] == sum(tensor.size for tensor in stored.values())
    assert cli.main(["check", str(source)]) == 0
    assert "transformer   diffusers layout, 69 tensors -> 42 parameters, 79,632 values" in capsys.readouterr().out


def test_check_compares_the_model_that_is_named(source, capsys):
    assert cli.main(["check", "wan2.1-t2v-1.3b", "--weights", str(source)]) == 2
    assert "not wan2.1-t2v-1.3b: dim 48 instead of 1536, layers 2 instead of 30" in capsys.readouterr().err
    assert cli.main(["check", "wan2.1-t2v-1.3", "--weights", str(source)]) == 2
    assert "did you mean 'wan2.1-t2v-1.3b'?" in capsys.readouterr().err


def punch_hole(file):
    """Four KiB of zeros in the middle, as an interrupted download leaves them."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)
    file.write_bytes(data)


def test_verify_finds_a_hole_in_a_converted_file(converted, tmp_path, capsys):
    copy = shutil.copytree(converted, tmp_path / "copy")
    assert cli.main(["check", str(copy), "--verify"]) == 0
    assert capsys.readouterr().out.count("SHA-256 is right") == 3
    punch_hole(copy / "vae" / "model.safetensors")
    assert cli.main(["check", str(copy)]) == 0, "names and shapes are right"
    capsys.readouterr()
    assert cli.main(["check", str(copy), "--verify", "--quiet"]) == 2
    assert "vae/model.safetensors: damaged: its SHA-256 is " in capsys.readouterr().err


def test_verify_knows_the_hugging_face_cache_and_its_downloads(source, tmp_path, capsys):
    import hashlib

    cache, plain = (shutil.copytree(source, tmp_path / name) for name in ("snapshot", "plain"))
    file = "transformer/diffusion_pytorch_model.safetensors"
    digest = hashlib.sha256((source / file).read_bytes()).hexdigest()

    (tmp_path / "blobs").mkdir()
    (cache / file).rename(tmp_path / "blobs" / digest)
    (cache / file).symlink_to(tmp_path / "blobs" / digest)

    note = plain / ".cache" / "huggingface" / "download" / f"{file}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'0' * 40}\n{digest}\n1700000000.0\n")

    for folder in (cache, plain):
        assert cli.main(["check", str(folder), "--verify"]) == 0
        out = capsys.readouterr().out
        assert out.count("SHA-256 is right") == 1 and out.count("no SHA-256 is known") == 2
        punch_hole((folder / file).resolve())
        assert cli.main(["check", str(folder), "--verify", "--quiet"]) == 2
        assert "damaged" in capsys.readouterr().err
