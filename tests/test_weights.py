"""Checkpoints: what is read and how it arrives; every fault of a file, index, folder or mapping as a sentence."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pth_files import View, write_pth
from safetensors.numpy import save_file

from vidax import nn
from vidax.errors import UserError
from vidax.weights import Folder, Mapping, check_names, checkpoint_names, load, open_checkpoint
from vidax.weights.load import ROWS, reader

LAYERS = 4


@nn.module
class Block:
    up: nn.Linear
    norm: nn.RMSNorm


@nn.module
class Model:
    patch: nn.Linear  # a convolution in the checkpoint
    blocks: Block
    table: Any

    @staticmethod
    def spec(dtype=jnp.float32):
        block = Block(nn.Linear.spec(6, 8, ("embed", "mlp"), dtype), nn.RMSNorm.spec(6, 1e-6))
        table = nn.Spec((2, 6), (None, "embed"), jnp.float32, nn.zeros, stored=(1, 2, 6))
        return Model(nn.Linear.spec(12, 6, (None, "embed"), dtype, kernel=(1, 2, 2)), nn.stack(block, LAYERS), table)


MAPPING = Mapping(
    renames=(
        (r"^patch", "patch_embedding"),
        (r"^table$", "scale_shift_table"),
        (r"^blocks\.", "blocks.{}."),
        (r"\.up\.", ".ffn.0."),
    ),
    skips=((r"^rope\.", "recomputed"),),
)


def stored(dtype=np.float32, seed=0) -> dict[str, np.ndarray]:
    """A checkpoint of `Model` with one tensor that the mapping skips."""
    rng = np.random.default_rng(seed)
    shapes = {"patch_embedding.weight": (6, 3, 1, 2, 2), "patch_embedding.bias": (6,), "scale_shift_table": (1, 2, 6)}
    for i in range(LAYERS):
        shapes |= {f"blocks.{i}.ffn.0.weight": (8, 6), f"blocks.{i}.ffn.0.bias": (8,), f"blocks.{i}.norm.weight": (6,)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in (shapes | {"rope.freqs": (5,)}).items()}


def as_model(tensors, dtype=jnp.float32) -> Model:
    """What loading must give, written out."""

    def layers(name):
        return np.stack([tensors[f"blocks.{i}.{name}"] for i in range(LAYERS)])

    return Model(
        nn.Linear(tensors["patch_embedding.weight"].reshape(6, 12).T.astype(dtype), tensors["patch_embedding.bias"]),
        Block(
            nn.Linear(layers("ffn.0.weight").transpose(0, 2, 1).astype(dtype), layers("ffn.0.bias")),
            nn.RMSNorm(layers("norm.weight"), 1e-6),
        ),
        tensors["scale_shift_table"][0],
    )


def save(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


def save_sharded(folder: Path, tensors: dict[str, np.ndarray], stem: str = "model", shards: int = 3) -> Path:
    """Two shards are enough for most faults; three show that `each` is meant."""
    where = {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save(folder / file, part)
        where |= dict.fromkeys(part, file)
    return dump(folder / f"{stem}.safetensors.index.json", {"metadata": {}, "weight_map": where})


def save_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file, right or wrong, from its parts."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def dump(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def entry(dtype="F32", shape=(2,), begin=0, end=8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def message(call, *args, **kw) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kw)
    return str(error.value)


def assert_same(tree, expected):
    for (path, leaf), (_, want) in zip(nn.named_leaves(tree), nn.named_leaves(expected), strict=True):
        assert leaf.dtype == want.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(want, np.float32), err_msg=path)


# Opening files.


def test_values_shapes_dtypes_and_metadata_of_a_file(tmp_path):
    kinds = [np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]
    tensors = {np.dtype(kind).name: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    tensors |= {"scalar": np.array(3.0), "empty": np.zeros((0, 4), np.float32)}
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", tensors, {"config": "{}"}))
    assert set(checkpoint) == set(tensors) and len(checkpoint) == len(tensors)
    assert checkpoint.metadata == {"config": "{}"}
    for name, value in tensors.items():
        assert (checkpoint[name].shape, checkpoint[name].dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(checkpoint[name].view(), value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", ml_dtypes.bfloat16), ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)],
)
def test_dtypes_that_numpy_lacks(tmp_path, name, dtype):
    values = np.array([1.5, -2.0, 0.25]).astype(dtype)
    end = values.nbytes
    file = save_raw(tmp_path / "a.safetensors", {"a": entry(name, (3,), 0, end)}, values.tobytes())
    tensor = open_checkpoint(file)["a"]
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.view().astype(np.float32), [1.5, -2.0, 0.25])


def test_views_are_read_only_windows_on_the_file(tmp_path):
    """16 GiB of holes instead of data: looking at one row is instant only if nothing else is read."""
    rows, end = 2**22, 2**34
    file = save_raw(tmp_path / "a.safetensors", {"a": entry("F32", (rows, 1024), 0, end)})
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size + end)
    view = open_checkpoint(file)["a"].view()
    assert not view.flags.writeable and not view.flags.owndata
    assert view[rows // 2].sum() == 0
    spec = nn.Spec((1024, rows), (None, None), jnp.float32, nn.zeros, stored=(rows, 1024), transpose=(1, 0))
    part = reader(spec, [open_checkpoint(file)["a"]])((slice(None), slice(5, 7)))
    assert part.shape == (1024, 2) and not part.any()


def test_tensors_need_not_be_aligned(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    header = {"flag": entry("BOOL", (1,), 0, 1), "a": entry("F32", (3, 4), 1, 49)}
    checkpoint = open_checkpoint(save_raw(tmp_path / "a.safetensors", header, b"\1" + values.tobytes()))
    spec = nn.Spec((4, 3), (None, None), jnp.bfloat16, nn.zeros, stored=(3, 4), transpose=(1, 0))
    tree = load({"a": spec}, checkpoint, Mapping(skips=(("^flag$", "a marker"),)))
    np.testing.assert_array_equal(np.asarray(tree["a"], np.float32), values.T)


FAULTS = [
    ("empty", b"", "an empty file"),
    ("short", b"\1\0\0", "a header of 1 bytes does not fit in a file of 3 bytes"),
    ("pytorch", b"PK\3\4" + bytes(60), "a header of 67324752 bytes does not fit in a file of 64 bytes"),
    ("git-lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer, not the file"),
    ("header-length", ({}, b"", 2**40), "a header of 1099511627776 bytes does not fit in a file of 10 bytes"),
    ("json", (b'{"a": ', b""), "the header is not valid JSON: Expecting value"),
    ("not-utf8", (b"\xff\xfe{}", b""), "the header is not valid JSON"),
    ("nested", (b"[" * 100_000, b""), "the header is not valid JSON"),
    ("list", ([], b""), "the header is not a JSON object"),
    ("twice", (b'{"a": 1, "a": 2}', b""), "the header is not valid JSON: a occurs twice"),
    ("metadata", ({"__metadata__": 3}, b""), "its __metadata__ is not a JSON object"),
    ("not-an-entry", ({"a": {"dtype": "F32"}}, b""), "a is described by {'dtype': 'F32'}, not by dtype, shape and"),
    ("negative", ({"a": entry(shape=(-2,))}, bytes(8)), "a has shape [-2] and byte range 0 to 8"),
    ("float-shape", ({"a": entry(shape=(2.0,))}, bytes(8)), "a has shape [2.0] and byte range 0 to 8"),
    ("true-shape", ({"a": entry(shape=(True, 2))}, bytes(8)), "a has shape [True, 2] and byte range 0 to 8"),
    ("backwards", ({"a": entry(begin=8, end=0)}, bytes(8)), "a has -8 bytes, but F32 [2] takes 8"),
    ("dtype", ({"a": entry("F4")}, bytes(8)), "a is of dtype F4; vidax reads BOOL, U8,"),
    ("bytes", ({"a": entry(shape=(3,))}, bytes(8)), "a has 8 bytes, but F32 [3] takes 12"),
    ("cut", ({"a": entry()}, bytes(5)), "cut short: a ends at byte 77 of a file of 74 bytes"),
    ("overlap", ({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), "b overlaps another tensor"),
    ("gap", ({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)), "b has a gap before it"),
    ("starts-late", ({"a": entry(begin=4, end=12)}, bytes(12)), "a has a gap before it"),
    ("trailing", ({"a": entry()}, bytes(11)), "3 bytes follow the last tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "what"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_damaged_files_are_named_with_the_fault(tmp_path, content, what):
    file = tmp_path / "a.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        save_raw(file, *content)
    text = message(open_checkpoint, file)
    assert text.startswith(f"{file}: {what}")
    assert any(way in text for way in ("; download it again", "git lfs pull", "vidax reads"))


def test_every_cut_of_a_file_is_noticed(tmp_path):
    whole = save(tmp_path / "whole.safetensors", stored()).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in [*range(0, 16), 100, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        assert "download it again" in message(open_checkpoint, cut)


def test_what_is_not_a_checkpoint(tmp_path):
    assert message(open_checkpoint, tmp_path / "none.safetensors").endswith("none.safetensors: no such file or folder")
    (tmp_path / "a.gguf").touch()
    assert "a.gguf: not a checkpoint format that vidax reads; give a .safetensors" in message(
        open_checkpoint, tmp_path / "a.gguf"
    )


# Sharded checkpoints.


def test_a_sharded_checkpoint_equals_the_whole(tmp_path):
    tensors = stored()
    checkpoint = open_checkpoint(save_sharded(tmp_path, tensors))
    assert {tensor.file.name for tensor in checkpoint.values()} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    assert_same(load(Model.spec(), checkpoint, MAPPING), as_model(tensors))


def test_missing_shards_are_named(tmp_path):
    index = save_sharded(tmp_path, stored())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    text = message(open_checkpoint, index)
    assert text == f"{index}: 1 of 3 shards are not beside it: model-00002-of-00003.safetensors; download them"


def test_a_damaged_shard_is_named(tmp_path):
    index = save_sharded(tmp_path, stored())
    shard = tmp_path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert message(open_checkpoint, index).startswith(f"{shard}: cut short")


def test_index_and_shards_must_agree(tmp_path):
    index = save_sharded(tmp_path, stored())
    where = json.loads(index.read_text())["weight_map"]
    first, second, *_ = sorted(set(where.values()))
    inside = next(name for name, file in where.items() if file == first)

    dump(index, {"weight_map": where | {"ghost": first}})
    assert f"{first} does not hold ghost, which the index places there" in message(open_checkpoint, index)
    dump(index, {"weight_map": {name: file for name, file in where.items() if name != inside}})
    assert f"{first} holds {inside}, which the index does not list" in message(open_checkpoint, index)
    dump(index, {"weight_map": where})
    both = {name: stored()[name] for name, file in where.items() if file == second}
    save(tmp_path / second, both | {inside: stored()[inside]})  # doubled: in two shards
    assert f"{second} holds {inside}, which the index places in {first}" in message(open_checkpoint, index)


@pytest.mark.parametrize("where", [None, [], {"a": 3}, {"a": "../a.safetensors"}, {"a": "/etc/passwd"}])
def test_malformed_weight_map(tmp_path, where):
    index = dump(tmp_path / "model.safetensors.index.json", {"weight_map": where})
    assert (
        message(open_checkpoint, index)
        == f"{index}: its weight_map does not map tensor names to file names; download it again"
    )


def test_corrupt_index(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {')
    assert message(open_checkpoint, index).startswith(f"{index}: it is not valid JSON: Expecting property name")


# Folders.


@pytest.mark.parametrize(
    ("files", "opened"),
    [
        (["diffusion_pytorch_model.safetensors", "config.json", "README.md"], "diffusion_pytorch_model.safetensors"),
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.fp16.safetensors"),
        (["diffusion_pytorch_model.bf16.safetensors"], "diffusion_pytorch_model.bf16.safetensors"),
        (["model.fp16.safetensors", "model.safetensors"], "model.safetensors"),
        (["ltxv-2b-0.9.8-distilled.safetensors"], "ltxv-2b-0.9.8-distilled.safetensors"),
    ],
)
def test_the_file_of_a_folder(tmp_path, files, opened):
    for name in files:
        save(tmp_path / name, stored())
    assert open_checkpoint(tmp_path).path == tmp_path / opened


@pytest.mark.parametrize(
    "late", [False, True], ids=["model.fp16.safetensors.index.json", "model.safetensors.index.fp16.json"]
)
def test_the_index_of_a_folder(tmp_path, late):
    variant = save_sharded(tmp_path, stored(), "model.fp16", shards=2)
    if late:
        variant = variant.rename(tmp_path / "model.safetensors.index.fp16.json")
    assert open_checkpoint(tmp_path).path == variant
    index = save_sharded(tmp_path, stored())
    assert open_checkpoint(tmp_path).path == index


def test_folders_without_one_checkpoint(tmp_path):
    assert message(open_checkpoint, tmp_path) == f"{tmp_path}: holds no .safetensors, .pth or .pt file"
    save_sharded(tmp_path, stored()).unlink()
    assert "holds shards (model-00001-of-00003.safetensors) without their .safetensors.index.json" in message(
        open_checkpoint, tmp_path
    )
    for shard in tmp_path.iterdir():
        shard.unlink()
    for name in ("b.safetensors", "a.bf16.safetensors"):
        save(tmp_path / name, stored())
    assert (
        message(open_checkpoint, tmp_path)
        == f"{tmp_path}: holds several checkpoints (a.bf16.safetensors, b.safetensors); name the file"
    )


def pipeline(path: Path, **components) -> Path:
    dump(path / "model_index.json", {"_class_name": "WanPipeline", "boundary_ratio": 0.875, **components})
    return path


def test_a_diffusers_folder(tmp_path):
    path = pipeline(
        tmp_path,
        transformer=["diffusers", "WanTransformer3DModel"],
        scheduler=["diffusers", "UniPCMultistepScheduler"],
        image_encoder=[None, None],
    )
    dump(path / "transformer/config.json", {"num_layers": 2})
    dump(path / "scheduler/scheduler_config.json", {"flow_shift": 3.0})
    save(path / "transformer/diffusion_pytorch_model.safetensors", stored())
    folder = Folder(path)
    assert folder.pipeline == "WanPipeline" and folder.index["boundary_ratio"] == 0.875
    assert folder.components == {"transformer": "WanTransformer3DModel", "scheduler": "UniPCMultistepScheduler"}
    assert folder.class_name("transformer") == "WanTransformer3DModel"
    assert folder.config("transformer") == {"num_layers": 2}
    assert folder.config("scheduler") == {"flow_shift": 3.0}
    assert folder.checkpoint("transformer").keys() == stored().keys()


def test_faults_of_a_diffusers_folder(tmp_path):
    assert message(Folder, tmp_path / "none") == f"{tmp_path / 'none'}: no such folder"
    assert f"{tmp_path}: holds no model_index.json; give the folder of a whole pipeline" in message(Folder, tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    assert f"{tmp_path / 'model_index.json'}: it is not valid JSON" in message(Folder, tmp_path)
    dump(tmp_path / "model_index.json", {})
    assert "names no _class_name" in message(lambda: Folder(tmp_path).pipeline)

    folder = Folder(pipeline(tmp_path, vae=["diffusers", "AutoencoderKLWan"], image_encoder=[None, None]))
    assert message(folder.config, "image_encoder") == f"{tmp_path}: has no component image_encoder; it has vae"
    assert (
        message(folder.checkpoint, "vae")
        == f"{tmp_path}: model_index.json names vae, but there is no such sub-folder; download it"
    )
    (tmp_path / "vae").mkdir()
    assert f"{tmp_path / 'vae'}: holds no configuration (config.json or" in message(folder.config, "vae")
    assert message(folder.checkpoint, "vae") == f"{tmp_path / 'vae'}: holds no .safetensors, .pth or .pt file"
    (tmp_path / "vae/config.json").write_text("{]")
    assert f"{tmp_path / 'vae/config.json'}: it is not valid JSON" in message(folder.config, "vae")


# Names.


def test_names_of_a_model():
    names = {leaf.path: leaf.names for leaf in checkpoint_names(Model.spec(), MAPPING)}
    assert names["blocks.up.weight"] == tuple(f"blocks.{i}.ffn.0.weight" for i in range(LAYERS))
    assert names["table"] == ("scale_shift_table",)
    assert list(names) == [path for path, _ in nn.named_leaves(Model.spec())]


def test_braces_and_backslashes_in_names_are_only_characters():
    spec = nn.stack({"a": nn.Spec((2,), (None,), jnp.float32, nn.zeros)}, 2)
    assert checkpoint_names(spec, Mapping(renames=((r"^a$", r"x{0}.{}.{name}\\d"),)))[0].names == (
        r"x{0}.0.{name}\d",
        r"x{0}.1.{name}\d",
    )


def test_two_parameters_of_one_name():
    renames = (*MAPPING.renames, (r"norm\.weight", "ffn.0.bias"))
    text = message(checkpoint_names, Model.spec(), Mapping(renames=renames))
    assert text == (
        "4 tensors are named by two parameters: blocks.0.ffn.0.bias (blocks.up.bias and blocks.norm.weight), "
        "blocks.1.ffn.0.bias (blocks.up.bias and blocks.norm.weight), "
        "blocks.2.ffn.0.bias (blocks.up.bias and blocks.norm.weight) and 1 more; correct the renames"
    )


def test_a_mapping_that_contradicts_the_model_is_our_own_fault():
    with pytest.raises(AssertionError, match=r"blocks\.up\.weight .* one \{\} if stacked"):
        checkpoint_names(Model.spec(), Mapping())
    shapes = {name: value.shape for name, value in stored().items()}
    with pytest.raises(AssertionError, match=r"skipped but needed: blocks\.0\.norm\.weight"):
        check_names(
            Model.spec(), Mapping(renames=MAPPING.renames, skips=(("norm|rope", "a careless pattern"),)), shapes
        )
    with pytest.raises(AssertionError, match="a holds 3 where a Spec belongs"):
        checkpoint_names({"a": 3}, Mapping())


@nn.module
class Projections:
    q: nn.Linear
    k: nn.Linear


FUSED = Mapping(
    renames=(
        (r"^blocks\.([qk])\.", r"blocks.{}.\1."),
        (r"\.q\.(.+)", r".qk.\1[0/2]"),
        (r"\.k\.(.+)", r".qk.\1[1/2]"),
    ),
    ones=(("first", 2),),
)


FUSED_SHAPES = {"weight": (8, 3), "bias": (8,)}


def fused() -> dict[str, Any]:
    spec = Projections(*(nn.Linear.spec(3, 4, (None, None), jnp.float32) for _ in "qk"))
    return {"blocks": nn.stack(spec, 2), "first": nn.Spec((5,), (None,), jnp.float32, nn.zeros)}


def test_a_tensor_of_several_parameters(tmp_path):
    """Equal parts along its first axis, also of what does not lie in order in its file; and further axes of size 1."""
    rng = np.random.default_rng(0)
    tensors = {"first": rng.standard_normal((1, 1, 5), np.float32)}
    for i in range(2):
        tensors[f"blocks.{i}.qk.weight"] = rng.standard_normal((8, 3), np.float32)
        tensors[f"blocks.{i}.qk.bias"] = rng.standard_normal(8, np.float32)
    save(tmp_path / "a.safetensors", tensors)
    turned = {
        name: View(np.ascontiguousarray(x.T), 0, x.shape, tuple(step // 4 for step in np.asfortranarray(x).strides))
        for name, x in tensors.items()
    }
    write_pth(tmp_path / "a.pth", turned)
    for file in ("a.safetensors", "a.pth"):
        got = load(fused(), open_checkpoint(tmp_path / file), FUSED)
        np.testing.assert_array_equal(got["first"], tensors["first"][0, 0])
        for i, part in enumerate((got["blocks"].q, got["blocks"].k)):
            for layer in range(2):
                weight = tensors[f"blocks.{layer}.qk.weight"][4 * i : 4 * i + 4]
                np.testing.assert_array_equal(part.weight[layer], weight.T)
                np.testing.assert_array_equal(part.bias[layer], tensors[f"blocks.{layer}.qk.bias"][4 * i : 4 * i + 4])


def test_faults_of_a_tensor_of_several_parameters(tmp_path):
    shapes = {"first": (1, 1, 5)} | {f"blocks.{i}.qk.{end}": s for i in range(2) for end, s in FUSED_SHAPES.items()}
    check_names(fused(), FUSED, shapes)
    text = message(check_names, fused(), FUSED, shapes | {"blocks.0.qk.weight": (12, 3), "first": (5,)})
    assert "blocks.0.qk.weight is [12, 3] where the model has [8, 3]" in text
    assert "first is [5] where the model has [1, 1, 5]" in text
    del shapes["blocks.1.qk.bias"]
    assert "1 missing: blocks.1.qk.bias [8]" in message(check_names, fused(), FUSED, shapes)
    with pytest.raises(AssertionError, match=r"not all parts of blocks\.0\.q\.weight: \[\(0, 2\)\]"):
        names = dataclasses.replace(FUSED, renames=(FUSED.renames[0], (r"\.([qk])\.(.+)", r".\1.\2[0/2]")))
        checkpoint_names(fused(), names)
    integers = {name: np.zeros(shape, np.int32) for name, shape in (shapes | {"blocks.1.qk.bias": (8,)}).items()}
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", integers))
    assert "blocks.0.qk.weight[0/2] in a.safetensors is int32" in message(load, fused(), checkpoint, FUSED)


def test_skips_come_with_their_reasons():
    assert check_names(Model.spec(), MAPPING, {n: v.shape for n, v in stored().items()}).skipped == {
        "rope.freqs": "recomputed"
    }


def test_all_faults_of_the_names_are_told_at_once(tmp_path):
    tensors = stored()
    for i in range(LAYERS):
        del tensors[f"blocks.{i}.norm.weight"]
    tensors |= {"patch_embedding.bias": np.zeros(7, np.float32), "lora.a": np.zeros((1, 2), np.float32)}
    file = save(tmp_path / "a.safetensors", tensors)
    assert message(load, Model.spec(), open_checkpoint(file), MAPPING) == (
        f"{file}: its tensors are not those of this model; "
        "check that it belongs to the model you named and is complete\n"
        "  4 missing: blocks.0.norm.weight [6], blocks.1.norm.weight [6], blocks.2.norm.weight [6] and 1 more\n"
        "  1 unexpected: lora.a [1, 2]\n"
        "  1 of another shape: patch_embedding.bias is [7] where the model has [6]"
    )


def test_the_shard_of_a_wrong_tensor_is_named(tmp_path):
    tensors = stored() | {"patch_embedding.bias": np.zeros(7, np.float32)}
    index = save_sharded(tmp_path, tensors)
    assert "patch_embedding.bias in model-00002-of-00003.safetensors is [7]" in message(
        load, Model.spec(), open_checkpoint(index), MAPPING
    )


def test_nothing_is_read_before_the_names_are_right(tmp_path, monkeypatch):
    tensors = stored()
    del tensors["scale_shift_table"]
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", tensors))
    monkeypatch.setattr("vidax.weights.files.Tensor.view", lambda self: pytest.fail("read"))
    assert "1 missing: scale_shift_table [1, 2, 6]" in message(load, Model.spec(), checkpoint, MAPPING)


TIED = {"shared": nn.Spec((130, 2), (None, None), jnp.float32, nn.zeros)}
TIES = Mapping(aliases=(("shared", "embed_tokens"),))


@pytest.mark.parametrize("names", [("shared",), ("embed_tokens",), ("shared", "embed_tokens")])
def test_tied_tensors_may_be_stored_under_either_name_or_both(tmp_path, names):
    value = np.arange(260, dtype=np.float32).reshape(130, 2)
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", dict.fromkeys(names, value)))
    np.testing.assert_array_equal(load(TIED, checkpoint, TIES)["shared"], value)


def test_tied_tensors_that_differ(tmp_path):
    value = np.arange(260, dtype=np.float32).reshape(130, 2)
    other = value.copy()
    other[-1, -1] += 1
    file = save(tmp_path / "a.safetensors", {"shared": value, "embed_tokens": other})
    text = message(load, TIED, open_checkpoint(file), TIES)
    assert text == f"{file}: shared and embed_tokens should be one tensor but differ; download it again"
    file = save(tmp_path / "b.safetensors", {"shared": value, "embed_tokens": other[1:]})
    assert "embed_tokens is [129, 2] where the model has [130, 2]" in message(load, TIED, open_checkpoint(file), TIES)
    assert "1 missing: shared [130, 2]" in message(check_names, TIED, TIES, {})


# Values.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_arrives_stacked_transposed_and_cast(tmp_path, dtype):
    tensors = stored()
    steps = []
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", tensors))
    model = load(Model.spec(dtype), checkpoint, MAPPING, progress=lambda done, total: steps.append((done, total)))
    assert_same(model, as_model(tensors, dtype))
    assert isinstance(model, Model) and all(leaf.devices() == {jax.devices()[0]} for _, leaf in nn.named_leaves(model))
    total = nn.parameter_bytes(Model.spec(dtype))
    assert len(steps) == 6 and steps[-1] == (total, total) and steps == sorted(steps)


def nearest_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, in integer arithmetic."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
def test_casts_are_exact(tmp_path, source, target):
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, 2**-14], np.float32)
    values = np.concatenate([ties, np.random.default_rng(0).standard_normal(3 * ROWS + 1)]).astype(source)
    name = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[np.dtype(source).name]
    file = save_raw(tmp_path / "a.safetensors", {"a": entry(name, values.shape, 0, values.nbytes)}, values.tobytes())
    spec = {"a": nn.Spec(values.shape, (None,), target, nn.zeros)}
    loaded = np.asarray(load(spec, open_checkpoint(file), Mapping())["a"], np.float32)
    expected = values.astype(np.float32) if target == jnp.float32 else nearest_bfloat16(values)
    np.testing.assert_array_equal(loaded.view(np.uint32), expected.view(np.uint32))


def test_scalars_and_scalars_per_layer(tmp_path):
    tensors = {"a": np.array(2.5, np.float32), "b.0": np.array(3.0, np.float32), "b.1": np.array(4.0, np.float32)}
    one = nn.Spec((), (), jnp.bfloat16, nn.zeros)
    file = save(tmp_path / "a.safetensors", tensors)
    tree = load({"a": one, "b": nn.stack(one, 2)}, open_checkpoint(file), Mapping(renames=(("^b$", "b.{}"),)))
    assert tree["a"] == 2.5 and tree["b"].tolist() == [3.0, 4.0] and tree["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("stored_as", "held_as"), [(np.int8, jnp.bfloat16), (np.float32, jnp.int32), (np.int64, jnp.int32)]
)
def test_only_floating_point_is_cast(tmp_path, stored_as, held_as):
    file = save(tmp_path / "a.safetensors", {"a": np.zeros(3, stored_as)})
    text = message(load, {"a": nn.Spec((3,), (None,), held_as, nn.zeros)}, open_checkpoint(file), Mapping())
    kinds = f"{np.dtype(stored_as)} where the model has {jnp.dtype(held_as)}"
    assert text.startswith(f"{file}: 1 tensors cannot be converted: a in a.safetensors is {kinds}; quantized")


def test_integers_that_are_meant_pass(tmp_path):
    file = save(tmp_path / "a.safetensors", {"a": np.arange(3, dtype=np.int32)})
    assert load({"a": nn.Spec((3,), (None,), jnp.int32, nn.zeros)}, open_checkpoint(file), Mapping())["a"].tolist() == [
        0,
        1,
        2,
    ]


# Placement.

RULES = [{"embed": "x"}, {"mlp": "y"}, {"embed": "x", "mlp": "y"}, {"layers": "y", "embed": "x"}, {}]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_sharded_loading_equals_the_whole(tmp_path, rules, kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def place(spec):
        return NamedSharding(mesh, PartitionSpec(*map(rules.get, spec.axes)), memory_kind=kind)

    tensors = stored()
    spec = Model.spec(jnp.bfloat16)
    model = load(spec, open_checkpoint(save(tmp_path / "a.safetensors", tensors)), MAPPING, sharding=place)
    assert_same(model, as_model(tensors, jnp.bfloat16))
    for (path, leaf), (_, s) in zip(nn.named_leaves(model), nn.named_leaves(spec), strict=True):
        assert leaf.sharding == place(s), path
        assert leaf.addressable_shards[0].data.shape == place(s).shard_shape(s.shape), path


def test_a_device_reads_only_its_layers_and_equal_slices_once(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(save(tmp_path / "a.safetensors", stored()))
    leaf = next(leaf for leaf in checkpoint_names(Model.spec(), MAPPING) if leaf.path == "blocks.up.weight")
    seen = []

    class Seen:
        def __init__(self, name):
            self.name = name

        def view(self):
            seen.append(self.name)
            return checkpoint[self.name].view()

    read = reader(leaf.spec, [Seen(name) for name in leaf.names])
    index = (slice(1, 3), slice(2, 5), slice(None))
    whole = np.stack([stored()[name].T for name in leaf.names])
    np.testing.assert_array_equal(read(index), whole[index])
    assert sorted(seen) == ["blocks.1.ffn.0.weight", "blocks.2.ffn.0.weight"]
    assert read((slice(1, 3, None), slice(2, 5), slice(0, 8))) is read(index)
    assert len(seen) == 2
