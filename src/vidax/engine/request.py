"""What a user asks for, filled from the model's card and checked in sentences."""

import dataclasses
import os
import re
import secrets
from typing import Any, NamedTuple, get_args

import numpy as np

from vidax.errors import UserError
from vidax.media.image import FITS, Picture, open_picture
from vidax.models.architecture import Architecture
from vidax.models.interface import Video
from vidax.models.registry import CARDS, Card
from vidax.sampling.guidance import dynamic
from vidax.sampling.noise import Kind
from vidax.sampling.sampler import Sampler, from_diffusers_config
from vidax.sampling.schedules import TRAIN_TIMESTEPS
from vidax.sampling.solvers import DDIM, DPM, Euler, Solver, UniPC

SOLVERS: dict[str, Solver] = {"unipc": UniPC(), "euler": Euler(), "ddim": DDIM(), "dpm": DPM()}
OF_FLOWS, OF_ALPHAS = ("unipc", "euler"), ("ddim", "dpm")  # by what the network's noise levels are
DEFAULT_SEED = 42
IMAGES = ("image", "last_image")  # the fields of a request, in the order of its frames
EXTREME = 3.0  # of a video's sides, one to the other


class Stage(NamedTuple):
    """Steps of one transformer. At guidance 1 and below one branch is run, as in diffusers."""

    steps: range
    guidance_scale: float

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One video, every setting decided. `origins` says of each setting where its value comes from.

    guidance_scale_2, boundary_ratio: of the second of two experts, else None. dynamic_guidance: whether the scale
    changes from step to step; None where no such thing is known. images: the first frame and perhaps the last; fit: how
    they become frames, "official" or one of `FITS`. tiling: whether frames are decoded in tiles; None where that is not
    to be had.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    frames: int
    fps: int
    guidance_scale: float
    guidance_scale_2: float | None
    boundary_ratio: float | None
    dynamic_guidance: bool | None
    images: tuple[Picture, ...]
    fit: str | None
    tiling: bool | None
    seed: int
    noise: Kind
    sampler: Sampler
    origins: dict[str, str]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The steps of one transformer or of two experts; an expert may have none."""
        if self.boundary_ratio is None:
            return (Stage(range(self.sampler.steps), self.guidance_scale),)
        assert self.guidance_scale_2 is not None
        high = int((self.sampler.table().timestep >= self.boundary_ratio * TRAIN_TIMESTEPS).sum())
        steps = range(high), range(high, self.sampler.steps)
        return Stage(steps[0], self.guidance_scale), Stage(steps[1], self.guidance_scale_2)

    def scales(self, stage: Stage) -> np.ndarray | None:
        """The guidance scale at each step of the table, float32; None where one branch is run."""
        if not stage.guided:
            return None
        if self.dynamic_guidance:
            return dynamic(stage.guidance_scale, self.sampler.table().timestep, self.sampler.steps)
        return np.full(self.sampler.steps, stage.guidance_scale, np.float32)

    @property
    def guided(self) -> bool:
        """Whether the negative prompt plays a part."""
        return any(stage.guided for stage in self.stages)

    @property
    def branches(self) -> int:
        """How many samples one denoising step computes, at most."""
        return 2 if self.guided else 1

    @property
    def video(self) -> Video:
        return Video(self.width, self.height, self.frames, self.branches, len(self.images), bool(self.tiling))

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
            **({} if self.boundary_ratio is None else self.of_experts()),
            **({} if self.dynamic_guidance is None else {"dynamic_guidance": self.dynamic_guidance}),
            "flow_shift": self.sampler.shift,
            "solver": self.sampler.solver.name,
            "sigma_grid": self.sampler.grid,
            "seed": self.seed,
            "noise": self.noise,
            **self.of_images(),
            **({} if self.tiling is None else {"vae_tiling": self.tiling}),
        }

    def of_experts(self) -> dict[str, Any]:
        return {"guidance_scale_2": self.guidance_scale_2, "boundary_ratio": self.boundary_ratio}

    def of_images(self) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for name, picture in zip(IMAGES, self.images, strict=False):
            described[name] = ", ".join((picture.name, "x".join(map(str, picture.size)), *picture.notes))
            described[f"{name}_sha256"] = picture.digest
        return described | ({"fit": self.fit} if self.images else {})


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
    guidance_scale_2: float | None = None,
    boundary_ratio: float | None = None,
    dynamic_guidance: bool | None = None,
    image: Any = None,
    last_image: Any = None,
    fit: str | None = None,
    vae_tiling: bool | None = None,
    flow_shift: float | None = None,
    solver: str | None = None,
    seed: int | None = None,
    noise: Kind | None = None,
) -> Request:
    """The request with the card's values where one is None. size is (width, height); seed -1 draws one.

    image, last_image: the first and the last frame: files, PIL images, or arrays as `open_picture` takes them. Without
        a size the video has the first one's aspect.

    Raises `UserError` with the value, the rule and the way out.
    """
    origins: dict[str, str] = {}

    def pick(name: str, given: Any, default: Any, origin: str | None = None) -> Any:
        origins[name] = "given" if given is not None else origin or origin_in_card(card, name)
        return default if given is None else given

    if not prompt.strip():
        raise UserError("the prompt is empty: say what the video shows, for example 'a red circle moves right'")
    images = open_images(card, model, image, last_image)
    origins |= dict.fromkeys(IMAGES[: len(images)], "given")
    width, height = pick_size(pick, card, model, images, size)
    fit = pick_fit(pick, images, size, fit)
    check_size(width, height, model.size_multiple)
    frames = pick("frames", frames, card.frames)
    check_frames(frames, model.frame_multiple)
    check_only(card, model, (width, height, frames))
    if frames == 1 and len(images) == 2:
        raise UserError(f"1 frame: a first and a last one take {model.frame_multiple + 1} at least")
    fps = pick("fps", fps, card.fps)
    if fps < 1:
        raise UserError(f"{fps} frames per second: at least 1")
    guidance_scale = pick("guidance_scale", guidance_scale, card.guidance_scale)
    check_guidance(guidance_scale)
    follows = guidance_scale if origins["guidance_scale"] == "given" else None
    guidance_scale_2, boundary_ratio = pick_experts(pick, card, model, follows, guidance_scale_2, boundary_ratio)
    sampler = make_sampler(card, model, pick, steps, flow_shift, solver, (width, height))
    dynamic_guidance = pick_dynamic_guidance(pick, card, sampler, dynamic_guidance)
    tiling = pick_tiling(pick, card, model, vae_tiling)
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
        guidance_scale_2=guidance_scale_2,
        boundary_ratio=boundary_ratio,
        dynamic_guidance=dynamic_guidance,
        images=images,
        fit=fit,
        tiling=tiling,
        seed=seed,
        noise=noise,
        sampler=sampler,
        origins=origins,
    )


def open_images(card: Card, model: Architecture, image: Any, last: Any) -> tuple[Picture, ...]:
    """The images that are given, opened. Raises UserError where they are not those that the model takes."""
    given = [name for name, value in (("image", image), ("last image", last)) if value is not None]
    least, most = model.images
    if last is not None and image is None:
        raise UserError("a last image without a first; give that too, with --image")
    if len(given) > most:
        takes = "no image" if most == 0 else "a first frame only"
        raise UserError(
            f"{given[-1]} {named(last if most else image)}: {card.name} takes {takes}; leave it out, or {others(most)}"
        )
    if len(given) < least:
        wanted = "--image and --last-image" if least == 2 else "--image"
        frames = "its first and its last frame" if least == 2 else "its first frame"
        raise UserError(f"{card.name} makes a video from {frames}; give {wanted}")
    return tuple(open_picture(value) for value in (image, last) if value is not None)


def named(image: Any) -> str:
    return str(image) if isinstance(image, str | os.PathLike) else "(array)"


def others(most: int) -> str:
    """Which models take more images."""
    able = [card.name for card in CARDS.values() if card.images[1] > most]
    return f"use a model that takes one: {', '.join(able)}"


def pick_size(
    pick, card: Card, model: Architecture, images: tuple[Picture, ...], size: tuple[int, int] | None
) -> tuple[int, int]:
    """(width, height): of a video from an image, where nothing is given, as its authors derive it from the image."""
    if size is not None or not images:
        return pick("size", size, card.size)
    derived = model.image_size(images[0].size, card.size)
    if derived == card.size:
        return pick("size", None, derived)
    return pick("size", None, derived, f"the aspect of {images[0].name}, scaled to card {card.name}")


def pick_experts(
    pick, card: Card, model: Architecture, follows: float | None, scale: float | None, ratio: float | None
) -> tuple[float | None, float | None]:
    """Guidance and boundary of the second expert, if there is one. follows: the guidance that is given for the first,
    which then is for both.
    """
    if model.experts == 1:
        for name, value in (("guidance scale 2", scale), ("boundary ratio", ratio)):
            if value is not None:
                raise UserError(f"{name} {value}: {card.name} has one transformer; leave it out, it is for two experts")
        return None, None
    if follows is None and card.guidance_scale_2 is not None:
        scale = pick("guidance_scale_2", scale, card.guidance_scale_2)
    else:
        scale = pick("guidance_scale_2", scale, card.guidance_scale if follows is None else follows, "guidance_scale")
    assert scale is not None
    check_guidance(scale)
    if model.boundary_ratio is None:
        ratio = pick("boundary_ratio", ratio, card.boundary_ratio)
    else:
        ratio = pick("boundary_ratio", ratio, model.boundary_ratio, "model_index.json")
    check_boundary(ratio)
    return float(scale), ratio


def pick_dynamic_guidance(pick, card: Card, sampler: Sampler, wish: bool | None) -> bool | None:
    """Whether guidance changes from step to step, where that is known: by default with the card's solver."""
    if not sampler.variance_preserving:
        if wish is not None:
            raise UserError(f"dynamic guidance: {card.name} knows none; leave it out")
        return None
    if card.dynamic_guidance and sampler.solver.name != "dpm":
        return pick("dynamic_guidance", wish, False, f"solver {sampler.solver.name}; with dpm the card has it")
    return pick("dynamic_guidance", wish, card.dynamic_guidance)


