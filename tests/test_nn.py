"""Modules as pytrees of descriptions and of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vidax import nn


@nn.module
class Block:
    norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    heads: int = nn.static()

    @staticmethod
    def spec(dtype=jnp.float32):
        up, down = ("embed", "mlp"), ("mlp", "embed")
        return Block(
            nn.LayerNorm.spec(4, 1e-6),
            nn.Linear.spec(4, 8, up, dtype),
            nn.Linear.spec(8, 4, down, dtype, bias=False),
            2,
        )

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x)))) / self.heads


@nn.module
class Model:
    embedding: nn.Embedding
    patch: nn.Linear
    blocks: Block
    norm: nn.RMSNorm

    @staticmethod
    def spec():
        patch = nn.Linear.spec(12, 4, (None, "embed"), jnp.float32, kernel=(1, 2, 2))
        return Model(nn.Embedding.spec(10, 4, jnp.bfloat16), patch, nn.stack(Block.spec(), 3), nn.RMSNorm.spec(4, 1e-6))


def test_every_leaf_of_a_spec_is_a_spec_with_an_axis_per_dimension():
    for path, leaf in nn.named_leaves(Model.spec()):
        assert isinstance(leaf, nn.Spec), path
        assert len(leaf.axes) == len(leaf.shape), path


def test_a_forgotten_static_shows_as_a_leaf():
    @nn.module
    class Careless:
        weight: nn.Spec
        heads: int

    spec = Careless(nn.Spec((2,), (None,), jnp.float32, nn.zeros), 2)
    assert [leaf for _, leaf in nn.named_leaves(spec) if not nn.is_spec(leaf)] == [2]


def test_names_of_the_leaves():
    assert [path for path, _ in nn.named_leaves(Model.spec())] == [
        "embedding.weight",
        "patch.weight",
        "patch.bias",
        "blocks.norm.weight",
        "blocks.norm.bias",
        "blocks.up.weight",
        "blocks.up.bias",
        "blocks.down.weight",
        "norm.weight",
    ]
    listed = {"layers": [nn.RMSNorm.spec(2, 1e-6), nn.RMSNorm.spec(2, 1e-6)]}
    assert [path for path, _ in nn.named_leaves(listed)] == ["layers.0.weight", "layers.1.weight"]


def test_stack_adds_an_axis_and_keeps_what_a_layer_is_stored_as():
    one, many = Block.spec().up.weight, nn.stack(Block.spec(), 3).up.weight
    assert (one.stacked, one.shape, one.axes) == (False, (4, 8), ("embed", "mlp"))
    assert (many.stacked, many.shape, many.axes) == (True, (3, 4, 8), ("layers", "embed", "mlp"))
    assert many.stored_shape == one.stored_shape == (8, 4) and many.transpose == one.transpose
    assert nn.stack(Block.spec(), 3).norm.weight.stored_shape == (4,)


def test_abstract_and_init_agree_with_the_spec():
    spec = Model.spec()
    abstract, arrays = nn.abstract(spec), nn.init(spec, jax.random.key(0))
    for (path, s), (_, a), (_, x) in zip(*map(nn.named_leaves, (spec, abstract, arrays)), strict=True):
        assert (s.shape, s.dtype) == (a.shape, a.dtype) == (x.shape, x.dtype), path
    assert nn.parameter_bytes(spec) == sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert not np.array_equal(arrays.blocks.up.weight[0], arrays.blocks.up.weight[1])


def test_abstract_takes_shardings():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert all(leaf.sharding == place for leaf in jax.tree.leaves(nn.abstract(Model.spec(), lambda spec: place)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dot_casts_to_the_weight_and_gives_float32(dtype):
    x = jax.random.normal(jax.random.key(0), (3, 64))
    weight = jax.random.normal(jax.random.key(1), (64, 5), dtype)
    y = nn.dot(x, weight)
    assert y.dtype == jnp.float32
    expected = np.asarray(x.astype(dtype), np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(
        y, expected, rtol=1e-5, atol=1e-5
    )  # float32 sums: a bfloat16 result would be off by 1e-2


def test_a_float32_weight_asks_for_full_precision():
    def dots(dtype):
        return str(jax.make_jaxpr(nn.dot)(jnp.ones((2, 4)), jnp.ones((4, 3), dtype)))

    assert "HIGHEST" in dots(jnp.float32) and "HIGHEST" not in dots(jnp.bfloat16)


def test_linear_is_the_convolution_that_the_checkpoint_holds():
    spec = Model.spec().patch.weight
    assert (spec.shape, spec.stored, spec.transpose) == ((12, 4), (4, 3, 1, 2, 2), (1, 2, 3, 4, 0))
    kernel, x = np.random.default_rng(0).standard_normal((2, 4, 3, 1, 2, 2))  # x: four patches
    weight = jnp.asarray(kernel.transpose(spec.transpose).reshape(spec.shape), jnp.float32)
    y = nn.Linear(weight, jnp.zeros(4))(jnp.asarray(x.reshape(4, 12), jnp.float32))
    np.testing.assert_allclose(y, np.einsum("bcthw,octhw->bo", x, kernel), rtol=1e-5, atol=1e-5)


def test_norms_are_float32_whatever_comes_in():
    x = jax.random.normal(jax.random.key(0), (2, 4), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    y = nn.RMSNorm(jnp.full(4, 2.0), 1e-6)(x)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, 2 * wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6), rtol=1e-5)
    y = nn.LayerNorm(jnp.full(4, 2.0), jnp.ones(4), 1e-6)(x)
    assert y.dtype == jnp.float32
    centred = wide - wide.mean(-1, keepdims=True)
    np.testing.assert_allclose(
        y, 1 + 2 * centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6), rtol=1e-5, atol=1e-6
    )


def test_embedding_gives_float32_rows():
    table = nn.Embedding(jnp.arange(6, dtype=jnp.bfloat16).reshape(3, 2))
    y = table(jnp.array([[2, 0]]))
    assert y.dtype == jnp.float32 and y.tolist() == [[[4.0, 5.0], [0.0, 1.0]]]


def test_modules_go_through_jit_scan_and_slicing():
    model = nn.init(Model.spec(), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4))

    @jax.jit
    def scanned(model, x):
        return model.norm(jax.lax.scan(lambda x, block: (block(x), None), x, model.blocks)[0])

    y = x
    for i in range(3):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], model.blocks)
        assert isinstance(block, Block) and block.heads == 2 and block.up.weight.shape == (4, 8)
        y = block(y)
    np.testing.assert_allclose(scanned(model, x), model.norm(y), rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda model: jnp.sum(scanned(model, x)))(model)
    assert jax.tree.structure(gradient) == jax.tree.structure(model)
