"""The TPU kernel, interpreted on CPU with small tiles, over the list of cases that every implementation runs."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, Case, attention_in_float64, relative_error

from vidax.ops.attention import pallas_tpu as module
from vidax.ops.attention.pallas_tpu import CONSERVATIVE, choose_tiles, fit, guarded_heads, pallas_tpu, scaled
from vidax.ops.attention.pallas_tpu_kernel import Tiles

# One product with the values for two with the keys, as on v6e; and one for one, as on v4
DEEP = (128, 256, 128, 128, 256, 128)
SHALLOW = (256, 256, 128, 128, 128, 256)


def attend(case: Case, inputs=None, **options) -> jax.Array:
    call = functools.partial(pallas_tpu, scale=case.scale, interpret=True, **{"tiles": DEEP} | options)
    return jax.jit(call)(*(inputs or case.inputs), **case.options)


def expected(case: Case) -> np.ndarray:
    """Where scores are large, from queries rounded as the kernel's are, which moves such scores."""
    if case.magnitude == 1:
        return case.expected
    q, k, v = case.inputs
    return attention_in_float64(scaled(q, case.scale, q.dtype), k, v, scale=math.log(2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounded(case):
    out = attend(case)
    assert out.dtype == case.dtype
    assert relative_error(out, expected(case)) < case.tolerance


FEW = [
    Case(129, 129, 128),
    Case(129, 513, 128, "bfloat16"),
    Case(127, 512, 128, kv_lengths=(511, 3)),
    Case(129, 300, 64, "bfloat16", (300, 140), key_offset=60),
    Case(129, 300, 128, "bfloat16", magnitude=2, key_norm=120),
]


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize(("kernel", "tiles"), [("running", DEEP), ("bounded", SHALLOW)])
def test_other_forms(case, kernel, tiles):
    assert relative_error(attend(case, kernel=kernel, tiles=tiles), expected(case)) < case.tolerance


LARGE = Case(129, 300, 128, magnitude=30, key_norm=60)


def test_large_keys_take_the_running_maximum():
    quiet = Case(257, 300, 128, "bfloat16")
    np.testing.assert_array_equal(guarded_heads(*quiet.inputs[:2], scale=quiet.scale), [[False, False]] * 2)
    one = Case(257, 300, 128, "bfloat16", magnitude=2, key_norm=120)
    np.testing.assert_array_equal(guarded_heads(*one.inputs[:2], scale=one.scale), [[False, True]] * 2)
    out = attend(LARGE)
    assert np.isfinite(out).all()
    assert relative_error(out, expected(LARGE)) < 2e-4  # scores of thousands, in float32; measured: 7e-5


def test_without_the_guard_large_keys_fail(monkeypatch):
    monkeypatch.setattr(module, "MAXIMUM_GAP", 1e9)
    assert not np.isfinite(attend(LARGE)).all()


def test_an_offset_of_all_keys_costs_no_bound():
    """It moves all scores of a query alike."""
    case = Case(129, 300, 128, "bfloat16", key_offset=60)
    q, k, _ = case.inputs
    spans = jnp.linalg.norm(q.astype("float32"), axis=-1).max() * jnp.linalg.norm(k.astype("float32"), axis=-1).max()
    assert spans * case.scale * 1.44 > module.MAXIMUM_GAP / 2
    assert not guarded_heads(q, k, scale=case.scale).any()


def test_keys_beyond_a_length_are_not_read():
    for dtype in ("float32", "bfloat16"):
        case = Case(129, 257, 64, dtype, kv_lengths=(1, 129))
        q, k, v = case.inputs
        beyond = jnp.arange(257)[:, None, None] >= case.lengths[:, None, None, None]
        wild = q, jnp.where(beyond, 1e4, k).astype(dtype), jnp.where(beyond, 1e4, v).astype(dtype)
        np.testing.assert_array_equal(attend(case, wild), attend(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["bounded", "running"])
def test_keys_beyond_a_known_number_are_not_read(kernel, dtype):
    """As many as make the tokens of a video whole tiles; neither their values nor NaN in them play a part."""
    case = Case(129, 384, 64, dtype)
    q, k, v = case.inputs
    k, v = k.at[:, 300:].set(1e4), v.at[:, 300:].set(-1e4)
    wanted = attention_in_float64(q, k[:, :300], v[:, :300], scale=case.scale)
    out = attend(case, (q, k, v), kernel=kernel, real_keys=300)
    assert relative_error(out, wanted) < case.tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["bounded", "running"])
def test_padding_of_whole_blocks(kernel, dtype):
    """Many devices make the padding longer than a block: of four blocks here the last two and a half."""
    case = Case(129, 1024, 64, dtype)
    q, k, v = case.inputs
    wanted = attention_in_float64(q, k[:, :384], v[:, :384], scale=case.scale)
    out = attend(case, (q, k, v), kernel=kernel, real_keys=384)
    assert relative_error(out, wanted) < case.tolerance


def test_float32_queries_are_rounded_once():
    """Queries in float32 with keys in bfloat16 are at least as near as queries rounded before they are scaled."""
    case = Case(257, 300, 128)
    q, k, v = case.inputs
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    out = attend(case, (q, k, v))
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, case.expected) < 1e-2


def test_unknown_kernel_and_tiles():
    case = Case(1, 1)
    with pytest.raises(ValueError, match="no TPU attention kernel is called 'fast'; there are 'bounded' and 'running'"):
        attend(case, kernel="fast")
    with pytest.raises(ValueError, match="each inner tile must be a multiple of 128 and divide the tile that it cuts"):
        attend(case, tiles=(512, 512, 128, 100, 512, 128))


def test_tiles_of_known_and_unknown_chips():
    rows = json.loads(Path(module.__file__).with_name("tiles.json").read_text())["rows"]
    for row in rows:
        if row["kernel"] == "vidax":
            found, note = choose_tiles(row["chip"], row["head_size"], row["tokens"], row["keys"])
            assert note is None and list(vars(found).values()) == row["tiles"]
    tiles, note = choose_tiles("TPU v9", 128, 75_600, 75_600)
    assert tiles == CONSERVATIVE
    assert "attention tiles are not tuned for 'TPU v9'" in note and "TPU v6 lite" in note
    with pytest.warns(UserWarning, match="not tuned for 'TPU v9'"):
        jax.eval_shape(functools.partial(pallas_tpu, scale=1.0, chip="TPU v9", interpret=True), *Case(1, 1).inputs)


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [
        (75_600, 75_600, (1024, 2048, 256, 256, 2048, 128)),
        (75_600, 512, (1024, 512, 256, 256, 512, 128)),
        (1, 1, (128, 128, 128, 128, 128, 128)),
        (1_100, 2_100, (768, 1280, 256, 256, 1280, 128)),  # two even blocks each
        (75_600, 300, (1024, 512, 256, 256, 512, 128)),
    ],
)
def test_fit(queries, keys, expected):
    assert fit(Tiles(1024, 2048, 256, 256, 2048, 128), queries, keys) == Tiles(*expected)
