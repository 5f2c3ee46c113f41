"""From what the user names, a folder, a file, a model's name or a repository, to a model that is open and its card."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from vidax.errors import UserError, did_you_mean
from vidax.models.interface import PARTS, Architecture, Model, Sources
from vidax.models.registry import CARDS, Card, card_for
from vidax.models.towers.tokenizer import find_tokenizer, nearest_tokenizer
from vidax.models.wan.architecture import WanArchitecture
from vidax.models.wan.config import CLIP_VIT_H, PUBLISHED, UMT5_XXL, WAN22_VAE
from vidax.models.wan.layouts import DIFFUSERS_FILES, OFFICIAL_FILES, WAN
from vidax.models.wan.pipeline import WanModel
from vidax.weights import Folder, open_checkpoint
from vidax.weights.hub import REPOSITORY, fetch
from vidax.weights.layouts import Catalogue, components_in, differences, flag, identify


class Family(NamedTuple):
    """What opens a family's models, and the components that they have."""

    open: Callable[[Sources], Model]
    catalogue: Catalogue


# By the class of the pipeline in model_index.json. Other folders are known by their tensors.
FAMILIES = dict.fromkeys(("WanPipeline", "WanImageToVideoPipeline"), Family(WanModel.open, WAN))


def wan(card: Card) -> Architecture:
    vae = PUBLISHED[card.dit]
    return WanArchitecture(
        dit=card.dit,
        vae=vae,
        text=UMT5_XXL,
        image=CLIP_VIT_H if card.dit.image_dim else None,
        experts=card.experts,
        first_frame=vae == WAN22_VAE,
    )


# By a card's family: its model when nothing of it is on disk.
ARCHITECTURES: dict[str, Callable[[Card], Architecture]] = {"wan": wan}

REQUIRED = tuple(part for part in PARTS if part not in WAN.optional)

Given = dict[str, Path]


def locate(model: str | os.PathLike | None, given: Given) -> tuple[Card, Model]:
    """Open a model and find its card.

    model: a folder or a checkpoint file; the name of a card; a repository of the Hugging Face hub; None for the demo,
           or for a model that is `given` whole.
    given: parts (`PARTS`) that take the place of the model's own: a file or a folder each, in any layout.
    """
    for part, place in given.items():
        if not place.exists():
            raise UserError(f"{place}: no such file or folder; it is given as the {part.replace('_', ' ')}")
    if model is None and given:
        opened = open_parts(Sources(parts=given))
        return card_for(opened, given["transformer"].stem), opened
    name = "demo" if model is None else str(model)
    if (path := Path(name)).exists():
        opened = open_parts(sources_at(path, given))
        return card_for(opened, path.stem if path.is_file() else path.resolve().name), opened
    if name in CARDS:
        return open_card(CARDS[name], given)
    if REPOSITORY.fullmatch(name):
        more = [part for part in WAN.optional if part not in given]
        folder = fetch([name], [DIFFUSERS_FILES, OFFICIAL_FILES], missing(given), more)
        opened = open_parts(sources_at(folder, given))
        return card_for(opened, path.name), opened
    hint = did_you_mean(name.lower(), CARDS, cutoff=0.4)
    raise UserError(
        f"{name!r} is neither a model's name nor a folder, nor OWNER/NAME of a Hugging Face repository; "
        f"{hint}known models: {', '.join(CARDS)}"
    )


def describe(model: str | os.PathLike | None) -> tuple[Card, Architecture]:
    """A card and its model's architecture; no file of it is needed. What is no card's name is opened as in `locate`."""
    card = None if model is None or Path(model).exists() else CARDS.get(str(model))
    if card is None or card.embedded is not None:
        return locate(model, {})
    return card, ARCHITECTURES[card.family](card)


def open_card(card: Card, given: Given) -> tuple[Card, Model]:
    """A card's model, which must be that of the card. Its recipe is the card's, whichever copy of it is at hand."""
    if card.embedded is not None:
        sources = sources_at(Path(str(files("vidax").joinpath(card.embedded))), given)
    elif needed := missing(given, card.parts):
        assert card.repository is not None, card.name
        repositories = [card.repository, f"{card.repository}-Diffusers"]
        folder = fetch(repositories, [OFFICIAL_FILES, DIFFUSERS_FILES], needed)
        sources = dataclasses.replace(sources_at(folder, given), scheduler=None, image_processor=None)
    else:
        sources = Sources(parts=given)
    opened = open_parts(sources)
    check_card(card, opened)
    return card, opened


def check_card(card: Card, model: Model) -> None:
    """Raises UserError if a model is not that of a card."""
    place = model.files["transformer"]
    if difference := differences(model.dit, card.dit):
        raise UserError(f"{place}: not {card.name}: {difference}")
    if model.experts != card.experts:
        raise UserError(f"{place}: not {card.name}: experts {model.experts} instead of {card.experts}")


def missing(given: Given, parts: Sequence[str] = REQUIRED) -> list[str]:
    """What of a model's parts a repository is needed for, and the recipe that comes with them. A tokenizer may lie with
    the text encoder.
    """
    needed = [part for part in parts if part not in given]
    if "text_encoder" in given and "tokenizer" in needed and nearest_tokenizer(given["text_encoder"]):
        needed.remove("tokenizer")
    return [*needed, "scheduler"] if needed else []


def sources_at(path: Path, given: Given) -> Sources:
    """The parts in a folder or file, those that are given in their place."""
    if (path / "model_index.json").is_file():
        folder = Folder(path)
        if folder.pipeline not in FAMILIES:
            raise UserError(f"{path}: holds a {folder.pipeline}; vidax runs {', '.join(FAMILIES)}")
        there = [part for part in PARTS if part in REQUIRED or part in folder.components]
        parts = {part: folder.folder(part) for part in there if part not in given}
        return Sources(
            parts=parts | given,
            folder=path,
            options=folder.index,
            scheduler=folder.config("scheduler"),
            image_processor=folder.config("image_processor") if "image_processor" in folder.components else None,
        )
    if path.is_file():
        known = identify(WAN, open_checkpoint(path))
        return Sources(parts={known[0] if known else "transformer": path} | given)
    if not path.exists():
        raise UserError(f"{path}: no such folder; install vidax again")
    parts = components_in(WAN, path, [part for part in WAN.kinds if part not in given])
    if tokenizer := find_tokenizer(path):
        parts["tokenizer"] = tokenizer
    return Sources(parts=parts | given, folder=path)


def open_parts(sources: Sources) -> Model:
    # The only family so far: without a model_index.json nothing else can be meant.
    family = FAMILIES[sources.options.get("_class_name", "WanPipeline")]
    catalogue = family.catalogue
    if absent := [part for part in catalogue.kinds if part not in (*sources.parts, *catalogue.optional)]:
        titles = " and no ".join(catalogue.kinds[part].title for part in absent)
        where = sources.folder or next(iter(sources.parts.values()))
        flags = " and ".join(map(flag, absent))
        raise UserError(f"{where}: no whole model: no {titles}; give the folder of one that is, or {flags}")
    return family.open(sources)
