"""The engine: loads one part of a model at a time, runs its phase and takes the memory back."""

import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from vidax import __version__
from vidax.engine.request import Request, resolve
from vidax.errors import UserError
from vidax.media.files import write_json
from vidax.media.output import open_writer, to_uint8
from vidax.models.interface import Model, Part
from vidax.models.locate import locate
from vidax.models.registry import Card
from vidax.nn import parameter_bytes
from vidax.ops.attention import choose
from vidax.sampling.noise import normal
from vidax.weights import load as load_weights

DTYPES = ("bfloat16", "float32")


class Progress(Protocol):
    """Told what the engine is doing. Every method may be called from the thread that generates."""

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, done: int) -> None: ...


class Silent:
    """Progress that nobody sees."""

    def phase(self, name: str, total: int) -> None:
        pass

    def advance(self, done: int) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A video: frames [F H W 3], float32 in [0, 1] or uint8, frames per second, every setting, version and timing."""

    frames: np.ndarray
    fps: int
    metadata: dict[str, Any]

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> Path:
        """Write the frames as .mp4, .npy or .png and the metadata as .json beside them; returns the path."""
        frames, height, width = self.frames.shape[:3]
        writer = open_writer(
            path, frames=frames, height=height, width=width, fps=self.fps, tags=tags(self.metadata), overwrite=overwrite
        )
        with writer:
            writer.write(as_dtype(self.frames, writer.dtype))
        write_json(writer.path.with_suffix(".json"), self.metadata, overwrite=overwrite)
        return writer.path


class Engine:
    """A model ready to generate. Weights are loaded phase by phase, when a request runs."""

    def __init__(self, card: Card, model: Model, *, dtype: str = "bfloat16"):
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r}: choose {' or '.join(DTYPES)}")
        self.card, self.model, self.dtype = card, model, dtype

    def request(self, prompt: str, **fields: Any) -> Request:
        """What would be generated: the fields of `vidax.engine.request.resolve`, the rest from the card."""
        return resolve(self.card, self.model, prompt, **fields)

    def generate(
        self, prompt: str, *, frames_dtype: str = "float32", progress: Progress | None = None, **fields: Any
    ) -> Result:
        """Generate one video; fields as in `request`. frames_dtype: "float32" in [0, 1] or "uint8", rounded."""
        request = self.request(prompt, **fields)
        metadata: dict[str, Any] = {}
        frames = np.concatenate(list(self.run(request, frames_dtype, metadata, progress)))
        return Result(frames=frames, fps=request.fps, metadata=metadata)

    def run(
        self, request: Request, frames_dtype: str, metadata: dict[str, Any], progress: Progress | None = None
    ) -> Iterator[np.ndarray]:
        """Frames [f H W 3] of a request, as they are decoded. `metadata` fills up and is complete at the end."""
        progress = progress or Silent()
        timings: dict[str, float] = {}
        metadata |= self.describe(request) | {"timings_seconds": timings}
        dtype = jnp.dtype(self.dtype)

        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        encoder = self.load("text encoder", self.model.text_encoder(dtype), timings, progress)
        with phase("encode text", len(prompts), timings, progress):
            text = self.model.encode_text(encoder, prompts)
        metadata["prompt_truncated"] = text.truncated[0]
        del encoder

        sampler = request.sampler
        f, h, w, c = self.model.latent_shape(request.width, request.height, request.frames)
        noise = normal((1, c, f, h, w), request.seed, request.noise).transpose(0, 2, 3, 4, 1)  # drawn channels first
        guidance_scale = request.guidance_scale if request.guided else None
        dit = self.load("transformer", self.model.transformer(dtype), timings, progress)
        with phase("denoise", sampler.steps, timings, progress) as advance:
            latents = self.model.denoise(dit, sampler.table(), noise, text.embeddings, guidance_scale, advance)
        del dit

        vae = self.load("decoder", self.model.decoder(), timings, progress)
        with phase("decode", request.frames, timings, progress) as advance:
            done = 0
            for frames in self.model.decode(vae, latents, frames_dtype):
                yield frames[0]
                done += frames.shape[1]
                advance(done)

    def load(self, name: str, part: Part, timings: dict[str, float], progress: Progress) -> Any:
        """A part's weights on the device. Nothing here keeps them: they are gone when the caller lets go."""
        with phase(f"load {name}", parameter_bytes(part.spec), timings, progress) as advance:
            return load_weights(part.spec, part.checkpoint, part.mapping, progress=lambda done, _: advance(done))

    def describe(self, request: Request) -> dict[str, Any]:
        """Everything needed to make the same video again, and what it was made with."""
        length, heads, size = self.model.attention_shape(request.width, request.height, request.frames)
        shape = (2 if request.guided else 1, length, heads, size)
        attention = choose(shape, shape)
        return {
            "model": self.card.name,
            "weights": self.model.files,
            "dtype": self.dtype,
            **request.settings(),
            "origins": request.origins,
            "attention": f"{attention.name} ({attention.reason})",
            "device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
            "versions": {"vidax": __version__, "jax": jax.__version__, "python": platform.python_version()},
        }


@contextlib.contextmanager
def phase(name: str, total: int, timings: dict[str, float], progress: Progress) -> Iterator[Callable[[int], None]]:
    """Time a phase and report it; gives the function that says how much of `total` is done."""
    progress.phase(name, total)
    start = time.perf_counter()
    yield progress.advance
    progress.advance(total)
    timings[name] = round(time.perf_counter() - start, 3)


def load(
    model: str | os.PathLike | None = None,
    *,
    transformer: str | os.PathLike | None = None,
    vae: str | os.PathLike | None = None,
    text_encoder: str | os.PathLike | None = None,
    tokenizer: str | os.PathLike | None = None,
    dtype: str = "bfloat16",
) -> Engine:
    """An engine for a model. Files are opened and checked; weights are loaded when they are needed.

    model: a folder or file in any layout (docs/weights.md), a model's name, or a Hugging Face repository; the demo if
        nothing is given.
    transformer, vae, text_encoder, tokenizer: files or folders that take the place of the model's own.
    dtype: of the large matrices and of what is multiplied with them, "bfloat16" or "float32"; all else is float32.
    """
    parts = {"transformer": transformer, "vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    card, opened = locate(model, {name: Path(path) for name, path in parts.items() if path is not None})
    return Engine(card, opened, dtype=dtype)


def tags(metadata: dict[str, Any]) -> dict[str, Any]:
    """What goes into the video file itself."""
    kept = ("prompt", "negative_prompt", "seed", "model", "steps", "guidance_scale", "flow_shift", "solver", "noise")
    return {key: metadata[key] for key in kept} | {"vidax": metadata["versions"]["vidax"]}


def as_dtype(frames: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Frames as uint8 or as float32 in [0, 1], whichever they are."""
    if frames.dtype == dtype:
        return frames
    return to_uint8(frames * 2 - 1) if dtype == np.uint8 else frames.astype(np.float32) / 255
