"""Train the demo model that ships in the package: a tiny Wan 2.1 for the drawn world of demo_data.py.

    python recipes/train_demo.py --work runs/demo    # 75 minutes at most on two cores; stopped, it goes on where it was

Four phases, each skipped when its file in the work folder is complete:
1. vae      autoencoder, on small crops first (most of what it must learn is local), then on whole clips
2. latents  a pool of clips through the encoder, once, and the statistics that make latents unit variance
3. dit      text encoder and DiT together: rectified flow with empty captions now and then, for guidance
4. export   src/vidax/assets/demo in diffusers' layout, with diffusers' names
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import demo_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from safetensors.numpy import save_file

from vidax import nn
from vidax.models.towers import t5_files
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan import config, dit, mapping, vae
from vidax.ops.attention import attention
from vidax.weights.mapping import Mapping, checkpoint_names

SEED = 0
ASSETS = Path(__file__).parents[1] / "src/vidax/assets"

# ---- what is trained. Stored: VAE 2.7 MB in float32, DiT 3.4 MB and text encoder 0.2 MB, mostly bfloat16.
Z = 16
VAE = vae.VAEConfig(base_dim=8, blocks=1, latent_channels=Z, latents_mean=(0.0,) * Z, latents_std=(1.0,) * Z)
DIT = config.DEMO
TEXT_LENGTH = 16  # real tokens of a training caption, at most; what pads them to 512 is put into one key, see below

# ---- how
VAE_STAGES = ((900, 8, (5, 32)), (300, 4, (9, 32)), (200, 2, (17, 64)))  # steps, clips, (frames, size) of the crop
VAE_RATE, LATENT_NOISE = 5e-3, 0.1
POOL = 3000  # clips
DIT_STEPS, DIT_BATCH, DIT_RATE, EMA = 3000, 32, 2e-3, 0.997
NO_CAPTION = 0.12  # share of samples trained on the empty prompt
FLOW_SHIFT = 1.0


# ---- training with checkpoints


def muon(spec: Any, rate: float, steps: int, weight_decay: float) -> optax.GradientTransformation:
    """Muon for matrices and convolutions (K. Jordan et al. 2024), Adam for the rest, warmed up and decayed."""

    def inputs_and_output(s: nn.Spec) -> optax.contrib.MuonDimensionNumbers | None:
        last = len(s.shape) - 1
        return s.transpose and optax.contrib.MuonDimensionNumbers(tuple(range(s.stacked, last)), last)

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 50, steps, rate / 50)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            weight_decay=weight_decay,
            consistent_rms=0.2,  # learning rates as for AdamW
            adam_b2=0.99,
            muon_weight_dimension_numbers=nn.map_specs(inputs_and_output, spec),
        ),
    )


class State(NamedTuple):
    """Everything that a resumed run needs."""

    params: Any
    average: Any  # moving average of the parameters
    optimizer: Any


def fit(
    file: Path,
    params: Any,
    loss: Callable,
    batch: Callable[[int], tuple],
    steps: int,
    optimizer: optax.GradientTransformation,
    decay: float,
    save_every: int = 200,
) -> Any:
    """Minimise `loss(params, key, *batch(i))`, a scalar and a dict to print; returns the averaged parameters."""

    @jax.jit
    def gradients(params, i: jax.Array, inputs: tuple):
        key = jax.random.fold_in(jax.random.key(SEED), i)
        return jax.grad(loss, has_aux=True)(params, key, *inputs)

    @functools.partial(jax.jit, donate_argnums=0)  # apart from the gradients, since it is slow to compile
    def update(state: State, grads: Any, i: jax.Array) -> State:
        changes, inner = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        rate = jnp.minimum(decay, (1 + i) / (10 + i))
        return State(params, jax.tree.map(lambda a, p: rate * a + (1 - rate) * p, state.average, params), inner)

    state = State(params, jax.tree.map(jnp.copy, params), optimizer.init(params))
    start, state = restore(file, state)
    began = time.time()
    for i in range(start, steps):
        grads, report = gradients(state.params, jnp.int32(i), batch(i))
        state = update(state, grads, jnp.int32(i))
        if (i + 1) % 50 == 0:
            values = "  ".join(f"{name} {float(value):.4f}" for name, value in report.items())
            print(
                f"{file.stem} {i + 1}/{steps}  {values}  {(time.time() - began) / (i + 1 - start):.3f} s/step",
                flush=True,
            )
        if (i + 1) % save_every == 0 or i + 1 == steps:
            save(file, i + 1, state)
    return state.average


def save(file: Path, step: int, tree: Any) -> None:
    """Write the leaves, whole or not at all."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        np.savez(out, np.int64(step), *map(np.asarray, jax.tree.leaves(tree)))
    os.replace(partial, file)


