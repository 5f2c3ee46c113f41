"""What the tolerances of tests/parity/test_wan.py catch: mistakes that are easily made in a port, made on purpose.

Each test computes the wrong output and asserts that its distance from the reference exceeds the tolerance there. The
factor by which it did stands beside it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny
from test_goldens import PIXEL_TOLERANCE, TOLERANCE

from parity import reference
from vidax import nn
from vidax.cli import main
from vidax.errors import UserError
from vidax.models.towers.t5 import T5Encoder
from vidax.models.wan import config, dit
from vidax.models.wan.dit import DiT
from vidax.models.wan.pipeline import WanModel
from vidax.nn import standardize
from vidax.weights import Mapping

pytestmark = pytest.mark.parity

SIZE = (48, 32)
LENGTHS = np.array([200, 50], np.int32)


def dit_error(part: tiny.Part | None = None, text_tokens: int = 20, cut: int | None = None) -> float:
    """The error of the transformer; `cut` leaves out the text tokens from there on, zeros for the reference."""
    latents, timesteps = tiny.normal(2, 3, 6, 10, 16), np.array([999.0, 500.0], np.float32)
    text = tiny.normal(2, text_tokens, 32, seed=1)
    text[:, cut:] = 0 if cut else text[:, cut:]
    theirs = reference.predict(reference.transformer(), latents, timesteps, text)
    run = jax.jit(lambda model, text: model(latents, jnp.asarray(timesteps), model.prepare(text)))
    return tiny.relative_error(run(tiny.parameters(part or tiny.transformer()), text[:, :cut]), theirs)


def umt5_error(part: tiny.Part | None = None) -> float:
    ids = np.random.RandomState(0).randint(3, 256, (2, 200)).astype(np.int32)
    theirs = reference.encode_text(reference.text_encoder(), ids, LENGTHS)
    run = jax.jit(lambda model, ids: model(ids, LENGTHS))
    return tiny.relative_error(run(tiny.parameters(part or tiny.text_encoder()), ids), theirs)


@pytest.fixture(scope="module")
def theirs() -> np.ndarray:
    return reference.generate(reference.pipeline(), size=SIZE)


def run_error(theirs: np.ndarray, tmp_path, *more: str) -> float:
    folder = tiny.write_folder(tmp_path / "model")
    assert main(tiny.command(folder, tmp_path / "x.npy", size=SIZE, more=more)) == 0
    return tiny.pixel_error(tmp_path / "x.npy", theirs)


def renamed(part: tiny.Part, first: str, second: str) -> tiny.Part:
    """With two of our names exchanged before the mapping looks at them."""
    swap = ((first, "SWAPPED"), (second, first), ("SWAPPED", second))
    return dataclasses.replace(part, mapping=dataclasses.replace(part.mapping, renames=(*swap, *part.mapping.renames)))


def test_nothing_is_caught_without_a_mutation(theirs, tmp_path):
    assert dit_error() < TOLERANCE
    assert umt5_error() < TOLERANCE
    assert run_error(theirs, tmp_path) < PIXEL_TOLERANCE


@pytest.mark.parametrize("error", [dit_error, umt5_error])
def test_exact_gelu_for_the_tanh_form(error, monkeypatch):
    """DiT: 13 times the tolerance, UMT5: 48 times."""
    gelu = jax.nn.gelu
    monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate=True: gelu(x, approximate=not approximate))
    monkeypatch.setitem(nn.ACTIVATIONS, "gelu_tanh", lambda x: gelu(x, approximate=False))
    assert error() > TOLERANCE


def test_epsilon():
    """1e-5 for 1e-6. DiT: 2.7 times the tolerance, UMT5: 135 times."""
    larger = dataclasses.replace(config.dit_config(tiny.TRANSFORMER_CONFIG, "tiny"), eps=1e-5)
    assert dit_error(dataclasses.replace(tiny.transformer(), spec=DiT.spec(larger, np.float32))) > TOLERANCE
    larger = dataclasses.replace(config.t5_config(tiny.TEXT_ENCODER_CONFIG, "tiny"), eps=1e-5)
    assert umt5_error(dataclasses.replace(tiny.text_encoder(), spec=T5Encoder.spec(larger, np.float32))) > TOLERANCE


def test_norm2_and_norm3_of_the_checkpoint():
    """diffusers' norm2 is the official norm3, and the only one with parameters: a mapping that keeps the number fits no
    checkpoint."""
    part = tiny.transformer()
    kept = tuple(rename for rename in part.mapping.renames if "norm3" not in rename[0])
    with pytest.raises(UserError, match=r"blocks\.0\.norm3\.weight \[48\]"):
        tiny.parameters(dataclasses.replace(part, mapping=Mapping(renames=kept)), shapes=part.shapes)


def test_norm2_and_norm3_of_a_block(monkeypatch):
    """The norm with parameters before the MLP instead of before cross-attention: 14,000 times."""

    def swapped(block, tokens, context):
        x = tokens.x
        shift1, scale1, gate1, shift2, scale2, gate2 = tokens.each(block.modulation + tokens.modulation)
        h = standardize(x, block.eps) * (1 + scale1) + shift1
        x = x + block.self_attn(h, h, rope=tokens.rope) * gate1
        x = x + block.cross_attn(standardize(x, block.eps), context.text)
        return x + block.ffn(block.norm3(x) * (1 + scale2) + shift2) * gate2

    monkeypatch.setattr(dit.Block, "__call__", swapped)
    assert dit_error() > TOLERANCE


@pytest.mark.parametrize(
    ("error", "part", "first", "second"),
    [
        (dit_error, tiny.transformer, "norm_q", "norm_k"),
        (dit_error, tiny.transformer, "self_attn", "cross_attn"),
        (umt5_error, tiny.text_encoder, "norm1", "norm2"),
        (umt5_error, tiny.text_encoder, "mlp.gate", "mlp.up"),
    ],
)
def test_swapped_names(error, part, first, second):
    """Two parameters of one shape, each under the other's name: from 430 times."""
    assert error(renamed(part(), first, second)) > TOLERANCE


def test_flow_shift_off_by_one(theirs, tmp_path):
    """4 for 3: 1,000 times."""
    assert run_error(theirs, tmp_path, "--flow-shift", "4") > PIXEL_TOLERANCE


def test_text_without_its_zeros():
    """Cross-attention reads the padding too: 40,000 times."""
    assert dit_error(text_tokens=512, cut=12) > TOLERANCE


def test_a_run_with_text_without_its_zeros(theirs, tmp_path, monkeypatch):
    """Prompts padded to 64 tokens, not 512: 1,100 times."""
    monkeypatch.setattr(WanModel, "text_tokens", 64)
    assert run_error(theirs, tmp_path) > PIXEL_TOLERANCE
