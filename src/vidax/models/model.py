"""A model on disk, whatever its family, and its phases: encode text and images, denoise, decode.

Configs are read and checked, weights are not. Nothing here holds weights: the engine loads a part, hands it to the
phase and takes its memory back.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vidax.errors import UserError
from vidax.models.architecture import Architecture
from vidax.models.condition import Given
from vidax.models.interface import Inputs, Part, Sources, Text, Video
from vidax.models.programs import (
    decode_chunk,
    denoise_step,
    encode,
    encode_chunk,
    encode_image,
    encode_leave,
    encode_through,
    enter,
    leave,
    prepare,
    resume,
    start,
    through,
)
from vidax.models.towers.clip_vision import CLIPVision, preprocess
from vidax.models.towers.t5 import T5Encoder
from vidax.models.towers.tokenizer import NAMES, Tokenizer, nearest_tokenizer
from vidax.parallel.rules import whole
from vidax.sampling.noise import Stream
from vidax.sampling.solvers import SolverState, SolverTable
from vidax.weights import Component, checkpoint_names
from vidax.weights.layouts import Catalogue, differences
from vidax.weights.residency import Ring

TOGETHER = "take all components from one model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Architecture):
    """Where its parts are, and what is made with them.

    parts: by their names in `PARTS`. tokenizer: its file, or the text encoder's that has it inside.
    image_processor: `preprocessor_config.json`, if the model came with one.
    """

    parts: dict[str, Component]
    tokenizer: Path
    image_processor: dict[str, Any] | None = None

    # What a family says.

    @property
    @abc.abstractmethod
    def cleans_text(self) -> bool:
        """Whether prompts are mended before they become tokens."""

    @property
    @abc.abstractmethod
    def masks_padding(self) -> bool:
        """Whether the text encoder is told which tokens are padding."""

    @property
    @abc.abstractmethod
    def pipeline(self) -> str:
        """The class of the pipeline in a `model_index.json` of this family."""

    @property
    def options(self) -> dict[str, Any]:
        """What else stands in it."""
        return {}

    @abc.abstractmethod
    def video_chunks(self, images: Sequence[np.ndarray], frames: int) -> Iterator[np.ndarray]:
        """What is encoded [1 f H W 3] in [-1, 1] for a video of so many frames, from its first frame and perhaps the
        last [H W 3] in [0, 1].
        """

    @abc.abstractmethod
    def given(self, video: Video, encoded: Any, noise: Stream) -> Given:
        """What is known of the latents of a video from images, of which `encode_frames` gave `encoded`. noise: drawn
        from where the latents of an image are a sample.
        """

    # Its parts.

    @property
    def files(self) -> dict[str, str]:
        """Where each part is."""
        return {name: str(part.path) for name, part in self.parts.items()} | {"tokenizer": str(self.tokenizer)}

    def components(self, dtype) -> dict[str, tuple[Part, Any, str]]:
        """Every component whole, with its config and the layout that it is in, for `check` and `convert`."""
        configs = {name: part.config for name, part in self.parts.items()} | {"vae": self.vae}
        return {name: (self.part(name, dtype), configs[name], part.layout) for name, part in self.parts.items()}

    def converted(self, part: str) -> bool:
        """Whether a part of `PARTS` is in the form that `vidax convert` writes. Both experts have one residency."""
        return all(one.names.held for name, one in self.parts.items() if name.removesuffix("_2") == part)

    def part(self, name: str, dtype) -> Part:
        part = self.parts[name]
        spec = self.networks.vae.spec(self.vae) if name == "vae" else self.specs(dtype)[name.removesuffix("_2")]
        return Part(spec, part.checkpoint(), part.names)

    def text_encoder(self, dtype) -> Part:
        return self.part("text_encoder", dtype)

    def image_encoder(self, dtype) -> Part | None:
        return self.part("image_encoder", dtype) if self.image else None

    def transformers(self, dtype) -> tuple[Part, ...]:
        """One, or two experts."""
        return tuple(self.part(name, dtype) for name in ("transformer", "transformer_2")[: self.experts])

    def encoder(self) -> Part:
        return self.half("encoder", other="decoder")

    def decoder(self) -> Part:
        return self.half("decoder", other="encoder")

    def half(self, name: str, other: str) -> Part:
        """Of the autoencoder, always float32. The tensors of the other half are left unread."""
        part, whole = self.parts["vae"], self.networks.vae.spec(self.vae)
        unread = checkpoint_names(dataclasses.replace(whole, **{name: None}), part.names)
        tensors = [re.escape(tensor.removeprefix(part.names.prefix)) for leaf in unread for tensor in leaf.names]
        skip = f"^({'|'.join(tensors)})$", f"of the {other}, and only the {name} is needed"
        names = dataclasses.replace(part.names, skips=(*part.names.skips, skip))
        return Part(dataclasses.replace(whole, **{other: None}), part.checkpoint(), names)

    # Its phases.

    def encode_text(self, encoder: T5Encoder, prompts: list[str]) -> Iterator[Text]:
        """One after the other, each on its own, so that a prompt's embeddings do not depend on its neighbours."""
        tokens = Tokenizer.load(self.tokenizer).encode(prompts, self.text_tokens, clean=self.cleans_text)
        if (largest := tokens.ids.max()) >= self.text.vocabulary:
            raise UserError(
                f"{self.tokenizer}: gives token {largest}, but the text encoder's vocabulary has "
                f"{self.text.vocabulary}; take both from one model"
            )
        lengths = tokens.lengths if self.masks_padding else np.full_like(tokens.lengths, self.text_tokens)
        table, blocks = encoder.token_embedding, encoder.blocks
        ends = dataclasses.replace(encoder, token_embedding=None, blocks=None)
        for row, truncated in enumerate(tokens.truncated):
            x, length = whole(table(tokens.ids[row : row + 1])), whole(lengths[row : row + 1])
            if isinstance(blocks, Ring):
                x = blocks.run(functools.partial(encode_through, ends, length), x)
                embeddings = encode_leave(ends, length, x)
            else:
                embeddings = encode(dataclasses.replace(ends, blocks=blocks), length, x)
            yield Text(np.array(embeddings)[0], truncated)

    def encode_images(self, tower: CLIPVision, images: Sequence[np.ndarray]) -> np.ndarray:
        """States of the image encoder [1 I image_dim] for images [H W 3] uint8 as they were given."""
        assert self.image is not None
        pixels = [preprocess(image, self.image_processor, size=self.image.image) for image in images]
        return np.array(encode_image(tower, whole(np.stack(pixels))))

    def encode_frames(
        self, encoder: Any, images: Sequence[np.ndarray], frames: int, on_frames: Callable[[int], None]
    ) -> Any:
        """What the autoencoder's encoder makes of a video from images [H W 3] of its size, on the host. on_frames:
        called with the number of frames encoded.
        """
        cache, parts, done = None, [], 0
        for chunk in self.video_chunks(images, frames):
            encoded, cache = encode_chunk(encoder.encoder, whole(chunk), cache)
            parts.append(jax.tree.map(np.array, encoded))
            on_frames(done := done + chunk.shape[1])
        return jax.tree.map(lambda *chunks: np.concatenate(chunks, 1), *parts)

    def denoise(
        self,
        transformer: Any,
        table: SolverTable,
        steps: range,
        state: SolverState | np.ndarray,
        inputs: Inputs,
        guidance: np.ndarray | None,
        on_step: Callable[[int], None],
        noise: Iterator[np.ndarray] | None = None,
    ) -> SolverState:
        """The state after these steps, from noise [1 F H W C] or from a state on the host.

        transformer: a `DiffusionTransformer`, whose layers may be in a `Ring`. guidance: the scale of each step of the
        table; None without guidance. on_step: called after each step has finished on the device, with the number of
        the step, from 1. noise: what each of these steps adds, of a solver that adds some.
        """
        table, given = whole(table), whole(inputs.given)
        ring = transformer.blocks if isinstance(transformer.blocks, Ring) else None
        ends = dataclasses.replace(transformer, blocks=None)
        context = prepare(ends, whole(inputs.text), None if inputs.states is None else whole(inputs.states))
        # Placed like a step's result: otherwise the first step would compile a program of its own.
        now = start(table, whole(state)) if isinstance(state, np.ndarray) else resume(whole(state))
        for i in steps:
            index = whole(np.int32(i))
            scale = None if guidance is None else whole(np.float32(guidance[i]))
            fresh = None if noise is None else whole(next(noise))
            if ring:
                tokens = enter(ends, table, index, now, context, given, scale)
                tokens = ring.run(lambda layer, tokens: through(ends, layer, tokens, context), tokens)
                now = leave(ends, table, index, now, tokens, scale, fresh)
            else:
                now = denoise_step(transformer, table, index, now, context, given, scale, fresh)
            now.sample.block_until_ready()
            on_step(i + 1)
        return now

    def finish(self, video: Video, state: SolverState, given: Given) -> np.ndarray:
        """Latents [1 F H W C] of a video, those that are decoded, of the state after the last step; on the host."""
        latents = given.first(np.array(state.sample))
        return latents[:, -self.latent_frames(video.frames) :]

    def decode(self, decoder: Any, video: Video, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        """Frames [B f H W 3] of latents [B F H W C], chunk by chunk, in device memory that does not grow with F.

        dtype: "uint8", rounded on the device, or "float32" in [0, 1].
        """
        cache, begin = None, 0
        for count in self.decoded_chunks(video.frames):
            frames, cache = decode_chunk(decoder.decoder, whole(latents[:, begin : begin + count]), cache, dtype)
            yield np.asarray(frames)
            begin += count


def check_text(model: Model) -> None:
    """Raises UserError unless the transformer takes what the text encoder gives."""
    if model.dit.text_dim != model.text.dim:
        raise UserError(
            f"{model.files['transformer']}: the transformer has text_dim {model.dit.text_dim} where "
            f"{model.files['text_encoder']} has {model.text.dim}; {TOGETHER}"
        )


def check_published(model: Model, catalogue: Catalogue, published: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises UserError where the parts of a published transformer are not those that it is published with.

    published: of each part that the model may have, the config that it has and the one that it should.
    """
    for part, (config, wanted) in published.items():
        if part in model.parts and (difference := differences(config, wanted)):
            title = f"{catalogue.kinds[part].title} of {catalogue.title}"
            raise UserError(f"{model.files[part]}: not the {title}: {difference}")


def tokenizer_of(sources: Sources, text_encoder: Component) -> Path:
    """The one that is named, or that which lies near the text encoder. Raises UserError where there is none."""
    encoder = text_encoder.path
    if (tokenizer := sources.parts.get("tokenizer") or nearest_tokenizer(encoder)) is None:
        raise UserError(
            f"{encoder.parent}: holds no {' or '.join(NAMES)} for the text encoder, nor does a folder tokenizer/ "
            "or google/umt5-xxl/ near it; give one with --tokenizer"
        )
    return tokenizer
