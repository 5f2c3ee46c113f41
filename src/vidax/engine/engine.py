"""The engine: loads one part of a model at a time, runs its phase for every job and takes the memory back."""

import contextlib
import dataclasses
import functools
import os
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vidax import __version__
from vidax.engine.progress import Progress, Silent, after, phase
from vidax.engine.request import Request, resolve, untrained
from vidax.engine.residency import SOURCES, Stack, memory, settle
from vidax.engine.work import Job, Work, require_same_jobs, streaming, waiting, warn, warn_of_cut
from vidax.errors import UserError
from vidax.media.files import record, write_json
from vidax.media.output import open_writer, to_uint8
from vidax.models.interface import Footprint, Model, Part
from vidax.models.locate import locate
from vidax.models.registry import Card
from vidax.nn import Spec, parameter_bytes, placement
from vidax.ops.attention import describe as describe_attention
from vidax.parallel import mesh as meshes
from vidax.parallel import processes
from vidax.parallel.mesh import MeshShape
from vidax.sampling.noise import normal
from vidax.weights import load as load_weights
from vidax.weights.memory import host_available
from vidax.weights.residency import DEVICE, PINNED, RESIDENT, UNPINNED, Residency, Ring, layers_apart
from vidax.weights.residency import parse as parse_residency

WAITING = 0.1  # of the denoising time, above which a user should know
DTYPES = ("bfloat16", "float32")

T = TypeVar("T")


