"""A Wan model on disk: its parts, what it is given of images, and whether the parts fit together."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vidax.errors import UserError
from vidax.models.condition import Given
from vidax.models.interface import Sources, Video
from vidax.models.model import TOGETHER, Model, check_published, check_text, tokenizer_of
from vidax.models.wan.architecture import WanArchitecture
from vidax.models.wan.condition import chunks, mask
from vidax.models.wan.config import CLIP_VIT_H, PUBLISHED, UMT5_XXL
from vidax.models.wan.layouts import WAN
from vidax.sampling.noise import Stream
from vidax.weights.layouts import differences, open_component


@dataclasses.dataclass(frozen=True, kw_only=True)
class WanModel(WanArchitecture, Model):
    """A Wan model on disk, in any layout."""

    cleans_text: ClassVar = True
    masks_padding: ClassVar = True

    @staticmethod
    def open(sources: Sources) -> "WanModel":
        """Raises UserError where a part is not that of a Wan model, or they do not fit together."""
        parts = {name: open_component(WAN, name, sources.parts[name]) for name in WAN.kinds if name in sources.parts}
        vae = parts["vae"].config
        if parts["transformer"].config.image_dim is None:
            parts.pop("image_encoder", None)  # some folders have one that nothing reads
        model = WanModel(
            parts=parts,
            tokenizer=tokenizer_of(sources, parts["text_encoder"]),
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

    def video_chunks(self, images: Sequence[np.ndarray], frames: int) -> Iterator[np.ndarray]:
        return chunks(images, frames if self.by_channels else 1, self.vae.time_factor)

    def given(self, video: Video, encoded: Any, noise: Stream) -> Given:
        if not self.by_channels:
            return Given(None, encoded)
        time_factor = self.vae.time_factor
        ones = mask(video.frames, video.images > 1, time_factor)[None, :, None, None]
        ones = np.broadcast_to(ones, (*encoded.shape[:4], time_factor))
        return Given(np.concatenate([ones, encoded], -1), None)


def check_parts(model: WanModel) -> None:
    """Raises UserError unless the parts fit together; those of a published transformer are known to the number."""
    dit, files, published = model.dit, model.files, PUBLISHED.get(model.dit)
    transformer = files["transformer"]
    check_text(model)
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
        vae = dataclasses.replace(published, latents_mean=mean, latents_std=std)
        parts = {"vae": (model.vae, vae), "text_encoder": (model.text, UMT5_XXL)}
        check_published(model, WAN, {**parts, "image_encoder": (model.image, CLIP_VIT_H)})
