"""Tiny Wan models, made of numpy alone: their weights, and whole folders in diffusers' layout and the official one.

Nothing is stored and nothing is downloaded. A weight follows from its checkpoint name, its shape and a seed, so the
same model exists in PyTorch (tests/parity/reference.py), in vidax (`parameters`) and on disk (`write_folder`,
`write_official_folder`), and a golden file needs to hold outputs only.

`weights` draws n from a standard normal and makes of it:
    biases                      0.2 n
    norm scales                 1 + 0.2 n
    everything else             n / sqrt(fan in), times the factor that `GAINS` gives its name
No value is a zero or a one that a mistake could leave out unnoticed.
"""

import dataclasses
import functools
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pth_files import Ordered, write_pth
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from vidax.models.towers import t5_files
from vidax.models.towers.clip_vision import CLIPVision
from vidax.models.towers.t5 import T5Encoder
from vidax.models.wan import config, mapping
from vidax.models.wan.dit import DiT
from vidax.models.wan.vae import VAE
from vidax.weights import Checkpoint, Tensor, checkpoint_names, load
from vidax.weights.mapping import part_of

SEED = 0

# The tables of Wan 2.1 would do; random ones show that the file's own are read.
LATENTS_MEAN = [round(float(x), 4) for x in np.random.RandomState(1).uniform(-1, 1, 16)]
LATENTS_STD = [round(float(x), 4) for x in np.random.RandomState(2).uniform(1, 3, 16)]

TRANSFORMER_CONFIG = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 64,
    "pos_embed_seq_len": None,
}

# Heads of 20 channels: no multiple of 6, so that frames get more of them than rows and columns.
UNEVEN_TRANSFORMER_CONFIG = {**TRANSFORMER_CONFIG, "num_attention_heads": 3, "attention_head_dim": 20, "num_layers": 3}

# Image to video: a mask of 4 and 16 latent channels beside the noisy ones; 2.1 attends to the image too.
I2V_CONFIG = {**TRANSFORMER_CONFIG, "in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 48}
FLF2V_CONFIG = {**I2V_CONFIG, "pos_embed_seq_len": 10}
I2V_22_CONFIG = {**TRANSFORMER_CONFIG, "in_channels": 36}
TI2V_CONFIG = {**TRANSFORMER_CONFIG, "in_channels": 48, "out_channels": 48}

VAE_CONFIG = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "latents_mean": LATENTS_MEAN,
    "latents_std": LATENTS_STD,
}

# Of Wan 2.2: a decoder of another width, and statistics for 48 channels.
VAE22_CONFIG = {
    **VAE_CONFIG,
    "decoder_base_dim": 12,
    "z_dim": 48,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "latents_mean": [round(float(x), 4) for x in np.random.RandomState(3).uniform(-1, 1, 48)],
    "latents_std": [round(float(x), 4) for x in np.random.RandomState(4).uniform(0.5, 1.5, 48)],
}

TEXT_ENCODER_CONFIG = {
    "architectures": ["UMT5EncoderModel"],
    "model_type": "umt5",
    "vocab_size": 256,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

IMAGE_ENCODER_CONFIG = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
# Heads that no mesh divides, and patches of another size.
UNEVEN_IMAGE_ENCODER_CONFIG = {
    **IMAGE_ENCODER_CONFIG,
    **{"hidden_size": 40, "num_hidden_layers": 5, "num_attention_heads": 5, "image_size": 48, "patch_size": 8},
}

PROCESSOR_CONFIG = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 28},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 28, "width": 28},
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "flow_shift": 3.0,
}
UNIPC3 = {**UNIPC, "solver_order": 3}
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}

PROMPT = "a red cat walks, on the beach"
NEGATIVE_PROMPT = "blurred"

GAINS = (
    (r"patch_embedding\.weight$", 0.1),  # small tokens: a layer norm's epsilon shows
    (r"relative_attention_bias", math.sqrt(TEXT_ENCODER_CONFIG["num_heads"])),  # fan in 1: each bucket counts
    (r"scale_shift_table$", 3.0),
    (r"decoder\.conv_out\.weight$", 0.3),  # few pixels beyond [-1, 1], where clipping would hide an error
    (r"decoder\.conv_out\.conv\.weight$", 0.1),
)


