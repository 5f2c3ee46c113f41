"""Published layouts: how a checkpoint is recognised, the config its tensors tell, and what is said of a wrong one.

The real checkpoints are stood for by their names and shapes (tests/manifests); the tiny model is written out in every
layout and must make the same video from each.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from pth_files import Ordered, write_pth
from published import FLF2V, hollow, manifest
from safetensors.numpy import load_file, save_file

import vidax
from vidax import nn
from vidax.engine.checkpoints import open_named
from vidax.errors import UserError
from vidax.models.interface import PARTS
from vidax.models.locate import describe, locate
from vidax.models.registry import CARDS
from vidax.models.towers.clip_vision import CLIPVision
from vidax.models.wan import mapping
from vidax.models.wan.config import (
    CLIP_VIT_H,
    UMT5_XXL,
    WAN21_1_3B,
    WAN21_14B,
    WAN21_FLF2V,
    WAN21_I2V,
    WAN21_VAE,
    WAN22_5B,
    WAN22_I2V,
    WAN22_VAE,
    vae_config,
)
from vidax.models.wan.layouts import WAN
from vidax.weights import Checkpoint, Tensor, check_names, checkpoint_names
from vidax.weights.layouts import PREFIXES, identify, read_component
from vidax.weights.mapping import Leaf

PUBLISHED = {
    "wan2.1_t2v_1.3b_dit": ("transformer", WAN21_1_3B, 825),
    "wan2.1_t2v_14b_dit": ("transformer", WAN21_14B, 1095),
    "wan2.1_i2v_14b_dit": ("transformer", WAN21_I2V, 1303),
    FLF2V: ("transformer", WAN21_FLF2V, 1304),
    "wan2.2_t2v_a14b_expert_dit": ("transformer", WAN21_14B, 1095),
    "wan2.2_i2v_a14b_expert_dit": ("transformer", WAN22_I2V, 1095),
    "wan2.2_ti2v_5b_dit": ("transformer", WAN22_5B, 825),
    "wan2.1_vae": ("vae", WAN21_VAE, 194),
    "wan2.2_vae": ("vae", WAN22_VAE, 196),
    "wan_umt5_xxl_enc": ("text_encoder", UMT5_XXL, 242),
}
CLIP = "wan2.1_clip_xlm_roberta_vit_h14"


def checkpoint(shapes: dict[str, Any], path: str = "/nowhere/a.safetensors") -> Checkpoint:
    """Tensors without bytes."""
    tensors = {name: Tensor(Path(path), np.dtype(np.float32), tuple(s), b"", 0) for name, s in shapes.items()}
    return Checkpoint(Path(path), tensors, {})


def published(name: str, layout: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint. tests/test_manifests.py shows that the diffusers names are right."""
    if layout == "official":
        return manifest(name)
    component, config, _ = PUBLISHED[name]
    leaves = leaves_of(component, config, layout)
    return {name: leaf.spec.stored_shape for leaf in leaves for name in leaf.names}


def leaves_of(component: str, config: Any, layout: str) -> list[Leaf]:
    """A component's tensors in the layout of that name that has them all: there are two of the autoencoder."""
    kind = WAN.kinds[component]
    for form in kind.layouts:
        if form.name == layout:
            leaves = checkpoint_names(kind.spec(config), form.names(config))
            if set(form.markers) <= {name for leaf in leaves for name in leaf.names}:
                return leaves
    raise AssertionError(f"no layout {layout} of {component}")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", ["official", "diffusers"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_of_every_layout_has_one_parameter(name, layout, prefix):
    """The config, layout and prefix are found from names and shapes alone; names map to parameters and back, one to
    one. Nothing is allocated.
    """
    component, config, count = PUBLISHED[name]
    file = checkpoint({prefix + tensor: shape for tensor, shape in published(name, layout).items()})
    found = identify(WAN, file)
    assert found is not None and (found[0], found[1].name, found[2]) == (component, layout, prefix)
    opened = read_component(WAN, component, file)
    assert (opened.config, opened.layout, opened.names.prefix) == (config, layout, prefix)
    spec = WAN.kinds[component].spec(config)
    match = check_names(spec, opened.names, {name: tensor.shape for name, tensor in file.items()})
    back = {tensor: (leaf.path, layer) for leaf in match.leaves for layer, tensor in enumerate(leaf.names)}
    assert set(back) == set(file) and len(back) == len(set(back.values())) == count
    assert {path for path, _ in back.values()} == {path for path, _ in nn.named_leaves(spec)}
    assert not match.skipped and not match.twins


