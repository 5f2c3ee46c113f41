"""The engine: loads one part of a model at a time, runs its phase for every job and takes the memory back."""

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vidax import __version__
from vidax.engine.clip import Clip, Result
from vidax.engine.loading import Ahead, Loader
from vidax.engine.progress import Progress, Silent, after, phase
from vidax.engine.request import Request, resolve, untrained
from vidax.engine.residency import SOURCES, Stack, memory, settle
from vidax.engine.work import (
    Encoded,
    Job,
    Work,
    framed,
    require_same_jobs,
    seen,
    waiting,
    warn,
    warn_of_cut,
)
from vidax.errors import UserError
from vidax.media.image import FITS, Picture, cover
from vidax.models.condition import NOTHING
from vidax.models.interface import Footprint, Part
from vidax.models.locate import locate
from vidax.models.model import Model
from vidax.models.registry import Card
from vidax.ops.attention import describe as describe_attention
from vidax.parallel import mesh as meshes
from vidax.parallel import processes
from vidax.parallel.mesh import MeshShape
from vidax.sampling.noise import Stream, fresh_noise
from vidax.weights.memory import host_available
from vidax.weights.residency import Residency, Ring
from vidax.weights.residency import parse as parse_residency

WAITING = 0.1  # of the denoising time, above which a user should know
DTYPES = ("bfloat16", "float32")

T = TypeVar("T")


class Parts(NamedTuple):
    """What a run loads; of images where there are any."""

    text_encoder: Part
    image_encoder: Part | None
    encoder: Part | None
    transformers: tuple[Part, ...]
    decoder: Part

    @staticmethod
    def open(model: Model, dtype: Any, *, images: bool) -> "Parts":
        return Parts(
            text_encoder=model.text_encoder(dtype),
            image_encoder=model.image_encoder(dtype) if images else None,
            encoder=model.encoder() if images else None,
            transformers=model.transformers(dtype),
            decoder=model.decoder(),
        )