def weight(name: str, shape: Sequence[int], seed: int = SEED) -> np.ndarray:
    """The value of one parameter, float32. `RandomState` because numpy promises to keep its stream."""
    n = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32).standard_normal(tuple(shape))
    if name.endswith(".bias"):
        n *= 0.2
    elif re.search(r"norm[^.]*\.(weight|gamma)$", name):
        n = 1 + 0.2 * n
    else:
        n *= math.prod(gain for pattern, gain in GAINS if re.search(pattern, name)) / math.sqrt(math.prod(shape[1:]))
    return n.astype(np.float32)


def weights(shapes: Mapping[str, Sequence[int]], seed: int = SEED) -> dict[str, np.ndarray]:
    return {name: weight(name, shape, seed) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Part:
    """One network: its vidax description, the mapping of its checkpoint, and where diffusers puts it."""

    spec: Any
    mapping: mapping.Mapping
    file: str

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        leaves = checkpoint_names(self.spec, self.mapping)
        named = [(part_of(name), leaf.spec.stored_shape) for leaf in leaves for name in leaf.names]
        return {name: (parts * shape[0], *shape[1:]) if shape else shape for (name, _, parts), shape in named}


def transformer(config_file: Mapping[str, Any] = TRANSFORMER_CONFIG, dtype=np.float32) -> Part:
    spec = DiT.spec(config.dit_config(config_file, "tiny"), dtype)
    return Part(spec, mapping.DIT_DIFFUSERS, "transformer/diffusion_pytorch_model.safetensors")


def vae(config_file: Mapping[str, Any] = VAE_CONFIG) -> Part:
    c = config.vae_config(config_file, "tiny")
    names = mapping.VAE22_DIFFUSERS if c.residual else mapping.VAE_DIFFUSERS
    return Part(VAE.spec(c), names, "vae/diffusion_pytorch_model.safetensors")


def text_encoder(config_file: Mapping[str, Any] = TEXT_ENCODER_CONFIG, dtype=np.float32) -> Part:
    spec = T5Encoder.spec(config.t5_config(config_file, "tiny"), dtype)
    return Part(spec, t5_files.TRANSFORMERS, "text_encoder/model.safetensors")


def image_encoder(config_file: Mapping[str, Any] = IMAGE_ENCODER_CONFIG, dtype=np.float32) -> Part:
    c = config.clip_config(config_file, "tiny")
    return Part(CLIPVision.spec(c, dtype), mapping.clip_diffusers(c, prefix=""), "image_encoder/model.safetensors")


def stored_image_encoder(config_file: Mapping[str, Any]) -> Part:
    """All layers that a checkpoint has. The last is not run, and so no part of `image_encoder`."""
    return image_encoder({**config_file, "num_hidden_layers": config_file["num_hidden_layers"] + 1})


def parameters(part: Part, seed: int = SEED, shapes: Mapping[str, Sequence[int]] | None = None) -> Any:
    """The part's module with its arrays, by way of `vidax.weights.load`: names, shapes and layouts are checked.

    shapes: what the checkpoint holds, if not what the part expects.
    """
    file = Path("tiny")
    arrays = weights(part.shapes if shapes is None else shapes, seed)
    tensors = {name: Tensor(file, array.dtype, array.shape, array.tobytes(), 0) for name, array in arrays.items()}
    return load(part.spec, Checkpoint(file, tensors, {}), part.mapping)


@functools.cache
def tokenizer() -> Tokenizer:
    """Like UMT5's: a Unigram model over words marked with their leading space, `</s>` at the end."""
    words = ["a", "red", "cat", "walks", "on", "the", "beach", "blurred"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    space = "\u2581"
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), (space, -2.0)]
    vocabulary += [(space + word, -3.0 - 0.01 * i) for i, word in enumerate(words)]
    vocabulary += [(letter, -8.0) for letter in letters]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement=space, prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return backend


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": 512,
    "padding_side": "right",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """What a pipeline's folder holds. SECOND is the seed of the second expert's weights."""

    pipeline: str = "WanPipeline"
    scheduler: Mapping[str, Any] = dataclasses.field(default_factory=lambda: UNIPC)
    transformer: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TRANSFORMER_CONFIG)
    experts: int = 1
    vae: Mapping[str, Any] = dataclasses.field(default_factory=lambda: VAE_CONFIG)
    text_encoder: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TEXT_ENCODER_CONFIG)
    image_encoder: Mapping[str, Any] | None = None
    boundary_ratio: float | None = None
    expand_timesteps: bool = False

    @property
    def official_type(self) -> str:
        """`model_type` of the official config.json."""
        if self.expand_timesteps:
            return "ti2v"
        if self.transformer["in_channels"] == self.transformer["out_channels"]:
            return "t2v"
        return "flf2v" if self.transformer["pos_embed_seq_len"] else "i2v"

    @property
    def index(self) -> dict[str, Any]:
        absent = [None, None]
        return {
            "_class_name": self.pipeline,
            "_diffusers_version": "0.42.1",
            "boundary_ratio": self.boundary_ratio,
            "expand_timesteps": self.expand_timesteps,
            "image_encoder": ["transformers", "CLIPVisionModel"] if self.image_encoder else absent,
            "image_processor": ["transformers", "CLIPImageProcessorPil"] if self.image_encoder else absent,
            "scheduler": ["diffusers", self.scheduler["_class_name"]],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "transformer_2": ["diffusers", "WanTransformer3DModel"] if self.experts == 2 else absent,
            "vae": ["diffusers", "AutoencoderKLWan"],
        }

    @property
    def files(self) -> dict[str, Mapping[str, Any]]:
        """The configs, by their places."""
        found = {
            "model_index.json": self.index,
            "scheduler/scheduler_config.json": self.scheduler,
            "transformer/config.json": self.transformer,
            "vae/config.json": self.vae,
            "text_encoder/config.json": self.text_encoder,
        }
        if self.experts == 2:
            found["transformer_2/config.json"] = self.transformer
        if self.image_encoder:
            found["image_encoder/config.json"] = self.image_encoder
            found["image_processor/preprocessor_config.json"] = PROCESSOR_CONFIG
        return found

    def parts(self, seed: int) -> list[tuple[Part, int]]:
        """The networks, each with the seed of its weights."""
        first, coder, text = transformer(self.transformer), vae(self.vae), text_encoder(self.text_encoder)
        found = [(first, seed), (coder, seed), (text, seed)]
        if self.experts == 2:
            second = first.file.replace("transformer", "transformer_2")
            found.append((dataclasses.replace(first, file=second), SECOND))
        if self.image_encoder:
            found.append((stored_image_encoder(self.image_encoder), seed))
        return found


