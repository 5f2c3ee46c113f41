"""What `vidax check` and `vidax convert` do with a model's files, without running it."""

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from vidax.engine.engine import DTYPES
from vidax.engine.progress import Progress, Silent
from vidax.errors import UserError, did_you_mean
from vidax.media.files import sentences
from vidax.models.locate import check_card, locate
from vidax.models.model import Model
from vidax.models.registry import CARDS
from vidax.models.towers.tokenizer import save_tokenizer
from vidax.nn import named_leaves, parameter_bytes
from vidax.weights import check_names, held
from vidax.weights.hashes import verify, write_sums


class Account(NamedTuple):
    """A component's tensors, every one of them."""

    component: str
    layout: str
    path: str
    tensors: int
    parameters: int
    values: int
    stored_bytes: int
    skipped: dict[str, str]  # name to reason
    verified: dict[str, bool]  # file to whether a hash of it is known and right; empty if that was not asked


def open_named(name: str, weights: str | os.PathLike | None) -> Model:
    """The model at `weights`, which must be the one called `name`; without `weights`, what `name` alone means."""
    if weights is None:
        return locate(name, {})[1]
    if name not in CARDS:
        hint = did_you_mean(name.lower(), CARDS, cutoff=0.4)
        raise UserError(f"{name!r} is not a model's name; {hint}known models: {', '.join(CARDS)}")
    _, model = locate(weights, {})
    check_card(CARDS[name], model)
    return model


def check(model: Model, *, hashes: bool = False, progress: Progress | None = None) -> list[Account]:
    """Account for every tensor; with `hashes`, compare each file with the SHA-256 that came with it.

    Opening a model has checked names and shapes. Raises UserError for a damaged file.
    """
    progress = progress or Silent()
    accounts = []
    for name, (part, _, layout) in model.components(jnp.bfloat16).items():
        checkpoint = part.checkpoint
        shapes = {tensor: entry.shape for tensor, entry in checkpoint.items()}
        match = check_names(part.spec, part.mapping, shapes, source=str(checkpoint.path))
        files = sorted({entry.file for entry in checkpoint.values()})
        verified = {}
        for file in files if hashes else []:
            progress.phase(f"verify {file.name}", file.stat().st_size)
            verified[str(file)] = verify(file, progress.advance)
        accounts.append(
            Account(
                component=name,
                layout=layout,
                path=str(checkpoint.path),
                tensors=len(checkpoint),
                parameters=len(match.leaves),
                values=sum(spec.size for _, spec in named_leaves(part.spec)),
                stored_bytes=sum(file.stat().st_size for file in files),
                skipped=match.skipped,
                verified=verified,
            )
        )
    return accounts


def convert(model: Model, output: str | os.PathLike, *, dtype: str, progress: Progress | None = None) -> Path:
    """Write a folder that loads without conversion: our names, stacked and cast; whole or not at all. Returns its path.

    dtype: of the large matrices. What comes with the model is kept: tokenizer, scheduler.
    """
    progress, output = progress or Silent(), Path(output)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: choose {' or '.join(DTYPES)}")
    if output.exists():
        raise UserError(f"{output} exists; name a folder that does not")
    parts = model.components(jnp.dtype(dtype))
    needed = sum(parameter_bytes(part.spec) for part, _, _ in parts.values())
    with sentences(output):
        free = shutil.disk_usage(output.absolute().parent).free
    if free < needed:
        raise UserError(f"{output}: needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there")
    temporary = output.absolute().parent / f".vidax-{secrets.token_hex(4)}"
    sums: dict[str, str] = {}
    try:
        with sentences(output):
            for name, (part, config, _) in parts.items():
                file = temporary / name / "model.safetensors"
                file.parent.mkdir(parents=True)
                progress.phase(f"convert {name}", parameter_bytes(part.spec))
                digest = held.write(part.spec, part.checkpoint, part.mapping, config, file, progress.advance)
                sums[f"{name}/{file.name}"] = digest
            save_tokenizer(model.tokenizer, temporary / "tokenizer")
            if model.scheduler is not None:
                write_index(model, temporary)
            write_sums(temporary, sums)
            temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def write_index(model: Model, folder: Path) -> None:
    """`model_index.json` and `scheduler_config.json`, as in the layout of diffusers, whose recipe the folder keeps."""
    configs = {"scheduler/scheduler_config.json": model.scheduler}
    if model.image_processor is not None:
        configs["image_processor/preprocessor_config.json"] = model.image_processor
    components = {name: ["vidax", name] for name in (*model.files, *(Path(file).parent.name for file in configs))}
    configs["model_index.json"] = {"_class_name": model.pipeline, **model.options, **components}
    for name, content in configs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
