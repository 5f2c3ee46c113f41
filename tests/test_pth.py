"""PyTorch's files: what is read of them, what is refused, and that no damage gets past a sentence. No PyTorch."""

import os
import random
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from pth_files import KINDS, Ordered, Raw, View, archive, call, entries_of, name, write_pth

from vidax import nn
from vidax.errors import UserError
from vidax.weights import Mapping, load, open_checkpoint


def message(path) -> str:
    with pytest.raises(UserError) as error:
        open_checkpoint(path)
    return str(error.value)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_values_of_every_dtype(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    one = np.array(values[1, 2])
    checkpoint = open_checkpoint(write_pth(tmp_path / "a.pth", Ordered({"a": values, "scalar": one})))
    assert list(checkpoint) == ["a", "scalar"] and checkpoint["a"].dtype == dtype
    assert checkpoint["scalar"].shape == ()
    np.testing.assert_array_equal(checkpoint["a"].view(), values)
    np.testing.assert_array_equal(checkpoint["scalar"].view(), one)


def test_strides_offsets_and_shared_storages(tmp_path):
    base = np.arange(24, dtype=np.float32)
    matrix = base.reshape(4, 6)
    views = {
        "whole": (View(base, 0, (4, 6), (6, 1)), matrix),
        "transposed": (View(base, 0, (6, 4), (1, 6)), matrix.T),
        "part": (View(base, 8, (3, 2), (6, 2)), matrix[1:, 2:6:2]),
        "expanded": (View(base, 2, (3, 5), (0, 1)), np.broadcast_to(base[2:7], (3, 5))),
        "scalar": (View(base, 23, (), ()), base[23]),
        "empty": (View(base, 24, (0, 7), (7, 1)), np.zeros((0, 7), np.float32)),
    }
    file = write_pth(tmp_path / "a.pt", {key: view for key, (view, _) in views.items()})
    with zipfile.ZipFile(file) as written:
        assert [entry for entry in written.namelist() if "/data/" in entry] == ["archive/data/0"]
    checkpoint = open_checkpoint(file)
    for key, (_, expected) in views.items():
        np.testing.assert_array_equal(checkpoint[key].view(), expected, err_msg=key)
    spec = nn.Spec((4, 6), (None, None), jnp.bfloat16, nn.zeros, stored=(6, 4), transpose=(1, 0))
    only = Mapping(renames=(("^a$", "transposed"),), skips=(("whole|part|expanded|scalar|empty", "another test"),))
    np.testing.assert_array_equal(load({"a": spec}, checkpoint, only)["a"], matrix)


def test_views_are_windows_on_the_file(tmp_path):
    view = open_checkpoint(write_pth(tmp_path / "a.pth", {"a": np.ones((2, 3), np.float32)}))["a"].view()
    assert not view.flags.writeable and not view.flags.owndata


def test_beyond_four_gigabytes(tmp_path):
    """An archive whose entries begin at 5 GiB: their places are in the 64-bit fields of the directory."""
    file = tmp_path / "a.pth"
    with file.open("wb") as f:
        f.write(b"PK\3\4")
        f.seek(5 * 2**30)
        with zipfile.ZipFile(f, "w") as written:
            for entry, content in entries_of({"a": np.arange(5.0)}).items():
                written.writestr(f"x/{entry}", content)
    tensor = open_checkpoint(file)["a"]
    assert tensor.offset > 5 * 2**30
    np.testing.assert_array_equal(tensor.view(), np.arange(5.0))


def test_parameters(tmp_path):
    storages: list[np.ndarray] = []
    parameter = call(
        name("torch._utils", "_rebuild_parameter"), np.arange(3.0), True, Ordered(), storages=storages
    )  # fmt: skip
    entries = entries_of({"a": parameter}) | {"data/0": storages[0].tobytes()}
    file = tmp_path / "a.pth"
    file.write_bytes(archive(entries))
    np.testing.assert_array_equal(open_checkpoint(file)["a"].view(), np.arange(3.0))


TENSORS = {"w": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    "value",
    [
        {"state_dict": TENSORS, "epoch": 3, "loss": 0.5, "name": "x"},
        {"model": Ordered(TENSORS), "optimizer": {"state": {0: {"step": 3}}, "groups": [{"lr": 0.1}]}},
        {"module": TENSORS, "ds_config": None},
        {"model": {"module": TENSORS}, "step": True},
        TENSORS | {"epoch": 3},
    ],
    ids=["state_dict", "model", "module", "nested", "flat"],
)
def test_wrapped_state_dicts(tmp_path, value):
    checkpoint = open_checkpoint(write_pth(tmp_path / "a.pth", value))
    assert {key: tensor.shape for key, tensor in checkpoint.items()} == {"w": (2,), "b": (2,)}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"model": TENSORS, "ema": TENSORS}, "holds tensors in 'model', 'ema', where one state dict is wanted"),
        ({"generator": TENSORS}, "holds tensors in 'generator', where one state dict is wanted"),
        (TENSORS | {"optimizer": [TENSORS]}, "holds tensors in the top, 'optimizer', where one state dict is wanted"),
        ({0: np.zeros(2)}, "holds tensors under 0, not under names"),
        ({"epoch": 3}, "holds no tensors"),
        ([np.zeros(2)], "holds a list, not tensors by name"),
        (np.zeros(2), "holds a Tensor, not tensors by name"),
    ],
)
def test_what_is_no_state_dict(tmp_path, value, what):
    file = write_pth(tmp_path / "a.pth", value)
    assert message(file).startswith(f"{file}: {what}")