SECOND = 1
I2V_21 = Folder(pipeline="WanImageToVideoPipeline", transformer=I2V_CONFIG, image_encoder=IMAGE_ENCODER_CONFIG)
FOLDERS = {
    "i2v 2.1": I2V_21,
    "flf2v": dataclasses.replace(I2V_21, transformer=FLF2V_CONFIG),
    "t2v 2.2": Folder(experts=2, boundary_ratio=0.875),
    "i2v 2.2": Folder(pipeline="WanImageToVideoPipeline", transformer=I2V_22_CONFIG, experts=2, boundary_ratio=0.9),
    "5b": Folder(transformer=TI2V_CONFIG, vae=VAE22_CONFIG, expand_timesteps=True),
}


def write_folder(path: str | Path, folder: Any = None, *, seed: int = SEED, **changes: Any) -> Path:
    """Write a model as `save_pretrained` of its pipeline would (3 MB, 0.1 s); returns the path.

    folder: a `Folder` of this family or another. changes: fields of it.
    """
    path, folder = Path(path), dataclasses.replace(folder or Folder(), **changes)
    for name, content in (folder.files | {"tokenizer/tokenizer_config.json": TOKENIZER_CONFIG}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content, indent=2))
    tokenizer().save(str(path / "tokenizer" / "tokenizer.json"))
    for part, own in folder.parts(seed):
        save_file(weights(part.shapes, own), path / part.file, metadata={"format": "pt"})
    return path


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with a little noise, uint8 [height width 3]."""
    random = np.random.RandomState(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = np.stack([np.sin(6 * (a * x + b * y) + c) for a, b, c in random.uniform(-1, 1, (3, 3))], -1)
    return np.clip(127.5 + 100 * waves + 10 * random.standard_normal(waves.shape), 0, 255).astype(np.uint8)


def short_run(folder: Folder) -> dict[str, Any]:
    """Fields of a request: from as many images as the model takes, and of two experts each has a step."""
    count = {"t2v": 0, "flf2v": 2}.get(folder.official_type, folder.experts)
    pictures = {name: picture(64, 32, seed) for seed, name in enumerate(("image", "last_image")[:count])}
    boundary = {"boundary_ratio": 0.9} if folder.experts == 2 else {}
    return {"prompt": PROMPT, "size": (64, 32), "frames": 5, "steps": 2, "flow_shift": 5.0, **boundary, **pictures}


OFFICIAL_CONFIG = {
    "_class_name": "WanModel",
    "_diffusers_version": "0.30.0",
    "dim": 48,
    "eps": 1e-6,
    "ffn_dim": 64,
    "freq_dim": 32,
    "in_dim": 16,
    "model_type": "t2v",
    "num_heads": 2,
    "num_layers": 2,
    "out_dim": 16,
    "text_len": 512,
}
# The official autoencoder has no config file: its latent statistics stand in the code.
OFFICIAL_VAE_CONFIG = {key: value for key, value in VAE_CONFIG.items() if not key.startswith("latents_")}
OFFICIAL_FILES = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "Wan2.1_VAE.pth",
    "text_encoder": "models_t5_umt5-xxl-enc-bf16.pth",
}
EXPERT_FILES = {
    "transformer": "high_noise_model/diffusion_pytorch_model.safetensors",
    "transformer_2": "low_noise_model/diffusion_pytorch_model.safetensors",
}


def publishable(folder: Folder) -> Folder:
    """The same in all that the official layout cannot say: no statistics of latents, 16 heads of the image encoder."""
    vae = {key: value for key, value in folder.vae.items() if not key.startswith("latents_")}
    tower = folder.image_encoder and {**folder.image_encoder, "num_attention_heads": 16}
    return dataclasses.replace(folder, vae=vae, image_encoder=tower)


def official_files(folder: Folder) -> dict[str, str]:
    """The files of `write_official_folder`, by component."""
    return {
        **OFFICIAL_FILES,
        **(EXPERT_FILES if folder.experts == 2 else {}),
        **({"vae": "Wan2.2_VAE.pth"} if folder.vae.get("is_residual") else {}),
        **(
            {"image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"} if folder.image_encoder else {}
        ),
    }


def renamed(part: Part, names: mapping.Mapping, seed: int = SEED) -> dict[str, np.ndarray]:
    """A part's weights under their names in another layout. In either a tensor may be several of our parameters."""
    values, found = weights(part.shapes, seed), dict[str, dict[int, np.ndarray]]()
    leaves = (checkpoint_names(part.spec, layout) for layout in (part.mapping, names))
    for ours, theirs in zip(*leaves, strict=True):
        for name, other in zip(ours.names, theirs.names, strict=True):
            (source, index, parts), (whole, place, _) = part_of(name), part_of(other)
            value = np.split(values[source], parts)[index] if parts > 1 else values[source]
            found.setdefault(whole, {})[place] = value.reshape(theirs.spec.stored_shape)
    return {
        whole: np.concatenate([pieces[place] for place in sorted(pieces)]) if len(pieces) > 1 else pieces[0]
        for whole, pieces in found.items()
    }


