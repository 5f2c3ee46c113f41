"""Prompts to token ids for T5 text encoders, from the `tokenizer.json` or `spiece.model` that comes with a checkpoint.

Cleaning is the official Wan code's `clean="whitespace"` (wan/modules/tokenizers.py) and diffusers' `prompt_clean`
(pipelines/wan/pipeline_wan.py), which agree. Both use the `regex` module's `\\s`; the standard `re` differs on
U+001C to U+001F only, and ftfy and `html.unescape` have removed those by then. Without ftfy diffusers leaves that
step out; here it is a dependency.
"""

import abc
import dataclasses
import html
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ftfy
import numpy as np
import sentencepiece
import tokenizers

from vidax.errors import UserError
from vidax.weights import open_checkpoint

SPECIAL_TOKENS = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
NAMES = ("tokenizer.json", "spiece.model")  # the first is what Wan's own code reads
EMBEDDED = "spiece_model"  # a uint8 tensor in single-file text encoders made for ComfyUI


def clean_prompt(text: str) -> str:
    """Mend mojibake, full-width letters and curly quotes (ftfy), resolve HTML entities twice, collapse whitespace."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class Tokens(NamedTuple):
    """ids: int32 [B, S], padded on the right. lengths: int32 [B], text tokens with </s>. truncated: text was cut."""

    ids: np.ndarray
    lengths: np.ndarray
    truncated: list[bool]


class Tokenizer(abc.ABC):
    """Prompts to ids, ended with </s> and padded. One thread at a time."""

    pad_id: int

    @abc.abstractmethod
    def encode(self, prompts: Sequence[str], length: int = 512, *, clean: bool = True) -> Tokens:
        """Encode, and before that perhaps mend (`clean_prompt`). What does not fit in `length` is cut at the end, and
        </s> stays the last token.
        """

    @staticmethod
    def load(path: str | os.PathLike) -> "Tokenizer":
        """From a `tokenizer.json`, with `tokenizer_config.json` and `special_tokens_map.json` beside it; a
        `spiece.model`; the folder of either; or a checkpoint that has a `spiece.model` inside (`EMBEDDED`).

        Raises UserError where there is none, it cannot be read, or nothing names a padding token.
        """
        file = find_tokenizer(Path(path), within=("",)) or Path(path)
        if not file.is_file():
            what = f"holds neither {' nor '.join(NAMES)}" if file.exists() else "no such file or folder"
            where = "a tokenizer is in tokenizer/ of a diffusers checkpoint, in google/umt5-xxl/ of an official Wan one"
            raise UserError(f"{file}: {what}; {where}")
        if file.suffix == ".json":
            return JsonTokenizer.read(file)
        if file.suffix == ".model":
            return SpieceTokenizer.read(file.read_bytes(), str(file))
        if (embedded := open_checkpoint(file).get(EMBEDDED)) is None:
            raise UserError(f"{file}: has no tensor {EMBEDDED}; give a {' or '.join(NAMES)}")
        return SpieceTokenizer.read(embedded.view().tobytes(), f"{EMBEDDED} in {file}")


def find_tokenizer(folder: Path, within: Sequence[str] = ("", "tokenizer", "google/umt5-xxl")) -> Path | None:
    """The tokenizer's file in a folder, or in one of these folders inside it."""
    places = (folder / part / name for part in within for name in NAMES)
    return next((place for place in places if place.is_file()), None)


def save_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer (a file or its folder), and what stands beside it about special tokens, into a new folder."""
    source = find_tokenizer(source, within=("",)) or source
    folder.mkdir(parents=True)
    if source.name not in NAMES:
        (folder / "spiece.model").write_bytes(open_checkpoint(source)[EMBEDDED].view().tobytes())
        return
    for file in (source, *(source.parent / name for name in SPECIAL_TOKENS)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def nearest_tokenizer(text_encoder: Path) -> Path | None:
    """The tokenizer that belongs to a text encoder's file or folder: inside it, beside it, or beside its folder."""
    if text_encoder.is_file():
        if EMBEDDED in open_checkpoint(text_encoder):
            return text_encoder
        text_encoder = text_encoder.parent
    return find_tokenizer(text_encoder) or find_tokenizer(text_encoder.parent)


