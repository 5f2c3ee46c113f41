"""What every model family offers to the engine."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from vidax.sampling.solvers import SolverTable
from vidax.weights import Checkpoint, Folder, Mapping


class Part(NamedTuple):
    """What the engine needs to load one part of a model."""

    spec: Any
    checkpoint: Checkpoint
    mapping: Mapping


class Text(NamedTuple):
    """Embeddings [S text_dim] of one prompt, on the host, and whether it was cut because it is too long."""

    embeddings: np.ndarray
    truncated: bool


class Model(Protocol):
    """A model on disk: configs read and checked, weights not. Its phases take weights that the engine has loaded."""

    @property
    def folder(self) -> Folder: ...

    @property
    def dit(self) -> Any:
        """The transformer's config."""

    @property
    def scheduler(self) -> dict[str, Any]:
        """`scheduler_config.json`."""

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