class Engine:
    """A model ready to generate. Weights are loaded phase by phase, when jobs run."""

    def __init__(
        self,
        card: Card,
        model: Model,
        *,
        dtype: str = "bfloat16",
        mesh: Mesh | MeshShape | str = "auto",
        devices: Sequence[jax.Device] | None = None,
        residency: Residency | str = "auto",
        memory_limit: float | None = None,
        stream_from: str = "auto",
        force: bool = False,
    ):
        """Arguments as in `load`."""
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r}: choose {' or '.join(DTYPES)}")
        if stream_from not in SOURCES:
            raise UserError(f"stream from {stream_from!r}: choose {', '.join(SOURCES[:-1])} or {SOURCES[-1]}")
        self.card, self.model, self.dtype = card, model, dtype
        self.stream_from, self.force = stream_from, force
        self.residency = parse_residency(residency) if isinstance(residency, str) else residency
        self.mesh_origin = "auto" if mesh == "auto" else "given"
        if mesh == "auto":
            devices = meshes.default_devices() if devices is None else devices
            mesh = meshes.choose(len(devices), model.dit.heads, 2 if card.guidance_scale > 1 else 1)
        elif isinstance(mesh, str):
            mesh = meshes.parse(mesh)
        self.mesh = meshes.make(mesh, devices) if isinstance(mesh, MeshShape) else meshes.check(mesh)
        self.shared = self.mesh.is_multi_process
        if self.shared and (there := len({d.process_index for d in self.mesh.devices.flat})) < processes.count():
            raise UserError(
                f"the mesh {meshes.shape_of(self.mesh)} has devices of {there} of {processes.count()} processes; "
                "give it devices of one process, or of all"
            )
        self.memory = memory(self.mesh, memory_limit)
        self.loader = Loader(mesh=self.mesh, dtype=dtype)
        self._residencies: dict[str, Residency] = {}

    def request(self, prompt: str, **fields: Any) -> Request:
        """What would be generated: the fields of `vidax.engine.request.resolve`, the rest from the card."""
        request = resolve(self.card, self.model, prompt, **fields)
        if (data := self.mesh.shape["data"]) > request.branches:
            branches = "in the two branches of guidance" if request.guided else "without guidance in one branch"
            raise UserError(
                f"mesh {meshes.shape_of(self.mesh)} ({self.mesh_origin}): data={data}, but a video is denoised by "
                f"itself, {branches}; give a mesh with data={request.branches}, and the other devices to seq"
            )
        return request

    def generate(
        self, prompt: str, *, frames_dtype: str = "float32", progress: Progress | None = None, **fields: Any
    ) -> Result:
        """Generate one video; fields as in `request`. frames_dtype: "float32" in [0, 1] or "uint8", rounded."""
        (result,) = self.generate_many([self.request(prompt, **fields)], frames_dtype=frames_dtype, progress=progress)
        return result

    def generate_many(
        self, requests: Iterable[Request], *, frames_dtype: str = "float32", progress: Progress | None = None
    ) -> Iterator[Result]:
        """One video after the other, in order, each phase's weights loaded once for all of them.

        The first that fails ends it; `run` goes on with the others.
        """
        jobs = [Job(request=request, frames_dtype=frames_dtype) for request in requests]
        for job, clip in zip(jobs, self.run(jobs, progress), strict=True):
            # Without a name: this frame would keep the video while the next one is made.
            yield Result(frames=np.concatenate(list(clip.frames)), fps=job.request.fps, metadata=clip.metadata)

    def run(self, jobs: Sequence[Job], progress: Progress | None = None) -> Iterator[Clip]:
        """Texts and images are encoded, then all latents are denoised, then decoded as the clips are taken, in order.

        Between the phases a job is a few megabytes on the host. A fault of one job is raised by its clip alone; what
        concerns all of them, such as weights that cannot be loaded, is raised here.

        Where several processes share the mesh, each calls this with the same jobs, takes the clips alike and gets all
        frames. What is left of a clip when the next one is asked for is decoded nevertheless, for the others' sake.
        """
        if not jobs:
            return
        progress = progress or Silent()
        timings = dict[str, float]()
        works = [Work(job, self.describe(job.request) | {"timings_seconds": {}}) for job in jobs]
        # Opened before any is read: a damaged file is found now, not after an hour of denoising.
        with processes.in_step(self.shared):
            parts = Parts.open(self.model, jnp.dtype(self.dtype), images=any(job.request.images for job in jobs))
        if self.shared:
            require_same_jobs(works)
        encoded = Encoded()
        self.encode_texts(parts, works, encoded, timings, progress)
        self.encode_images(parts, works, encoded, timings, progress)
        self.denoise(parts.transformers, works, encoded, timings, progress)
        del encoded
        yield from self.clips(parts.decoder, works, timings, progress)

    def encode_texts(
        self, parts: "Parts", works: Sequence[Work], encoded: Encoded, timings: dict[str, float], progress: Progress
    ) -> None:
        encoder = self.loader.load("text encoder", parts.text_encoder, works, timings, progress, self.settle_text())
        prompts = list(dict.fromkeys(prompt for work in works for prompt in work.job.request.prompts))
        with phase("encode text", len(prompts), timings, progress) as advance, self.in_collectives():
            made = self.on_mesh(self.model.encode_text(encoder, prompts))
            for prompt, text in zip(prompts, made, strict=True):
                encoded.texts[prompt] = text.embeddings
                if text.truncated:
                    warn_of_cut(prompt, len(text.embeddings), works, progress)
                advance(len(encoded.texts))
        release(encoder)

    def encode_images(
        self, parts: "Parts", works: Sequence[Work], encoded: Encoded, timings: dict[str, float], progress: Progress
    ) -> None:
        requests = [work.job.request for work in works if work.job.request.images]
        if parts.image_encoder:
            images = {seen(request): request.images for request in requests}
            tower = self.loader.load("image encoder", parts.image_encoder, works, timings, progress)
            with phase("look at images", len(images), timings, progress) as advance, self.in_collectives():
                for key, pictures in images.items():
                    with jax.set_mesh(self.mesh):
                        encoded.states[key] = self.model.encode_images(tower, [p.pixels for p in pictures])
                    advance(len(encoded.states))
            del tower
        if parts.encoder:
            videos = {framed(request): request for request in requests}
            encoder = self.loader.load("encoder", parts.encoder, works, timings, progress)
            total = sum(request.frames for request in videos.values())
            with phase("encode images", total, timings, progress) as advance, self.in_collectives():
                done = 0
                for key, request in videos.items():
                    frames = [self.frame(request, picture) for picture in request.images]
                    with jax.set_mesh(self.mesh):
                        encoded.frames[key] = self.model.encode_frames(
                            encoder, frames, request.frames, after(done, advance)
                        )
                    done += request.frames

    def frame(self, request: Request, picture: Picture) -> np.ndarray:
        """A picture as a frame [H W 3] of a request's video. A last one that is not of the first one's size is cut."""
        if request.fit is not None and request.fit != "official":
            how = FITS[request.fit]
        else:
            how = self.model.fit if picture.size == request.images[0].size else cover
        return how(picture.pixels, (request.width, request.height))

    def denoise(
        self,
        transformers: Sequence[Part],
        works: Sequence[Work],
        encoded: Encoded,
        timings: dict[str, float],
        progress: Progress,
    ) -> None:
        """All steps of one transformer, for all jobs, and then those of the other; each leaves its latents."""
        residency = min((self.settle(work.job.request) for work in works), key=lambda r: r.resident / r.of)
        names = ("transformer",) if len(transformers) == 1 else ("high-noise transformer", "low-noise transformer")
        turns = [
            (stage, Ahead(self.loader, name, part, residency))
            for stage, (name, part) in enumerate(zip(names, transformers, strict=True))
            if any(work.awaits(stage) for work in works)
        ]
        try:
            for turn, (stage, ahead) in enumerate(turns):
                if not any(work.awaits(stage) for work in works):
                    continue  # the jobs that wanted it have failed
                dit = ahead.take(works, timings, progress)
                for _, following in turns[turn + 1 :]:
                    following.start(works, progress)
                self.denoise_stage(dit, stage, works, encoded, timings, progress)
                release(dit)
                del dit
        finally:
            for _, ahead in turns:
                ahead.close()
        for work in works:
            if work.copies.share > WAITING:
                warn(waiting(work.copies.share, self.settle(work.job.request)), [work], progress)

    def denoise_stage(
        self,
        dit: Any,
        stage: int,
        works: Sequence[Work],
        encoded: Encoded,
        timings: dict[str, float],
        progress: Progress,
    ) -> None:
        """The steps of one transformer, for all jobs."""
        name = "denoise" if len(works[0].job.request.stages) == 1 else f"denoise, {('high', 'low')[stage]} noise"
        total = sum(len(work.job.request.stages[stage].steps) for work in works)
        with phase(name, total, timings, progress) as advance:
            done = 0
            for number, work in enumerate(works, 1):
                progress.job(number, len(works))
                if work.awaits(stage):
                    with work.own_fault(), self.in_collectives(), work.timed("denoise"):
                        self.denoise_job(dit, work, stage, encoded, after(done, advance))
                done += len(work.job.request.stages[stage].steps)
                advance(done)
        del dit  # the trace of a job's error has this frame

    def denoise_job(self, dit: Any, work: Work, stage: int, encoded: Encoded, on_steps: Callable[[int], None]) -> None:
        """A job's steps of one transformer: its state comes to the host, after the last one as latents [1 F H W C]."""
        request, video = work.job.request, work.job.request.video
        table, steps = request.sampler.table(), request.stages[stage].steps
        noise = Stream(request.seed, request.noise, self.model.noise_order)
        given = self.model.given(video, encoded.frames[framed(request)], noise) if video.images else NOTHING
        inputs = encoded.inputs(request, guided=request.stages[stage].guided)._replace(given=given)
        latents = self.model.latents(video)
        if work.state is None:
            work.state = noise.normal(latents)
        elif table.noise is not None:
            noise.skip(latents)
        ring = dit.blocks if isinstance(dit.blocks, Ring) and dit.blocks.streamed else None
        before = (ring.bytes_moved, ring.seconds_waited, time.perf_counter()) if ring else None
        try:
            with jax.set_mesh(self.mesh):
                state = self.model.denoise(
                    dit,
                    table,
                    steps,
                    work.state,
                    inputs,
                    request.scales(request.stages[stage]),
                    lambda step: on_steps(step - steps.start),
                    None if table.noise is None else fresh_noise(noise, latents, steps),
                )
            if steps.stop == table.steps:
                work.latents, work.state = self.model.finish(video, state, given), None
            else:
                work.state = jax.tree.map(np.array, state)
        except BaseException:
            release(dit)
            raise
        if ring and before:
            moved, waited = ring.bytes_moved - before[0], ring.seconds_waited - before[1]
            work.copies.add(moved, waited, time.perf_counter() - before[2], len(steps))
            work.metadata["streaming"] = work.copies.record()

    def clips(
        self, decoder: Part, works: Sequence[Work], timings: dict[str, float], progress: Progress
    ) -> Iterator[Clip]:
        # Where every job has failed there is nothing to decode, but each still says why.
        undone = any(work.error is None for work in works)
        vae = self.loader.load("decoder", decoder, works, timings, progress) if undone else None
        with phase("decode", sum(work.job.request.frames for work in works), timings, progress) as advance:
            done = 0
            for number, work in enumerate(works, 1):
                progress.job(number, len(works))
                work.metadata["timings_seconds"] |= timings | work.metadata["timings_seconds"]
                frames = self.decode(vae, work, after(done, advance))
                yield Clip(frames, work.metadata)
                if self.shared and work.latents is not None:
                    self.finish(frames, work)
                frames.close()
                work.latents = None
                done += work.job.request.frames
                advance(done)

    def decode(self, vae: Any, work: Work, on_frames: Callable[[int], None]) -> Generator[np.ndarray]:
        """A job's frames [f H W 3]; its record is complete at the end."""
        if work.error is not None:
            raise work.error
        assert work.latents is not None
        done = 0
        with work.timed("decode"):
            made = self.model.decode(vae, work.job.request.video, work.latents, work.job.frames_dtype)
            for frames in self.on_mesh(made):
                yield frames[0]
                done += frames.shape[1]
                on_frames(done)

    def finish(self, frames: Iterator[np.ndarray], work: Work) -> None:
        """Decode what is left of a clip, as the other processes do. An error is that of whoever took the frames."""
        with contextlib.suppress(Exception), self.in_collectives():
            for _ in frames:
                pass
            if "decode" not in work.metadata["timings_seconds"]:
                raise RuntimeError("decoding has failed")

    def in_collectives(self) -> contextlib.AbstractContextManager[None]:
        """For work that the processes of the mesh do together: an error of one becomes that of all, or ends it."""
        return processes.in_step(self.shared, processes.IN_COLLECTIVES_SECONDS)

    def on_mesh(self, items: Iterator[T]) -> Iterator[T]:
        """The same items, each made with the mesh in force, which it is not while their user works with them."""
        while True:
            with jax.set_mesh(self.mesh):
                item = next(items, None)
            if item is None:
                return
            yield item

    def settle(self, request: Request) -> Residency:
        """How many of the transformer's layers stay on the devices for a request, and where the others are."""
        shape = request.video, jnp.dtype(self.dtype), self.mesh
        work = f"{request.width}x{request.height}, {request.frames} frames"
        work += "" if request.guided else ", unguided"
        return self._settle(
            "transformer",
            work + ("", ", from an image", ", from two images")[len(request.images)],
            functools.partial(self.model.footprint, *shape),
            functools.partial(self.model.lower_layer, *shape),
        )

    def settle_text(self) -> Residency:
        """The same of the text encoder."""
        shape = jnp.dtype(self.dtype), self.mesh
        return self._settle(
            "text_encoder",
            "the text encoder",
            functools.partial(self.model.text_footprint, *shape),
            functools.partial(self.model.lower_text_layer, *shape),
        )

    def _settle(self, part: str, work: str, footprint: Callable[..., Footprint], lower: Callable[[], Any]) -> Residency:
        if work not in self._residencies:
            stack = Stack(
                work=work,
                footprint=footprint,
                compile=lambda: lower().compile(),
                converted=self.model.converted(part),
            )
            self._residencies[work] = settle(
                stack,
                self.residency,
                self.stream_from,
                self.mesh,
                self.memory,
                host_available(),
                force=self.force,
            )
        return self._residencies[work]

    def describe(self, request: Request) -> dict[str, Any]:
        """Everything needed to make the same video again, and what it was made with."""
        length, heads, size = self.model.attention_shape(request.width, request.height, request.frames)
        with jax.set_mesh(self.mesh):
            attention = describe_attention((request.branches, length, heads, size), jnp.dtype(self.dtype))
        device = self.mesh.devices.flat[0]
        return {
            "model": self.card.name,
            "weights": self.model.files,
            "dtype": self.dtype,
            **request.settings(),
            "origins": request.origins,
            "warnings": untrained(self.card, request),
            "residency": f"{self.settle(request)} ({'auto' if self.residency is None else 'given'})",
            "text_residency": f"{self.settle_text()} ({'auto' if self.residency is None else 'given'})",
            "mesh": f"{meshes.shape_of(self.mesh)} ({self.mesh_origin})",
            "attention": attention,
            "device": f"{device.device_kind} ({device.platform})"
            + (f", {processes.count()} processes" if self.shared else ""),
            "versions": {"vidax": __version__, "jax": jax.__version__, "python": platform.python_version()},
        }