def pick_tiling(pick, card: Card, model: Architecture, wish: bool | None) -> bool | None:
    if model.tiles:
        return pick("vae_tiling", wish, False, "default")
    if wish:
        raise UserError(f"vae tiling: the frames of {card.name} are not decoded in tiles; leave it out")
    return None


def pick_fit(pick, images: tuple[Picture, ...], size: tuple[int, int] | None, fit: str | None) -> str | None:
    """How images become frames: as the model's authors do it where the size follows from the image."""
    if fit is not None and fit not in FITS:
        raise UserError(f"fit {fit!r}: choose {', '.join(FITS)}")
    if not images:
        if fit is not None:
            raise UserError(f"fit {fit}: says how an image becomes a frame, and none is given; leave it out")
        return None
    return pick("fit", fit, *(("official", "default") if size is None else ("crop", "default for a given size")))


def check_guidance(scale: float) -> None:
    if not 0 <= scale < float("inf"):
        raise UserError(f"guidance scale {scale}: a number of 0 or more; 1 turns guidance off")


def check_boundary(ratio: float | None) -> None:
    if ratio is None:
        raise UserError(
            "nothing says at which noise the second expert takes over; give --boundary-ratio, 0.875 for Wan 2.2 text "
            "to video, 0.9 for image to video"
        )
    if not 0 <= ratio <= 1:
        raise UserError(
            f"boundary ratio {ratio}: from 0, all steps with the first expert, to 1, all below full noise with the "
            "second"
        )


