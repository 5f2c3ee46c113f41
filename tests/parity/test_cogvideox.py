"""CogVideoX's transformer and T5 v1.1 against diffusers and transformers, live, in float32.

Weights come from tests/tiny_cogvideox.py. Errors are the largest difference relative to the largest reference value;
what was measured stands beside each test.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import diffusers
import tiny
import tiny_cogvideox
import torch
import transformers
from test_goldens import TOLERANCE

from parity import reference
from vidax.models.cogvideox import config as configs
from vidax.models.cogvideox import mapping
from vidax.models.cogvideox.dit import DiT, rope_positions, sinusoid_positions
from vidax.ops.rope import grid_table
from vidax.weights import check_names

pytestmark = pytest.mark.parity

# By the largest timestep. Sinusoids of 999 in float32 are uncertain by 6e-5, since a frequency is by its last bit; the
# reference is as far from the exact values as we are.
TIMESTEPS = {(3.0, 250.0): 2e-6, (999.0, 501.0): 1e-5}

# Latent frames, height and width. The sample is 3 x 8 x 12; 1.5 takes an even number of frames.
SIZES = {
    "2b": ((3, 8, 12), (2, 6, 10), (5, 4, 14)),
    "5b": ((3, 8, 12), (2, 6, 10), (5, 14, 4)),
    "5b-i2v": ((3, 8, 12),),
    "1.5-5b": ((4, 8, 12), (2, 6, 10), (6, 14, 4)),
    "1.5-5b-i2v": ((4, 8, 12), (2, 14, 4)),
}
CASES = [(name, size) for name, sizes in SIZES.items() for size in sizes]


def transformer(config) -> diffusers.CogVideoXTransformer3DModel:
    return reference.fill(diffusers.CogVideoXTransformer3DModel.from_config(dict(config)))


def rotation(model, size):
    """The pipeline's own table for latents of this size, made without the other parts of a pipeline."""
    pipe = object.__new__(diffusers.CogVideoXPipeline)
    vars(pipe).update(_internal_dict={}, transformer=model, vae_scale_factor_spatial=8)
    frames, height, width = size
    return pipe._prepare_rotary_positional_embeddings(8 * height, 8 * width, frames, torch.device("cpu"))


def predict(model, latents, timesteps, text) -> np.ndarray:
    """[B F H W C] of latents [B F H W C]; this model takes frames before channels."""
    config = model.config
    out = model(
        hidden_states=torch.from_numpy(np.ascontiguousarray(latents.transpose(0, 1, 4, 2, 3))),
        encoder_hidden_states=torch.from_numpy(text),
        timestep=torch.from_numpy(timesteps),
        ofs=torch.full((1,), 2.0) if config.ofs_embed_dim else None,
        image_rotary_emb=rotation(model, latents.shape[1:4]) if config.use_rotary_positional_embeddings else None,
        return_dict=False,
    )[0]
    return out.permute(0, 1, 3, 4, 2).numpy()


def inputs(config, size, timesteps=(999.0, 501.0)):
    latents = tiny.normal(2, *size, config["in_channels"])
    text = tiny.normal(2, tiny_cogvideox.TEXT, config["text_embed_dim"], seed=1)
    return latents, np.array(timesteps, np.float32), text


@jax.jit
def ours(dit: DiT, latents, timesteps, text):
    return dit(latents, timesteps, dit.prepare(text))


@pytest.mark.parametrize(("name", "size"), CASES)
def test_dit(name, size):
    """Measured: 1.2e-6, and 5.0e-6 at timestep 999."""
    config = tiny_cogvideox.CONFIGS[name]
    model, dit = transformer(config), tiny.parameters(tiny_cogvideox.transformer(config))
    for timesteps, tolerance in TIMESTEPS.items():
        given = inputs(config, size, timesteps)
        error = tiny.relative_error(ours(dit, *given), predict(model, *given))
        assert error < tolerance, timesteps


