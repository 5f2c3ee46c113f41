"""Operations against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, TOLERANCE, Case, attention_in_float64, relative_error

from vidax.models.towers.t5 import relative_buckets
from vidax.ops import attention as attention_module
from vidax.ops import conv, rope
from vidax.ops.attention import REFERENCE_SCORE_BYTES, attention, choose
from vidax.ops.attention.chunked import chunked
from vidax.ops.attention.reference import reference
from vidax.ops.conv import conv3d
from vidax.ops.rope import axis_angles, grid_table, rotate

# Attention

# Blocks so small that these cases have several, the last of them not full
IMPLEMENTATIONS = {
    "reference": jax.jit(reference, static_argnames="scale"),
    "chunked": jax.jit(functools.partial(chunked, query_block=100, key_block=200), static_argnames="scale"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_attention(name, case):
    out = IMPLEMENTATIONS[name](*case.inputs, **case.options, scale=case.scale)
    assert out.dtype == case.dtype
    assert relative_error(out, case.expected) < case.tolerance


def test_chunked_with_its_own_blocks():
    case = Case(600, 1100, kv_lengths=(1100, 1030))
    out = jax.jit(functools.partial(attention, impl="chunked"))(*case.inputs, kv_lengths=case.lengths)
    assert relative_error(out, case.expected) < TOLERANCE[case.dtype]


def test_keys_beyond_a_length_are_not_read():
    case = Case(257, 257, kv_lengths=(1, 129))
    q, k, v = case.inputs
    beyond = jnp.arange(257)[:, None, None] >= case.lengths[:, None, None, None]
    for implementation in IMPLEMENTATIONS.values():
        attend = functools.partial(implementation, kv_lengths=case.lengths, scale=case.scale)
        wild = attend(q, jnp.where(beyond, 1e4, k), jnp.where(beyond, 1e4, v))
        np.testing.assert_array_equal(wild, attend(q, k, v))


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_real_keys(name):
    q, k, v = Case(9, 20, 64).inputs
    out = attention(q, k, v, real_keys=13, impl=name)
    assert np.array_equal(out, attention(q, k[:, :13], v[:, :13], impl=name))
    with pytest.raises(ValueError, match="real_keys goes with neither segments nor a bias"):
        attention(q, k, v, real_keys=13, bias=jnp.zeros((2, 9, 20)), impl="reference")


def test_bias_and_scale():
    """As T5 has them: an additive bias, and scores that are not scaled."""
    q, k, v = Case(129, 129).inputs
    bias = np.random.RandomState(1).standard_normal((2, 129, 129)).astype(np.float32)
    lengths = jnp.array([129, 50])
    out = jax.jit(functools.partial(attention, scale=1.0))(q, k, v, bias=jnp.asarray(bias), kv_lengths=lengths)
    expected = attention_in_float64(q, k, v, bias=bias, scale=1.0, lengths=(129, 50))
    assert relative_error(out, expected) < 2e-5


def test_choose():
    # Wan 2.1 at 832x480, 81 frames: 32760 tokens
    assert choose((1, 32760, 12, 128), (1, 32760, 12, 128)).name == "chunked"
    assert "51.51 GB" in choose((1, 32760, 12, 128), (1, 32760, 12, 128)).reason
    assert choose((2, 96, 6, 32), (2, 96, 6, 32)).name == "reference"
    assert choose((1, 32760, 12, 128), (1, 32760, 12, 128), biased=True).name == "reference"
    limit = REFERENCE_SCORE_BYTES // 4
    assert choose((1, limit, 1, 64), (1, 1, 1, 64)).name == "reference"
    assert choose((1, limit + 1, 1, 64), (1, 1, 1, 64)).name == "chunked"


@pytest.mark.parametrize(
    ("platform", "dtype", "size", "name"),
    [
        ("tpu", jnp.bfloat16, 128, "pallas_tpu"),
        ("tpu", jnp.float32, 128, "chunked"),
        ("gpu", jnp.bfloat16, 128, "cudnn"),
        ("gpu", jnp.bfloat16, 256, "chunked"),
        ("gpu", jnp.float32, 128, "chunked"),
        ("cpu", jnp.bfloat16, 128, "chunked"),
    ],
)
def test_choose_by_platform(monkeypatch, platform, dtype, size, name):
    monkeypatch.setattr(attention_module, "kind_in_force", lambda: (platform, "some kind"))
    shape = (1, 32760, 12, size)
    assert choose(shape, shape, dtype).name == name
    assert choose((1, 9, 2, 64), (1, 9, 2, 64), dtype).name == "reference"  # small
    if platform == "gpu":
        assert choose(shape, shape, dtype, segments=True).name == "chunked"


def test_cudnn_is_asked_for_what_the_others_do(monkeypatch):
    """With XLA's implementation of the same call in the place of cuDNN's, which needs a GPU."""
    call = jax.nn.dot_product_attention

    def instead(*operands, implementation, **options):
        assert implementation == "cudnn"
        return call(*operands, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    case = Case(129, 257, 64, "bfloat16", kv_lengths=(257, 100))
    q, k, v = case.inputs
    out = attention(q.astype(jnp.float32), k, v, kv_lengths=case.lengths, scale=case.scale, impl="cudnn")
    assert relative_error(out, case.expected) < 2e-2  # XLA's rounds the weights before it divides by their sum
    with pytest.raises(ValueError, match="cuDNN attention takes no segments; use impl='chunked'"):
        attention(q, k, v, segments=(jnp.zeros((2, 129)), jnp.zeros((2, 257))), impl="cudnn")
    with pytest.raises(ValueError, match="cuDNN attention takes bfloat16 or float16, not float32"):
        attention(*Case(9, 9, 64).inputs, impl="cudnn")


def test_refusals():
    q, k, v = Case(1, 1).inputs
    with pytest.raises(ValueError, match="no attention implementation is called 'flash'; there are"):
        attention(q, k, v, impl="flash")
    with pytest.raises(ValueError, match="chunked attention takes no additive bias; use impl='reference'"):
        attention(q, k, v, impl="chunked", bias=jnp.zeros((2, 1, 1)))


# Rotary positions


@pytest.mark.parametrize(
    ("grid", "channels"), [((3, 4, 6), (8, 8, 8)), ((5, 3, 2), (8, 6, 6)), ((21, 2, 3), (44, 42, 42))]
)
def test_rope(grid, channels):
    """Against the official code's form: pairs of channels as complex numbers, turned by the angles of three axes."""
    size, length = sum(channels), int(np.prod(grid))
    x = np.random.RandomState(0).standard_normal((2, length, 3, size)).astype(np.float32)
    position = np.stack(np.unravel_index(np.arange(length), grid), -1)  # [L 3], frames slowest
    angles = [position[:, [i]] * 10000.0 ** -(np.arange(0, width, 2) / width) for i, width in enumerate(channels)]
    turned = x[..., ::2] + 1j * x[..., 1::2].astype(np.float64)
    turned = turned * np.exp(1j * np.concatenate(angles, -1))[:, None]
    expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    ours = rotate(jnp.asarray(x), *grid_table(grid, channels))
    assert ours.dtype == jnp.float32
    assert relative_error(ours, expected) < 3e-7


