"""What `vidax plan` does: the plans that are asked for, those of before taken from disk."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from vidax.engine.engine import DTYPES
from vidax.engine.request import IMAGES, resolve
from vidax.errors import UserError
from vidax.models.architecture import Architecture
from vidax.models.locate import describe
from vidax.models.registry import Card
from vidax.parallel import mesh as meshes
from vidax.planner import show, store
from vidax.planner.phases import digest
from vidax.planner.plan import here, make_plan, there
from vidax.weights.residency import parse as parse_residency


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a user asks for. fields: settings of `vidax.engine.request.resolve`, None for the card's. images: how many
    the video is made from, None for as few as the model takes.
    """

    model: str
    fields: Mapping[str, Any]
    images: int | None = None
    topologies: tuple[str, ...] = ()
    here: bool = False
    dtype: str = "bfloat16"
    mesh: str = "auto"
    residency: str = "auto"
    memory_limit: float | None = None
    full: bool = False
    search: bool = True
    again: bool = False
    price_per_chip_hour: float | None = None


def pictures(card: Card, model: Architecture, wanted: Wanted) -> dict[str, Any]:
    """Fields of a request that is made from images, of which none is at hand, at the size of the card if none is given.

    Raises UserError for a number of images that the model does not take.
    """
    least, most = model.images
    count = least if wanted.images is None else wanted.images
    if not least <= count <= most:
        takes = f"{least} to {most}" if least < most else "none" if most == 0 else str(most)
        raise UserError(f"{count} images: {card.name} takes {takes}; leave it out, or give a number that it takes")
    if not count:
        return {}
    images = dict.fromkeys(IMAGES[:count], np.zeros((1, 1, 3), np.uint8))
    return {"size": wanted.fields.get("size") or card.size, **images}


def plans(wanted: Wanted, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Plans as `Plan.as_json` gives them, one for each slice. Raises UserError before the first is made."""
    if not wanted.topologies and not wanted.here:
        raise UserError("give a slice to plan for, as in --topology v5e-8, or --here for this machine")
    if wanted.dtype not in DTYPES:
        raise UserError(f"dtype {wanted.dtype!r}: choose {' or '.join(DTYPES)}")
    price = wanted.price_per_chip_hour
    if price is not None and not 0 <= price < float("inf"):
        raise UserError(f"price {price}: give what a chip costs an hour, as in 1.2")
    card, model = describe(wanted.model)
    request = resolve(card, model, "any", **{**wanted.fields, **pictures(card, model, wanted)})
    mesh = None if wanted.mesh == "auto" else meshes.parse(wanted.mesh)
    residency = parse_residency(wanted.residency)
    sites = [there(name, wanted.memory_limit) for name in wanted.topologies]
    sites += [here(wanted.memory_limit)] if wanted.here else []
    if mesh:
        for site in sites:
            site.mesh(mesh)  # says if it does not suffice
    for site in sites:
        settings = {
            "card": card.name,
            "architecture": [repr(model.dit), *map(digest, model.specs(wanted.dtype).values())],
            "request": request.settings() | {"seed": None},
            "site": [site.name, site.limit_bytes, site.compiles],
            "dtype": wanted.dtype,
            "mesh": wanted.mesh,
            "residency": wanted.residency,
            "full": wanted.full,
            "search": wanted.search,
        }
        made = None if wanted.again else store.recall(settings)
        if made is None:
            made = make_plan(
                card,
                model,
                request,
                site,
                dtype=wanted.dtype,
                mesh=mesh,
                residency=residency,
                full=wanted.full,
                search=wanted.search,
                say=say,
            ).as_json()
            if unkept := store.keep(settings, made):
                say(f"warning: {unkept}")
        yield made if price is None else made | {"cost_per_clip": show.cost(made, price)}
