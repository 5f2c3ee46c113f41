"""What a user asks for, filled from the model's card and checked in sentences."""

import dataclasses
import re
import secrets
from typing import Any, get_args

from vidax.errors import UserError
from vidax.models.interface import Architecture
from vidax.models.registry import Card
from vidax.sampling.noise import Kind
from vidax.sampling.sampler import Sampler, from_diffusers_config
from vidax.sampling.solvers import Euler, UniPC

SOLVERS = ("unipc", "euler")
DEFAULT_SEED = 42


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One video, every setting decided. `origins` says of each setting where its value comes from."""

    prompt: str
    negative_prompt: str
    width: int
    height: int
    frames: int
    fps: int
    guidance_scale: float
    seed: int
    noise: Kind
    sampler: Sampler
    origins: dict[str, str]

    @property
    def guided(self) -> bool:
        """Whether the negative prompt plays a part: at guidance 1 and below one branch is run, as in diffusers."""
        return self.guidance_scale > 1

    @property
    def branches(self) -> int:
        """How many samples one denoising step computes."""
        return 2 if self.guided else 1

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts to encode, in the order of the branches."""
        return (self.prompt, self.negative_prompt) if self.guided else (self.prompt,)

    def settings(self) -> dict[str, Any]:
        """Every setting under the name that the command line gives it."""
        return {
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt if self.guided else None,
            "size": f"{self.width}x{self.height}",
            "frames": self.frames,
            "fps": self.fps,
            "steps": self.sampler.steps,
            "guidance_scale": self.guidance_scale,
            "flow_shift": self.sampler.shift,
            "solver": solver_name(self.sampler),
            "sigma_grid": self.sampler.grid,
            "seed": self.seed,
            "noise": self.noise,
        }


def solver_name(sampler: Sampler) -> str:
    return "euler" if isinstance(sampler.solver, Euler) else f"unipc{sampler.solver.order}"


def resolve(
    card: Card,
    model: Architecture,
    prompt: str,
    *,
    negative_prompt: str | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    fps: int | None = None,
    steps: int | None = None,
    guidance_scale: float | None = None,
    flow_shift: float | None = None,
    solver: str | None = None,
    seed: int | None = None,
    noise: Kind | None = None,
) -> Request:
    """The request with the card's values where one is None. size is (width, height); seed -1 draws one.

    Raises `UserError` with the value, the rule and the way out.
    """
    origins: dict[str, str] = {}

    def pick(name: str, given: Any, default: Any, origin: str | None = None) -> Any:
        origins[name] = "given" if given is not None else origin or origin_in_card(card, name)
        return default if given is None else given

    if not prompt.strip():
        raise UserError("the prompt is empty: say what the video shows, for example 'a red circle moves right'")
    width, height = pick("size", size, card.size)
    check_size(width, height, model.size_multiple)
    frames = pick("frames", frames, card.frames)
    check_frames(frames, model.frame_multiple)
    fps = pick("fps", fps, card.fps)
    if fps < 1:
        raise UserError(f"{fps} frames per second: at least 1")
    guidance_scale = pick("guidance_scale", guidance_scale, card.guidance_scale)
    if not 0 <= guidance_scale < float("inf"):
        raise UserError(f"guidance scale {guidance_scale}: a number of 0 or more; 1 turns guidance off")
    sampler = make_sampler(card, model, pick, steps, flow_shift, solver)
    seed = pick("seed", seed, DEFAULT_SEED, "default")
    if seed == -1:
        seed, origins["seed"] = secrets.randbelow(2**32), "random"
    noise = pick("noise", noise, "torch", "default")
    if noise not in get_args(Kind):
        raise UserError(f"noise {noise!r}: choose {' or '.join(get_args(Kind))}")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed {seed}: a whole number from 0 to 2**64 - 1, or -1 for a random one")
    return Request(
        prompt=prompt,
        negative_prompt=pick("negative_prompt", negative_prompt, card.negative_prompt),
        width=width,
        height=height,
        frames=frames,
        fps=fps,
        guidance_scale=float(guidance_scale),
        seed=seed,
        noise=noise,
        sampler=sampler,
        origins=origins,
    )


