import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from vidax.errors import UserError
from vidax.models.towers.tokenizer import Tokenizer, clean_prompt

WORDS = ["a", "cat", "walks", "on", "the", "grass"]
PAD, END, UNKNOWN = 0, 1, 2


def tiny_backend(special_tokens=("<pad>", "</s>", "<unk>")):
    """Built as umT5's: Unigram over Metaspace, </s> appended by the post-processor, ids pad 0, </s> 1, unknown 2."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    vocabulary += [("▁" + word, -3.0 - 0.01 * index) for index, word in enumerate(WORDS)]
    vocabulary += [(letter, -8.0) for letter in "abcdefghijklmnopqrstuvwxyz.,'&"]
    backend = Backend(models.Unigram(vocabulary, unk_id=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    backend.add_special_tokens(list(special_tokens))
    return backend


def save(folder, backend=None, **config):
    (backend or tiny_backend()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "</s>"} | config))
    return folder


def word(name):
    return tiny_backend().token_to_id("▁" + name)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a cat", "a cat"),
        ("", ""),
        (" \t\n ", ""),
        ("  a\t\tcat \r\n walks\u3000on\xa0grass ", "a cat walks on grass"),
        ("cat &amp; dog", "cat & dog"),
        ("cat &amp;amp; dog", "cat & dog"),
        ("&lt;b&gt;cat&lt;/b&gt;&nbsp;", "<b>cat</b>"),
        ("a cat&#28;", "a cat"),
        ("café", "café"),
        ("âœ” a cat", "✔ a cat"),
        ("\uff21\uff22\uff23\u3000\uff11\uff12", "ABC 12"),
        ("“cat\u2019s”", '"cat\'s"'),
        ("一只猫\uff0c走", "一只猫,走"),
        ("a\x00b\x1fc", "abc"),
        ("a \udcff", "a �"),
    ],
)
def test_cleaning(text, clean):
    assert clean_prompt(text) == clean


def test_encode(tmp_path):
    tokens = Tokenizer.load(save(tmp_path)).encode(["a cat walks", "", " cat&nbsp;"], length=6)
    expected = [
        [word("a"), word("cat"), word("walks"), END, PAD, PAD],
        [END] + [PAD] * 5,
        [word("cat"), END] + [PAD] * 4,
    ]
    np.testing.assert_array_equal(tokens.ids, expected)
    np.testing.assert_array_equal(tokens.lengths, [4, 1, 2])
    assert tokens.ids.dtype == tokens.lengths.dtype == np.int32
    assert tokens.truncated == [False] * 3


def test_truncation_keeps_the_end_token(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path))
    prompts = ["a cat walks", "a cat walks on", "a cat walks on the grass", "a"]
    tokens = tokenizer.encode(prompts, length=4)
    cut = [word("a"), word("cat"), word("walks"), END]
    np.testing.assert_array_equal(tokens.ids, [cut, cut, cut, [word("a"), END, PAD, PAD]])
    assert tokens.truncated == [False, True, True, False]
    assert tokenizer.encode(prompts).ids.shape == (4, 512), "the length of one call stays with it"
    assert tokenizer.encode([], length=4).ids.shape == (0, 4)


def test_settings_in_the_file_give_way(tmp_path):
    backend = tiny_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=3, direction="left", pad_id=PAD, pad_token="<pad>")
    tokens = Tokenizer.load(save(tmp_path, backend)).encode(["a cat"], length=5)
    np.testing.assert_array_equal(tokens.ids, [[word("a"), word("cat"), END, PAD, PAD]])


@pytest.mark.parametrize("named_by", ["config", "config as a dict", "map", "file", "nothing"])
def test_the_padding_token(tmp_path, named_by):
    backend = tiny_backend()
    if named_by == "file":
        backend.enable_padding(pad_id=UNKNOWN, pad_token="<unk>")
    backend.save(str(tmp_path / "tokenizer.json"))
    token = {"content": "<unk>", "lstrip": False} if named_by == "config as a dict" else "<unk>"
    if named_by.startswith("config"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": token}))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "</s>"}))
    if named_by == "map":
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": token}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    expected = PAD if named_by == "nothing" else UNKNOWN
    assert tokenizer.pad_id == expected and tokenizer.encode([""], length=2).ids.tolist() == [[END, expected]]


def test_special_tokens_of_the_configuration_are_not_split(tmp_path):
    tokens = Tokenizer.load(save(tmp_path, tiny_backend(special_tokens=()))).encode(["</s>"], length=4)
    np.testing.assert_array_equal(tokens.ids, [[END, END, PAD, PAD]])


def lfs_pointer(folder):
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16837417\n")


def half(folder):
    content = (save(folder) / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content[: len(content) // 2])


def only_spiece(folder):
    (folder / "spiece.model").write_bytes(b"\n\x0e")


def broken_config(folder):
    (save(folder) / "tokenizer_config.json").write_text("{")


def config_without_settings(folder):
    (save(folder) / "tokenizer_config.json").write_text("[]")


def unknown_pad(folder):
    save(folder, pad_token="[PAD]")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, r"tokenizer\.json does not exist; it is in tokenizer/ of a diffusers checkpoint"),
        (only_spiece, r"spiece\.model is not read yet; put tokenizer\.json beside it"),
        (
            lfs_pointer,
            r"tokenizer\.json: not a readable tokenizer\.json .*Git LFS pointer looks like this, fetch it again",
        ),
        (half, r"tokenizer\.json: not a readable tokenizer\.json"),
        (broken_config, r"tokenizer_config\.json: not readable JSON"),
        (config_without_settings, r"tokenizer_config\.json: holds no settings"),
        (unknown_pad, r"the padding token '\[PAD\]' is not in its vocabulary"),
    ],
)
def test_what_cannot_be_loaded(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"no-such-folder does not exist"):
        Tokenizer.load(tmp_path / "no-such-folder")