@dataclasses.dataclass(frozen=True, eq=False)
class JsonTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` and its padding token; `encode` sets the length on it."""

    backend: tokenizers.Tokenizer
    pad_token: str
    pad_id: int

    @staticmethod
    def read(file: Path) -> "JsonTokenizer":
        backend = _read_backend(file)
        named = _special_tokens(file.parent)
        # As transformers does: a special token that only the configuration names is not split either. None is new.
        backend.add_special_tokens([token for token in named.values() if backend.token_to_id(token) is not None])
        pad_token = named.get("pad_token") or (backend.padding or {}).get("pad_token") or "<pad>"
        pad_id = backend.token_to_id(pad_token)
        if pad_id is None:
            raise UserError(
                f"{file}: the padding token {pad_token!r} is not in its vocabulary; take both from one checkpoint"
            )
        return JsonTokenizer(backend, pad_token, pad_id)

    def encode(self, prompts: Sequence[str], length: int = 512, *, clean: bool = True) -> Tokens:
        assert length > self.backend.num_special_tokens_to_add(is_pair=False), length
        # The file may hold settings of its own; the caller's length replaces them.
        self.backend.enable_truncation(length)
        self.backend.enable_padding(length=length, pad_id=self.pad_id, pad_token=self.pad_token)
        # One by one: encode_batch starts threads, and tokenizers warns when a process with threads forks.
        encoded = [self.backend.encode(clean_prompt(prompt) if clean else prompt) for prompt in prompts]
        return Tokens(
            ids=np.array([e.ids for e in encoded], np.int32).reshape(len(encoded), length),
            lengths=np.array([sum(e.attention_mask) for e in encoded], np.int32),
            truncated=[bool(e.overflowing) for e in encoded],
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SpieceTokenizer(Tokenizer):
    """A SentencePiece model, giving the ids that transformers' T5 tokenizer makes of it.

    Two things differ from SentencePiece's own: special tokens written in a prompt are themselves, not letters; and
    characters without a piece are <unk>, one for each run of them, also where the model could spell them in bytes.
    """

    processor: sentencepiece.SentencePieceProcessor
    pad_id: int
    special: re.Pattern[str]

    @staticmethod
    def read(model: bytes, source: str) -> "SpieceTokenizer":
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{source}: not a readable SentencePiece model ({error}); fetch it again") from None
        ids = {"padding": processor.pad_id(), "end": processor.eos_id(), "unknown": processor.unk_id()}
        if missing := [name for name, number in ids.items() if number < 0]:
            raise UserError(f"{source}: names no {' and no '.join(missing)} token, as T5 models do; take another one")
        pieces = [processor.id_to_piece(number) for number in ids.values()]
        return SpieceTokenizer(processor, ids["padding"], re.compile(f"({'|'.join(map(re.escape, pieces))})"))

    def encode(self, prompts: Sequence[str], length: int = 512, *, clean: bool = True) -> Tokens:
        encoded = [self.ids(clean_prompt(prompt) if clean else prompt) for prompt in prompts]
        end, room = [self.processor.eos_id()], length - 1
        rows = [(ids[:room] + end + [self.pad_id] * length)[:length] for ids in encoded]
        return Tokens(
            ids=np.array(rows, np.int32).reshape(len(rows), length),
            lengths=np.array([min(len(ids), room) + 1 for ids in encoded], np.int32),
            truncated=[len(ids) > room for ids in encoded],
        )

    def ids(self, text: str) -> list[int]:
        """Ids of a text, of any number and without </s>."""
        found: list[int] = []
        for index, part in enumerate(self.special.split(text)):
            if index % 2:
                found.append(self.processor.piece_to_id(part))
                continue
            unknown = [(self.processor.is_byte(number), number) for number in self.processor.encode(part)]
            for is_byte, run in itertools.groupby(unknown, key=lambda pair: pair[0]):
                found += [self.processor.unk_id()] if is_byte else [number for _, number in run]
        return found


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower class
        raise UserError(
            f"{file}: not a readable tokenizer.json ({error}); "
            "an interrupted download or a Git LFS pointer looks like this, fetch it again"
        ) from error


def _special_tokens(folder: Path) -> dict[str, str]:
    """{"pad_token": "<pad>", ...}; the configuration wins over the older map."""
    named: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        file = folder / name
        if file.is_file():
            named.update(_tokens_of(_read_json(file)))
    return named


def _tokens_of(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(key)
        if isinstance(token, dict):  # written with its properties: {"content": "<pad>", "lstrip": false, ...}
            token = token.get("content")
        if token:
            yield key, token


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not readable JSON ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: holds no settings; fetch it again")
    return config
