"""The Wan model against diffusers and transformers, live, in float32: every network, every block, whole runs.

Weights come from tests/tiny.py. Errors are the largest difference relative to the largest reference value, or for
whole runs the largest difference of a pixel in [0, 1]. What was measured stands beside each test.
tests/parity/test_mutations.py shows what these tolerances catch.
"""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import diffusers
import tiny
import torch
from goldens import record
from test_goldens import GOLDENS, PIXEL_TOLERANCE, TOLERANCE

from parity import reference
from vidax.cli import main
from vidax.models.towers.t5 import relative_buckets
from vidax.models.wan.config import WAN21_VAE
from vidax.nn import standardize
from vidax.weights import open_checkpoint

pytestmark = pytest.mark.parity

TEXT = 20  # tokens of the transformer's text input, where it does not matter

BFLOAT16_DIT = 2e-2  # of the largest value; see test_bfloat16_dit
BFLOAT16_PIXELS = 5e-2


@jax.jit
def call(module, *args):
    return module(*args)


# The text encoder


@pytest.mark.parametrize("lengths", [(300, 77), (1, 260)])
def test_umt5(lengths):
    """Measured: 2.7e-6. Keys up to 299 tokens away use every logarithmic bucket."""
    ids = np.random.RandomState(0).randint(3, 256, (2, 300)).astype(np.int32)
    ours = np.asarray(call(tiny.parameters(tiny.text_encoder()), ids, np.array(lengths)))
    assert not ours[np.arange(300) >= np.array(lengths)[:, None]].any()
    theirs = reference.encode_text(reference.text_encoder(), ids, np.array(lengths))
    assert tiny.relative_error(ours, theirs) < TOLERANCE


def test_umt5_does_not_read_its_padding():
    """Measured: 0. Ids past a length are anything, and the padded length does not matter."""
    encoder, ids = tiny.parameters(tiny.text_encoder()), np.random.RandomState(1).randint(3, 256, (2, 300))
    other = np.where(np.arange(300) < 50, ids, 0)
    lengths = np.array([50, 50])
    np.testing.assert_allclose(call(encoder, ids, lengths), call(encoder, other, lengths), atol=1e-6)


@pytest.mark.parametrize("length", [1, 129, 600])
def test_relative_buckets(length):
    """Equal: float32 logarithms round alike at every edge."""
    attention = reference.text_encoder().encoder.block[0].layer[0].SelfAttention
    position = torch.arange(length)
    theirs = attention._relative_position_bucket(position[None, :] - position[:, None])
    np.testing.assert_array_equal(relative_buckets(length, 32, 128), theirs.numpy())


# The transformer

# (config, latent frames, height, width): patches 3x4x6 and 5x3x5, heads of 24 and 20 channels
DIT_CASES = {
    "landscape": (tiny.TRANSFORMER_CONFIG, (3, 8, 12)),
    "uneven": (tiny.UNEVEN_TRANSFORMER_CONFIG, (5, 6, 10)),
}