def test_rope_pairs_by_a_product():
    """As a TPU does it: the same bits as by moving channels, for numbers of any size."""
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 64)).astype(np.float32) * np.float32(0.3) ** np.arange(64)
    np.testing.assert_array_equal(rope._partners_by_product(jnp.asarray(x)), rope._partners(jnp.asarray(x)))


def test_rope_at_the_origin_changes_nothing():
    x = np.random.RandomState(0).standard_normal((1, 1, 2, 24)).astype(np.float32)
    np.testing.assert_array_equal(rotate(jnp.asarray(x), *grid_table((1, 1, 1), (8, 8, 8))), x)


def test_axis_angles():
    np.testing.assert_allclose(axis_angles(3, 4), [[0, 0], [1, 0.01], [2, 0.02]])


# Convolutions


def conv3d_in_float64(x, weight, stride, padding) -> np.ndarray:
    x, weight = np.pad(np.asarray(x, np.float64), ((0, 0), *padding, (0, 0))), np.asarray(weight, np.float64)
    kernel = weight.shape[:3]
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:4], kernel, stride, strict=True)]
    out = np.zeros((x.shape[0], *sizes, weight.shape[-1]))
    for tap in np.ndindex(*kernel):
        window = [slice(t, t + s * (n - 1) + 1, s) for t, n, s in zip(tap, sizes, stride, strict=True)]
        out += x[:, window[0], window[1], window[2]] @ weight[tap]
    return out


