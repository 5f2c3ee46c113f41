"""What every model family offers to the engine."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from vidax.sampling.solvers import SolverTable
from vidax.weights import Checkpoint
from vidax.weights import Mapping as Names
from vidax.weights.residency import Residency

PARTS = ("transformer", "vae", "text_encoder", "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the parts of a model are, before any of them is opened.

    parts:     one of `PARTS` to a file or a folder; a tokenizer that is not named is looked for near the text encoder.
    folder:    the folder of a whole model, if one was named.
    options:   its `model_index.json` in diffusers' layout.
    scheduler: its `scheduler_config.json`; None where there is none, and the model's card decides.
    """

    parts: dict[str, Path]
    folder: Path | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: dict[str, Any] | None = None


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


class Architecture(Protocol):
    """What a model is without its weights: all that requests are checked with, and plans are made of."""

    @property
    def dit(self) -> Any:
        """The transformer's config."""

    @property
    def scheduler(self) -> dict[str, Any] | None:
        """`scheduler_config.json`, if the model came with one."""

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
        """What the phases load: text_encoder, transformer and decoder, described."""

    def flops(self, width: int, height: int, frames: int, branches: int, dtype) -> dict[str, dict[str, float]]:
        """Of each program once, by the dtype of the operands: `text` for one text, `step`, `decode` for a latent frame
        after the first.
        """

    def footprint(
        self, width: int, height: int, frames: int, branches: int, dtype, mesh: Any, program: Any = None
    ) -> Footprint:
        """What denoising takes; without the compiled `program` of a layer (`lower_layer`) activations are left out."""

    def text_footprint(self, dtype, mesh: Any, program: Any = None) -> Footprint:
        """What encoding a text takes; `program` is that of `lower_text_layer`."""

    def lower_text(self, dtype, mesh: Any) -> Any:
        """The program that encodes a text, lowered for the devices of a mesh, which need not be here."""

    def lower_text_layer(self, dtype, mesh: Any) -> Any:
        """That of one of the encoder's layers, where some are streamed."""

    def lower_step(self, width: int, height: int, frames: int, branches: int, past: int, dtype, mesh: Any) -> Any:
        """That of a denoising step with all layers resident, for a solver that keeps `past` predictions."""

    def lower_layer(self, width: int, height: int, frames: int, branches: int, dtype, mesh: Any) -> Any:
        """That of one of its layers, where some are streamed."""

    def lower_decode(self, width: int, height: int, mesh: Any) -> Any:
        """That which decodes a latent frame after the first."""


class Model(Architecture, Protocol):
    """A model on disk: configs read and checked, weights not. Its phases take weights that the engine has loaded."""

    @property
    def pipeline(self) -> str:
        """The class of the pipeline in a `model_index.json` of this family."""

    @property
    def files(self) -> dict[str, str]:
        """Where each part is."""

    @property
    def tokenizer(self) -> Path:
        """A tokenizer's file, or the text encoder's file that has it inside."""

    def components(self, dtype) -> dict[str, tuple[Part, Any, str]]:
        """Every component whole, with its config and the layout that it is in, for `check` and `convert`."""

    def converted(self, part: str) -> bool:
        """Whether a part of `PARTS` is in the form that `vidax convert` writes."""

    def text_encoder(self, dtype) -> Part: ...

    def transformer(self, dtype) -> Part: ...

    def decoder(self) -> Part: ...

    def encode_text(self, encoder: Any, prompts: list[str]) -> Iterator[Text]:
        """One after the other, each on its own, so that a prompt's embeddings do not depend on its neighbours."""

    def denoise(
        self,
        transformer: Any,
        table: SolverTable,
        noise: np.ndarray,
        text: np.ndarray,
        guidance_scale: float | None,
        on_step: Callable[[int], None],
    ) -> jax.Array:
        """Latents [B F H W C] from noise of that shape.

        text: [B S text_dim] without guidance (`guidance_scale` None), [2B S text_dim] with it, negative prompts last.
        on_step: called after each step has finished on the device, with the number of steps done.
        """

    def decode(self, decoder: Any, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        """Frames [B f H W 3] of latents [B F H W C], chunk by chunk, in device memory that does not grow with F.

        dtype: "uint8", rounded on the device, or "float32" in [0, 1].
        """