def official_image_encoder(config_file: Mapping[str, Any], seed: int = SEED) -> dict[str, np.ndarray]:
    """With what nothing reads: the rest of CLIP."""
    part = stored_image_encoder(config_file)
    rest = {"log_scale": np.array(1, np.float32), "textual.norm.weight": np.ones(3, np.float32)}
    return renamed(part, mapping.clip_official(part.spec.config), seed) | rest


def official_weights(folder: Folder | None = None, seed: int = SEED) -> dict[str, dict[str, np.ndarray]]:
    """The weights of `write_folder` under their official names, by component."""
    folder = publishable(folder or Folder())
    dit, autoencoder = transformer(folder.transformer), vae(folder.vae)
    vae_names = mapping.vae_official(config.vae_config(folder.vae, "tiny"))
    return {
        "transformer": renamed(dit, mapping.DIT_OFFICIAL, seed),
        **({"transformer_2": renamed(dit, mapping.DIT_OFFICIAL, SECOND)} if folder.experts == 2 else {}),
        "vae": renamed(autoencoder, vae_names, seed),
        "text_encoder": renamed(text_encoder(folder.text_encoder), mapping.UMT5_OFFICIAL, seed),
        **({"image_encoder": official_image_encoder(folder.image_encoder, seed)} if folder.image_encoder else {}),
    }