EVIL = {
    "system": call(name("posix", "system"), "touch HACKED"),
    "eval": call(name("builtins", "eval"), "open('HACKED', 'w')"),
    "getattr": name("builtins", "getattr"),
    "a class of ours": name("vidax.weights.pth", "Machine"),
    "load": call(name("torch", "load"), "HACKED"),
    "instance": Raw(b"(X\x06\x00\x00\x00HACKEDiio\nFileIO\n"),
    "by the stack": Raw(b"X\x05\x00\x00\x00posixX\x06\x00\x00\x00system\x93"),
    "a longer name": name("collections", "OrderedDict.fromkeys"),
}
NAMES = {
    "system": "posix.system",
    "eval": "builtins.eval",
    "getattr": "builtins.getattr",
    "a class of ours": "vidax.weights.pth.Machine",
    "load": "torch.load",
    "instance": "io.FileIO",
    "by the stack": "posix.system",
    "a longer name": "collections.OrderedDict.fromkeys",
}


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_in_a_file_is_run(tmp_path, monkeypatch, evil):
    monkeypatch.chdir(tmp_path)
    file = write_pth(tmp_path / "a.pth", TENSORS | {"x": EVIL[evil]})
    monkeypatch.setattr("builtins.__import__", lambda name, *_: pytest.fail(f"imported {name}"))
    try:
        open_checkpoint(file)
    except UserError as error:
        text = str(error)
    monkeypatch.undo()
    assert text.startswith(
        f"{file}: asks for {NAMES[evil]}, which weights do not need; vidax runs no code from a checkpoint; "
        "if you trust it, save its tensors alone: "
    )
    assert os.listdir(tmp_path) == ["a.pth"]


def pickled(*instructions: bytes) -> bytes:
    """An archive with this data.pkl, and a storage 0 of three float32."""
    return archive({"data.pkl": b"\x80\x02" + b"".join(instructions), "data/0": bytes(12)})


FLOATS = np.zeros(3, np.float32)


def tensor(*arguments) -> bytes:
    return archive(entries_of({"a": View(FLOATS, *arguments)}))


def without(*missing: str) -> bytes:
    return archive({key: content for key, content in entries_of(TENSORS).items() if key not in missing})


def replaced(**contents: bytes) -> bytes:
    return archive(entries_of(TENSORS) | {key.replace("_", "."): content for key, content in contents.items()})


