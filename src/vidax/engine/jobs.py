"""What a run is asked for: the lines of a file of prompts, times seeds, times videos for each."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vidax.engine.request import DEFAULT_SEED, parse_size
from vidax.errors import UserError, did_you_mean

FEW = 10  # faults that are listed before the rest is counted


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a line asks for: fields of a request, and perhaps an `output`. `place` names it in messages."""

    place: str
    fields: dict[str, Any]


def read_jobs(text: str, source: str) -> list[Wish]:
    """A job for each line: a prompt as it stands, or a JSON object whose fields are those of FIELDS.

    Empty lines and lines that begin with # count for nothing. Raises UserError with all the lines that are wrong.
    """
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    places = [(f"{source}, line {number}", line) for number, line in lines if line and not line.startswith("#")]
    if not places:
        raise UserError(f"{source}: holds no prompt; write one a line, or a JSON object a line")
    return each(places, lambda place, line: Wish(place, read_line(line)))


def read_line(line: str) -> dict[str, Any]:
    if line == "[" or line.startswith(("[{", "[[")):
        raise UserError("a list; write one JSON object a line, without brackets and commas around them")
    if not line.startswith("{"):
        return {"prompt": line}
    try:
        pairs = json.loads(line, object_pairs_hook=list)
    except ValueError as error:
        raise UserError(f"not readable JSON ({error}); a plain prompt does not begin with a brace") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in FIELDS:
            raise UserError(f"unknown field {name!r}; {nearest(name)}there are {', '.join(FIELDS)}")
        if name in fields:
            raise UserError(f"{name} is given twice; leave one out")
        fields[name] = None if value is None else FIELDS[name](name, value)
    if fields.get("prompt") is None:
        raise UserError("the prompt is missing; every job has one")
    return fields


def nearest(name: str) -> str:
    """The field that was meant, also by its name in diffusers."""
    theirs = {"num_frames": "frames", "num_inference_steps": "steps", "height": "size", "width": "size"}
    return did_you_mean(theirs.get(name, name), FIELDS)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} is {json.dumps(value)}; write it in quotes")
    return value


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} is {json.dumps(value)}; it is a whole number, without quotes")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} is {json.dumps(value)}; it is a number, without quotes")
    return value


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} is {json.dumps(value)}; it is true or false, without quotes")
    return value


def size(name: str, value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int for side in value):
        return value[0], value[1]
    raise UserError(f'{name} is {json.dumps(value)}; write "832x480" or [832, 480], width first')


FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "prompt": text,
    "negative_prompt": text,
    "size": size,
    "frames": whole,
    "fps": whole,
    "steps": whole,
    "guidance_scale": number,
    "guidance_scale_2": number,
    "boundary_ratio": number,
    "dynamic_guidance": switch,
    "image": text,
    "last_image": text,
    "fit": text,
    "vae_tiling": switch,
    "flow_shift": number,
    "solver": text,
    "seed": whole,
    "noise": text,
    "output": text,
}


def each(places: Iterable[tuple[str, Any]], make: Callable[[str, Any], Any]) -> list[Any]:
    """`make(place, item)` of all, or one UserError that tells the fault of each place."""
    made, faults = [], []
    for place, item in places:
        try:
            made.append(make(place, item))
        except UserError as error:
            faults.append(f"{place}: {error}" if place else str(error))
    if faults:
        more = [f"and {len(faults) - FEW} more"] if len(faults) > FEW else []
        raise UserError("\n".join([*faults[:FEW], *more]))
    return made


def multiply(wishes: Iterable[Wish], defaults: dict[str, Any], seeds: Sequence[int], videos: int) -> list[Wish]:
    """Every wish with every seed, `videos` times: a seed, the one after it, and so on. -1 is drawn anew each time.

    defaults: fields that a wish leaves open. A wish that has a seed of its own keeps to it.
    """
    if videos < 1:
        raise UserError(f"{videos} videos: at least 1")

    many = []
    for wish in wishes:
        given = {name: value for name, value in wish.fields.items() if value is not None}
        starts = [given["seed"]] if "seed" in given else list(seeds)
        if not starts and videos == 1:
            many.append(Wish(wish.place, defaults | given))  # the default seed
            continue
        runs = [start if start == -1 else start + more for start in starts or [DEFAULT_SEED] for more in range(videos)]
        once = dict.fromkeys(seed for seed in runs if seed != -1)
        many += [Wish(wish.place, defaults | given | {"seed": seed}) for seed in (*once, *[-1] * runs.count(-1))]
    return many
