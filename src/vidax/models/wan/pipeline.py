"""A Wan model on disk, and its three phases: encode text, denoise, decode.

Nothing here holds weights: the engine loads a part, hands it to the phase and takes its memory back.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vidax.errors import UserError
from vidax.models.interface import Part, Sources, Text
from vidax.models.towers.t5 import T5Encoder
from vidax.models.towers.tokenizer import NAMES, Tokenizer, nearest_tokenizer
from vidax.models.wan import mapping
from vidax.models.wan.architecture import WanArchitecture
from vidax.models.wan.config import PUBLISHED, TEXT_TOKENS, UMT5_XXL, WAN21_VAE
from vidax.models.wan.dit import DiT
from vidax.models.wan.layouts import WAN21
from vidax.models.wan.programs import (
    decode_chunk,
    denoise_step,
    encode,
    encode_leave,
    encode_through,
    enter,
    leave,
    prepare,
    start,
    through,
)
from vidax.models.wan.vae import VAE
from vidax.parallel.rules import whole
from vidax.sampling.solvers import SolverTable
from vidax.weights import Component
from vidax.weights.layouts import differences, open_component
from vidax.weights.residency import Ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanModel(WanArchitecture):
    """Wan text-to-video on disk, in any layout; see `vidax.models.interface.Model` for its methods."""

    parts: dict[str, Component]
    tokenizer: Path

    @staticmethod
    def open(sources: Sources) -> "WanModel":
        """Raises UserError where a part is not that of a Wan 2.1 text-to-video model, or they do not fit together."""
        for option in ("boundary_ratio", "expand_timesteps"):
            if value := sources.options.get(option):
                file = f"{sources.folder}/model_index.json"
                raise UserError(f"{file}: {option} is {value!r}, as in Wan 2.2; Wan 2.1 text to video is supported")
        parts = {name: open_component(WAN21, name, sources.parts[name]) for name in WAN21.kinds}
        encoder = parts["text_encoder"].path
        if (tokenizer := sources.parts.get("tokenizer") or nearest_tokenizer(encoder)) is None:
            raise UserError(
                f"{encoder.parent}: holds no {' or '.join(NAMES)} for the text encoder, nor does a folder tokenizer/ "
                "or google/umt5-xxl/ near it; give one with --tokenizer"
            )
        model = WanModel(
            parts=parts,
            tokenizer=tokenizer,
            scheduler=sources.scheduler,
            dit=parts["transformer"].config,
            vae=parts["vae"].config,
            text=parts["text_encoder"].config,
        )
        check_parts(model)
        return model

    @property
    def pipeline(self) -> str:
        return "WanPipeline"

    @property
    def files(self) -> dict[str, str]:
        return {name: str(part.path) for name, part in self.parts.items()} | {"tokenizer": str(self.tokenizer)}

    def components(self, dtype) -> dict[str, tuple[Part, Any, str]]:
        specs = self.specs(dtype) | {"vae": VAE.spec(self.vae)}
        return {
            name: (Part(specs[name], part.checkpoint(), part.names), part.config, part.layout)
            for name, part in self.parts.items()
        }

    def converted(self, part: str) -> bool:
        return self.parts[part].names.held

    def text_encoder(self, dtype) -> Part:
        part = self.parts["text_encoder"]
        return Part(self.specs(dtype)["text_encoder"], part.checkpoint(), part.names)

    def transformer(self, dtype) -> Part:
        part = self.parts["transformer"]
        return Part(self.specs(dtype)["transformer"], part.checkpoint(), part.names)

    def decoder(self) -> Part:
        """The autoencoder without its encoder, always float32."""
        part = self.parts["vae"]
        half = dataclasses.replace(part.names, skips=mapping.VAE_ENCODER[part.layout])
        return Part(self.specs(None)["decoder"], part.checkpoint(), half)

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

    def denoise(
        self,
        transformer: DiT,
        table: SolverTable,
        noise: np.ndarray,
        text: np.ndarray,
        guidance_scale: float | None,
        on_step: Callable[[int], None],
    ) -> jax.Array:
        table = whole(table)
        ring = transformer.blocks if isinstance(transformer.blocks, Ring) else None
        ends = dataclasses.replace(transformer, blocks=None)
        context = prepare(ends, whole(text))
        scale = None if guidance_scale is None else whole(np.float32(guidance_scale))
        # Placed like a step's result: otherwise the first step would compile a program of its own.
        state = start(table, whole(noise))
        for i in range(table.steps):
            index = whole(np.int32(i))
            if ring:
                tokens = enter(ends, table, index, state, scale)
                tokens = ring.run(lambda layer, tokens: through(ends, layer, tokens, context), tokens)
                state = leave(ends, table, index, state, tokens, scale)
            else:
                state = denoise_step(transformer, table, index, state, context, scale)
            state.sample.block_until_ready()
            on_step(i + 1)
        return state.sample

    def decode(self, decoder: VAE, latents: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
        cache = None
        for i in range(latents.shape[1]):
            frames, cache = decode_chunk(decoder.decoder, whole(latents[:, i : i + 1]), cache, dtype)
            yield np.asarray(frames)


def check_parts(model: WanModel) -> None:
    """Raises UserError unless the parts fit together; those of a published transformer are known to the number."""
    files = model.files
    for name, found, other, wanted in (
        ("text_dim", model.dit.text_dim, "text_encoder", model.text.dim),
        ("in_channels", model.dit.in_channels, "vae", model.vae.latent_channels),
        ("out_channels", model.dit.out_channels, "vae", model.vae.latent_channels),
    ):
        if found != wanted:
            raise UserError(
                f"{files['transformer']}: the transformer has {name} {found} where {files[other]} has {wanted}; "
                "take all components from one model"
            )
    if model.dit in PUBLISHED:
        mean, std = model.vae.latents_mean, model.vae.latents_std  # a fine-tuned autoencoder may have its own
        published = {
            "vae": dataclasses.replace(WAN21_VAE, latents_mean=mean, latents_std=std),
            "text_encoder": UMT5_XXL,
        }
        for part, config in published.items():
            if difference := differences(model.parts[part].config, config):
                raise UserError(f"{files[part]}: not the {WAN21.kinds[part].title} of Wan 2.1: {difference}")