def test_layouts_agree_on_every_parameter():
    """Official and diffusers names of one parameter have one shape, so a repack between them is a rename."""
    for name, (component, config, _) in PUBLISHED.items():
        official, diffusers = (leaves_of(component, config, layout) for layout in ("official", "diffusers"))
        a, b = published(name, "official"), published(name, "diffusers")
        for one, other in zip(official, diffusers, strict=True):
            assert [a[n] for n in one.names] == [b[n] for n in other.names]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", ["official", "diffusers", "transformers 5"])
def test_an_image_encoder(layout, prefix):
    """All of its config but the heads is read off its tensors, of which some are left: tests/test_clip_vision.py."""
    inside = {"diffusers": "vision_model.", "transformers 5": ""}.get(layout)
    if inside is None:
        shapes = manifest(CLIP)
    else:
        spec = CLIPVision.spec(dataclasses.replace(CLIP_VIT_H, layers=CLIP_VIT_H.layers + 1))
        leaves = checkpoint_names(spec, mapping.clip_diffusers(CLIP_VIT_H, inside))
        shapes = {name: leaf.spec.stored_shape for leaf in leaves for name in leaf.names}
    opened = read_component(WAN, "image_encoder", checkpoint({prefix + name: s for name, s in shapes.items()}))
    assert (opened.config, opened.names.prefix) == (CLIP_VIT_H, prefix)
    assert opened.layout == ("official" if inside is None else "diffusers")


def test_a_tokenizer_inside_a_text_encoder_is_no_tensor_of_it():
    shapes = published("wan_umt5_xxl_enc", "diffusers") | {"spiece_model": (4_548_313,)}
    assert read_component(WAN, "text_encoder", checkpoint(shapes)).config == UMT5_XXL


@pytest.mark.parametrize("names", [("shared.weight",), ("encoder.embed_tokens.weight",), None])
def test_either_name_of_the_embedding(names):
    shapes = published("wan_umt5_xxl_enc", "diffusers")
    value = shapes.pop("shared.weight")
    shapes |= dict.fromkeys(names or ("shared.weight", "encoder.embed_tokens.weight"), value)
    assert read_component(WAN, "text_encoder", checkpoint(shapes)).config == UMT5_XXL


# What is refused, by name and number.


