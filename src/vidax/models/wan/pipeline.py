"""A Wan model on disk, and its phases: encode text and images, denoise, decode.

Nothing here holds weights: the engine loads a part, hands it to the phase and takes its memory back.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vidax.errors import UserError
from vidax.models.interface import Inputs, Part, Sources, Text
from vidax.models.towers.clip_vision import CLIPVision, preprocess
from vidax.models.towers.t5 import T5Encoder
from vidax.models.towers.tokenizer import NAMES, Tokenizer, nearest_tokenizer
from vidax.models.wan import mapping
from vidax.models.wan.architecture import WanArchitecture
from vidax.models.wan.condition import NOTHING, Given, chunks, mask
from vidax.models.wan.config import CLIP_VIT_H, PUBLISHED, TEXT_TOKENS, UMT5_XXL
from vidax.models.wan.dit import DiT
from vidax.models.wan.layouts import WAN
from vidax.models.wan.programs import (
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
from vidax.models.wan.vae import VAE
from vidax.parallel.rules import whole
from vidax.sampling.solvers import SolverState, SolverTable
from vidax.weights import Component
from vidax.weights.layouts import differences, open_component
from vidax.weights.residency import Ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanModel(WanArchitecture):
    """A Wan model on disk, in any layout; see `vidax.models.interface.Model` for its methods."""

    parts: dict[str, Component]
    tokenizer: Path
    image_processor: dict[str, Any] | None = None

    @staticmethod
    def open(sources: Sources) -> "WanModel":
        """Raises UserError where a part is not that of a Wan model, or they do not fit together."""
        parts = {name: open_component(WAN, name, sources.parts[name]) for name in WAN.kinds if name in sources.parts}
        encoder = parts["text_encoder"].path
        if (tokenizer := sources.parts.get("tokenizer") or nearest_tokenizer(encoder)) is None:
            raise UserError(
                f"{encoder.parent}: holds no {' or '.join(NAMES)} for the text encoder, nor does a folder tokenizer/ "
                "or google/umt5-xxl/ near it; give one with --tokenizer"
            )
        vae = parts["vae"].config
        if parts["transformer"].config.image_dim is None:
            parts.pop("image_encoder", None)  # some folders have one that nothing reads
        model = WanModel(
            parts=parts,
            tokenizer=tokenizer,
            scheduler=sources.scheduler,
            image_processor=sources.image_processor,
            dit=parts["transformer"].config,
            vae=vae,
            text=parts["text_encoder"].config,
            image=parts["image_encoder"].config if "image_encoder" in parts else None,
            experts=2 if "transformer_2" in parts else 1,
            # The autoencoder of 2.2 comes with no other model.
            first_frame=sources.options.get("expand_timesteps", vae.residual),
            boundary_ratio=sources.options.get("boundary_ratio"),
        )
        check_parts(model)
        return model

    @property
    def pipeline(self) -> str:
        return "WanImageToVideoPipeline" if self.by_channels else "WanPipeline"

    @property
    def options(self) -> dict[str, Any]:
        return {"boundary_ratio": self.boundary_ratio, "expand_timesteps": self.first_frame}

    @property
    def files(self) -> dict[str, str]:
        return {name: str(part.path) for name, part in self.parts.items()} | {"tokenizer": str(self.tokenizer)}

    def components(self, dtype) -> dict[str, tuple[Part, Any, str]]:
        return {name: (self.part(name, dtype), part.config, part.layout) for name, part in self.parts.items()}

    def converted(self, part: str) -> bool:
        # Both experts have one residency.
        return all(one.names.held for name, one in self.parts.items() if name.removesuffix("_2") == part)

    def part(self, name: str, dtype) -> Part:
        part = self.parts[name]
        spec = VAE.spec(self.vae) if name == "vae" else self.specs(dtype)[name.removesuffix("_2")]
        return Part(spec, part.checkpoint(), part.names)

    def text_encoder(self, dtype) -> Part:
        return self.part("text_encoder", dtype)

    def image_encoder(self, dtype) -> Part | None:
        return self.part("image_encoder", dtype) if self.image else None

    def transformers(self, dtype) -> tuple[Part, ...]:
        return tuple(self.part(name, dtype) for name in ("transformer", "transformer_2")[: self.experts])

    def encoder(self) -> Part:
        return self.half("encoder", unused="decoder")

    def decoder(self) -> Part:
        return self.half("decoder", unused="encoder")

    def half(self, name: str, unused: str) -> Part:
        """Of the autoencoder, always float32."""
        part = self.parts["vae"]
        names = dataclasses.replace(part.names, skips=mapping.VAE_UNUSED[unused][part.layout])
        return Part(self.specs(None)[name], part.checkpoint(), names)

    def encode_text(self, encoder: T5Encoder, prompts: list[str]) -> Iterator[Text]:
        tokens = Tokenizer.load(self.tokenizer).encode(prompts, TEXT_TOKENS)
        if (largest := tokens.ids.max()) >= self.text.vocabulary:
            raise UserError(
                f"{self.tokenizer}: gives token {largest}, but the text encoder's vocabulary has "
                f"{self.text.vocabulary}; take both from one model"
            )
        table, blocks = encoder.token_embedding, encoder.blocks
        ends = dataclasses.replace(encoder, token_embedding=None, blocks=None)
        for row, truncated in enumerate(tokens.truncated):
            x, lengths = whole(table(tokens.ids[row : row + 1])), whole(tokens.lengths[row : row + 1])
            if isinstance(blocks, Ring):
                x = blocks.run(functools.partial(encode_through, ends, lengths), x)
                embeddings = encode_leave(ends, lengths, x)
            else:
                embeddings = encode(dataclasses.replace(ends, blocks=blocks), lengths, x)
            yield Text(np.array(embeddings)[0], truncated)

    def encode_images(self, tower: CLIPVision, images: Sequence[np.ndarray]) -> np.ndarray:
        assert self.image is not None
        pixels = [preprocess(image, self.image_processor, size=self.image.image) for image in images]
        return np.array(encode_image(tower, whole(np.stack(pixels))))

    def encode_frames(
        self, encoder: VAE, images: Sequence[np.ndarray], frames: int, on_frames: Callable[[int], None]
    ) -> Given:
        time_factor, cache, latents, done = self.vae.time_factor, None, [], 0
        count = frames if self.by_channels else 1
        for chunk in chunks(images, count, time_factor):
            encoded, cache = encode_chunk(encoder.encoder, whole(chunk), cache)
            latents.append(np.array(encoded))
            on_frames(done := done + chunk.shape[1])
        known = np.concatenate(latents, 1)
        if not self.by_channels:
            return Given(None, known)
        ones = mask(frames, len(images) > 1, time_factor)[None, :, None, None]
        ones = np.broadcast_to(ones, (*known.shape[:4], time_factor))
        return Given(np.concatenate([ones, known], -1), None)

    def denoise(
        self,
        transformer: DiT,
        table: SolverTable,
        steps: range,
        state: SolverState | np.ndarray,
        inputs: Inputs,
        guidance_scale: float | None,
        on_step: Callable[[int], None],
    ) -> SolverState:
        table, given = whole(table), whole(inputs.given or NOTHING)
        ring = transformer.blocks if isinstance(transformer.blocks, Ring) else None
        ends = dataclasses.replace(transformer, blocks=None)
        context = prepare(ends, whole(inputs.text), None if inputs.states is None else whole(inputs.states))
        scale = None if guidance_scale is None else whole(np.float32(guidance_scale))
        # Placed like a step's result: otherwise the first step would compile a program of its own.
        now = start(table, whole(state)) if isinstance(state, np.ndarray) else resume(whole(state))
        for i in steps:
            index = whole(np.int32(i))
            if ring:
                tokens = enter(ends, table, index, now, given, scale)
                tokens = ring.run(lambda layer, tokens: through(ends, layer, tokens, context), tokens)
                now = leave(ends, table, index, now, tokens, scale)
            else:
                now = denoise_step(transformer, table, index, now, context, given, scale)
            now.sample.block_until_ready()
            on_step(i + 1)
        return now

    def finish(self, state: SolverState, inputs: Inputs) -> np.ndarray:
        return (inputs.given or NOTHING).first(np.array(state.sample))

    def decode(self, decoder: VAE, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        cache = None
        for i in range(latents.shape[1]):
            frames, cache = decode_chunk(decoder.decoder, whole(latents[:, i : i + 1]), cache, dtype)
            yield np.asarray(frames)


def check_parts(model: WanModel) -> None:
    """Raises UserError unless the parts fit together; those of a published transformer are known to the number."""
    dit, files, published = model.dit, model.files, PUBLISHED.get(model.dit)
    transformer = files["transformer"]
    if dit.text_dim != model.text.dim:
        raise UserError(
            f"{transformer}: the transformer has text_dim {dit.text_dim} where {files['text_encoder']} has "
            f"{model.text.dim}; {TOGETHER}"
        )
    latents = model.vae.latent_channels
    if dit.out_channels != latents:
        other = "2.2" if model.vae.residual else "2.1"
        raise UserError(
            f"{files['vae']}: the autoencoder of Wan {other}, latent_channels {latents}; the transformer {transformer} "
            f"has out_channels {dit.out_channels}; {TOGETHER}"
        )
    beside = model.vae.time_factor + latents  # a mask for each frame of a latent frame, and the latents
    if dit.in_channels not in (latents, latents + beside):
        raise UserError(
            f"{transformer}: in_channels {dit.in_channels}; Wan text to video takes {latents}, image to video "
            f"{latents + beside}"
        )
    if dit.image_dim is not None and model.image is None:
        raise UserError(
            f"{transformer}: attends to the states of an image encoder, and there is none; give the folder of the "
            "whole model, or --image-encoder"
        )
    if model.image and model.image.dim != dit.image_dim:
        raise UserError(
            f"{transformer}: the transformer has image_dim {dit.image_dim} where {files['image_encoder']} has "
            f"{model.image.dim}; {TOGETHER}"
        )
    if model.image and dit.image_positions not in (None, 2 * model.image.tokens):
        raise UserError(
            f"{transformer}: positions for {dit.image_positions} image tokens, where {files['image_encoder']} gives "
            f"{model.image.tokens} for each of two images; {TOGETHER}"
        )
    if model.experts == 2 and (difference := differences(model.parts["transformer_2"].config, dit)):
        raise UserError(f"{files['transformer_2']}: not the second expert of {transformer}: {difference}")
    folder = Path(transformer).parent.name
    if model.experts == 1 and (model.boundary_ratio is not None or folder in WAN.folders.values()):
        why = folder if model.boundary_ratio is None else f"boundary_ratio {model.boundary_ratio}"
        raise UserError(
            f"{transformer}: one of two experts ({why}), and there is no other; give the folder of the whole model, or "
            "--transformer-2"
        )
    if published:
        mean, std = model.vae.latents_mean, model.vae.latents_std  # a fine-tuned autoencoder may have its own
        for part, config in {
            "vae": dataclasses.replace(published, latents_mean=mean, latents_std=std),
            "text_encoder": UMT5_XXL,
            "image_encoder": CLIP_VIT_H,
        }.items():
            if part in model.parts and (difference := differences(model.parts[part].config, config)):
                raise UserError(f"{files[part]}: not the {WAN.kinds[part].title} of Wan: {difference}")


TOGETHER = "take all components from one model"