FORMS = {"chosen": conv3d, "direct": conv._direct, "folded": conv._folded, "stripwise": conv._stripwise}


@pytest.mark.parametrize("size", [(6, 8), (8, 6), (7, 7)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((3, 3, 3), (1, 1, 1), ((0, 0), (1, 1), (1, 1))),
        ((3, 3, 3), (1, 1, 1), ((2, 0), (1, 1), (1, 1))),
        ((3, 1, 1), (2, 1, 1), ((0, 0), (0, 0), (0, 0))),
        ((1, 3, 3), (1, 2, 2), ((0, 0), (0, 1), (0, 1))),
        ((1, 1, 1), (1, 1, 1), ((0, 0), (0, 0), (0, 0))),
    ],
)
def test_conv3d(form, size, kernel, stride, padding, monkeypatch):
    monkeypatch.setattr(conv, "LARGE_FRAME", 0)  # two strips of the side that is even
    random = np.random.RandomState(0)
    x = random.standard_normal((2, 5, *size, 3)).astype(np.float32)
    weight = random.standard_normal((*kernel, 3, 4)).astype(np.float32)
    ours = form(jnp.asarray(x), jnp.asarray(weight), stride=stride, padding=padding)
    assert relative_error(ours, conv3d_in_float64(x, weight, stride, padding)) < 1e-6


def test_conv3d_moves_a_pixel():
    x = jnp.zeros((1, 3, 3, 3, 1)).at[0, 1, 1, 1].set(7)
    weight = jnp.zeros((3, 3, 3, 1, 1)).at[0, 1, 2].set(1)  # out[f, h, w] = x[f - 1, h, w + 1]
    out = conv3d(x, weight, padding=((1, 1),) * 3)
    np.testing.assert_array_equal(np.argwhere(out), [[0, 2, 1, 0, 0]])


# Position buckets of T5


def test_relative_buckets():
    """Four buckets a side, to a distance of 16: 0, 1, and from 2 on 2 + 2 log(distance / 2) / log 8, at most 3."""
    behind = [0, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    table = relative_buckets(10, 8, 16)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table[9, ::-1], behind)
    np.testing.assert_array_equal(table[0], [0, *(bucket + 4 for bucket in behind[1:])])
    for offset in range(-9, 10):  # only the distance counts
        assert len(set(np.diagonal(table, offset))) == 1


def test_relative_buckets_of_umt5():
    """Exact up to 7; from 8 on bucket 8 + k begins at 8 * 2^(k / 2); all from 128 * 2^-0.5 on share the last."""
    behind = relative_buckets(200, 32, 128)[199, ::-1]
    np.testing.assert_array_equal(behind[:8], range(8))
    starts = [np.argmax(behind == bucket) for bucket in range(8, 16)]
    np.testing.assert_array_equal(starts, [8, 12, 16, 23, 32, 46, 64, 91])
    assert set(behind[91:]) == {15}