def restore(file: Path, tree: Any) -> tuple[int, Any]:
    """(steps done, tree): what `save` wrote, or (0, `tree`) where there is nothing yet."""
    if not file.exists():
        return 0, tree
    with np.load(file) as stored:
        step, *leaves = (stored[f"arr_{i}"] for i in range(len(stored.files)))
    return int(step), jax.tree.unflatten(jax.tree.structure(tree), leaves)


# ---- 1. autoencoder


def in_two_chunks(coder, x):
    """A whole clip through an encoder or decoder: the first frame alone, then the rest at once."""
    first, cache = coder(x[:, :1])
    rest, _ = coder(x[:, 1:], cache)
    return jnp.concatenate([first, rest], 1)


def to_unit(pixels):
    return pixels.astype(jnp.float32) / 127.5 - 1


def vae_loss(model: vae.VAE, key, pixels):
    """Absolute and squared error. Noise on latents of unit variance makes similar latents look alike."""
    x = to_unit(pixels)
    z = in_two_chunks(model.encoder, x)
    error = in_two_chunks(model.decoder, z + LATENT_NOISE * jax.random.normal(key, z.shape)) - x
    absolute, squared, variance = jnp.abs(error).mean(), (error**2).mean(), (z * z).mean((0, 1, 2, 3))
    loss = absolute + 4 * squared + 0.02 * ((variance - 1) ** 2).mean()
    return loss, {"absolute": absolute, "squared": squared, "variance": variance.mean()}


def vae_batch(i: int) -> tuple[np.ndarray]:
    """Crops near the shape, of the size of the stage that step i belongs to."""
    stage = np.searchsorted(np.cumsum([steps for steps, _, _ in VAE_STAGES]), i, side="right")
    _, clips, (frames, size) = VAE_STAGES[stage]
    rng = np.random.default_rng((SEED, 1, i))
    scenes = demo_data.sample_scenes(rng, clips)
    start = np.zeros((clips, 3))
    if size < demo_data.SIZE:
        start[:, 0] = rng.integers(0, demo_data.FRAMES - frames + 1, clips)
        middle = demo_data.position(scenes, start[:, :1] + frames / 2)[:, 0]
        start[:, 1:] = np.clip(np.round(middle - size / 2 + rng.uniform(-14, 14, (clips, 2))), 0, demo_data.SIZE - size)
    return (demo_data.draw(scenes, (frames, size), start),)


def train_vae(work: Path) -> vae.VAE:
    spec = vae.VAE.spec(VAE)
    params = nn.init(spec, jax.random.key(SEED))
    steps = sum(stage[0] for stage in VAE_STAGES)
    optimizer = muon(spec, VAE_RATE, steps, 1e-3)
    return fit(work / "vae.npz", params, vae_loss, vae_batch, steps, optimizer, decay=0.99)


# ---- 2. latents


def make_latents(work: Path, model: vae.VAE, scenes: demo_data.Scenes) -> np.ndarray:
    """The scenes' latents [n 5 8 8 Z] as the encoder gives them."""
    file = work / "latents.npz"
    done, latents = restore(file, np.zeros(0))
    if not done:
        encode = jax.jit(lambda encoder, pixels: in_two_chunks(encoder, to_unit(pixels)))
        parts = [slice(start, start + 20) for start in range(0, len(scenes), 20)]
        latents = np.concatenate([encode(model.encoder, demo_data.draw(scenes[part])) for part in parts])
        save(file, 1, latents)
    return latents


def normalized(model: vae.VAE, latents: np.ndarray) -> tuple[vae.VAE, np.ndarray]:
    """The autoencoder whose latents have mean 0 and variance 1 in each channel, and those latents."""
    mean, std = latents.mean((0, 1, 2, 3)), latents.std((0, 1, 2, 3))
    measured = dataclasses.replace(
        VAE, latents_mean=tuple(map(float, mean.round(5))), latents_std=tuple(map(float, std.round(5)))
    )
    model = vae.VAE(*(dataclasses.replace(half, config=measured) for half in (model.encoder, model.decoder)))
    return model, ((latents - mean) / std).astype(np.float32)


# ---- 3. text encoder and DiT


class Generator(NamedTuple):
    text: T5Encoder
    dit: dit.DiT