def origin_in_card(card: Card, name: str) -> str:
    """Where a card's value comes from, with its source where the published ones disagree."""
    return f"card {card.name}" + (f": {card.sources[name]}" if name in card.sources else "")


def untrained(card: Card, request: Request) -> list[str]:
    """Sentences on what is asked of the model beyond what it was trained for."""
    sentences = []
    size = (request.width, request.height)
    follows = request.images and request.origins["size"] != "given"
    if card.trained_sizes and size not in card.trained_sizes and not follows:
        sizes = ", ".join(f"{width}x{height}" for width, height in card.trained_sizes)
        sentences.append(f"size {size[0]}x{size[1]}: {card.name} was trained for {sizes}; other sizes may look worse")
    if card.trained_frames and request.frames not in card.trained_frames:
        lengths = " and ".join(map(str, card.trained_frames))
        frames = f"{request.frames} frame{'s' if request.frames > 1 else ''}"
        sentences.append(f"{frames}: {card.name} was trained for {lengths}; other lengths may look worse")
    if follows and max(size) > EXTREME * min(size):
        shape = "x".join(map(str, request.images[0].size))
        sentences.append(
            f"image {shape}: the video is {size[0]}x{size[1]}, far from what models are trained for; crop the image, "
            "or give a size"
        )
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
    if frames < 1 or (frames - 1) % multiple:
        below = max(1, (frames - 1) // multiple * multiple + 1)
        near = f"use {below} or {below + multiple}" if frames > 1 else "use 1"
        raise UserError(f"{frames} frames: this model takes {multiple}k+1; {near}")


def check_only(card: Card, model: Architecture, asked: tuple[int, int, int]) -> None:
    """Raises UserError where a model makes one size and length, and another is asked for."""
    if model.only is not None and asked != model.only:
        (width, height, frames), only = asked, model.only
        raise UserError(
            f"{width}x{height}, {frames} frames: {card.name} has learned positions for {only[0]}x{only[1]} and "
            f"{only[2]} frames alone; leave size and frames out"
        )


def make_sampler(
    card: Card,
    model: Architecture,
    pick,
    steps: int | None,
    shift: float | None,
    solver: str | None,
    size: tuple[int, int],
) -> Sampler:
    """The sampler of the folder's scheduler, or of the card where there is none, with what the request changes about
    it. Another solver keeps the sigma grid and the shift.
    """
    steps = pick("steps", steps, card.steps)
    if model.scheduler is None:
        origin = origin_in_card(card, "flow_shift")
        own = card.shift(*size)
        origin += "" if own == card.flow_shift else ", for sizes up to that of 832x480"
        sampler = card_sampler(card, steps, own if shift is None else shift)
        pick("flow_shift", shift, sampler.shift, origin)
        origin = origin_in_card(card, "solver")
    else:
        origin = "scheduler_config.json"
        sampler = from_diffusers_config(model.scheduler, steps=steps, shift=shift)
        if sampler.variance_preserving != card_sampler(card, steps, sampler.shift).variance_preserving:
            raise UserError(
                f"{origin}: {model.scheduler['_class_name']} is not for {card.name}, whose network knows another kind "
                "of noise levels; take the scheduler that the model came with"
            )
        disputed = "flow_shift" in card.sources and sampler.shift != card.flow_shift
        other = f"; {card.flow_shift:g} in {origin_in_card(card, 'flow_shift')}" if disputed else ""
        pick("flow_shift", shift, sampler.shift, origin + other)
    name = pick("solver", solver, sampler.solver.name, origin)
    fitting = OF_ALPHAS if sampler.variance_preserving else OF_FLOWS
    if solver is not None and solver not in fitting:
        raise UserError(f"solver {name!r}: choose {' or '.join(fitting)}")
    if solver == "unipc" and isinstance(sampler.solver, Euler):
        # UniPC cannot start at sigma 1, where the grid of the Euler scheduler does.
        sampler, origin = dataclasses.replace(sampler, solver=UniPC(), grid="diffusers"), "solver unipc"
    elif solver not in (None, "unipc"):
        sampler = dataclasses.replace(sampler, solver=SOLVERS[solver])
    pick("sigma_grid", None, sampler.grid, origin)
    return sampler


def card_sampler(card: Card, steps: int, shift: float) -> Sampler:
    return Sampler(solver=SOLVERS[card.solver], grid=card.grid, steps=steps, shift=shift)
