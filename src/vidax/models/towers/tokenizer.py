"""Prompts to token ids for T5 text encoders, from the `tokenizer.json` that comes with a checkpoint.

Cleaning is the official Wan code's `clean="whitespace"` (wan/modules/tokenizers.py) and diffusers' `prompt_clean`
(pipelines/wan/pipeline_wan.py), which agree. Both use the `regex` module's `\\s`; the standard `re` differs on
U+001C to U+001F only, and ftfy and `html.unescape` have removed those by then. Without ftfy diffusers leaves that
step out; here it is a dependency.
"""

import dataclasses
import html
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ftfy
import numpy as np
import tokenizers

from vidax.errors import UserError


def clean_prompt(text: str) -> str:
    """Mend mojibake, full-width letters and curly quotes (ftfy), resolve HTML entities twice, collapse whitespace."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class Tokens(NamedTuple):
    """ids: int32 [B, S], padded on the right. lengths: int32 [B], text tokens with </s>. truncated: text was cut."""

    ids: np.ndarray
    lengths: np.ndarray
    truncated: list[bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A `tokenizers.Tokenizer` and its padding token. One thread at a time: `encode` sets the length on it."""

    backend: tokenizers.Tokenizer
    pad_token: str
    pad_id: int

    @staticmethod
    def load(path: str | os.PathLike) -> "Tokenizer":
        """From a `tokenizer.json` or its folder, with `tokenizer_config.json` and `special_tokens_map.json` beside it.

        Raises UserError where there is none, it cannot be read, or nothing names a padding token.
        """
        file = _find(Path(path))
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
        return Tokenizer(backend, pad_token, pad_id)

    def encode(self, prompts: Sequence[str], length: int = 512) -> Tokens:
        """Clean and encode. What does not fit in `length` is cut at the end, and </s> stays the last token."""
        assert length > self.backend.num_special_tokens_to_add(is_pair=False), length
        # The file may hold settings of its own; the caller's length replaces them.
        self.backend.enable_truncation(length)
        self.backend.enable_padding(length=length, pad_id=self.pad_id, pad_token=self.pad_token)
        # One by one: encode_batch starts threads, and tokenizers warns when a process with threads forks.
        encoded = [self.backend.encode(clean_prompt(prompt)) for prompt in prompts]
        return Tokens(
            ids=np.array([e.ids for e in encoded], np.int32).reshape(len(encoded), length),
            lengths=np.array([sum(e.attention_mask) for e in encoded], np.int32),
            truncated=[bool(e.overflowing) for e in encoded],
        )


def _find(path: Path) -> Path:
    """The file to read. A `spiece.model` (SentencePiece) would be chosen here and read in `_read_backend`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    where = "it is in tokenizer/ of a diffusers checkpoint, in google/umt5-xxl/ of an official Wan one"
    if (file.parent / "spiece.model").is_file():
        raise UserError(
            f"{file} does not exist, and spiece.model is not read yet; put tokenizer.json beside it: {where}"
        )
    raise UserError(f"{file} does not exist; {where}")


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
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
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