def dit_inputs(size: tuple[int, int, int], timesteps=(999.0, 500.0)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tiny.normal(2, *size, 16), np.array(timesteps, np.float32), tiny.normal(2, TEXT, 32, seed=1)


@jax.jit
def predict(dit, latents, timesteps, text):
    return dit(latents, timesteps, dit.prepare(text))


@pytest.mark.parametrize("name", DIT_CASES)
def test_dit(name):
    """Measured: 6e-7."""
    config, size = DIT_CASES[name]
    model, dit = reference.transformer(config), tiny.parameters(tiny.transformer(config))
    for timesteps in ((999.0, 500.0), (3.7, 999.0)):
        inputs = dit_inputs(size, timesteps)
        assert tiny.relative_error(predict(dit, *inputs), reference.predict(model, *inputs)) < TOLERANCE, timesteps


@pytest.mark.parametrize("name", DIT_CASES)
def test_dit_intermediates(name):
    """Measured: 7.4e-7, in the worst of all."""
    config, size = DIT_CASES[name]
    inputs = dit_inputs(size, (500.0, 3.7))
    theirs = reference_intermediates(reference.transformer(config), *inputs)
    ours = intermediates(tiny.parameters(tiny.transformer(config)), *inputs)
    assert sorted(ours) == sorted(theirs)
    assert len(ours) == 4 + 4 * config["num_layers"] + 1
    errors = {key: tiny.relative_error(ours[key], theirs[key]) for key in ours}
    assert max(errors.values()) < TOLERANCE, errors


def reference_intermediates(model, latents, timesteps, text) -> dict[str, np.ndarray]:
    seen: dict[str, np.ndarray] = {}

    def keep(*names):
        def hook(module, args, output):
            outputs = output if isinstance(output, tuple) else (output,)
            seen.update({name: out.numpy() for name, out in zip(names, outputs, strict=False)})

        return hook

    model.condition_embedder.register_forward_hook(keep("time", "modulation", "context"))
    model.patch_embedding.register_forward_hook(keep("tokens"))
    for i, block in enumerate(model.blocks):
        parts = {"self-attention": block.attn1, "cross-attention": block.attn2, "ffn": block.ffn, "output": block}
        for part, module in parts.items():
            module.register_forward_hook(keep(f"block {i} {part}"))
    model.proj_out.register_forward_hook(keep("head"))
    reference.predict(model, latents, timesteps, text)
    b, d = seen["tokens"].shape[:2]
    seen["tokens"] = seen["tokens"].reshape(b, d, -1).swapaxes(1, 2)
    seen["modulation"] = seen["modulation"].reshape(b, 6, d)
    return seen


def intermediates(dit, latents, timesteps, text) -> dict[str, jax.Array]:
    """The parts of `DiT.__call__` and `Block.__call__` one by one, each block sliced out of the stack."""
    context = jax.jit(lambda dit, text: dit.prepare(text))(dit, text)
    tokens = jax.jit(lambda dit, *args: dit.embed(*args))(dit, latents, timesteps, context)
    seen = {
        "tokens": tokens.x,
        "time": tokens.time[:, 0],
        "modulation": tokens.modulation[:, 0],
        "context": context.text,
    }
    for i in range(dit.config.layers):
        parts = block_parts(tiny.block(dit.blocks, i), tokens, context)
        seen |= {f"block {i} {part}": value for part, value in parts.items()}
        tokens = dataclasses.replace(tokens, x=parts["output"])
    return seen | {"head": call(dit.head, tokens)}


@jax.jit
def block_parts(block, tokens, context) -> dict[str, jax.Array]:
    shift1, scale1, gate1, shift2, scale2, _ = tokens.each(block.modulation + tokens.modulation)
    h = standardize(tokens.x, block.eps) * (1 + scale1) + shift1
    attended = block.self_attn(h, h, rope=tokens.rope)
    after = tokens.x + attended * gate1
    crossed = block.cross_attn(block.norm3(after), context.text, context.image)
    after = after + crossed
    mixed = block.ffn(standardize(after, block.eps) * (1 + scale2) + shift2)
    return {
        "self-attention": attended,
        "cross-attention": crossed,
        "ffn": mixed,
        "output": block(tokens, context),
    }


def test_bfloat16_dit():
    """Measured: 3.6e-3 of the largest value. Matrices and their operands are bfloat16, the rest is float32."""
    inputs = dit_inputs((3, 8, 12))
    exact = predict(tiny.parameters(tiny.transformer()), *inputs)
    rounded = predict(tiny.parameters(tiny.transformer(dtype=jnp.bfloat16)), *inputs)
    assert TOLERANCE < tiny.relative_error(rounded, exact) < BFLOAT16_DIT


# The autoencoder: batch 2, frames of 24x16 (width x height)

CHUNK_ENDS = (1, 5, 9, 13)  # the first frame, then four by four


def in_chunks(coder, x: np.ndarray, ends) -> np.ndarray:
    """Code x [B F ...] chunk by chunk through the cache."""
    cache, parts = None, []
    for chunk in np.split(x, [end for end in ends if end < x.shape[1]], axis=1):
        part, cache = call(coder, chunk, cache)
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1)


def frames(count: int) -> np.ndarray:
    return np.tanh(tiny.normal(2, count, 16, 24, 3))


def latents(count: int) -> np.ndarray:
    return tiny.normal(2, count, 2, 3, 16)


@pytest.mark.parametrize("count", [1, 5, 9, 17])
def test_vae_encode(count):
    """Measured: 8.1e-7."""
    ours = in_chunks(tiny.parameters(tiny.vae()).encoder, frames(count), CHUNK_ENDS)
    assert tiny.relative_error(ours, reference.encode(reference.vae(), frames(count))) < TOLERANCE


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_vae_decode(count):
    """Measured: 1.3e-6, for 1, 5, 9 and 17 frames. Values are in units of the largest, which clipping makes 1."""
    ours = in_chunks(tiny.parameters(tiny.vae()).decoder, latents(count), range(1, count))
    theirs = reference.decode(reference.vae(), latents(count))
    assert (np.abs(theirs) >= 1).mean() < 0.05
    assert tiny.relative_error(ours, theirs) < TOLERANCE


def test_vae_in_longer_chunks():
    """Measured: 6.6e-7. Sixteen frames, or four latent frames, at once."""
    vae = tiny.parameters(tiny.vae())
    for coder, x, ends in ((vae.encoder, frames(17), CHUNK_ENDS), (vae.decoder, latents(5), range(1, 5))):
        assert tiny.relative_error(in_chunks(coder, x, (1,)), in_chunks(coder, x, ends)) < TOLERANCE


