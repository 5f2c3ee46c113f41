"""Ids, masks and cleaning against transformers' tokenizers and diffusers' `prompt_clean`."""

import io
import json
import random
import sys

import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from vidax.models.towers.tokenizer import Tokenizer, clean_prompt

pytestmark = pytest.mark.parity

transformers = pytest.importorskip("transformers")

SPECIAL = ["<pad>", "</s>", "<unk>"]
TEXT = """A cat walks on the grass, realistic style. Two robots are dancing in the rain; the camera turns around them.
Bright tones, overexposed, static, blurred details, subtitles, worst quality, JPEG compression residue.
一只猫在草地上走, 写实风格. 最差质量, 细节模糊不清. Le café était déjà fermé, naïve façade à l'heure d'été."""
# What ftfy, html.unescape and the whitespace rule act on, beside ordinary letters.
PIECES = [
    *"abc xyzéü猫草。“”…\uff21\uff22\uff11\uff0c\u2019\t\n\r\u3000\xa0\u2009\x1c\x1f\x85\u200b\0&;#<>",
    *SPECIAL,
    "&amp;",
    "&amp;lt;",
    "&#28;",
    "&nbsp",
]
PIECES += [
    "Ã©",
    "â€œ",
    "âœ”",
    "&#x85;",
    "&quot;",
    "  ",
    "cat",
    " walks",
    "the grass",
    ". ",
    "e\u0301",
    "ﬁ",
    "🎬",
    "\ufeff",
]


def random_texts(seed, count):
    rng = random.Random(seed)
    for index in range(count):
        if index % 4:
            yield "".join(rng.choices(PIECES, k=rng.randrange(40)))
        else:
            points = (
                rng.choice([rng.randrange(0x250), rng.randrange(sys.maxunicode + 1)]) for _ in range(rng.randrange(20))
            )
            yield "".join(map(chr, points))


@pytest.fixture(scope="module", params=["Metaspace", "WhitespaceSplit, Metaspace"])
def folder(request, tmp_path_factory):
    """A Unigram tokenizer trained on a few lines, in both pre-tokenizer forms that T5 files have."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    split = [pre_tokenizers.WhitespaceSplit()] if "," in request.param else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, metaspace])
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXT.splitlines() * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path = tmp_path_factory.mktemp("tokenizer")
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **names).save_pretrained(path)
    return path


def assert_same(ours, reference, texts, length):
    clean = [clean_prompt(text) for text in texts]
    theirs = reference(clean, padding="max_length", truncation=True, max_length=length)
    tokens = ours.encode(texts, length)
    np.testing.assert_array_equal(tokens.ids, theirs["input_ids"])
    mask = np.arange(length) < tokens.lengths[:, None]
    np.testing.assert_array_equal(mask, theirs["attention_mask"])
    whole = [len(ids) for ids in reference(clean)["input_ids"]]
    assert tokens.truncated == [count > length for count in whole]


@pytest.mark.parametrize("length", [2, 8, 512])
def test_ids_and_masks(folder, length):
    texts = [*TEXT.splitlines(), TEXT, "", *random_texts(length, 300)]
    assert_same(Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder), texts, length)


def test_ids_of_the_t5_class(folder):
    """The class a diffusers Wan folder names. transformers 5 rebuilds it from the vocabulary, with its own
    pre-tokenizer and no normalizer but a SentencePiece one, so these texts are kept to what both leave alone."""
    reference = transformers.T5TokenizerFast.from_pretrained(folder)
    assert_same(Tokenizer.load(folder), reference, [*TEXT.splitlines(), "", "a"], 512)


@pytest.mark.parametrize("bytes_too", [False, True])
def test_sentencepiece_models(tmp_path, bytes_too):
    """T5Tokenizer makes its own tokenizer of a spiece.model. Ids and masks agree, byte pieces or not."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 4),
        model_writer=model,
        model_type="unigram",
        vocab_size=600 if bytes_too else 250,
        hard_vocab_limit=False,
        byte_fallback=bytes_too,
        character_coverage=0.98,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        minloglevel=2,
    )
    (tmp_path / "spiece.model").write_bytes(model.getvalue())
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_ids": 0}
    config = {"tokenizer_class": "T5Tokenizer", "additional_special_tokens": [], **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.T5Tokenizer.from_pretrained(tmp_path)
    special = ["a</s>b", "</s>", "<pad> a", "<unk>", "a < b", "< /s>"]
    for length in (2, 8, 512):
        texts = [*TEXT.splitlines(), TEXT, "", *special, *random_texts(length, 300)]
        assert_same(Tokenizer.load(tmp_path), reference, texts, length)


@pytest.mark.parametrize("listed", [True, False])
def test_special_tokens_in_a_prompt(tmp_path, listed):
    """Listed in tokenizer.json or named by tokenizer_config.json alone."""
    backend = Backend(
        models.Unigram([*((token, -9.0) for token in SPECIAL), ("▁", -2.0), *((c, -5.0) for c in "abs<>/")], 2)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path)
    if not listed:
        backend.save(str(tmp_path / "tokenizer.json"))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a</s>b", "</s>", "<pad> a", "<unk>", "a < b", "< /s>"]
    assert_same(Tokenizer.load(tmp_path), reference, texts, 12)


def test_cleaning():
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    texts = [*TEXT.splitlines(), *random_texts(0, 3000), *(f"a{chr(point)}b" for point in range(0x3100))]
    assert [clean_prompt(text) for text in texts] == [prompt_clean(text) for text in texts]