def load(
    model: str | os.PathLike | None = None,
    *,
    transformer: str | os.PathLike | None = None,
    transformer_2: str | os.PathLike | None = None,
    vae: str | os.PathLike | None = None,
    text_encoder: str | os.PathLike | None = None,
    image_encoder: str | os.PathLike | None = None,
    tokenizer: str | os.PathLike | None = None,
    dtype: str = "bfloat16",
    mesh: Mesh | MeshShape | str = "auto",
    devices: Sequence[jax.Device] | None = None,
    residency: Residency | str = "auto",
    memory_limit: float | None = None,
    stream_from: str = "auto",
    force: bool = False,
) -> Engine:
    """An engine for a model. Files are opened and checked; weights are loaded when they are needed.

    model: a folder or file in any layout (docs/weights.md), a model's name, or a Hugging Face repository; the demo if
        nothing is given.
    transformer, transformer_2 (the expert for low noise), vae, text_encoder, image_encoder, tokenizer: files or folders
        that take the place of the model's own.
    dtype: of the large matrices and of what is multiplied with them, "bfloat16" or "float32"; all else is float32.
    mesh: how devices share the work, as in "data=2,seq=4" (`vidax.parallel.mesh`), or "auto".
    residency: of the transformer's layers and the text encoder's, "resident", "streamed" or "mixed:r/g"; "auto" keeps
        as many on the device as fit.
    memory_limit: GB of each device that may be used; what the device has if None.
    stream_from: where streamed layers wait, "memory" (of the host) or "disk"; "auto" takes memory if they fit there.
    force: try it even where memory does not suffice by what programs are known to take.
    devices: those to use; every accelerator if None, and for "auto" one CPU device where there is none.
    """
    parts = {
        "transformer": transformer,
        "transformer_2": transformer_2,
        "vae": vae,
        "text_encoder": text_encoder,
        "image_encoder": image_encoder,
        "tokenizer": tokenizer,
    }
    card, opened = locate(model, {name: Path(path) for name, path in parts.items() if path is not None})
    return Engine(
        card,
        opened,
        dtype=dtype,
        mesh=mesh,
        devices=devices,
        residency=residency,
        memory_limit=memory_limit,
        stream_from=stream_from,
        force=force,
    )


def release(network: Any) -> None:
    """Give up what streamed layers have on its way."""
    if isinstance(network.blocks, Ring):
        network.blocks.close()
