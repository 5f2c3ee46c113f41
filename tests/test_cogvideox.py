"""CogVideoX's transformer and T5 v1.1 on a mesh compute what they compute on one device; how a config.json is read."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_cogvideox
from test_mesh import TOLERANCE, largest_error, on, random_parameters

from vidax.errors import UserError
from vidax.models.cogvideox import config as configs
from vidax.models.cogvideox.dit import DiT, DiTConfig, step_flops
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.nn import abstract, named_leaves

WORDS = 7
BASE = DiTConfig(
    layers=4,
    heads=4,
    head_size=16,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    text_tokens=WORDS,
    time_dim=32,
    sample=(3, 8, 12),
)
# (config, latent frames, height and width)
CASES = {
    "2b": (dataclasses.replace(BASE, rotary=False), (3, 8, 12)),
    "5b, 3 heads": (dataclasses.replace(BASE, heads=3), (3, 6, 10)),
    "5b-i2v": (dataclasses.replace(BASE, learned=True), (3, 8, 12)),
    "1.5-i2v": (dataclasses.replace(BASE, patch=(2, 2, 2), ofs_dim=32), (4, 6, 10)),
}
MESHES = ("seq=8", "seq=2,tensor=2", "data=2", "tensor=4", "seq=4", "data=2,seq=2,tensor=2")


@functools.cache
def case(name: str):
    config, size = CASES[name]
    spec = DiT.spec(config, jnp.float32)
    values, rng = random_parameters(spec, 5), np.random.default_rng(1)
    latents = rng.standard_normal((2, *size, 4)).astype(np.float32)
    text = rng.standard_normal((2, WORDS, 24)).astype(np.float32)

    def run(dit: DiT, latents, timesteps, text):
        return dit(latents, timesteps, dit.prepare(text))

    inputs = latents, np.array([250, 3], np.float32), text
    return spec, values, run, inputs, np.asarray(on("seq=1", spec, values, run, *inputs))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_dit_on_a_mesh(name, mesh):
    """79, 52 and 37 tokens, which few meshes divide; 3 heads on 2, 4 and 8 devices."""
    spec, values, run, inputs, wanted = case(name)
    assert largest_error(on(mesh, spec, values, run, *inputs), wanted) < TOLERANCE


@pytest.mark.parametrize("mesh", ["seq=8", "tensor=4"])
@pytest.mark.parametrize("heads", [4, 3])
def test_t5_on_a_mesh(heads, mesh):
    config = T5Config(vocabulary=52, dim=32, head_size=8, heads=heads, mlp_dim=40, layers=4, shared_bias=True)
    spec = T5Encoder.spec(config, jnp.float32)
    values, rng = random_parameters(spec, heads), np.random.default_rng(2)
    inputs = rng.integers(0, 52, (2, 13)), np.array([13, 4], np.int32)
    got, wanted = (on(m, spec, values, T5Encoder.__call__, *inputs) for m in (mesh, "seq=1"))
    assert largest_error(got, wanted) < TOLERANCE


def test_a_sample_does_not_depend_on_its_batch():
    spec, values, run, inputs, wanted = case("2b")
    alone = on("seq=1", spec, values, run, *(x[1:] for x in inputs))
    assert largest_error(alone, wanted[1:]) < TOLERANCE


def test_no_frame_is_given():
    spec, values, _, inputs, _ = case("2b")
    with pytest.raises(AssertionError):
        on("seq=1", spec, values, lambda dit, x, t, text: dit(x, t, dit.prepare(text), 1), *inputs)


def test_learned_positions_have_one_size():
    config, size = CASES["5b-i2v"]
    assert config.only_size == size and CASES["2b"][0].only_size is None
    spec, values, run, (latents, *rest), _ = case("5b-i2v")
    with pytest.raises(AssertionError):
        on("seq=1", spec, values, run, latents[:, :2], *rest)


@pytest.mark.parametrize("config", configs.PUBLISHED)
def test_full_size_shapes(config):
    """The video comes out as it went in, with the channels of the output."""
    dit = abstract(DiT.spec(config))
    size = config.only_size or (14, 60, 90)
    shape = jax.ShapeDtypeStruct((2, *size, config.in_channels), jnp.float32)
    text = jax.ShapeDtypeStruct((2, config.text_tokens, config.text_dim), jnp.float32)
    time = jax.ShapeDtypeStruct((2,), jnp.float32)
    out = jax.eval_shape(lambda dit, x, t, text: dit(x, t, dit.prepare(text)), dit, shape, time, text)
    assert out.shape == (2, *size, config.out_channels) and out.dtype == jnp.float32


def test_step_flops():
    """Twice the values of every matrix for each token that it works on, and attention."""
    sizes = {name: s.size for name, s in named_leaves(DiT.spec(BASE, jnp.float32)) if name.endswith(".weight")}
    tokens, joint = 72, WORDS + 72
    rows = (
        (r"patch_embedding|head\.head", tokens),
        (r"text_embedding", WORDS),
        (r"blocks\.(attn\.[qkvo]|ffn\.fc.)", joint),
        (r"blocks\.norm.\.(video|text)", 1),
    )
    matrices = [
        (name, count) for pattern, count in rows for name in sizes if re.fullmatch(rf"({pattern})\.weight", name)
    ]
    assert len(matrices) == 3 + 6 + 4
    total = sum(2 * count * sizes[name] for name, count in matrices)
    assert step_flops(BASE, tokens, WORDS) == total + 4 * BASE.layers * joint**2 * BASE.dim


# The configuration


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"freq_shift": 1}, "tiny: freq_shift is 1; CogVideoX needs 0"),
        ({"patch_size_t": 3}, "tiny: patch_size_t is 3; CogVideoX needs None"),
        ({"attention_head_dim": 20}, "tiny: 2 heads of size 20; positions take a size that 8 divides"),
        ({"use_learned_positional_embeddings": True}, "learned positions without rotary ones"),
        ({"ofs_embed_dim": 64}, "ofs_embed_dim is 64; it is added to a time of time_embed_dim 32"),
    ],
)
def test_a_config_that_is_not_computed(change, sentence):
    with pytest.raises(UserError, match=sentence):
        configs.dit_config(tiny_cogvideox.SINCOS | change, "tiny")


def test_a_config_agrees_with_its_tensors():
    assert configs.dit_config(tiny_cogvideox.PAIRS, "tiny", {"patch": (2, 2, 2), "layers": 3}).layers == 3
    with pytest.raises(UserError, match=r"patch_size is \(1, 2, 2\), but the tensors beside it have \(2, 2, 2\)"):
        configs.dit_config(tiny_cogvideox.SINCOS, "tiny", {"patch": (2, 2, 2)})


def test_a_config_known_from_its_tensors_alone():
    numbers = {"heads": 48, "layers": 42, "in_channels": 16, "patch": (2, 2, 2), "learned": False}
    assert configs.dit_config({}, "tiny", numbers) == configs.COGVIDEOX15_5B
    assert configs.dit_config({}, "tiny", {"heads": 30, "layers": 30}) == configs.COGVIDEOX_2B


def test_the_text_encoder_is_t5():
    assert configs.t5_config(tiny_cogvideox.T5_CONFIG, "tiny").shared_bias
    with pytest.raises(UserError, match="model_type is 'umt5'; CogVideoX needs 't5'"):
        configs.t5_config(tiny_cogvideox.T5_CONFIG | {"model_type": "umt5"}, "tiny")
