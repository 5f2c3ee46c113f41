"""Repositories of the Hugging Face hub: what the cache on disk has, what is asked of the network, what is said without
one. The hub's own code reads the cache; downloads are stood in for.
"""

import dataclasses
import functools
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import tiny
from huggingface_hub import constants

import vidax
from vidax.errors import UserError
from vidax.models import locate as locating
from vidax.weights import hub

DIFFUSERS = "Someone/Tiny-Diffusers"
OFFICIAL = "Someone/Tiny"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, repository: str, write=tiny.write_folder) -> Path:
    """A repository as the hub keeps it: a revision whose files are links to blobs. Returns the revision's folder."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123abcd")
    (home / "blobs").mkdir()
    folder = home / "snapshots" / "0123abcd"
    folder.parent.mkdir()
    write(folder)
    for index, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        shutil.move(file, home / "blobs" / str(index))
        file.symlink_to(home / "blobs" / str(index))
    return folder


@pytest.fixture
def network(monkeypatch):
    """Stands in for downloads: patterns asked for, by repository; `write` puts the files into the cache."""

    class Network:
        def __init__(self):
            self.asked: dict[str, list[str]] = {}
            self.write = None

        def snapshot_download(self, repository, *, local_files_only=False, allow_patterns=None):
            if not local_files_only:
                self.asked[repository] = allow_patterns
                if self.write:
                    return str(self.write(repository))
            return real(repository, local_files_only=local_files_only, allow_patterns=allow_patterns)

    real, stand_in = huggingface_hub.snapshot_download, Network()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
    return stand_in


@pytest.mark.parametrize(
    ("repository", "write"), [(DIFFUSERS, tiny.write_folder), (OFFICIAL, tiny.write_official_folder)]
)
def test_a_repository_in_the_cache_needs_no_network(cache, network, repository, write):
    folder = put(cache, repository, write)
    engine = vidax.load(repository)
    assert engine.model.files["transformer"].startswith(str(folder)) and not network.asked
    assert engine.card.name == repository.split("/")[1]


def test_a_repository_is_downloaded_without_what_is_not_needed(cache, network):
    network.write = lambda repository: put(cache, repository)
    assert vidax.load(DIFFUSERS).model.dit.layers == 2
    patterns = network.asked[DIFFUSERS]
    assert {"transformer/*.safetensors*", "model_index.json", "Wan2.[12]_VAE.pth", "google/umt5-xxl/*"} <= set(patterns)
    # What only some models have is not missed where it is not.
    assert {"transformer_2/*.safetensors*", "low_noise_model/*.safetensors*", "image_processor/*.json"} <= set(patterns)


@pytest.mark.parametrize("lost", ["vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"])
def test_what_the_cache_lacks_is_downloaded(cache, network, lost):
    folder = put(cache, DIFFUSERS)
    kept = (folder / lost).resolve()
    (folder / lost).unlink()

    def write(repository):
        (folder / lost).symlink_to(kept)
        return folder

    network.write = write
    vidax.load(DIFFUSERS)
    assert list(network.asked) == [DIFFUSERS]


def test_a_part_that_is_given_is_not_downloaded(cache, network, tmp_path):
    whole = tiny.write_folder(tmp_path / "whole")
    folder = put(cache, DIFFUSERS)
    (folder / "vae/diffusion_pytorch_model.safetensors").unlink()
    assert vidax.load(DIFFUSERS, vae=whole).model.files["vae"].startswith(str(whole))
    assert not network.asked


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "no network"])
def test_nothing_cached_and_no_network(cache, monkeypatch, how):
    why = "HF_HUB_OFFLINE is set"
    if how == "no network":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        why = "Connection refused"
        real = huggingface_hub.snapshot_download

        def unreachable(repository, *, local_files_only=False, **more):
            if local_files_only:
                return real(repository, local_files_only=True)
            raise ConnectionError("Connection refused\nwith more lines")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError) as error:
        vidax.load(DIFFUSERS)
    assert str(error.value) == (
        f"{DIFFUSERS}: no such folder, not in the Hugging Face cache {cache}, and it cannot be downloaded: {why}; "
        f"where there is a network, run `hf download {DIFFUSERS} --local-dir DIR` and give DIR as the model, "
        "or name what is needed of it: --transformer, --vae, --text-encoder, --tokenizer"
    )


def test_only_a_tokenizer_is_needed(cache, tmp_path, tiny_card):
    official = tiny.write_official_folder(tmp_path / "official")
    parts = {name: tmp_path / file for name, file in tiny.OFFICIAL_FILES.items()}
    for name, file in tiny.OFFICIAL_FILES.items():
        shutil.copy(official / file, parts[name])
    with pytest.raises(UserError, match=r"give DIR as the model, or name what is needed of it: --tokenizer$"):
        vidax.load("tiny", **parts)


def test_a_part_of_a_repository_cached_and_no_network(cache, network):
    folder = put(cache, DIFFUSERS)
    (folder / "text_encoder/model.safetensors").unlink()
    network.write = lambda repository: folder  # what the hub does without a network
    with pytest.raises(UserError) as error:
        vidax.load(DIFFUSERS)
    assert str(error.value).startswith(
        f"{DIFFUSERS}: {folder} in the Hugging Face cache lacks the text_encoder, which cannot be downloaded or is not"
    )


def test_a_shard_that_is_not_there(tmp_path):
    layout = {"transformer": ("transformer/*.safetensors*",)}
    (tmp_path / "transformer").mkdir()
    for i in (1, 3):
        (tmp_path / f"transformer/model-0000{i}-of-00003.safetensors").touch()
    assert hub.absent(tmp_path, layout) == ["transformer"]
    (tmp_path / "transformer/model-00002-of-00003.safetensors").touch()
    assert hub.absent(tmp_path, layout) == []


@pytest.fixture
def tiny_card(monkeypatch):
    return add_card(monkeypatch, "wan2.1-t2v-1.3b", tiny.Folder())


def add_card(monkeypatch, like: str, folder: tiny.Folder) -> vidax.Card:
    """A card "tiny" of another's recipe, and of the network of a folder."""
    dit = tiny.transformer(folder.transformer).spec.config
    card = dataclasses.replace(locating.CARDS[like], name="tiny", repository=OFFICIAL, dit=dit)
    monkeypatch.setitem(locating.CARDS, "tiny", card)
    return card


