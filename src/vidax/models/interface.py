"""What every model family offers to the engine."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from vidax.sampling.solvers import SolverState, SolverTable
from vidax.weights import Checkpoint
from vidax.weights import Mapping as Names
from vidax.weights.residency import Residency

PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder", "tokenizer")


class Video(NamedTuple):
    """What of a request decides which programs make it.

    branches: of guidance. images: how many are given.
    """

    width: int
    height: int
    frames: int
    branches: int
    images: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the parts of a model are, before any of them is opened.

    parts:     one of `PARTS` to a file or a folder; a tokenizer that is not named is looked for near the text encoder.
    folder:    the folder of a whole model, if one was named.
    options:   its `model_index.json` in diffusers' layout.
    scheduler: its `scheduler_config.json`; None where there is none, and the model's card decides.
    image_processor: its `preprocessor_config.json`, of pictures for the image encoder; None for the official way.
    """

    parts: dict[str, Path]
    folder: Path | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    image_processor: dict[str, Any] | None = None


class Part(NamedTuple):
    """What the engine needs to load one part of a model."""

    spec: Any
    checkpoint: Checkpoint
    mapping: Names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a network of many layers takes of each device's memory, in bytes."""

    fixed: int  # all but the layers' weights
    stream: int  # of that, the residual stream: the unit of a rough estimate
    layer: int  # one layer's weights
    layers: int

    def total(self, residency: Residency) -> int:
        """With two streamed layers at a time beside the resident ones, if there are any."""
        resident = residency.count(self.layers)
        return self.fixed + self.layer * min(resident + 2, self.layers + (resident < self.layers))


class Text(NamedTuple):
    """Embeddings [S text_dim] of one prompt, on the host, and whether it was cut because it is too long."""

    embeddings: np.ndarray
    truncated: bool


class Inputs(NamedTuple):
    """What a video is made from, on the host.

    text: [S text_dim], or [2 S text_dim] with guidance, that of the negative prompt last.
    states, given: of its images, as `Model.encode_images` and `encode_frames` give them; None without.
    """

    text: np.ndarray
    states: np.ndarray | None = None
    given: Any = None