class Clip(NamedTuple):
    """A job's frames [f H W 3] as they are decoded, and its record, which is complete when the last one is taken.

    What stopped the job, be it steps ago, is raised when its frames are asked for.
    """

    frames: Iterator[np.ndarray]
    metadata: dict[str, Any]


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
        write_json(record(writer.path), self.metadata, overwrite=overwrite)
        return writer.path


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
        """All text is encoded, then all latents are denoised, then decoded as the clips are taken, in order.

        Between the phases a job is a few megabytes on the host. A fault of one job is raised by its clip alone; what
        concerns all of them, such as weights that cannot be loaded, is raised here.

        Where several processes share the mesh, each calls this with the same jobs, takes the clips alike and gets all
        frames. What is left of a clip when the next one is asked for is decoded nevertheless, for the others' sake.
        """
        if not jobs:
            return
        progress = progress or Silent()
        dtype, timings = jnp.dtype(self.dtype), dict[str, float]()
        works = [Work(job, self.describe(job.request) | {"timings_seconds": {}}) for job in jobs]
        # Opened before any is read: a damaged file is found now, not after an hour of denoising.
        with processes.in_step(self.shared):
            parts = self.model.text_encoder(dtype), self.model.transformer(dtype), self.model.decoder()
        if self.shared:
            require_same_jobs(works)

        encoder = self.load("text encoder", parts[0], works, timings, progress, self.settle_text())
        prompts = list(dict.fromkeys(prompt for job in jobs for prompt in job.request.prompts))
        texts: dict[str, np.ndarray] = {}
        with phase("encode text", len(prompts), timings, progress) as advance, self.in_collectives():
            encoded = self.on_mesh(self.model.encode_text(encoder, prompts))
            for prompt, text in zip(prompts, encoded, strict=True):
                texts[prompt] = text.embeddings
                if text.truncated:
                    warn_of_cut(prompt, len(text.embeddings), works, progress)
                advance(len(texts))
        release(encoder)
        del encoder

        residency = min((self.settle(job.request) for job in jobs), key=lambda r: r.resident / r.of)
        dit = self.load("transformer", parts[1], works, timings, progress, residency)
        with phase("denoise", sum(work.steps for work in works), timings, progress) as advance:
            done = 0
            for number, work in enumerate(works, 1):
                progress.job(number, len(works))
                with work.own_fault(), self.in_collectives(), work.timed("denoise"):
                    work.latents = self.denoise(dit, work, texts, after(done, advance))
                if (share := work.metadata.get("streaming", {}).get("share_of_denoising", 0)) > WAITING:
                    warn(waiting(share, self.settle(work.job.request)), [work], progress)
                done += work.steps
                advance(done)
        release(dit)
        del dit, texts

        # Where every job has failed there is nothing to decode, but each still says why.
        undone = any(work.error is None for work in works)
        vae = self.load("decoder", parts[2], works, timings, progress) if undone else None
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

    def denoise(
        self, dit: Any, work: Work, texts: Mapping[str, np.ndarray], on_step: Callable[[int], None]
    ) -> np.ndarray:
        """A job's latents [1 F H W C], on the host."""
        request = work.job.request
        f, h, w, c = self.model.latent_shape(request.width, request.height, request.frames)
        noise = normal((1, c, f, h, w), request.seed, request.noise).transpose(0, 2, 3, 4, 1)  # drawn channels first
        text = np.stack([texts[prompt] for prompt in request.prompts])
        guidance_scale = request.guidance_scale if request.guided else None
        ring = dit.blocks if isinstance(dit.blocks, Ring) and dit.blocks.streamed else None
        before = (ring.bytes_moved, ring.seconds_waited, time.perf_counter()) if ring else None
        try:
            with jax.set_mesh(self.mesh):
                state = self.model.denoise(dit, request.sampler.table(), noise, text, guidance_scale, on_step)
            latents = np.array(state)
        except BaseException:
            release(dit)
            raise
        if ring and before:
            moved, waited = ring.bytes_moved - before[0], ring.seconds_waited - before[1]
            work.metadata["streaming"] = streaming(moved, waited, time.perf_counter() - before[2], work.steps)
        return latents

    def decode(self, vae: Any, work: Work, on_frames: Callable[[int], None]) -> Generator[np.ndarray]:
        """A job's frames [f H W 3]; its record is complete at the end."""
        if work.error is not None:
            raise work.error
        assert work.latents is not None
        done = 0
        with work.timed("decode"):
            for frames in self.on_mesh(self.model.decode(vae, work.latents, work.job.frames_dtype)):
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

    def load(
        self,
        name: str,
        part: Part,
        works: Sequence[Work],
        timings: dict[str, float],
        progress: Progress,
        residency: Residency = RESIDENT,
    ) -> Any:
        """A part's weights on the mesh, with as many layers on the devices as the residency says; the others are in a
        `Ring`. Nothing here keeps them: they are gone when the caller lets go.
        """
        read = functools.partial(self.read, name, part, timings, progress)
        if residency == RESIDENT and not (hasattr(part.spec, "blocks") and apart(self.mesh, self.dtype)):
            return read(None, DEVICE)
        try:
            loaded = read(residency, PINNED)
        except jax.errors.JaxRuntimeError as error:
            layers = f"the layers of the {name} ({first_line(error)})"
            warn(f"no pinned host memory for {layers}, so their copies may be slower", works, progress)
            loaded = read(residency, UNPINNED)
        return dataclasses.replace(loaded, blocks=Ring(layers_apart(loaded.blocks, loaded.config.layers)))

    def read(
        self,
        name: str,
        part: Part,
        timings: dict[str, float],
        progress: Progress,
        residency: Residency | None,
        host: str,
    ) -> Any:
        """A part's weights on the mesh. With a residency, layers are arrays of their own (`Apart`), and the large ones
        of streamed layers are in the memory of that kind, or `Stored`. Embedding tables stay in their files.
        """
        place = placement(self.mesh)

        def streamed(spec: Spec, layer: int) -> bool:
            return residency is not None and not spec.small and not residency.holds(layer)

        def place_layer(spec: Spec, layer: int) -> jax.sharding.Sharding:
            return place(spec).with_memory_kind(host if streamed(spec, layer) else DEVICE)

        def stored(spec: Spec, layer: int | None) -> bool:
            if layer is None:
                return spec.looked_up
            return residency is not None and residency.disk and streamed(spec, layer)

        loading = phase(f"load {name}", parameter_bytes(part.spec), timings, progress)
        with loading as advance, processes.in_step(self.shared):
            return load_weights(
                part.spec,
                part.checkpoint,
                part.mapping,
                sharding=place,
                layer_sharding=place_layer if residency else None,
                stored=stored,
                progress=lambda done, _: advance(done),
            )

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
        shape = request.width, request.height, request.frames, request.branches, jnp.dtype(self.dtype), self.mesh
        work = f"{request.width}x{request.height}, {request.frames} frames"
        return self._settle(
            "transformer",
            work if request.guided else f"{work}, unguided",
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
    vae: str | os.PathLike | None = None,
    text_encoder: str | os.PathLike | None = None,
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
    transformer, vae, text_encoder, tokenizer: files or folders that take the place of the model's own.
    dtype: of the large matrices and of what is multiplied with them, "bfloat16" or "float32"; all else is float32.
    mesh: how devices share the work, as in "data=2,seq=4" (`vidax.parallel.mesh`), or "auto".
    residency: of the transformer's layers and the text encoder's, "resident", "streamed" or "mixed:r/g"; "auto" keeps
        as many on the device as fit.
    memory_limit: GB of each device that may be used; what the device has if None.
    stream_from: where streamed layers wait, "memory" (of the host) or "disk"; "auto" takes memory if they fit there.
    force: try it even where memory does not suffice by what programs are known to take.
    devices: those to use; every accelerator if None, and for "auto" one CPU device where there is none.
    """
    parts = {"transformer": transformer, "vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
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


def apart(mesh: Mesh, dtype: Any) -> bool:
    """Whether layers run one by one even where all are resident. On CPUs those of bfloat16 do: in a loop over a stack
    of them XLA makes all of it float32 at each step, which takes three times the memory and more than twice the time.
    """
    return mesh.devices.flat[0].platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16


def release(network: Any) -> None:
    """Give up what streamed layers have on its way."""
    if isinstance(network.blocks, Ring):
        network.blocks.close()


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def tags(metadata: dict[str, Any]) -> dict[str, Any]:
    """What goes into the video file itself."""
    kept = ("prompt", "negative_prompt", "seed", "model", "steps", "guidance_scale", "flow_shift", "solver", "noise")
    return {key: metadata[key] for key in kept} | {"vidax": metadata["versions"]["vidax"]}


def as_dtype(frames: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Frames as uint8 or as float32 in [0, 1], whichever they are."""
    if frames.dtype == dtype:
        return frames
    return to_uint8(frames * 2 - 1) if dtype == np.uint8 else frames.astype(np.float32) / 255