def refusal(component: str, shapes: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        read_component(WAN, component, checkpoint(shapes))
    assert str(error.value).startswith("/nowhere/a.safetensors: ")
    return str(error.value).removeprefix("/nowhere/a.safetensors: ")


DIT, DIT_I2V, VAE = map(manifest, ("wan2.1_t2v_1.3b_dit", "wan2.1_i2v_14b_dit", "wan2.1_vae"))
TEXT, HF_TEXT = (published("wan_umt5_xxl_enc", layout) for layout in ("official", "diffusers"))
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
    "an image encoder as the text encoder": (
        "text_encoder", manifest(CLIP), "is the image encoder, not the text encoder"
    ),
    "image to video without its image embedding": (
        "transformer", {n: s for n, s in DIT_I2V.items() if not n.startswith("img_emb.")},
        "its tensors are not those of this model; check that it belongs to the model you named and is complete\n"
        "  200 unexpected: blocks.0.cross_attn.k_img.",
    ),
    "image to video that lacks one of it": (
        "transformer", {n: s for n, s in DIT_I2V.items() if n != "img_emb.proj.4.bias"},
        "its tensors are not those of this model; check that it belongs to the model you named and is complete\n"
        "  1 missing: img_emb.proj.4.bias [5120]",
    ),
    "VACE": ("transformer", DIT | {"vace_patch_embedding.weight": (1536, 96, 1, 2, 2)}, "the transformer of Wan VACE"),
    "48 latent channels of 2.1": (
        "vae", VAE | {"conv2.weight": (48, 48, 1, 1, 1)}, "latents_mean has 16 values for z_dim 48"
    ),
    "T5 v1.1": (
        "text_encoder", T5,
        "the encoder of T5 v1.1, whose position biases are in its first layer only, vocabulary 32128; "
        "Wan takes vocabulary 256384",
    ),
    "scaled float8": ("transformer", DIT | {"scaled_fp8": (2,)}, "quantized to scaled float8, not bfloat16 or float32"),
    "a LoRA": (
        "transformer", LORA,
        "no transformer of Wan in official or diffusers layout: "
        "its 2 tensors are a, diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    ),
    "nothing": ("vae", {}, "no autoencoder of Wan in official or diffusers layout: its 0 tensors"),
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
    assert read_component(WAN, "transformer", checkpoint(small)).config.heads == 2
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
    assert {name: part.layout for name, part in engine.model.parts.items()} == dict.fromkeys(
        tiny.OFFICIAL_FILES, "official"
    )
    result = engine.generate(tiny.PROMPT, **FIELDS)
    np.testing.assert_array_equal(result.frames, expected)
    assert result.metadata["weights"] == {name: str(official / file) for name, file in tiny.OFFICIAL_FILES.items()} | {
        "tokenizer": str(official / "google/umt5-xxl/tokenizer.json")
    }
    origins, settings = result.metadata["origins"], result.metadata
    assert {origins[name] for name in ("flow_shift", "solver", "sigma_grid")} == {"card official"}
    assert (settings["flow_shift"], settings["solver"], settings["sigma_grid"]) == (5.0, "unipc2", "official")


@pytest.mark.parametrize("name", tiny.FOLDERS)
def test_either_layout_of_every_model_makes_the_same_video(name, tmp_path):
    """From its images, with both of its experts: one step each."""
    folder = tiny.publishable(tiny.FOLDERS[name])
    official = tiny.write_official_folder(tmp_path / "official", folder)
    engine, other = (
        vidax.load(path, dtype="float32") for path in (official, tiny.write_folder(tmp_path / "diffusers", folder))
    )
    files = {part: str(official / file) for part, file in tiny.official_files(folder).items()}
    assert engine.model.files == files | {"tokenizer": str(official / "google/umt5-xxl/tokenizer.json")}
    assert {part.layout for part in engine.model.parts.values()} == {"official"}
    assert {part.layout for part in other.model.parts.values()} == {"diffusers"}
    # What an official folder has not, and then the card and the official code decide.
    other.model = dataclasses.replace(other.model, scheduler=None, image_processor=None)
    assert (engine.model.images, engine.model.experts) == (other.model.images, folder.experts)
    fields = tiny.short_run(folder)
    stages = engine.request(**fields).stages
    assert [len(stage.steps) for stage in stages] == ([1, 1] if folder.experts == 2 else [2])
    np.testing.assert_array_equal(engine.generate(**fields).frames, other.generate(**fields).frames)


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


def test_what_a_model_has_no_use_for(official, tmp_path):
    """An image encoder, of which a transformer of text to video knows nothing, and a LoRA."""
    folder = Path(shutil.copytree(official, tmp_path / "wan"))
    write_pth(folder / "clip.pth", Ordered(tiny.official_image_encoder(tiny.IMAGE_ENCODER_CONFIG)))
    save_file({"lora": np.ones(3, np.float32)}, folder / "style.safetensors")
    assert vidax.load(folder).model.parts.keys() == tiny.OFFICIAL_FILES.keys()


I2V_21, T2V_22 = tiny.FOLDERS["i2v 2.1"], tiny.FOLDERS["t2v 2.2"]
APART = {
    "the autoencoder of 2.2": (
        tiny.Folder(vae=tiny.VAE22_CONFIG),
        "{vae}: the autoencoder of Wan 2.2, latent_channels 48; the transformer {transformer} has out_channels 16; "
        "take all components from one model",
    ),
    "the autoencoder of 2.1": (
        dataclasses.replace(tiny.FOLDERS["5b"], vae=tiny.VAE_CONFIG),
        "{vae}: the autoencoder of Wan 2.1, latent_channels 16; the transformer {transformer} has out_channels 48; "
        "take all components from one model",
    ),
    "channels beside the noisy ones that nobody knows": (
        tiny.Folder(transformer={**tiny.TRANSFORMER_CONFIG, "in_channels": 20}),
        "{transformer}: in_channels 20; Wan text to video takes 16, image to video 36",
    ),
    "no image encoder": (
        dataclasses.replace(I2V_21, image_encoder=None),
        "{transformer}: attends to the states of an image encoder, and there is none; give the folder of the whole "
        "model, or --image-encoder",
    ),
    "an image encoder of another width": (
        dataclasses.replace(I2V_21, image_encoder={**tiny.IMAGE_ENCODER_CONFIG, "hidden_size": 64}),
        "{transformer}: the transformer has image_dim 32 where {image_encoder} has 64; take all components from one "
        "model",
    ),
    "an image encoder of another length": (
        dataclasses.replace(I2V_21, transformer={**tiny.FLF2V_CONFIG, "pos_embed_seq_len": 12}),
        "{transformer}: positions for 12 image tokens, where {image_encoder} gives 5 for each of two images; take all "
        "components from one model",
    ),
    "one expert of two": (
        dataclasses.replace(T2V_22, experts=1),
        "{transformer}: one of two experts (boundary_ratio 0.875), and there is no other; give the folder of the whole "
        "model, or --transformer-2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_parts_that_do_not_belong_together(case, tmp_path):
    folder, sentence = APART[case]
    path = tiny.write_folder(tmp_path, folder)
    files = {file.parent.name: file for file in path.glob("*/*.safetensors")}
    assert refused(path) == sentence.format(**files)


def test_one_expert_in_an_official_folder(tmp_path):
    """Nothing but the folder's name tells it from Wan 2.1. An expert may be given from elsewhere."""
    path = tiny.write_official_folder(tmp_path / "wan", T2V_22)
    shutil.move(path / "low_noise_model", tmp_path)
    high = path / tiny.EXPERT_FILES["transformer"]
    sentence = (
        f"{high}: one of two experts (high_noise_model), and there is no other; give the folder of the whole model, or "
        "--transformer-2"
    )
    assert refused(path) == sentence
    model = vidax.load(path, transformer_2=tmp_path / "low_noise_model").model
    assert model.experts == 2 and model.files["transformer_2"].startswith(str(tmp_path / "low_noise_model"))
    shutil.move(path / "high_noise_model", tmp_path)
    assert refused(path) == f"{path}: no whole model: no transformer; give the folder of one that is, or --transformer"
    assert refused(tmp_path / "low_noise_model", **parts_of(path)).startswith(
        f"{tmp_path / tiny.EXPERT_FILES['transformer_2']}: one of two experts (low_noise_model), and there is no other"
    )


def parts_of(path: Path) -> dict[str, Path]:
    return {name: path / tiny.OFFICIAL_FILES[name] for name in ("vae", "text_encoder")}


def test_experts_by_the_folder_of_the_whole_model(official, tmp_path):
    whole = tiny.write_official_folder(tmp_path / "wan", T2V_22)
    files = vidax.load(None, transformer=whole, transformer_2=whole, **parts_of(official)).model.files
    assert {name: files[name] for name in tiny.EXPERT_FILES} == {
        name: str(whole / file) for name, file in tiny.EXPERT_FILES.items()
    }


def test_experts_of_two_architectures(tmp_path):
    path = tiny.write_folder(tmp_path, T2V_22)
    other = tiny.write_folder(tmp_path / "other", transformer={**tiny.TRANSFORMER_CONFIG, "num_layers": 3})
    assert refused(path, transformer_2=other / "transformer") == (
        f"{other / 'transformer/diffusion_pytorch_model.safetensors'}: not the second expert of "
        f"{path / 'transformer/diffusion_pytorch_model.safetensors'}: layers 3 instead of 2"
    )


def test_a_config_of_the_other_autoencoder(tmp_path):
    published = tiny.VAE22_CONFIG | {"base_dim": 160, "decoder_base_dim": 256, "num_res_blocks": 2}
    statistics = {key: published[key] for key in ("latents_mean", "latents_std")}
    own = {key: tuple(value) for key, value in statistics.items()}
    assert vae_config({}, "a.json", {"residual": True}) == WAN22_VAE
    assert vae_config(published, "a.json") == dataclasses.replace(WAN22_VAE, **own)
    for config, numbers, sentence in (
        (published, {"residual": False}, "a.json: is_residual is True; the autoencoder of Wan 2.1 needs False"),
        (
            tiny.VAE_CONFIG | {"is_residual": False},
            {"residual": True},
            "a.json: is_residual is False; the autoencoder of Wan 2.2 needs True",
        ),
        (published | {"patch_size": 4}, {}, "a.json: patch_size is 4; the autoencoder of Wan 2.2 needs 2"),
        (published | {"z_dim": 16}, {}, "a.json: latents_mean has 48 values for z_dim 16"),
    ):
        with pytest.raises(UserError, match=sentence):
            vae_config(config, "a.json", numbers)
    folder = tiny.write_folder(tmp_path / "wan")
    (folder / "vae/config.json").write_text(json.dumps(tiny.VAE22_CONFIG))
    assert refused(folder).endswith("is_residual is True; the autoencoder of Wan 2.1 needs False")


def test_a_config_that_contradicts_the_tensors(official, tmp_path):
    folder = Path(shutil.copytree(official, tmp_path / "wan"))

    def with_config(**changes) -> str:
        (folder / "config.json").write_text(json.dumps(tiny.OFFICIAL_CONFIG | changes))
        return refused(folder).removeprefix(f"{folder / 'config.json'}: ")

    assert with_config(num_layers=3) == ("num_layers is 3, but the tensors beside it have 2; take both from one model")
    assert with_config(num_heads=5) == "5 heads of size unknown do not make dim 48"
    assert with_config(num_heads="two") == "the number of heads is 'two'; it is a whole number of 1 or more"
    assert with_config(model_type="vace") == ("model_type is 'vace'; Wan needs 't2v' or 'i2v' or 'flf2v' or 'ti2v'")
    assert with_config(text_len=226) == "text_len is 226; Wan needs 512"
    assert "dim 48 is no multiple of 128" in with_config(_class_name="HunyuanModel"), "another file's, and not read"
    (folder / "transformer").mkdir()
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        shutil.move(folder / name, folder / "transformer" / name)
    assert refused(folder) == (
        f"{folder / 'transformer/config.json'}: describes a HunyuanModel; "
        "the transformer of Wan is a WanTransformer3DModel"
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


SHAPES = {"text_encoder": TEXT, "image_encoder": manifest(CLIP)}
OFFICIAL = {
    "wan2.1-t2v-1.3b": "wan2.1_t2v_1.3b_dit",
    "wan2.1-t2v-14b": "wan2.1_t2v_14b_dit",
    "wan2.1-i2v-14b-480p": "wan2.1_i2v_14b_dit",
    "wan2.1-i2v-14b-720p": "wan2.1_i2v_14b_dit",
    "wan2.1-flf2v-14b": FLF2V,
    "wan2.2-t2v-a14b": "wan2.2_t2v_a14b_expert_dit",
    "wan2.2-i2v-a14b": "wan2.2_i2v_a14b_expert_dit",
    "wan2.2-ti2v-5b": "wan2.2_ti2v_5b_dit",
}


def published_folder(path: Path, card: str) -> Path:
    """A card's model as Wan-AI publishes it, but for its weights, which are nothing, and its tokenizer."""
    path.mkdir()
    transformer = manifest(OFFICIAL[card])
    vae = manifest("wan2.2_vae" if card == "wan2.2-ti2v-5b" else "wan2.1_vae")
    shapes = SHAPES | {"transformer": transformer, "transformer_2": transformer, "vae": vae}
    for part in CARDS[card].parts:
        if part == "tokenizer":
            (path / "google/umt5-xxl").mkdir(parents=True)
            tiny.tokenizer().save(str(path / "google/umt5-xxl/tokenizer.json"))
            continue
        file = path / f"{part}.safetensors"
        if CARDS[card].experts == 2 and part in tiny.EXPERT_FILES:
            file = path / tiny.EXPERT_FILES[part]
            file.parent.mkdir()
        hollow(file, shapes[part])
    return path


def test_every_card_has_a_published_model():
    published = [card for card in CARDS.values() if card.family == "wan" and card.embedded is None]
    assert OFFICIAL.keys() == {card.name for card in published}


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_published_folder_finds_its_card(name, tmp_path):
    """By its networks; of two cards of one network the folder's name decides."""
    card = CARDS[name]
    folder = published_folder(tmp_path / Path(card.repository).name, name)
    found, model = locate(folder, {})
    assert found == card
    assert (model.images, model.experts, model.dit) == (card.images, card.experts, card.dit)
    assert set(model.files) == set(card.parts)
    parts = {part: Path(file) for part, file in model.files.items()}
    assert locate(name, parts)[0] == card, "the name, with all of its files given"
    folder.rename(tmp_path / "mine")
    same = [other for other in CARDS.values() if (other.dit, other.experts) == (card.dit, card.experts)]
    assert locate(tmp_path / "mine", {})[0] == same[0]


@pytest.mark.parametrize("name", CARDS)
def test_the_architecture_of_a_card(name):
    """Nothing of the model is here but the card."""
    card, architecture = describe(name)
    assert card == CARDS[name]
    assert (architecture.images, architecture.experts, architecture.dit) == (card.images, card.experts, card.dit)
    parts = architecture.specs("bfloat16")
    wanted = {"text_encoder", "transformer", "decoder"} | ({"encoder"} if card.images[1] else set())
    assert set(parts) == wanted | ({"image_encoder"} & set(card.parts))
    assert all(nn.parameter_bytes(part) > 0 for part in parts.values())
    assert set(card.parts) <= set(PARTS)
    for size in card.trained_sizes:
        assert not any(side % architecture.size_multiple for side in size)


def test_a_model_of_one_transformer_for_a_card_of_two(tmp_path):
    folder = published_folder(tmp_path / "wan", "wan2.1-t2v-14b")
    with pytest.raises(UserError, match=r"transformer\.safetensors: not wan2\.2-t2v-a14b: experts 1 instead of 2$"):
        open_named("wan2.2-t2v-a14b", folder)


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

    large = hollow(tmp_path / "14b.safetensors", manifest("wan2.1_t2v_14b_dit"))
    assert refused("wan2.1-t2v-1.3b", **parts | {"transformer": large}) == (
        f"{large}: not wan2.1-t2v-1.3b: dim 5120 instead of 1536, layers 40 instead of 30, heads 40 instead of 12, "
        "mlp_dim 13824 instead of 8960"
    )
    assert vidax.load(**parts | {"transformer": large}).card.name == "wan2.1-t2v-14b"
    small = hollow(tmp_path / "small.safetensors", TEXT | {"token_embedding.weight": (32128, 4096)})
    assert refused("wan2.1-t2v-1.3b", **parts | {"text_encoder": small}) == (
        f"{small}: not the text encoder of Wan: vocabulary 32128 instead of 256384"
    )
    assert refused("wan2.1-t2v-1.3b", **parts | {"vae": official}) == (
        f"{official / 'Wan2.1_VAE.pth'}: not the autoencoder of Wan: base_dim 8 instead of 96, blocks 1 instead of 2"
    )