def origin_in_card(card: Card, name: str) -> str:
    """Where a card's value comes from, with its source where the published ones disagree."""
    return f"card {card.name}" + (f": {card.sources[name]}" if name in card.sources else "")


def untrained(card: Card, request: Request) -> list[str]:
    """Sentences on what is asked of the model beyond what it was trained for."""
    sentences = []
    size = (request.width, request.height)
    if card.trained_sizes and size not in card.trained_sizes:
        sizes = ", ".join(f"{width}x{height}" for width, height in card.trained_sizes)
        sentences.append(f"size {size[0]}x{size[1]}: {card.name} was trained for {sizes}; other sizes may look worse")
    if card.trained_frames and request.frames not in card.trained_frames:
        lengths = " and ".join(map(str, card.trained_frames))
        frames = f"{request.frames} frame{'s' if request.frames > 1 else ''}"
        sentences.append(f"{frames}: {card.name} was trained for {lengths}; other lengths may look worse")
    return sentences


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) of `832x480`, or of `832*480` as the official code writes it."""
    numbers = re.fullmatch(r"\s*(\d+)\s*[xX*\u00d7]\s*(\d+)\s*", text)
    if not numbers:
        raise UserError(f"{text!r} is not a size; write width x height, for example 832x480")
    return int(numbers[1]), int(numbers[2])


def check_size(width: int, height: int, multiple: int) -> None:
    if width < multiple or height < multiple or width % multiple or height % multiple:
        near = "x".join(str(max(multiple, round(value / multiple) * multiple)) for value in (width, height))
        raise UserError(
            f"size {width}x{height}: width and height are multiples of {multiple} here; the nearest is {near}"
        )


def check_frames(frames: int, multiple: int) -> None:
    if frames < 1 or frames % multiple != 1:
        below = max(1, (frames - 1) // multiple * multiple + 1)
        near = f"use {below} or {below + multiple}" if frames > 1 else "use 1"
        raise UserError(f"{frames} frames: this model takes {multiple}k+1; {near}")


def make_sampler(
    card: Card, model: Architecture, pick, steps: int | None, shift: float | None, solver: str | None
) -> Sampler:
    """The sampler of the folder's scheduler, or of the card where there is none, with what the request changes about
    it. Another solver keeps the sigma grid and the shift.
    """
    steps = pick("steps", steps, card.steps)
    if model.scheduler is None:
        origin = origin_in_card(card, "flow_shift")
        sampler = card_sampler(card, steps, card.flow_shift if shift is None else shift)
        pick("flow_shift", shift, sampler.shift, origin)
        origin = f"card {card.name}"
    else:
        origin = "scheduler_config.json"
        sampler = from_diffusers_config(model.scheduler, steps=steps, shift=shift)
        disputed = "flow_shift" in card.sources and sampler.shift != card.flow_shift
        other = f"; {card.flow_shift:g} in {origin_in_card(card, 'flow_shift')}" if disputed else ""
        pick("flow_shift", shift, sampler.shift, origin + other)
    name = pick("solver", solver, solver_name(sampler), origin)
    if solver == "euler":
        sampler = dataclasses.replace(sampler, solver=Euler())
    elif solver == "unipc" and isinstance(sampler.solver, Euler):
        # UniPC cannot start at sigma 1, where the grid of the Euler scheduler does.
        sampler, origin = dataclasses.replace(sampler, solver=UniPC(), grid="diffusers"), "solver unipc"
    elif solver not in (None, "unipc"):
        raise UserError(f"solver {name!r}: choose {' or '.join(SOLVERS)}")
    pick("sigma_grid", None, sampler.grid, origin)
    return sampler


def card_sampler(card: Card, steps: int, shift: float) -> Sampler:
    return Sampler(solver=Euler() if card.solver == "euler" else UniPC(), grid=card.grid, steps=steps, shift=shift)