def write_official_folder(path: str | Path, folder: Folder | None = None, *, seed: int = SEED) -> Path:
    """Write the model as Wan-AI publishes it; returns the path. It is that of `write_folder` with a `publishable`."""
    path, folder = Path(path), folder or Folder()
    tokens = path / "google" / "umt5-xxl"
    tokens.mkdir(parents=True)
    weights, sizes = official_weights(folder, seed), folder.transformer
    config = {"model_type": folder.official_type, "in_dim": sizes["in_channels"], "out_dim": sizes["out_channels"]}
    for component, name in official_files(folder).items():
        file = path / name
        if file.suffix == ".pth":
            write_pth(file, Ordered(weights[component]))
            continue
        file.parent.mkdir(exist_ok=True)
        save_file(weights[component], file)
        (file.parent / "config.json").write_text(json.dumps(OFFICIAL_CONFIG | config, indent=2))
    (tokens / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    tokenizer().save(str(tokens / "tokenizer.json"))
    return path


def command(
    folder: str | Path,
    output: str | Path,
    *,
    size: tuple[int, int],
    frames: int = 9,
    steps: int = 3,
    guidance_scale: float = 5,
    seed: int = 7,
    dtype: str = "float32",
    more: Sequence[str] = (),
) -> list[str]:
    """The arguments of `vidax generate` for one run of the tiny model; size is (width, height)."""
    return [
        "generate",
        PROMPT,
        *("--model", str(folder)),
        *("--output", str(output)),
        *("--negative-prompt", NEGATIVE_PROMPT),
        *("--size", f"{size[0]}x{size[1]}"),
        *("--frames", str(frames)),
        *("--steps", str(steps)),
        *("--guidance-scale", str(guidance_scale)),
        *("--seed", str(seed)),
        *("--dtype", dtype),
        "--overwrite",
        "--quiet",
        *more,
    ]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Inputs: standard normal, float32."""
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def relative_error(ours: Any, reference: Any) -> float:
    """The largest difference, relative to the largest reference value. Shapes must agree."""
    ours, reference = np.asarray(ours), np.asarray(reference)
    assert ours.shape == reference.shape, f"{ours.shape} is not {reference.shape}"
    assert np.isfinite(reference).all()
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def pixel_error(path: str | Path, reference: np.ndarray) -> float:
    """The largest difference of a pixel between a .npy file that `vidax generate` wrote and the reference's frames."""
    ours = np.load(path)
    assert ours.shape == reference.shape, f"{ours.shape} is not {reference.shape}"
    return float(np.abs(ours - reference).max())


def block(stacked: Any, layer: int) -> Any:
    """One layer of a stack of them."""
    return jax.tree.map(lambda leaf: leaf[layer], stacked)
