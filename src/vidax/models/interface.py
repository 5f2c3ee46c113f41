"""What passes between the engine and a model."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vidax.models.condition import NOTHING, Given
from vidax.weights import Checkpoint
from vidax.weights import Mapping as Names
from vidax.weights.residency import Residency

PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder", "tokenizer")


class Video(NamedTuple):
    """What of a request decides which programs make it.

    branches: of guidance. images: how many are given. tiled: whether its frames are decoded in tiles.
    """

    width: int
    height: int
    frames: int
    branches: int
    images: int = 0
    tiled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the parts of a model are, before any of them is opened.

    parts:     one of `PARTS` to a file or a folder; a tokenizer that is not named is looked for near the text encoder.
    folder:    the folder of a whole model, if one was named.
    options:   its `model_index.json` in diffusers' layout.
    scheduler: its `scheduler_config.json`; None where there is none, and the model's card decides.
    family:    whose model it is, where that is known by now.
    image_processor: its `preprocessor_config.json`, of pictures for the image encoder; None for the official way.
    """

    parts: dict[str, Path]
    folder: Path | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    image_processor: dict[str, Any] | None = None
    family: str | None = None


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
    states, given: of its images, as `Model.encode_images` and `Model.given` give them.
    """

    text: np.ndarray
    states: np.ndarray | None = None
    given: Given = NOTHING
