"""Published layouts: how a checkpoint is recognised, the config its tensors tell, and what is said of a wrong one.

The real checkpoints are stood for by their names and shapes (tests/manifests); the tiny model is written out in every
layout and must make the same video from each.
"""

import dataclasses
import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from pth_files import Ordered, write_pth
from safetensors.numpy import load_file, save_file

import vidax
from vidax import nn
from vidax.errors import UserError
from vidax.models.locate import locate
from vidax.models.wan import mapping
from vidax.models.wan.config import (
    UMT5_XXL,
    WAN21_1_3B,
    WAN21_14B,
    WAN21_VAE,
    WAN22_VAE,
    vae22_config,
    vae_config,
)
from vidax.models.wan.layouts import WAN21
from vidax.models.wan.vae import VAE as Autoencoder
from vidax.weights import Checkpoint, Tensor, check_names, checkpoint_names
from vidax.weights.layouts import PREFIXES, identify, read_component

MANIFESTS = Path(__file__).parent / "manifests"
PUBLISHED = {
    "wan2.1_t2v_1.3b_dit": ("transformer", WAN21_1_3B, 825),
    "wan2.1_t2v_14b_dit": ("transformer", WAN21_14B, 1095),
    "wan2.1_vae": ("vae", WAN21_VAE, 194),
    "wan_umt5_xxl_enc": ("text_encoder", UMT5_XXL, 242),
}


def checkpoint(shapes: dict[str, Any], path: str = "/nowhere/a.safetensors") -> Checkpoint:
    """Tensors without bytes."""
    tensors = {name: Tensor(Path(path), np.dtype(np.float32), tuple(s), b"", 0) for name, s in shapes.items()}
    return Checkpoint(Path(path), tensors, {})