def test_dit_intermediates():
    """Measured: 1.6e-6, in the worst of all, the time; 5.0e-6 at timestep 999 in the output of a block."""
    config = tiny_cogvideox.PAIRS_I2V
    given = inputs(config, (4, 6, 10), (3.0, 250.0))
    theirs = reference_intermediates(transformer(config), *given)
    mine = intermediates(tiny.parameters(tiny_cogvideox.transformer(config)), *given)
    assert sorted(mine) == sorted(theirs)
    assert len(mine) == 2 + 7 * config["num_layers"] + 1
    errors = {key: tiny.relative_error(mine[key], theirs[key]) for key in mine}
    assert max(errors.values()) < TOLERANCE, errors


def joint(video: torch.Tensor, text: torch.Tensor) -> np.ndarray:
    return torch.cat([text, video], 1).numpy()


def reference_intermediates(model, *given) -> dict[str, np.ndarray]:
    seen: dict[str, np.ndarray] = {}

    def keep(name, values):
        def hook(module, args, output):
            seen.update({f"{name}{key}": value for key, value in values(output).items()})

        return hook

    norm = lambda out: {"": joint(*out[:2]), " gates": torch.cat([out[3], out[2]], 1).numpy()}  # noqa: E731
    pair = lambda out: {"": joint(*out)}  # noqa: E731
    one = lambda out: {"": out.numpy()}  # noqa: E731
    model.time_embedding.register_forward_hook(keep("time", one))
    model.ofs_embedding.register_forward_hook(keep("ofs", one))
    model.patch_embed.register_forward_hook(keep("tokens", one))
    for i, block in enumerate(model.transformer_blocks):
        parts = {"norm1": (block.norm1, norm), "attention": (block.attn1, pair), "norm2": (block.norm2, norm)}
        parts |= {"ffn": (block.ff, one), "output": (block, pair)}
        for part, (module, values) in parts.items():
            module.register_forward_hook(keep(f"block {i} {part}", values))
    model.proj_out.register_forward_hook(keep("head", one))
    predict(model, *given)
    seen["time"] = seen["time"] + seen.pop("ofs")
    return seen


def intermediates(dit: DiT, latents, timesteps, text) -> dict[str, jax.Array]:
    """The parts of `DiT.__call__` and `Block.__call__` one by one, each block sliced out of the stack."""
    tokens = jax.jit(lambda dit, *args: dit.embed(*args, dit.prepare(text)))(dit, latents, timesteps)
    seen = {"tokens": tokens.x, "time": tokens.time}
    for i in range(dit.config.layers):
        parts = jax.jit(block_parts)(tiny.block(dit.blocks, i), tokens)
        seen |= {f"block {i} {part}": value for part, value in parts.items()}
        tokens = dataclasses.replace(tokens, x=parts["output"])
    return seen | {"head": jax.jit(lambda dit, t: dit.head(t))(dit, tokens)[:, tokens.text :]}


def block_parts(block, tokens) -> dict[str, jax.Array]:
    ends = jnp.array([0, -1])  # a text token and a video token
    h1, gate1 = block.norm1(tokens)
    attended = block.attn(h1, tokens.rope, tokens.real)
    after = tokens.with_x(tokens.x + attended * gate1)
    h2, gate2 = block.norm2(after)
    return {
        "norm1": h1,
        "norm1 gates": gate1[:, ends],
        "attention": attended,
        "norm2": h2,
        "norm2 gates": gate2[:, ends],
        "ffn": block.ffn(h2),
        "output": block(tokens, None),
    }


def test_bfloat16_dit():
    """Measured: 3.3e-3 of the largest value."""
    config = tiny_cogvideox.ROTARY
    given = inputs(config, (3, 8, 12))
    exact = ours(tiny.parameters(tiny_cogvideox.transformer(config)), *given)
    rounded = ours(tiny.parameters(tiny_cogvideox.transformer(config, jnp.bfloat16)), *given)
    error = tiny.relative_error(rounded, exact)
    assert TOLERANCE < error < 2e-2


