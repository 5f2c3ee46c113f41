"""From what the user names, a folder, a file, a model's name or a repository, to a model that is open and its card."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from vidax.errors import UserError, did_you_mean
from vidax.models.architecture import Architecture
from vidax.models.cogvideox import config as cogvideox
from vidax.models.cogvideox import layouts as cogvideox_layouts
from vidax.models.cogvideox.architecture import CogVideoXArchitecture
from vidax.models.cogvideox.pipeline import CogVideoXModel
from vidax.models.interface import PARTS, Sources
from vidax.models.model import Model
from vidax.models.registry import CARDS, Card, card_for
from vidax.models.towers.t5 import T5_XXL
from vidax.models.towers.tokenizer import find_tokenizer, nearest_tokenizer
from vidax.models.wan import config as wan
from vidax.models.wan import layouts as wan_layouts
from vidax.models.wan.architecture import WanArchitecture
from vidax.models.wan.pipeline import WanModel
from vidax.weights import Folder, open_checkpoint
from vidax.weights.files import list_checkpoints
from vidax.weights.hub import REPOSITORY, Layout, fetch
from vidax.weights.layouts import Catalogue, components_in, differences, flag, identify, own_folders

Places = Mapping[str, Path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of a family are found and opened.

    pipelines:    the classes of their pipelines in model_index.json. Other folders are known by their tensors.
    describe:     a card's model when nothing of it is on disk.
    repositories: what is added to the name of a card's repository, and the files there that are a model.
    """

    pipelines: tuple[str, ...]
    open: Callable[[Sources], Model]
    describe: Callable[[Card], Architecture]
    catalogue: Catalogue
    repositories: tuple[tuple[str, Layout], ...]


def describe_wan(card: Card) -> Architecture:
    vae = wan.PUBLISHED[card.dit]
    return WanArchitecture(
        dit=card.dit,
        vae=vae,
        text=wan.UMT5_XXL,
        image=wan.CLIP_VIT_H if card.image_encoder else None,
        experts=card.experts,
        first_frame=vae == wan.WAN22_VAE,
    )


def describe_cogvideox(card: Card) -> Architecture:
    return CogVideoXArchitecture(dit=card.dit, vae=cogvideox.PUBLISHED[card.dit], text=T5_XXL)


# By the name that cards give them.
FAMILIES = {
    "wan": Family(
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        open=WanModel.open,
        describe=describe_wan,
        catalogue=wan_layouts.WAN,
        repositories=(("", wan_layouts.OFFICIAL_FILES), ("-Diffusers", wan_layouts.DIFFUSERS_FILES)),
    ),
    "cogvideox": Family(
        pipelines=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"),
        open=CogVideoXModel.open,
        describe=describe_cogvideox,
        catalogue=cogvideox_layouts.COGVIDEOX,
        repositories=(("", cogvideox_layouts.FILES),),
    ),
}
PIPELINES = {pipeline: name for name, family in FAMILIES.items() for pipeline in family.pipelines}
OPTIONAL = ("transformer_2", "image_encoder")  # of some models
REQUIRED = tuple(part for part in PARTS if part not in OPTIONAL)


def locate(model: str | os.PathLike | None, given: Places) -> tuple[Card, Model]:
    """Open a model and find its card.

    model: a folder or a checkpoint file; the name of a card; a repository of the Hugging Face hub; None for the demo,
           or for a model that is `given` whole.
    given: parts (`PARTS`) that take the place of the model's own: a file or a folder each, in any layout.
    """
    for part, place in given.items():
        if not place.exists():
            raise UserError(f"{place}: no such file or folder; it is given as the {part.replace('_', ' ')}")
    if model is None and given:
        opened = open_parts(Sources(parts=dict(given)))
        return card_for(opened, given["transformer"].stem), opened
    name = "demo" if model is None else str(model)
    if (path := Path(name)).exists():
        opened = open_parts(sources_at(path, given))
        return card_for(opened, path.stem if path.is_file() else path.resolve().name), opened
    if name in CARDS:
        return open_card(CARDS[name], given)
    if REPOSITORY.fullmatch(name):
        more = [part for part in OPTIONAL if part not in given]
        layouts = [layout for family in FAMILIES.values() for _, layout in reversed(family.repositories)]
        folder = fetch([name], layouts, missing(given), more)
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
    return card, FAMILIES[card.family].describe(card)