def text_config() -> T5Config:
    vocabulary = demo_data.build_tokenizer().get_vocab_size()
    return T5Config(vocabulary=vocabulary, dim=DIT.text_dim, head_size=16, heads=4, mlp_dim=128, layers=2)


def attention_over_padding(q, k, v, **options):
    """Attention in which the last of TEXT_LENGTH + 1 keys stands for all the padding up to 512 tokens.

    Wan reads text without a mask, so a model must be trained with the padding that it will meet. But padding tokens are
    all alike, and n equal keys weigh as much as one whose score is larger by log(n): the same at a third of the time.
    """
    if k.shape[1] == TEXT_LENGTH + 1:
        repeats = config.TEXT_TOKENS - TEXT_LENGTH
        options["bias"] = jnp.zeros((q.shape[2], 1, k.shape[1])).at[:, :, -1].set(math.log(repeats))
    return attention(q, k, v, **options)


def velocity(model: Generator, noisy, sigma, ids, lengths, given: int):
    text = jnp.pad(model.text(ids, lengths), ((0, 0), (0, 1), (0, 0)))
    return model.dit(noisy, 1000 * sigma, model.dit.prepare(text), given)


def flow_loss(model: Generator, key, latents, ids, lengths, given: int = 0):
    """Rectified flow: the network says noise - latents at (1 - sigma) latents + sigma noise. The first `given` latent
    frames have no noise, and what it says of them does not count.
    """
    key_noise, key_sigma = jax.random.split(key)
    noise = jax.random.normal(key_noise, latents.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(key_sigma, latents.shape[:1]) + 0.5)
    s = sigma[:, None, None, None, None]
    noisy = ((1 - s) * latents + s * noise).at[:, :given].set(latents[:, :given])
    error = (velocity(model, noisy, sigma, ids, lengths, given) - (noise - latents))[:, given:]
    return (loss := (error**2).mean()), {"loss": loss}


def tokens(tokenizer, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    ids = np.zeros((len(prompts), TEXT_LENGTH), np.int32)
    for row, e in zip(ids, encoded, strict=True):
        row[: len(e)] = e
    return ids, np.array([len(e) for e in encoded], np.int32)


def generator_spec() -> Generator:
    return Generator(T5Encoder.spec(text_config(), jnp.float32), dit.DiT.spec(DIT, jnp.float32))


def init_generator() -> Generator:
    text, model = nn.init(generator_spec(), jax.random.key(SEED))
    attn = text.blocks.attention  # T5 does not scale its scores, so the queries start small
    attn = dataclasses.replace(attn, q=jax.tree.map(lambda w: w * text.config.head_size**-0.5, attn.q))
    text = dataclasses.replace(text, blocks=dataclasses.replace(text.blocks, attention=attn))
    # As in the official code, the network starts by saying 0. Its queries to the text start sharp, since a dozen words
    # must be heard among 500 paddings.
    head = dataclasses.replace(model.head, head=jax.tree.map(jnp.zeros_like, model.head.head))
    cross = model.blocks.cross_attn
    cross = dataclasses.replace(cross, norm_q=jax.tree.map(lambda w: 3 * w, cross.norm_q))
    return Generator(
        text, dataclasses.replace(model, head=head, blocks=dataclasses.replace(model.blocks, cross_attn=cross))
    )


def train_generator(
    work: Path,
    latents: np.ndarray,
    scenes: demo_data.Scenes,
    start: Generator,
    loss: Callable = flow_loss,
    steps: int = DIT_STEPS,
    rate: float = DIT_RATE,
) -> Generator:
    """What training on normalised latents of these scenes makes of `start`."""
    tokenizer = demo_data.build_tokenizer()
    wordings = {
        kind: demo_data.captions(*kind)
        for kind in itertools.product(demo_data.COLORS, demo_data.SHAPES, demo_data.MOTIONS)
    }

    def batch(i: int):
        rng = np.random.default_rng((SEED, 3, i))
        picked = rng.integers(0, len(scenes), DIT_BATCH)
        prompts = ["" if rng.random() < NO_CAPTION else rng.choice(wordings[scenes.names(p)]) for p in picked]
        return latents[picked], *tokens(tokenizer, prompts)

    dit.attention = attention_over_padding
    optimizer = muon(generator_spec(), rate, steps, 1e-2)
    return fit(work / "dit.npz", start, loss, batch, steps, optimizer, decay=EMA)


# ---- 4. export


def tensors(params: Any, spec: Any, names: Mapping) -> dict[str, np.ndarray]:
    """Parameters under a checkpoint's names and in its shapes: what `vidax.weights.load` does, backwards."""
    out = {}
    for leaf, (_, value) in zip(checkpoint_names(spec, names), nn.named_leaves(params), strict=True):
        s = leaf.spec
        for layer, name in enumerate(leaf.names):
            array = np.asarray(value[layer] if s.stacked else value)
            if s.transpose is not None:
                stored = s.stored_shape
                array = array.reshape([stored[axis] for axis in s.transpose]).transpose(np.argsort(s.transpose))
            out[name] = np.ascontiguousarray(array.reshape(s.stored_shape)).astype(s.dtype)
    return out


def write_json(file: Path, value: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2) + "\n")


