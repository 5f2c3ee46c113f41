"""Repositories of the Hugging Face hub: from the cache on this machine if they are there whole, else downloaded."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vidax.errors import UserError
from vidax.weights.layouts import flag

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
HEAVY = (".safetensors", ".pth", ".model")  # a component is here when one of these is, or a tokenizer.json

Layout = Mapping[str, Sequence[str]]  # a component to the patterns of its files


def fetch(
    repositories: Sequence[str], layouts: Sequence[Layout], components: Sequence[str], optional: Sequence[str] = ()
) -> Path:
    """The folder of the first repository that the cache has in one of the layouts, else of the first, downloaded.

    optional: components that are downloaded too where the repository has them. Where the cache has only a part of one,
        it is not whole.
    Raises UserError where a download is needed and there is no network, or the repository has no such files.
    """
    wanted = [{name: layout[name] for name in components if name in layout} for layout in layouts]
    for repository in repositories:
        if (folder := cached(repository)) and complete(folder, wanted) and not begun(folder, layouts, optional):
            return folder
    more = [pattern for layout in layouts for name in optional for pattern in layout.get(name, ())]
    return download(repositories[0], wanted, more)


def cached(repository: str) -> Path | None:
    """The folder in the cache, whatever it holds. Asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def download(repository: str, layouts: Sequence[Layout], more: Sequence[str] = ()) -> Path:
    """The files of the layouts, those that are in the cache already left as they are; progress is the hub's own."""
    from huggingface_hub import constants, snapshot_download

    patterns = [pattern for layout in layouts for patterns in layout.values() for pattern in patterns]
    parts = ", ".join(map(flag, dict.fromkeys(name for layout in layouts for name in layout if name != "scheduler")))
    local = (
        f"where there is a network, run `hf download {repository} --local-dir DIR` and give DIR as the model, "
        f"or name what is needed of it: {parts}"
    )
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*patterns, *more]))
    except Exception as error:  # the hub lets through what its HTTP library raises
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error).strip().split("\n")[0][:200]
        raise UserError(
            f"{repository}: no such folder, not in the Hugging Face cache {constants.HF_HUB_CACHE}, and it cannot be "
            f"downloaded: {why}; {local}"
        ) from error
    if not complete(folder, layouts):  # without a network the hub returns what it has
        missing = min([absent(folder, layout) for layout in layouts], key=len)
        raise UserError(
            f"{repository}: {folder} in the Hugging Face cache lacks the {' and the '.join(missing)}, which cannot be "
            f"downloaded or is not in the repository; {local}"
        )
    return folder


def complete(folder: Path, layouts: Sequence[Layout]) -> bool:
    return any(layout and not absent(folder, layout) for layout in layouts)


def begun(folder: Path, layouts: Sequence[Layout], optional: Sequence[str]) -> list[str]:
    """The optional components that the folder has files of, but not all."""
    parts = [(name, layout[name]) for layout in layouts for name in optional if name in layout]
    started = [(name, patterns) for name, patterns in parts if any(any(folder.glob(p)) for p in patterns)]
    return [name for name, patterns in started if absent(folder, {name: patterns})]


def absent(folder: Path, layout: Layout) -> list[str]:
    """The components of which a weight file, a shard or the tokenizer is not in the folder."""
    missing = []
    for name, patterns in layout.items():
        files = [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]
        heavy = [file for file in files if file.suffix in HEAVY or file.name in ("tokenizer.json", "model_index.json")]
        shards = [match for file in heavy if (match := SHARD.fullmatch(file.name))]
        counts = {(match["stem"], int(match["count"])) for match in shards}
        if not heavy or sum(count for _, count in counts) != len(shards):
            missing.append(name)
    return missing