def published(name: str, layout: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint. tests/test_manifests.py shows that the diffusers names are right."""
    component, config, _ = PUBLISHED[name]
    if layout == "official":
        return {
            k: tuple(v) for k, v in json.loads(gzip.decompress((MANIFESTS / f"{name}.json.gz").read_bytes())).items()
        }
    kind = WAN21.kinds[component]
    names = next(form.names(config) for form in kind.layouts if form.name == layout)
    return {n: leaf.spec.stored_shape for leaf in checkpoint_names(kind.spec(config), names) for n in leaf.names}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", ["official", "diffusers"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_of_every_layout_has_one_parameter(name, layout, prefix):
    """The config, layout and prefix are found from names and shapes alone; names map to parameters and back, one to
    one. Nothing is allocated.
    """
    component, config, count = PUBLISHED[name]
    file = checkpoint({prefix + tensor: shape for tensor, shape in published(name, layout).items()})
    found = identify(WAN21, file)
    assert found is not None and (found[0], found[1].name, found[2]) == (component, layout, prefix)
    opened = read_component(WAN21, component, file)
    assert (opened.config, opened.layout, opened.names.prefix) == (config, layout, prefix)
    spec = WAN21.kinds[component].spec(config)
    match = check_names(spec, opened.names, {name: tensor.shape for name, tensor in file.items()})
    back = {tensor: (leaf.path, layer) for leaf in match.leaves for layer, tensor in enumerate(leaf.names)}
    assert set(back) == set(file) and len(back) == len(set(back.values())) == count
    assert {path for path, _ in back.values()} == {path for path, _ in nn.named_leaves(spec)}
    assert not match.skipped and not match.twins


def test_layouts_agree_on_every_parameter():
    """Official and diffusers names of one parameter have one shape, so a repack between them is a rename."""
    for name, (component, config, _) in PUBLISHED.items():
        spec = WAN21.kinds[component].spec(config)
        official, diffusers = (
            checkpoint_names(spec, form.names(config)) for form in WAN21.kinds[component].layouts if not form.ours
        )
        a, b = published(name, "official"), published(name, "diffusers")
        for one, other in zip(official, diffusers, strict=True):
            assert [a[n] for n in one.names] == [b[n] for n in other.names]


def test_a_tokenizer_inside_a_text_encoder_is_no_tensor_of_it():
    shapes = published("wan_umt5_xxl_enc", "diffusers") | {"spiece_model": (4_548_313,)}
    assert read_component(WAN21, "text_encoder", checkpoint(shapes)).config == UMT5_XXL


@pytest.mark.parametrize("names", [("shared.weight",), ("encoder.embed_tokens.weight",), None])
def test_either_name_of_the_embedding(names):
    shapes = published("wan_umt5_xxl_enc", "diffusers")
    value = shapes.pop("shared.weight")
    shapes |= dict.fromkeys(names or ("shared.weight", "encoder.embed_tokens.weight"), value)
    assert read_component(WAN21, "text_encoder", checkpoint(shapes)).config == UMT5_XXL


# What is refused, by name and number.


def refusal(component: str, shapes: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        read_component(WAN21, component, checkpoint(shapes))
    assert str(error.value).startswith("/nowhere/a.safetensors: ")
    return str(error.value).removeprefix("/nowhere/a.safetensors: ")


DIT, DIT_14B, VAE, TEXT = (published(name, "official") for name in PUBLISHED)
HF_TEXT = published("wan_umt5_xxl_enc", "diffusers")
IMAGE = {"img_emb.proj.1.weight": (1280, 1280), "patch_embedding.weight": (5120, 36, 1, 2, 2)}
VAE_22 = {
    "encoder.downsamples.0.downsamples.0.residual.2.weight": (160, 160, 3, 3, 3),
    "conv2.weight": (48, 48, 1, 1, 1),
}
BIAS = "relative_attention_bias.weight"
T5 = {n: s for n, s in HF_TEXT.items() if not (n.endswith(BIAS) and ".block.0." not in n)} | {
    "shared.weight": (32128, 4096)
}
LORA = {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": (16, 1536), "a": (3,)}

REFUSALS = {
    "an autoencoder as the transformer": (
        "transformer", VAE, "is the autoencoder, not the transformer; take the file of the model that you named"
    ),
    "a text encoder as the autoencoder": ("vae", TEXT, "is the text encoder, not the autoencoder"),
    "a transformer as the text encoder": ("text_encoder", DIT, "is the transformer, not the text encoder"),
    "image to video": (
        "transformer", DIT_14B | IMAGE,
        "the transformer of an image-to-video Wan 2.1, in_channels 36; Wan 2.1 text to video takes in_channels 16",
    ),
    "image to video, with a prefix": (
        "transformer", {f"model.diffusion_model.{n}": s for n, s in (DIT_14B | IMAGE).items()},
        "the transformer of an image-to-video Wan 2.1, in_channels 36",
    ),
    "image to video without an image branch": (
        "transformer", DIT_14B | {"patch_embedding.weight": (5120, 36, 1, 2, 2)},
        "in_channels 36; Wan 2.1 text to video takes 16",
    ),
    "VACE": ("transformer", DIT | {"vace_patch_embedding.weight": (1536, 96, 1, 2, 2)}, "the transformer of Wan VACE"),
    "the autoencoder of Wan 2.2": (
        "vae", VAE_22, "the autoencoder of Wan 2.2, latent_channels 48; Wan 2.1 text to video takes latent_channels 16"
    ),
    "48 latent channels": (
        "vae", VAE | {"conv2.weight": (48, 48, 1, 1, 1)}, "latent_channels 48; Wan 2.1 text to video takes 16"
    ),
    "CLIP": ("text_encoder", {"visual.transformer.0.norm1.weight": (1280,)}, "a CLIP image encoder, for image"),
    "T5 v1.1": (
        "text_encoder", T5,
        "the encoder of T5 v1.1, whose position biases are in its first layer only, vocabulary 32128; "
        "Wan 2.1 text to video takes vocabulary 256384",
    ),
    "scaled float8": ("transformer", DIT | {"scaled_fp8": (2,)}, "quantized to scaled float8, not bfloat16 or float32"),
    "a LoRA": (
        "transformer", LORA,
        "no transformer of Wan 2.1 text to video in official or diffusers layout: "
        "its 2 tensors are a, diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    ),
    "nothing": ("vae", {}, "no autoencoder of Wan 2.1 text to video in official or diffusers layout: its 0 tensors"),
    "a missing tensor": (
        "transformer", {n: s for n, s in DIT.items() if n != "blocks.7.norm3.bias"},
        "its tensors are not those of this model; check that it belongs to the model you named and is complete\n"
        "  1 missing: blocks.7.norm3.bias [1536]",
    ),
    "a missing tensor that tells a number": (
        "transformer", {n: s for n, s in DIT.items() if n != "head.head.weight"},
        "has no tensor head.head.weight; it is not complete, download it again",
    ),
    "a missing layer": (
        "transformer", {n: s for n, s in DIT.items() if not n.startswith("blocks.7.")},
        "its tensors are not those of this model; check that it belongs to the model you named and is complete\n"
        "  27 missing: blocks.7.modulation [1, 6, 1536], ",
    ),
    "a tensor of other axes": (
        "transformer", DIT | {"patch_embedding.weight": (1536, 64)},
        "patch_embedding.weight is [1536, 64], where 5 axes are due; take the file of the model that you named",
    ),
    "an axis of nothing": (
        "vae", VAE | {"encoder.conv1.weight": (0, 3, 3, 3, 3)}, "encoder.conv1.weight is [0, 3, 3, 3, 3], where 5 axes",
    ),
    "more tensors": (
        "vae", VAE | {"loss.perceptual.weight": (3,)},
        "its tensors are not those of this model; check that it belongs to the model you named and is complete\n"
        "  1 unexpected: loss.perceptual.weight [3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_component_is_refused_by_name_and_number(case):
    component, shapes, sentence = REFUSALS[case]
    assert refusal(component, shapes).startswith(sentence)


def test_heads_that_no_tensor_tells():
    """128 channels each as in every published transformer, or as in a known model; else a config.json has to say."""
    small = {n: tuple(256 if x == 1536 else 1536 if x == 9216 else x for x in s) for n, s in DIT.items()}
    assert read_component(WAN21, "transformer", checkpoint(small)).config.heads == 2
    odd = {n: tuple(96 if x == 1536 else 576 if x == 9216 else x for x in s) for n, s in DIT.items()}
    sentence = refusal("transformer", odd)
    assert sentence.startswith(
        "dim 96 is no multiple of 128, the head size of the published models; put the config.json"
    )


# Files and folders of the tiny model.

FIELDS = {"size": (32, 32), "frames": 5, "steps": 2, "guidance_scale": 5.0, "negative_prompt": tiny.NEGATIVE_PROMPT}


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> Path:
    return tiny.write_official_folder(tmp_path_factory.mktemp("tiny") / "official")


@pytest.fixture(scope="module")
def diffusers(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "diffusers"
    return tiny.write_folder(folder, vae=tiny.OFFICIAL_VAE_CONFIG)


def frames(engine: vidax.Engine) -> np.ndarray:
    return engine.generate(tiny.PROMPT, **FIELDS).frames


@pytest.fixture(scope="module")
def expected(diffusers) -> np.ndarray:
    """The video of the diffusers folder, with the sampler that a model without a scheduler has."""
    engine = vidax.load(diffusers, dtype="float32")
    engine.model = dataclasses.replace(engine.model, scheduler=None)
    return frames(engine)


def test_an_official_folder_makes_the_same_video(official, expected):
    engine = vidax.load(official, dtype="float32")
    assert {name: part.layout for name, part in engine.model.parts.items()} == dict.fromkeys(WAN21.kinds, "official")
    result = engine.generate(tiny.PROMPT, **FIELDS)
    np.testing.assert_array_equal(result.frames, expected)
    assert result.metadata["weights"] == {name: str(official / file) for name, file in tiny.OFFICIAL_FILES.items()} | {
        "tokenizer": str(official / "google/umt5-xxl/tokenizer.json")
    }
    origins, settings = result.metadata["origins"], result.metadata
    assert {origins[name] for name in ("flow_shift", "solver", "sigma_grid")} == {"card official"}
    assert (settings["flow_shift"], settings["solver"], settings["sigma_grid"]) == (5.0, "unipc2", "official")


def test_the_scheduler_of_a_folder_stays_when_its_parts_are_replaced(official, diffusers):
    parts = {name: official / file for name, file in tiny.OFFICIAL_FILES.items()}
    engine = vidax.load(diffusers, **parts, dtype="float32")
    assert engine.model.files["tokenizer"] == str(diffusers / "tokenizer")
    result = engine.generate(tiny.PROMPT, **FIELDS)
    assert result.metadata["origins"]["sigma_grid"] == "scheduler_config.json"
    np.testing.assert_array_equal(result.frames, frames(vidax.load(diffusers, dtype="float32")))


def sharded(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    where = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        file = f"diffusion_pytorch_model-0000{i + 1}-of-00003.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def single_files(folder: Path, diffusers: Path) -> dict[str, Path]:
    """What ComfyUI loads: prefixes, an official autoencoder as safetensors, HF names for the text encoder."""
    folder.mkdir()
    weights = tiny.official_weights()
    (folder / "config.json").write_text(json.dumps(tiny.OFFICIAL_CONFIG))
    parts = {
        "transformer": {f"model.diffusion_model.{name}": array for name, array in weights["transformer"].items()},
        "vae": {f"vae.{name}": array for name, array in weights["vae"].items()},
        "text_encoder": load_file(diffusers / "text_encoder/model.safetensors"),
    }
    for name, tensors in parts.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in parts}


@pytest.mark.parametrize(
    "form", ["single files", "wrapped .pt files", "folders", "a folder of single files", "sharded"]
)
def test_parts_in_every_form_make_the_same_video(form, tmp_path, official, diffusers, expected):
    weights, config = tiny.official_weights(), json.dumps(tiny.OFFICIAL_CONFIG)
    tokenizer, model = diffusers / "tokenizer", None
    if form == "single files":
        parts = single_files(tmp_path / "files", diffusers)
    elif form == "wrapped .pt files":
        parts = {name: write_pth(tmp_path / f"{name}.pt", {"state_dict": Ordered(weights[name])}) for name in weights}
        (tmp_path / "config.json").write_text(config)
    elif form == "folders":  # one of a whole diffusers model, one of a whole official model, one of the part alone
        parts = {"transformer": diffusers, "vae": official, "text_encoder": diffusers / "text_encoder"}
    elif form == "a folder of single files":
        single_files(tmp_path / "files", diffusers)
        parts, model = {}, tmp_path / "files"
    else:
        parts = {"transformer": sharded(tmp_path / "shards", weights["transformer"]), "vae": official}
        parts["text_encoder"] = official / tiny.OFFICIAL_FILES["text_encoder"]
        (tmp_path / "shards/config.json").write_text(config)
    engine = vidax.load(model, **parts, tokenizer=tokenizer, dtype="float32")
    np.testing.assert_array_equal(frames(engine), expected)


def test_the_tokenizer_of_a_text_encoder_that_brings_none(official, tmp_path):
    """It is found beside the text encoder, or asked for."""
    parts = {name: official / file for name, file in tiny.OFFICIAL_FILES.items()}
    assert vidax.load(**parts).model.files["tokenizer"].endswith("official/google/umt5-xxl/tokenizer.json")
    alone = shutil.copy(parts["text_encoder"], tmp_path / "t5.pth")
    with pytest.raises(UserError, match=r"holds no tokenizer\.json or spiece\.model .* give one with --tokenizer"):
        vidax.load(**parts | {"text_encoder": alone})


def test_a_checkpoint_file_as_the_model(official):
    parts = {name: official / file for name, file in tiny.OFFICIAL_FILES.items()}
    card, model = locate(parts.pop("transformer"), parts)
    assert card.name == "diffusion_pytorch_model" and model.dit.layers == 2


# Whole models that are not one.


def refused(model, **parts) -> str:
    with pytest.raises(UserError) as error:
        vidax.load(model, **parts)
    return str(error.value)


def test_folders_that_are_no_whole_model(official, diffusers, tmp_path):
    assert refused(tmp_path) == (
        f"{tmp_path}: no whole model: no transformer and no autoencoder and no text encoder; "
        "give the folder of one that is, or --transformer and --vae and --text-encoder"
    )
    assert refused(diffusers / "transformer") == (
        f"{diffusers / 'transformer'}: no whole model: no autoencoder and no text encoder; "
        "give the folder of one that is, or --vae and --text-encoder"
    )
    file = official / tiny.OFFICIAL_FILES["vae"]
    assert refused(file).startswith(f"{file}: no whole model: no transformer and no text encoder; give")
    assert refused(None, vae=file).startswith(f"{file}: no whole model: no transformer and no text encoder; give")
    assert refused(None, vae=tmp_path / "x.pth") == (
        f"{tmp_path / 'x.pth'}: no such file or folder; it is given as the vae"
    )


def test_two_files_of_one_component(official, tmp_path):
    folder = Path(shutil.copytree(official, tmp_path / "wan"))
    shutil.copy(folder / "Wan2.1_VAE.pth", folder / "mine.pth")
    several = f"{folder}: holds several of the kind autoencoder (Wan2.1_VAE.pth, mine.pth); name the file with --vae"
    assert refused(folder) == several
    assert refused(official, vae=folder) == several
    assert vidax.load(folder, vae=folder / "mine.pth").model.files["vae"] == str(folder / "mine.pth")


def test_a_folder_without_the_part(official, tmp_path):
    for name in ("transformer", "text_encoder"):
        shutil.copy(official / tiny.OFFICIAL_FILES[name], tmp_path)
    files = "diffusion_pytorch_model.safetensors, models_t5_umt5-xxl-enc-bf16.pth"
    assert refused(official, vae=tmp_path) == f"{tmp_path}: holds no autoencoder among its checkpoints ({files})"


def test_strangers_in_a_folder(official, tmp_path):
    """Wan 2.2's autoencoder in the place of 2.1's is named; what image to video has besides is not looked at."""
    folder = Path(shutil.copytree(official, tmp_path / "wan"))
    for name in ("clip.pth", "other-clip.pth"):
        write_pth(folder / name, {"visual.transformer.0.norm1.weight": np.ones(3, np.float32)})
    save_file({"lora": np.ones(3, np.float32)}, folder / "style.safetensors")
    assert vidax.load(folder).card.name == "wan"
    (folder / "Wan2.1_VAE.pth").unlink()
    write_pth(folder / "Wan2.2_VAE.pth", {name: np.ones(shape[:1] * 2, np.float32) for name, shape in VAE_22.items()})
    assert refused(folder).startswith(f"{folder / 'Wan2.2_VAE.pth'}: the autoencoder of Wan 2.2, latent_channels 48;")


@pytest.mark.parametrize(
    "names", [mapping.vae_official(WAN22_VAE), mapping.VAE22_DIFFUSERS], ids=["official", "diffusers"]
)
def test_the_autoencoder_of_22_for_a_model_of_21(names):
    """The whole of it, in each layout."""
    leaves = checkpoint_names(Autoencoder.spec(WAN22_VAE), names)
    sentence = "the autoencoder of Wan 2.2, latent_channels 48; Wan 2.1 text to video takes latent_channels 16"
    assert refusal("vae", {n: leaf.spec.stored_shape for leaf in leaves for n in leaf.names}) == sentence


def test_a_config_of_the_other_autoencoder():
    published = tiny.VAE22_CONFIG | {"base_dim": 160, "decoder_base_dim": 256, "num_res_blocks": 2}
    statistics = {key: published[key] for key in ("latents_mean", "latents_std")}
    own = {key: tuple(value) for key, value in statistics.items()}
    assert vae22_config({}, "a.json") == WAN22_VAE
    assert vae22_config(published, "a.json") == dataclasses.replace(WAN22_VAE, **own)
    for read, config, sentence in (
        (vae_config, published, "a.json: is_residual is True; Wan 2.1 text-to-video needs False"),
        (
            vae22_config,
            tiny.VAE_CONFIG | {"is_residual": False},
            "is_residual is False; the autoencoder of Wan 2.2 needs",
        ),
        (vae22_config, published | {"patch_size": 4}, "a.json: patch_size is 4; the autoencoder of Wan 2.2 needs 2"),
        (vae22_config, published | {"z_dim": 16}, "a.json: latents_mean has 48 values for z_dim 16"),
    ):
        with pytest.raises(UserError, match=sentence):
            read(config, "a.json")


def test_a_config_that_contradicts_the_tensors(official, tmp_path):
    folder = Path(shutil.copytree(official, tmp_path / "wan"))

    def with_config(**changes) -> str:
        (folder / "config.json").write_text(json.dumps(tiny.OFFICIAL_CONFIG | changes))
        return refused(folder).removeprefix(f"{folder / 'config.json'}: ")

    assert with_config(num_layers=3) == ("num_layers is 3, but the tensors beside it have 2; take both from one model")
    assert with_config(num_heads=5) == "5 heads of size unknown do not make dim 48"
    assert with_config(num_heads="two") == "the number of heads is 'two'; it is a whole number of 1 or more"
    assert with_config(model_type="i2v") == "model_type is 'i2v'; Wan 2.1 text-to-video needs 't2v'"
    assert with_config(text_len=226) == "text_len is 226; Wan 2.1 text-to-video needs 512"
    assert "dim 48 is no multiple of 128" in with_config(_class_name="HunyuanModel"), "another file's, and not read"
    (folder / "transformer").mkdir()
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        shutil.move(folder / name, folder / "transformer" / name)
    assert refused(folder) == (
        f"{folder / 'transformer/config.json'}: describes a HunyuanModel; "
        "the transformer of Wan 2.1 text to video is a WanTransformer3DModel"
    )


def test_parts_of_two_models(official, tmp_path):
    config = {**tiny.TEXT_ENCODER_CONFIG, "d_model": 40}
    wide = tiny.text_encoder(config)
    file = tmp_path / "wide.safetensors"
    save_file(tiny.weights(wide.shapes), file)
    assert refused(official, text_encoder=file) == (
        f"{official / tiny.OFFICIAL_FILES['transformer']}: the transformer has text_dim 32 where {file} has 40; "
        "take all components from one model"
    )


def hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of full size that takes no room: all of it is a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def test_the_published_files_by_the_name_of_their_card(official, tmp_path):
    """Full-size files of a 14B model and of a 1.3B model, opened and checked; a wrong one is refused by its numbers."""
    shapes = {"transformer": DIT, "vae": VAE, "text_encoder": TEXT}
    parts: dict[str, Path] = {name: hollow(tmp_path / f"{name}.safetensors", s) for name, s in shapes.items()}
    parts["tokenizer"] = official / "google/umt5-xxl"
    engine = vidax.load("wan2.1-t2v-1.3b", **parts)
    assert engine.card.name == vidax.load(**parts).card.name == "wan2.1-t2v-1.3b"
    request = engine.request("a cat")
    assert (request.sampler.grid, request.sampler.shift, request.frames) == (
        "official",
        8.0,
        81,
    )
    assert request.origins["solver"] == "card wan2.1-t2v-1.3b"
    assert request.origins["flow_shift"].startswith("card wan2.1-t2v-1.3b: README.md of Wan2.1")

    large = hollow(tmp_path / "14b.safetensors", DIT_14B)
    assert refused("wan2.1-t2v-1.3b", **parts | {"transformer": large}) == (
        f"{large}: not wan2.1-t2v-1.3b: dim 5120 instead of 1536, layers 40 instead of 30, heads 40 instead of 12, "
        "mlp_dim 13824 instead of 8960"
    )
    assert vidax.load(**parts | {"transformer": large}).card.name == "wan2.1-t2v-14b"
    small = hollow(tmp_path / "small.safetensors", TEXT | {"token_embedding.weight": (32128, 4096)})
    assert refused("wan2.1-t2v-1.3b", **parts | {"text_encoder": small}) == (
        f"{small}: not the text encoder of Wan 2.1: vocabulary 32128 instead of 256384"
    )
    assert refused("wan2.1-t2v-1.3b", **parts | {"vae": official}) == (
        f"{official / 'Wan2.1_VAE.pth'}: not the autoencoder of Wan 2.1: "
        "base_dim 8 instead of 96, blocks 1 instead of 2"
    )
