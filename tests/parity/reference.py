"""The tiny models in PyTorch: the classes of diffusers and transformers with the weights of tests/tiny.py."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import tiny
import tiny_cogvideox
import torch
import transformers

torch.set_num_threads(1)  # the models are so small that threads would only wait for one another


def fill(model: torch.nn.Module, seed: int = tiny.SEED) -> torch.nn.Module:
    """Give every parameter its value by name, and the one buffer that a file holds, learned positions of CogVideoX."""
    stored, buffers = model.state_dict(), dict(model.named_buffers())
    held = [(name, stored[name]) for name in stored if name in buffers]
    assert {name for name, _ in held} <= {"patch_embed.pos_embedding"}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *held):
            tensor.copy_(torch.from_numpy(tiny.weight(name, tuple(tensor.shape), seed)))
    return model.eval().requires_grad_(False)


def transformer(config=tiny.TRANSFORMER_CONFIG) -> diffusers.WanTransformer3DModel:
    return fill(diffusers.WanTransformer3DModel.from_config(dict(config)))


def vae(config=tiny.VAE_CONFIG) -> diffusers.AutoencoderKLWan:
    return fill(diffusers.AutoencoderKLWan.from_config(dict(config)))


def text_encoder(config=tiny.TEXT_ENCODER_CONFIG) -> transformers.UMT5EncoderModel:
    return fill(transformers.UMT5EncoderModel(transformers.UMT5Config(**config)))


def image_encoder(config=tiny.IMAGE_ENCODER_CONFIG) -> transformers.CLIPVisionModel:
    return fill(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**config)))


def scheduler(config=tiny.UNIPC):
    return getattr(diffusers, config["_class_name"]).from_config(dict(config))


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    names = {key: value for key, value in tiny.TOKENIZER_CONFIG.items() if key != "tokenizer_class"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(), **names)


def pipeline(scheduler_config=tiny.UNIPC, folder: tiny.Folder | None = None) -> diffusers.DiffusionPipeline:
    """The pipeline that `tiny.write_folder` writes, made of its classes."""
    folder = dataclasses.replace(folder or tiny.Folder(), scheduler=scheduler_config)
    parts = {}
    if folder.image_encoder:
        parts["image_encoder"] = image_encoder(folder.image_encoder)
        processor = {key: value for key, value in tiny.PROCESSOR_CONFIG.items() if key != "image_processor_type"}
        parts["image_processor"] = transformers.CLIPImageProcessorPil(**processor)
    if folder.experts == 2:
        second = diffusers.WanTransformer3DModel.from_config(dict(folder.transformer))
        parts["transformer_2"] = fill(second, tiny.SECOND)
    pipe = getattr(diffusers, folder.pipeline)(
        tokenizer=tokenizer(),
        text_encoder=text_encoder(folder.text_encoder),
        vae=vae(folder.vae),
        transformer=transformer(folder.transformer),
        scheduler=scheduler(folder.scheduler),
        boundary_ratio=folder.boundary_ratio,
        expand_timesteps=folder.expand_timesteps,
        **parts,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cogvideox_pipeline(folder: tiny_cogvideox.Folder) -> diffusers.DiffusionPipeline:
    """The pipeline that `tiny.write_folder` writes, made of its classes."""
    pipe = getattr(diffusers, folder.pipeline)(
        tokenizer=tokenizer(),
        text_encoder=fill(transformers.T5EncoderModel(transformers.T5Config(**folder.text_encoder))),
        vae=fill(diffusers.AutoencoderKLCogVideoX.from_config(dict(folder.vae))),
        transformer=fill(diffusers.CogVideoXTransformer3DModel.from_config(dict(folder.transformer))),
        scheduler=scheduler(folder.scheduler),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def saver(
    tmp_path_factory, make: Callable[[str], diffusers.DiffusionPipeline]
) -> Callable[[str], tuple[Path, diffusers.DiffusionPipeline]]:
    """The folder of a named pipeline, saved once, and the pipeline."""

    @functools.cache
    def save(name: str) -> tuple[Path, diffusers.DiffusionPipeline]:
        path, pipe = tmp_path_factory.mktemp("pipeline"), make(name)
        pipe.save_pretrained(path)
        return path, pipe

    return save


def generate(
    pipe: diffusers.DiffusionPipeline,
    *,
    size: tuple[int, int],
    frames: int = 9,
    steps: int = 3,
    guidance_scale: float = 5,
    seed: int = 7,
    **more,
) -> np.ndarray:
    """Frames [F H W 3] in [0, 1] of the run that `tiny.command` asks vidax for; size is (width, height)."""
    width, height = size
    return pipe(
        prompt=tiny.PROMPT,
        negative_prompt=tiny.NEGATIVE_PROMPT,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=float(guidance_scale),
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="np",
        **more,
    ).frames[0]


def channels_last(tensor: torch.Tensor) -> np.ndarray:
    """[B C F H W] to our [B F H W C]."""
    return tensor.detach().permute(0, 2, 3, 4, 1).numpy()


def channels_first(array: np.ndarray) -> torch.Tensor:
    """Our [B F H W C] to [B C F H W]."""
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 4, 1, 2, 3)))


def encode_text(model: transformers.UMT5EncoderModel, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Embeddings [B S D], zero past each length, as WanPipeline makes them."""
    mask = torch.from_numpy((np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64))
    return (model(torch.from_numpy(ids).long(), mask).last_hidden_state * mask[..., None]).detach().numpy()


def encode_picture(model: transformers.CLIPVisionModel, pixels: np.ndarray, states: int = -2) -> np.ndarray:
    """Hidden states [B S D] of pixels [B H W 3], as WanImageToVideoPipeline.encode_image takes them."""
    pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return model(torch.from_numpy(pixels), output_hidden_states=True).hidden_states[states].detach().numpy()


def predict(model, latents: np.ndarray, timesteps: np.ndarray, text: np.ndarray, image=None) -> np.ndarray:
    """The transformer's output [B F H W C]. timesteps: [B], or [B L] for each token; image: [B I image_dim]."""
    image = None if image is None else torch.from_numpy(image)
    times, texts = torch.from_numpy(timesteps), torch.from_numpy(text)
    return channels_last(model(channels_first(latents), times, texts, image, return_dict=False)[0])


def normalisation(model: diffusers.AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / std) [1 C 1 1 1], as WanPipeline computes them."""
    mean = torch.tensor(model.config.latents_mean).view(1, -1, 1, 1, 1)
    return mean, 1.0 / torch.tensor(model.config.latents_std).view(1, -1, 1, 1, 1)


def decode(model: diffusers.AutoencoderKLWan, latents: np.ndarray) -> np.ndarray:
    """Frames of normalised latents, by the lines of WanPipeline.__call__."""
    mean, inverse_std = normalisation(model)
    return channels_last(model.decode(channels_first(latents) / inverse_std + mean, return_dict=False)[0])


def encode(model: diffusers.AutoencoderKLWan, frames: np.ndarray) -> np.ndarray:
    """Normalised latent means, by the lines of WanVideoToVideoPipeline.prepare_latents."""
    mean, inverse_std = normalisation(model)
    return channels_last((model.encode(channels_first(frames)).latent_dist.mode() - mean) * inverse_std)