@pytest.mark.parametrize("size", [(13, 60, 90), (13, 48, 84), (7, 90, 60), (13, 96, 96)])
def test_rotation_at_full_size(size):
    """The tables of 5B for videos that its sample's grid is cut, narrowed and shortened for, and those of 1.5.
    Measured: 3.0e-6, the rounding of the reference's angles, which are float32.
    """
    for given, frames in (({}, 1), ({"patch_size_t": 2, "sample_height": 300, "sample_width": 300}, 2)):
        config = {**tiny_cogvideox.ROTARY, "sample_height": 60, "sample_width": 90, "sample_frames": 49, **given}
        config = {**config, "attention_head_dim": 64, "num_attention_heads": 1, "num_layers": 1}
        even = (size[0] + size[0] % frames, *size[1:])
        spec = tiny_cogvideox.transformer(config).spec
        grid = tuple(length // patch for length, patch in zip(even, spec.config.patch, strict=True))
        cos, sin = grid_table(rope_positions(spec.config, grid), spec.config.rope_channels)
        model = diffusers.CogVideoXTransformer3DModel.from_config(config)
        their_cos, their_sin = rotation(model, even)
        error = np.abs(np.asarray(cos) - their_cos.numpy()).max()
        error = max(error, np.abs(np.asarray(sin)[:, 1::2] - their_sin.numpy()[:, 1::2]).max())
        assert error < 1e-5


def test_sinusoids_at_full_size():
    config = {**tiny_cogvideox.SINCOS, "sample_height": 60, "sample_width": 90, "sample_frames": 49}
    config = {**config, "attention_head_dim": 64, "num_attention_heads": 2, "num_layers": 1}
    spec = tiny_cogvideox.transformer(config).spec
    model = diffusers.CogVideoXTransformer3DModel.from_config(config)
    theirs = model.patch_embed.pos_embedding[0, tiny_cogvideox.TEXT :].numpy()
    np.testing.assert_allclose(sinusoid_positions(spec.config, spec.config.sample_grid), theirs, atol=1e-7)


ROTARY = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
PAIRS = {"patch_size_t": 2, "patch_bias": False, "sample_height": 300, "sample_width": 300, "sample_frames": 81}
I2V = {"in_channels": 32}
PUBLISHED = {
    configs.COGVIDEOX_2B: {},
    configs.COGVIDEOX_5B: ROTARY,
    configs.COGVIDEOX_5B_I2V: ROTARY | I2V | {"use_learned_positional_embeddings": True},
    configs.COGVIDEOX15_5B: ROTARY | PAIRS,
    configs.COGVIDEOX15_5B_I2V: ROTARY | PAIRS | I2V | {"ofs_embed_dim": 512},
}


@pytest.mark.parametrize("ours", PUBLISHED, ids=["2b", "5b", "5b-i2v", "1.5-5b", "1.5-5b-i2v"])
def test_full_size_names_and_config(ours):
    """Every tensor of the class at full size, and our config read from the file that it would write."""
    with torch.device("meta"):
        model = diffusers.CogVideoXTransformer3DModel.from_config(PUBLISHED[ours])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert not check_names(DiT.spec(ours), mapping.DIT_DIFFUSERS, shapes).skipped
    assert configs.dit_config(model.config, "config.json") == ours


# The text encoder


@pytest.mark.parametrize("lengths", [(300, 300), (300, 77), (1, 260)])
def test_t5(lengths):
    """Measured: 3.1e-6. Keys up to 299 tokens away use every logarithmic bucket; all tokens, as CogVideoX has it, or
    with a mask.
    """
    ids = np.random.RandomState(0).randint(3, 256, (2, 300)).astype(np.int32)
    model = reference.fill(transformers.T5EncoderModel(transformers.T5Config(**tiny_cogvideox.T5_CONFIG)))
    encoder = tiny.parameters(tiny_cogvideox.text_encoder())
    mine = jax.jit(lambda encoder, *args: encoder(*args))(encoder, ids, np.array(lengths))
    if lengths == (300, 300):
        theirs = model(torch.from_numpy(ids).long()).last_hidden_state.numpy()
    else:
        theirs = reference.encode_text(model, ids, np.array(lengths))
    error = tiny.relative_error(mine, theirs)
    assert error < TOLERANCE