def export(folder: Path, pipeline: dict, autoencoder: vae.VAE, generator: Generator) -> None:
    """Writes a whole model. `pipeline`: what its index says beside the components that every demo has."""
    tokenizer = demo_data.build_tokenizer()
    vae_c, text_c = autoencoder.decoder.config, text_config()
    write_json(folder / "model_index.json", {
        **pipeline,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    })  # fmt: skip
    write_json(folder / "scheduler/scheduler_config.json", {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": FLOW_SHIFT,
        "num_train_timesteps": 1000,
        "solver_order": 2,
        "solver_type": "bh2",
        "predict_x0": True,
        "lower_order_final": True,
        "final_sigmas_type": "zero",
    })  # fmt: skip
    write_json(folder / "transformer/config.json", {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": DIT.heads,
        "attention_head_dim": DIT.head_size,
        "num_layers": DIT.layers,
        "ffn_dim": DIT.mlp_dim,
        "in_channels": DIT.in_channels,
        "out_channels": DIT.out_channels,
        "text_dim": DIT.text_dim,
        "freq_dim": DIT.frequency_dim,
        "patch_size": list(DIT.patch),
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": DIT.eps,
        "rope_max_seq_len": 1024,
    })  # fmt: skip
    write_json(folder / "vae/config.json", {
        "_class_name": "AutoencoderKLWan",
        "base_dim": vae_c.base_dim,
        "z_dim": vae_c.latent_channels,
        "dim_mult": list(vae_c.multipliers),
        "num_res_blocks": vae_c.blocks,
        "attn_scales": [],
        "temperal_downsample": list(vae_c.time_downsample),
        "latents_mean": list(vae_c.latents_mean),
        "latents_std": list(vae_c.latents_std),
    })  # fmt: skip
    write_json(folder / "text_encoder/config.json", {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": text_c.vocabulary,
        "d_model": text_c.dim,
        "d_kv": text_c.head_size,
        "d_ff": text_c.mlp_dim,
        "num_layers": text_c.layers,
        "num_heads": text_c.heads,
        "relative_attention_num_buckets": text_c.buckets,
        "relative_attention_max_distance": text_c.max_distance,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": text_c.eps,
        "is_encoder_decoder": False,
        "tie_word_embeddings": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    })  # fmt: skip
    write_json(folder / "tokenizer/tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.TEXT_TOKENS,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    })  # fmt: skip
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    parts = {
        "transformer/diffusion_pytorch_model": (generator.dit, dit.DiT.spec(DIT), mapping.DIT_DIFFUSERS),
        "vae/diffusion_pytorch_model": (autoencoder, vae.VAE.spec(vae_c), mapping.VAE_DIFFUSERS),
        "text_encoder/model": (generator.text, T5Encoder.spec(text_c), t5_files.TRANSFORMERS),
    }
    for name, part in parts.items():
        file = folder / f"{name}.safetensors"
        save_file(tensors(*part), file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors keeps its files to their owner; these ship in a package
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.2f} MB")


def set_up(name: str, description: str) -> tuple[Path, Path]:
    """Readies JAX, and says where the command line wants the checkpoints and the demo model of this name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs", name), help="checkpoints; delete it to start anew")
    parser.add_argument("--out", type=Path, default=ASSETS / name)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    return args.work, args.out


def main() -> None:
    work, out = set_up("demo", __doc__)
    autoencoder = train_vae(work)
    scenes = demo_data.sample_scenes(np.random.default_rng((SEED, 2)), POOL)
    autoencoder, latents = normalized(autoencoder, make_latents(work, autoencoder, scenes))
    generator = train_generator(work, latents, scenes, init_generator())
    export(out, {"_class_name": "WanPipeline"}, autoencoder, generator)


if __name__ == "__main__":
    main()
