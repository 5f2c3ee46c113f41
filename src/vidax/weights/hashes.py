"""Whether files are what their publisher sent: SHA-256 against what the download left beside them."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from vidax.errors import UserError
from vidax.weights.checkpoint import read_json

SUMS = "vidax.json"  # written by `vidax convert`: {"sha256": {"transformer/model.safetensors": ...}}
SHA256 = re.compile(r"[0-9a-f]{64}")


def known_hash(file: Path) -> tuple[str, str] | None:
    """(SHA-256, where it is written) of a file from a Hugging Face cache or download, or of `vidax convert`."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and SHA256.fullmatch(blob.name):
        return blob.name, "the name of its blob in the Hugging Face cache"
    for folder in file.absolute().parents:
        inside = file.absolute().relative_to(folder)
        note = folder / ".cache" / "huggingface" / "download" / f"{inside}.metadata"
        if note.is_file():
            lines = note.read_text().split()
            if len(lines) > 1 and SHA256.fullmatch(lines[1]):  # commit, etag, time; a small file's etag is a Git hash
                return lines[1], str(note)
            return None
        if (folder / SUMS).is_file():
            sums = read_json(folder / SUMS).get("sha256", {})
            return (sums[inside.as_posix()], str(folder / SUMS)) if inside.as_posix() in sums else None
    return None


def verify(file: Path, progress: Callable[[int], None]) -> bool:
    """True if the file has the hash that is known of it, False if none is known. UserError if it is another."""
    if (known := known_hash(file)) is None:
        return False
    expected, source = known
    digest, done = hashlib.sha256(), 0
    with file.open("rb") as data:
        while block := data.read(1 << 24):
            digest.update(block)
            done += len(block)
            progress(done)
    if digest.hexdigest() != expected:
        raise UserError(
            f"{file}: damaged: its SHA-256 is {digest.hexdigest()}, and {source} says {expected}; download it again"
        )
    return True


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    (folder / SUMS).write_text(json.dumps({"sha256": sums}, indent=2) + "\n")