class Architecture(Protocol):
    """What a model is without its weights: all that requests are checked with, and plans are made of."""

    @property
    def dit(self) -> Any:
        """The transformer's config."""

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """`scheduler_config.json`, if the model came with one."""

    @property
    def experts(self) -> int:
        """How many transformers share the steps: the first takes those of high noise."""

    @property
    def boundary_ratio(self) -> float | None:
        """Of the training timesteps, where the second expert takes over, if the model came with it."""

    @property
    def images(self) -> tuple[int, int]:
        """How many images a video is made from, at least and at most: a first frame, then a last."""

    def image_size(self, image: tuple[int, int], area: int) -> tuple[int, int]:
        """The size of a video of about that many pixels from an image of (width, height), as the authors choose it."""

    def fit(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """An image [H W 3] as a frame of a video of that size, float32 about [0, 1], as the authors make it."""

    @property
    def size_multiple(self) -> int:
        """Width and height are multiples of this: what the autoencoder and the patches divide by."""

    @property
    def frame_multiple(self) -> int:
        """Frames are a multiple of this, plus one."""

    def latent_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int, int]:
        """(F, H, W, C) of the latents of a video."""

    def attention_shape(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        """(L, N, K) of the transformer's self-attention."""

    def specs(self, dtype) -> dict[str, Any]:
        """What the phases load, described: text_encoder, transformer, decoder, and where images are taken encoder and
        perhaps image_encoder.
        """

    def flops(self, video: Video, dtype) -> dict[str, dict[str, float]]:
        """Of each program once, by the dtype of the operands: `text` for one text, `step`, `decode` for a latent frame
        after the first; of a video from images `encode`, and where there is an image encoder `look`.
        """

    def chunks(self, video: Video) -> int:
        """How many chunks of frames the encoder sees, none without images."""

    def footprint(self, video: Video, dtype, mesh: Any, program: Any = None) -> Footprint:
        """What denoising takes; without the compiled `program` of a layer (`lower_layer`) activations are left out."""

    def text_footprint(self, dtype, mesh: Any, program: Any = None) -> Footprint:
        """What encoding a text takes; `program` is that of `lower_text_layer`."""

    def lower_text(self, dtype, mesh: Any) -> Any:
        """The program that encodes a text, lowered for the devices of a mesh, which need not be here."""

    def lower_text_layer(self, dtype, mesh: Any) -> Any:
        """That of one of the encoder's layers, where some are streamed."""

    def lower_step(self, video: Video, past: int, dtype, mesh: Any) -> Any:
        """That of a denoising step with all layers resident, for a solver that keeps `past` predictions."""

    def lower_layer(self, video: Video, dtype, mesh: Any) -> Any:
        """That of one of its layers, where some are streamed."""

    def lower_look(self, images: int, dtype, mesh: Any) -> Any:
        """That in which the image encoder looks at so many pictures."""

    def lower_encode(self, video: Video, mesh: Any) -> Any:
        """That which encodes a chunk of frames after the first, or the first where there is no other."""

    def lower_decode(self, width: int, height: int, mesh: Any) -> Any:
        """That which decodes a latent frame after the first."""


class Model(Architecture, Protocol):
    """A model on disk: configs read and checked, weights not. Its phases take weights that the engine has loaded."""

    @property
    def pipeline(self) -> str:
        """The class of the pipeline in a `model_index.json` of this family."""

    @property
    def options(self) -> dict[str, Any]:
        """What else stands in it."""

    @property
    def files(self) -> dict[str, str]:
        """Where each part is."""

    @property
    def tokenizer(self) -> Path:
        """A tokenizer's file, or the text encoder's file that has it inside."""

    @property
    def image_processor(self) -> dict[str, Any] | None:
        """`preprocessor_config.json`, if the model came with one."""

    def components(self, dtype) -> dict[str, tuple[Part, Any, str]]:
        """Every component whole, with its config and the layout that it is in, for `check` and `convert`."""

    def converted(self, part: str) -> bool:
        """Whether a part of `PARTS` is in the form that `vidax convert` writes."""

    def text_encoder(self, dtype) -> Part: ...

    def image_encoder(self, dtype) -> Part | None: ...

    def encoder(self) -> Part: ...

    def transformers(self, dtype) -> tuple[Part, ...]:
        """One, or two experts."""

    def decoder(self) -> Part: ...

    def encode_text(self, encoder: Any, prompts: list[str]) -> Iterator[Text]:
        """One after the other, each on its own, so that a prompt's embeddings do not depend on its neighbours."""

    def encode_images(self, tower: Any, images: Sequence[np.ndarray]) -> np.ndarray:
        """States of the image encoder [1 I image_dim] for images [H W 3] uint8 as they were given."""

    def encode_frames(
        self, encoder: Any, images: Sequence[np.ndarray], frames: int, on_frames: Callable[[int], None]
    ) -> Any:
        """What is known of the latents of a video, on the host, from images [H W 3] of its size: the first frame and
        perhaps the last. on_frames: called with the number of frames encoded.
        """

    def denoise(
        self,
        transformer: Any,
        table: SolverTable,
        steps: range,
        state: SolverState | np.ndarray,
        inputs: Inputs,
        guidance_scale: float | None,
        on_step: Callable[[int], None],
    ) -> SolverState:
        """The state after these steps, from noise [1 F H W C] or from a state on the host.

        guidance_scale: None without guidance. on_step: called after each step has finished on the device, with the
        number of the step, from 1.
        """

    def finish(self, state: SolverState, inputs: Inputs) -> np.ndarray:
        """Latents [1 F H W C] of the state after the last step, on the host."""

    def decode(self, decoder: Any, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        """Frames [B f H W 3] of latents [B F H W C], chunk by chunk, in device memory that does not grow with F.

        dtype: "uint8", rounded on the device, or "float32" in [0, 1].
        """