def test_vae_latent_statistics():
    """Those of a config without any are diffusers' defaults. The other tests have random ones (tests/tiny.py), applied
    by the pipeline's own lines (`reference.decode`)."""
    config = diffusers.AutoencoderKLWan().config
    assert list(WAN21_VAE.latents_mean) == list(config.latents_mean)
    assert list(WAN21_VAE.latents_std) == list(config.latents_std)


# Whole runs: a pipeline that diffusers saved, run by the command line

LANDSCAPE, PORTRAIT = (48, 32), (32, 48)

RUNS = {
    "3 steps": (tiny.UNIPC, {"size": LANDSCAPE, "steps": 3}),
    "10 steps": (tiny.UNIPC, {"size": LANDSCAPE, "steps": 10}),
    "50 steps": (tiny.UNIPC, {"size": LANDSCAPE, "steps": 50}),
    "no guidance": (tiny.UNIPC, {"size": LANDSCAPE, "guidance_scale": 1}),
    "order 3, portrait": (tiny.UNIPC3, {"size": PORTRAIT, "steps": 10}),
    "euler": (tiny.EULER, {"size": LANDSCAPE, "steps": 10}),
    "euler, portrait, no guidance": (tiny.EULER, {"size": PORTRAIT, "steps": 10, "guidance_scale": 1}),
    "one frame": (tiny.UNIPC, {"size": LANDSCAPE, "frames": 1}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A scheduler config to the folder of its pipeline, saved once."""
    folders: dict[str, str] = {}

    def save(scheduler) -> str:
        key = json.dumps(scheduler)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("pipeline"))
            reference.pipeline(scheduler).save_pretrained(folders[key])
        return folders[key]

    return save


@pytest.mark.parametrize("name", RUNS)
def test_runs(name, saved, tmp_path):
    """Measured: 1.7e-6."""
    scheduler, run = RUNS[name]
    assert main(tiny.command(saved(scheduler), tmp_path / "x.npy", **run)) == 0
    theirs = reference.generate(reference.pipeline(scheduler), **run)
    assert ((theirs <= 0) | (theirs >= 1)).mean() < 0.05
    assert tiny.pixel_error(tmp_path / "x.npy", theirs) < PIXEL_TOLERANCE


def test_a_run_as_a_command_of_its_own(saved, tmp_path):
    """Measured: 1.7e-6."""
    arguments = tiny.command(saved(tiny.UNIPC), tmp_path / "x.npy", size=LANDSCAPE)
    done = subprocess.run(
        [sys.executable, "-m", "vidax.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},  # without the eight devices of tests/conftest.py
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    theirs = reference.generate(reference.pipeline(), size=LANDSCAPE)
    assert tiny.pixel_error(tmp_path / "x.npy", theirs) < PIXEL_TOLERANCE


def test_a_sharded_folder(tmp_path):
    """Measured: 1.7e-6, as from one file for each network."""
    pipe = reference.pipeline()
    pipe.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("transformer/*-of-*.safetensors"))) > 1
    assert len(list((tmp_path / "shards").glob("text_encoder/*-of-*.safetensors"))) > 1
    assert main(tiny.command(tmp_path / "shards", tmp_path / "x.npy", size=LANDSCAPE)) == 0
    assert tiny.pixel_error(tmp_path / "x.npy", reference.generate(pipe, size=LANDSCAPE)) < PIXEL_TOLERANCE


def test_a_run_in_bfloat16(saved, tmp_path):
    """Measured: 3.6e-3 after three steps, against diffusers in float32."""
    assert main(tiny.command(saved(tiny.UNIPC), tmp_path / "x.npy", size=LANDSCAPE, dtype="bfloat16")) == 0
    error = tiny.pixel_error(tmp_path / "x.npy", reference.generate(reference.pipeline(), size=LANDSCAPE))
    assert PIXEL_TOLERANCE < error < BFLOAT16_PIXELS


# What the tests without PyTorch rest on


def test_the_written_folder_is_the_saved_one(saved, tmp_path):
    """`tiny.write_folder` against `save_pretrained`: the same tensors, and diffusers makes the same video of it."""
    written, other = tiny.write_folder(tmp_path), saved(tiny.UNIPC)
    for part in ("transformer", "vae", "text_encoder"):
        ours, theirs = open_checkpoint(written / part), open_checkpoint(f"{other}/{part}")
        assert set(ours) == set(theirs) - {"encoder.embed_tokens.weight"}
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor.view(), theirs[name].view(), err_msg=name)
    pipe = diffusers.WanPipeline.from_pretrained(written)
    pipe.set_progress_bar_config(disable=True)
    theirs = reference.generate(reference.pipeline(), size=LANDSCAPE)
    np.testing.assert_array_equal(reference.generate(pipe, size=LANDSCAPE), theirs)


def test_the_recorded_goldens_are_current():
    live = record.goldens()
    with np.load(GOLDENS) as recorded:
        assert sorted(recorded) == sorted(live)
        for name, value in live.items():
            assert tiny.relative_error(recorded[name], value) < 2e-6, name