def open_card(card: Card, given: Places) -> tuple[Card, Model]:
    """A card's model, which must be that of the card. Its recipe is the card's, whichever copy of it is at hand."""
    if card.embedded is not None:
        sources = sources_at(Path(str(files("vidax").joinpath(card.embedded))), given)
    elif needed := missing(given, card.parts):
        assert card.repository is not None, card.name
        places = FAMILIES[card.family].repositories
        repositories = [f"{card.repository}{suffix}" for suffix, _ in places]
        folder = fetch(repositories, [layout for _, layout in places], needed)
        sources = dataclasses.replace(sources_at(folder, given), scheduler=None, image_processor=None)
    else:
        sources = Sources(parts=dict(given))
    opened = open_parts(sources)
    check_card(card, opened)
    return card, opened


def check_card(card: Card, model: Model) -> None:
    """Raises UserError if a model is not that of a card."""
    place = model.files["transformer"]
    if model.family != card.family:
        raise UserError(f"{place}: not {card.name}: a transformer of {FAMILIES[model.family].catalogue.title}")
    if difference := differences(model.dit, card.dit):
        raise UserError(f"{place}: not {card.name}: {difference}")
    if model.experts != card.experts:
        raise UserError(f"{place}: not {card.name}: experts {model.experts} instead of {card.experts}")


def missing(given: Places, parts: Sequence[str] = REQUIRED) -> list[str]:
    """What of a model's parts a repository is needed for, and the recipe that comes with them. A tokenizer may lie with
    the text encoder.
    """
    needed = [part for part in parts if part not in given]
    if "text_encoder" in given and "tokenizer" in needed and nearest_tokenizer(given["text_encoder"]):
        needed.remove("tokenizer")
    return [*needed, "scheduler"] if needed else []


def sources_at(path: Path, given: Places) -> Sources:
    """The parts in a folder or file, those that are given in their place."""
    if (path / "model_index.json").is_file():
        folder = Folder(path)
        if folder.pipeline not in PIPELINES:
            raise UserError(f"{path}: holds a {folder.pipeline}; vidax runs {', '.join(PIPELINES)}")
        there = [part for part in PARTS if part in REQUIRED or part in folder.components]
        parts = {part: folder.folder(part) for part in there if part not in given}
        return Sources(
            parts={**parts, **given},
            folder=path,
            family=PIPELINES[folder.pipeline],
            options=folder.index,
            scheduler=folder.config("scheduler"),
            image_processor=folder.config("image_processor") if "image_processor" in folder.components else None,
        )
    if path.is_file():
        checkpoint = open_checkpoint(path)
        found = (identify(family.catalogue, checkpoint) for family in FAMILIES.values())
        component = next((known[0] for known in found if known), "transformer")
        return Sources(parts={component: path, **given})
    if not path.exists():
        raise UserError(f"{path}: no such folder; install vidax again")
    family = family_of([given.get("transformer", path)])
    catalogue = FAMILIES[family].catalogue
    parts = components_in(catalogue, path, [part for part in catalogue.kinds if part not in given])
    if tokenizer := find_tokenizer(path):
        parts["tokenizer"] = tokenizer
    return Sources(family=family, parts={**parts, **given}, folder=path)


def family_of(places: Iterable[Path]) -> str:
    """The family that knows the transformer in these files and folders, or else another component of its own; the first
    of all where none does.
    """
    other = None
    for file in checkpoints_in(places):
        checkpoint = open_checkpoint(file)
        for name, family in FAMILIES.items():
            if known := identify(family.catalogue, checkpoint):
                if known[0] == "transformer":
                    return name
                other = other or name
    return other or "wan"


def checkpoints_in(places: Iterable[Path]) -> Iterator[Path]:
    """Files, and the checkpoints of folders, those of their transformers first."""
    names = {name for family in FAMILIES.values() for name in own_folders(family.catalogue, "transformer")}
    for place in places:
        if not place.is_dir():
            yield place
            continue
        for folder in (*(place / name for name in sorted(names)), place):
            if folder.is_dir():
                yield from list_checkpoints(folder)


def open_parts(sources: Sources) -> Model:
    weights = (sources.parts.get(part) for part in ("transformer", "vae", "text_encoder"))
    family = FAMILIES[sources.family or family_of(path for path in weights if path)]
    catalogue = family.catalogue
    for part in sources.parts:
        if part not in (*catalogue.kinds, "tokenizer"):
            name = part.replace("_", " ")
            raise UserError(
                f"{sources.parts[part]}: given as the {name}, and {catalogue.title} has none; leave {flag(part)} out"
            )
    if absent := [part for part in catalogue.kinds if part not in (*sources.parts, *catalogue.optional)]:
        titles = " and no ".join(catalogue.kinds[part].title for part in absent)
        where = sources.folder or next(iter(sources.parts.values()))
        flags = " and ".join(map(flag, absent))
        raise UserError(f"{where}: no whole model: no {titles}; give the folder of one that is, or {flags}")
    return family.open(sources)