NO_PICKLE = "its data.pkl is not a pickle of tensors ("
FAULTS = {
    "empty": (b"", "an empty file"),
    "html": (b"<!doctype html>", "not a file that PyTorch wrote: it does not begin as a zip archive"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the file it stands for"),
    "before 1.6": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "in the form that PyTorch wrote before 1.6, which is"),
    "cut": (without()[:-30], "cut short, or not a whole zip archive"),
    "compressed": (archive(entries_of(TENSORS), compression=zipfile.ZIP_DEFLATED), "archive/data.pkl is compressed"),
    "no pickle": (without("data.pkl"), "a zip archive with 0 entries data.pkl where PyTorch writes one"),
    "two pickles": (archive({"data.pkl": b"", "x/data.pkl": b""}), "a zip archive with 2 entries data.pkl"),
    "big-endian": (replaced(byteorder=b"big"), "its byte order is 'big'; vidax reads little-endian files"),
    "no storage": (without("data/0"), NO_PICKLE + "'archive/data/0'"),
    "short storage": (replaced() and archive(entries_of(TENSORS) | {"data/0": b"1234"}), NO_PICKLE + "storage 0 has 4"),
    "beyond": (tensor(1, (3,), (1,)), NO_PICKLE + "it has a tensor that reaches beyond its storage of 3 elements"),
    "beyond by strides": (tensor(0, (2, 2), (2, 1)), NO_PICKLE + "it has a tensor that reaches beyond"),
    "negative": (tensor(0, (-2,), (1,)), NO_PICKLE + "it has a tensor whose shape, strides or offset"),
    "negative stride": (tensor(2, (2,), (-1,)), NO_PICKLE + "it has a tensor whose shape, strides or offset"),
    "true": (tensor(0, (True,), (1,)), NO_PICKLE + "it has a tensor whose shape, strides or offset"),
    "strides": (tensor(0, (2,), (1, 1)), NO_PICKLE + "it has a tensor of 1 axes with 2 strides and 2"),
    "too many": (tensor(0, (2**40, 2**40), (0, 0)), NO_PICKLE + "it has a tensor of 2 axes with 2 strides"),
    "axes": (tensor(0, (1,) * 70, (1,) * 70), NO_PICKLE + "it has a tensor of 70 axes"),
    "not a shape": (tensor(0, 3, (1,)), NO_PICKLE + "it makes a tensor of what is no storage"),
    "no stop": (pickled(b"}"), NO_PICKLE + "it ends before its last instruction"),
    "nothing": (pickled(b"."), NO_PICKLE + "pop from empty list"),
    "text": (pickled(b"hello"), NO_PICKLE),
    "instruction": (pickled(b"}\x85\x81."), NO_PICKLE + "it has the instruction NEWOBJ"),
    "string": (pickled(b"S'\\i'\n."), NO_PICKLE + "it has the instruction STRING"),
    "no instruction": (pickled(b"\xff"), NO_PICKLE + "it has the instruction b'\\xff'"),
    "memo": (pickled(b"h\7."), NO_PICKLE + "7"),
    "stack": (pickled(b"}u."), NO_PICKLE),
    "call": (pickled(b"})R."), NO_PICKLE + "it calls what is no function"),
    "call of a storage": (pickled(name("torch", "FloatStorage"), b")R."), NO_PICKLE + "it calls what is no function"),
    "wrong call": (pickled(name("torch._utils", "_rebuild_tensor_v2"), b")R."), NO_PICKLE),
    "attributes": (pickled(name("torch._utils", "_rebuild_tensor_v2"), b"}b."), NO_PICKLE + "it sets the attributes"),
    "key": (pickled(b"}(NNu."), NO_PICKLE + "it has a dict with keys other than names and numbers"),
    "odd dict": (pickled(b"}(K\1u."), NO_PICKLE),
    "nested key": (pickled(b"}(", b"N" + b"\x85" * 200_000, b"Nu."), NO_PICKLE + "it has a dict with keys other than"),
    "nested name": (pickled(b"N" + b"\x85" * 200_000, b"N\x93."), NO_PICKLE),
    "no storage id": (pickled(b"K\1Q."), NO_PICKLE + "it refers to something that is no storage"),
    "itself": (pickled(b"}q\0(X\1\0\0\0ah\0u."), "holds no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_files_are_named_with_the_fault(tmp_path, fault):
    content, what = FAULTS[fault]
    file = tmp_path / "a.pth"
    file.write_bytes(content)
    assert message(file).startswith(f"{file}: {what}")


def test_an_entry_that_the_directory_misplaces(tmp_path):
    content = bytearray(without())
    at = content.index(b"PK\1\2")
    content[at + 42 : at + 46] = struct.pack("<I", 7)
    file = tmp_path / "a.pth"
    file.write_bytes(content)
    assert "archive/data.pkl does not begin where the archive's directory says" in message(file)


def test_an_entry_of_two_places(tmp_path):
    file = tmp_path / "a.pth"
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(file, "w") as written:
        written.writestr("a/data.pkl", b"")
        written.writestr("a/data.pkl", b"")
    assert "a/data.pkl occurs twice" in message(file)


def test_every_cut_is_noticed(tmp_path):
    whole, file = archive(entries_of(TENSORS)), tmp_path / "a.pth"
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        message(file)


def test_mutations_end_in_a_sentence_or_in_tensors_within_the_file(tmp_path):
    """One to four bytes changed, 3,000 times: half anywhere, half in the pickle and the directory."""
    rng = random.Random(0)
    nested = {"model": Ordered(TENSORS | {"v": View(np.arange(12.0), 1, (2, 5), (6, 1))}), "epoch": 3}
    whole, file = archive(entries_of(nested)), tmp_path / "a.pth"
    places = [*range(whole.index(b"\x80\x02"), whole.index(b"PK\3\4", 4)), *range(whole.index(b"PK\1\2"), len(whole))]
    opened = 0
    for index in range(3000):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.choice(places) if index % 2 else rng.randrange(len(content))] = rng.randrange(256)
        file.write_bytes(content)
        try:
            for tensor in open_checkpoint(file).values():
                tensor.view().sum()
            opened += 1
        except UserError as error:
            assert str(error).startswith(f"{file}: ")
    assert 0 < opened < 2500


def test_the_file_of_a_folder(tmp_path):
    write_pth(tmp_path / "Wan2.1_VAE.pth", TENSORS)
    assert open_checkpoint(tmp_path).path == tmp_path / "Wan2.1_VAE.pth"
    (tmp_path / "Wan2.1_VAE.safetensors").write_bytes(b"")
    assert "Wan2.1_VAE.safetensors: an empty file" in message(tmp_path), "the form that needs no unpickling"
    write_pth(tmp_path / "other.pt", TENSORS)
    assert "holds several checkpoints (Wan2.1_VAE.safetensors, other.pt); name the file" in message(tmp_path)