@pytest.mark.parametrize("copies", [[OFFICIAL], [DIFFUSERS], [DIFFUSERS, OFFICIAL]])
def test_a_card_takes_either_copy_and_keeps_its_recipe(cache, network, tiny_card, copies):
    """The same name gives the same settings, whichever copy is in the cache."""
    for copy in copies:
        put(cache, copy, tiny.write_official_folder if copy == OFFICIAL else tiny.write_folder)
    engine = vidax.load("tiny")
    assert f"models--{copies[-1].replace('/', '--')}/" in engine.model.files["transformer"] and not network.asked
    request = engine.request("a cat", size=(32, 32))
    assert (request.sampler.grid, request.sampler.shift) == ("official", 8.0)
    assert request.origins["flow_shift"].startswith("card tiny: README.md")


def test_a_card_is_downloaded_from_its_own_repository(cache, network, tiny_card):
    network.write = lambda repository: put(cache, repository, tiny.write_official_folder)
    vidax.load("tiny")
    assert list(network.asked) == [OFFICIAL]


def test_a_card_whose_repository_holds_another_model(cache, network, tiny_card):
    put(cache, OFFICIAL, lambda folder: tiny.write_folder(folder, transformer=tiny.UNEVEN_TRANSFORMER_CONFIG))
    with pytest.raises(UserError, match=r"not tiny: dim 60 instead of 48, layers 3 instead of 2, heads 3 instead of 2"):
        vidax.load("tiny")


T2V_22, I2V_21 = tiny.FOLDERS["t2v 2.2"], tiny.FOLDERS["i2v 2.1"]
WRITE = {OFFICIAL: tiny.write_official_folder, DIFFUSERS: tiny.write_folder}


@pytest.mark.parametrize("name", ["tiny", OFFICIAL])
@pytest.mark.parametrize("part", ["transformer", "transformer_2"])
def test_two_experts_are_cached_when_both_are(cache, network, monkeypatch, name, part):
    """A download that was broken off has the small files of each folder."""
    add_card(monkeypatch, "wan2.2-t2v-a14b", T2V_22)
    folder = put(cache, OFFICIAL, functools.partial(tiny.write_official_folder, folder=T2V_22))
    assert vidax.load(name).model.experts == 2 and not network.asked
    lost = folder / tiny.EXPERT_FILES[part]
    kept = lost.resolve()
    lost.unlink()

    def write(repository):
        lost.symlink_to(kept)
        return folder

    network.write = write
    assert vidax.load(name).model.experts == 2
    assert "low_noise_model/*.safetensors*" in network.asked[OFFICIAL]


def test_an_expert_that_is_given_is_not_downloaded(cache, network, tmp_path):
    folder = put(cache, OFFICIAL, functools.partial(tiny.write_official_folder, folder=T2V_22))
    given = shutil.copyfile(folder / tiny.EXPERT_FILES["transformer_2"], tmp_path / "mine.safetensors")
    (folder / tiny.EXPERT_FILES["transformer_2"]).unlink()
    shutil.copy(folder / "low_noise_model/config.json", tmp_path)
    assert vidax.load(OFFICIAL, transformer_2=given).model.files["transformer_2"] == str(given)
    assert not network.asked


@pytest.mark.parametrize("repository", WRITE)
@pytest.mark.parametrize("name", ["tiny", "repository"])
def test_an_image_encoder_is_part_of_what_needs_one(cache, network, monkeypatch, repository, name):
    add_card(monkeypatch, "wan2.1-i2v-14b-480p", I2V_21)
    folder = put(cache, repository, functools.partial(WRITE[repository], folder=tiny.publishable(I2V_21)))
    model = vidax.load("tiny" if name == "tiny" else repository).model
    assert model.files["image_encoder"].startswith(str(folder)) and not network.asked
    # A card's pictures are prepared in the official way, whichever copy is at hand.
    own = name == "repository" and repository == DIFFUSERS
    assert model.image_processor == (tiny.PROCESSOR_CONFIG if own else None)


@pytest.mark.parametrize("name", ["a/b/c", "-x/y", "a--b/..", "nobody/nothing"])
def test_names_that_are_no_repository(cache, name):
    with pytest.raises(UserError, match=r"no such folder, not in|is neither a model's name nor a folder"):
        vidax.load(name)
