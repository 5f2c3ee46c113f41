import io
import json

import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import save_file
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


SENTENCES = ["a cat walks on the grass", "two dogs run in the rain", "the cat, the dogs & the grass."] * 5


def spiece(**settings) -> bytes:
    """A SentencePiece model with the special ids of T5: padding 0, end 1, unknown 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="unigram",
        **{"vocab_size": 60, "hard_vocab_limit": False, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} | settings,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("form", ["file", "folder", "in a checkpoint"])
def test_a_sentencepiece_model(tmp_path, form):
    model = spiece()
    path = tmp_path / "spiece.model"
    path.write_bytes(model)
    if form == "in a checkpoint":
        path = tmp_path / "umt5.safetensors"
        save_file({"spiece_model": np.frombuffer(model, np.uint8), "a": np.zeros(3, np.float32)}, path)
    tokenizer = Tokenizer.load(tmp_path if form == "folder" else path)
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    cat = plain.encode("a cat walks")
    long = "a cat walks on the grass and more"
    tokens = tokenizer.encode(["a  cat&nbsp;walks", "", long], length=16)
    assert tokens.ids[0].tolist() == [*cat, END, *[PAD] * (15 - len(cat))]
    assert tokens.ids[1].tolist() == [END, *[PAD] * 15]
    assert tokens.ids[2].tolist() == [*plain.encode(long)[:15], END]
    assert tokens.lengths.tolist() == [len(cat) + 1, 1, 16] and tokens.truncated == [False, False, True]
    assert tokens.ids.dtype == tokens.lengths.dtype == np.int32
    assert tokenizer.encode([], length=4).ids.shape == (0, 4)


@pytest.mark.parametrize("bytes_too", [False, True])
def test_special_tokens_and_unknown_characters_of_a_sentencepiece_model(tmp_path, bytes_too):
    (tmp_path / "spiece.model").write_bytes(spiece(byte_fallback=bytes_too, vocab_size=400 if bytes_too else 60))
    tokenizer = Tokenizer.load(tmp_path)
    a = tokenizer.encode(["a"], length=4)
    word = a.ids[0, : a.lengths[0] - 1].tolist()
    ids = tokenizer.encode(["a</s>a<pad> a <unk>"], length=20).ids[0].tolist()
    assert ids[: ids.index(PAD, 2 * len(word) + 2)] == [*word, END, *word, PAD, *word, UNKNOWN, END]
    ids = tokenizer.encode(["a 🎬猫 a"], length=20).ids[0].tolist()
    assert ids.count(UNKNOWN) == 1, "one for the run of two"


def test_a_tokenizer_json_comes_before_a_sentencepiece_model(tmp_path):
    (tmp_path / "spiece.model").write_bytes(b"unread")
    assert Tokenizer.load(save(tmp_path)).pad_id == PAD


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "umt5.safetensors")
    with pytest.raises(UserError, match=r"umt5\.safetensors: has no tensor spiece_model; give a tokenizer\.json or"):
        Tokenizer.load(tmp_path / "umt5.safetensors")


def lfs_pointer(folder):
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16837417\n")


def half(folder):
    content = (save(folder) / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content[: len(content) // 2])


def broken_spiece(folder):
    (folder / "spiece.model").write_bytes(b"\n\x0e")


def spiece_without_padding(folder):
    (folder / "spiece.model").write_bytes(spiece(pad_id=-1))


def broken_config(folder):
    (save(folder) / "tokenizer_config.json").write_text("{")


def config_without_settings(folder):
    (save(folder) / "tokenizer_config.json").write_text("[]")


def unknown_pad(folder):
    save(folder, pad_token="[PAD]")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda folder: None,
            r": holds neither tokenizer\.json nor spiece\.model; a tokenizer is in tokenizer/ of a diffusers",
        ),
        (broken_spiece, r"spiece\.model: not a readable SentencePiece model \(.*\); fetch it again"),
        (spiece_without_padding, r"spiece\.model: names no padding token, as T5 models do; take another one"),
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
    with pytest.raises(UserError, match=r"no-such-folder: no such file or folder; a tokenizer is in"):
        Tokenizer.load(tmp_path / "no-such-folder")
