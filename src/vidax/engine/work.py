"""A job, and a job under way."""

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vidax.engine.progress import Progress
from vidax.engine.request import Request
from vidax.models.interface import Inputs
from vidax.parallel import processes
from vidax.weights.residency import Residency

# What a record says of the run, not of the video.
OF_THE_RUN = ("origins", "warnings", "attention", "device", "versions")
# What the processes of one mesh may have each its own of; all else of a job's record must be the same.
OWN = ("weights", *OF_THE_RUN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A video to make, and how its frames are wanted: "float32" in [0, 1] or "uint8", rounded."""

    request: Request
    frames_dtype: str = "float32"


@dataclasses.dataclass
class Copies:
    """How the layers of a job's steps came to the device: bytes to each, seconds waited for, of seconds in all."""

    moved: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, moved: int, waited: float, seconds: float, steps: int) -> None:
        self.moved, self.waited = self.moved + moved, self.waited + waited
        self.seconds, self.steps = self.seconds + seconds, self.steps + steps

    @property
    def share(self) -> float:
        """Of the time, what was waited."""
        return self.waited / self.seconds if self.steps else 0.0

    def record(self) -> dict[str, float]:
        return {
            "bytes_per_step_and_device": self.moved // self.steps,
            "seconds_waited": round(self.waited, 3),
            "share_of_denoising": round(self.share, 3),
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
        }


@dataclasses.dataclass
class Work:
    """A job under way. `metadata` is its record, `error` what stopped it."""

    job: Job
    metadata: dict[str, Any]
    state: Any = None  # of the solver between two experts, on the host
    latents: np.ndarray | None = None
    copies: Copies = dataclasses.field(default_factory=Copies)
    error: Exception | None = None

    def awaits(self, stage: int) -> bool:
        """Whether there are steps for this transformer to take."""
        return self.error is None and len(self.job.request.stages[stage].steps) > 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        timings = self.metadata["timings_seconds"]
        timings[name] = round(timings.get(name, 0) + time.perf_counter() - start, 3)

    @contextlib.contextmanager
    def own_fault(self) -> Iterator[None]:
        """What goes wrong inside is this job's `error`. Its trace keeps the lines and lets go of the weights."""
        try:
            yield
        except Exception as error:
            self.error = error
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link = link.__cause__ or link.__context__


@dataclasses.dataclass
class Encoded:
    """What texts and images have become, on the host: each once, however many jobs it is for."""

    texts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    states: dict[tuple, np.ndarray] = dataclasses.field(default_factory=dict)
    frames: dict[tuple, Any] = dataclasses.field(default_factory=dict)

    def inputs(self, request: Request, *, guided: bool) -> Inputs:
        """Those of a job, with the negative prompt where it plays a part; what is given of its latents is left out."""
        text = np.stack([self.texts[prompt] for prompt in request.prompts[: 1 + guided]])
        return Inputs(text, self.states.get(seen(request)))


def seen(request: Request) -> tuple:
    """What of a request the image encoder sees."""
    return tuple(picture.digest for picture in request.images)


def framed(request: Request) -> tuple:
    """What of a request the autoencoder sees before there are latents."""
    return *seen(request), request.width, request.height, request.frames, request.fit


def warn_of_cut(prompt: str, tokens: int, works: Sequence[Work], progress: Progress) -> None:
    """Say that a prompt was cut, also in the records of its jobs."""
    start = prompt if len(prompt) <= 40 else f"{prompt[:40]}..."
    sentence = f"the prompt {start!r} is longer than {tokens} tokens; what comes after them is left out"
    warn(sentence, [work for work in works if prompt in work.job.request.prompts], progress)


def warn(sentence: str, works: Iterable["Work"], progress: Progress) -> None:
    """Say it, also in the records of these jobs."""
    for work in works:
        work.metadata["warnings"].append(sentence)
    progress.warn(sentence)


def waiting(share: float, residency: Residency) -> str:
    """What to do where copies take longer than what hides them."""
    source = "disk" if residency.disk else "host memory"
    return (
        f"{share:.0%} of denoising was waiting for layers from {source} ({residency}); keep more of them on the device "
        "(--residency mixed:r/g, or a higher --memory-limit), "
        + ("or stream from host memory" if residency.disk else "or split them over more devices in seq")
    )


def require_same_jobs(works: Sequence[Work]) -> None:
    """Raises UserError, on every process of the mesh, unless all are asked for the same videos in the same way."""
    versions = works[0].metadata["versions"]
    values = {"vidax": versions["vidax"], "jax": versions["jax"], "jobs": len(works)}
    for number, work in enumerate(works, 1):
        job = f" of job {number}" if len(works) > 1 else ""
        same = {name: value for name, value in work.metadata.items() if name not in (*OWN, "timings_seconds")}
        values |= {f"{name}{job}": value for name, value in same.items()} | {f"frames{job} as": work.job.frames_dtype}
    processes.require_same(values, "start all with the same settings; a seed of -1 is another one in each")
