"""Against the official Wan module itself, the class of the `wan22` package, on a CPU: bfloat16 as its users run it.

The official code runs on GPUs under autocast: float32 weights, bfloat16 matrix products, and float32 islands. On a
CPU its attention call is replaced by PyTorch's (with the same casts), and its islands, which name CUDA, by the CPU's.
"""

import contextlib
import copy
import importlib.util
import sys
import types
from importlib.metadata import distribution

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vidax.models.wan.dit import DiT, DiTConfig
from vidax.models.wan.mapping import DIT_OFFICIAL
from vidax.nn import map_specs
from vidax.weights import checkpoint_names

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

CONFIG = DiTConfig(dim=256, layers=4, heads=2, mlp_dim=704, text_dim=96, frequency_dim=64)
GRID = (3, 10, 14)  # latent frames, rows, columns: 105 tokens
TEXT_TOKENS = 512


def scaled_dot_product(q, k, v, k_lens=None, window_size=(-1, -1), **_):
    """What flash attention computes: bfloat16 operands, the result in the dtype of q. [B L N K]."""
    assert k_lens is None or int(k_lens.min()) == k.shape[1]
    dtype, half = q.dtype, torch.bfloat16 if scaled_dot_product.half else torch.float32
    q, k, v = (t.transpose(1, 2).to(half) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).to(dtype)


@pytest.fixture(scope="module")
def wan():
    """wan/modules/model.py of the package, without the package's other imports."""
    package = types.ModuleType("official_wan")
    package.__path__ = []
    attention = types.ModuleType("official_wan.attention")
    attention.flash_attention = scaled_dot_product
    sys.modules |= {"official_wan": package, "official_wan.attention": attention}
    file = distribution("wan22").locate_file("wan/modules/model.py")
    spec = importlib.util.spec_from_file_location("official_wan.model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def as_on_cuda(bfloat16: bool):
    """CPU autocast to bfloat16, in which `torch.amp.autocast("cuda", dtype=torch.float32)` is an island without it."""
    real, scaled_dot_product.half = torch.amp.autocast, bfloat16
    torch.amp.autocast = lambda *_, **__: torch.autocast("cpu", enabled=False)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            yield
    finally:
        torch.amp.autocast = real


@pytest.fixture(scope="module")
def official(wan):
    model = wan.WanModel(
        model_type="t2v",
        dim=CONFIG.dim,
        ffn_dim=CONFIG.mlp_dim,
        freq_dim=CONFIG.frequency_dim,
        text_dim=CONFIG.text_dim,
        num_heads=CONFIG.heads,
        num_layers=CONFIG.layers,
        text_len=TEXT_TOKENS,
    )
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(parameter.shape, np.float32))
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(0.2 * noise + ("norm" in name and name.endswith("weight")))
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return model.eval()


def parameters(official, dtype):
    """vidax's tree of the same weights, its large matrices stored in dtype."""
    state = {name: tensor.float().numpy() for name, tensor in official.state_dict().items()}
    spec = DiT.spec(CONFIG, dtype)
    arrays = []
    for _, leaf, names in checkpoint_names(spec, DIT_OFFICIAL):
        layers = [state[name] for name in names]
        layers = [layer.transpose(leaf.transpose) if leaf.transpose else layer for layer in layers]
        arrays.append(jnp.asarray(np.stack(layers).reshape(leaf.shape), leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(map_specs(lambda s: 0, spec)), arrays)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(1)
    latents = rng.standard_normal((16, *GRID), np.float32)
    return latents, 873.0, rng.standard_normal((40, CONFIG.text_dim), np.float32)


def run_official(model, inputs, bfloat16: bool) -> np.ndarray:
    latents, timestep, text = inputs
    tokens = GRID[0] * GRID[1] * GRID[2] // 4
    with as_on_cuda(bfloat16):
        out = model([torch.from_numpy(latents)], torch.tensor([timestep]), [torch.from_numpy(text)], tokens)[0]
    return out.float().numpy().transpose(1, 2, 3, 0)


def run_vidax(model, inputs) -> np.ndarray:
    latents, timestep, text = inputs
    text = np.pad(text, ((0, TEXT_TOKENS - len(text)), (0, 0)))
    context = model.prepare(jnp.asarray(text[None]))
    return np.asarray(model(jnp.asarray(latents.transpose(1, 2, 3, 0)[None]), jnp.array([timestep]), context))[0]


def error(ours: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square of the difference, relative to that of the exact result."""
    return float(np.sqrt(np.mean((ours - exact) ** 2) / np.mean(exact**2)))


def test_float32_equals_the_official_module(official, inputs):
    exact = run_official(official, inputs, bfloat16=False)
    ours = run_vidax(parameters(official, jnp.float32), inputs)
    assert np.abs(ours - exact).max() < 1e-5 * np.abs(exact).max()


def test_bfloat16_weights_are_as_good_as_float32_ones_under_autocast(official, inputs, capsys):
    """Autocast rounds every weight at each use: storing it rounded loses nothing. A bfloat16 residual stream does."""
    exact = run_official(official, inputs, bfloat16=False)
    rounded = copy.deepcopy(official)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name.startswith(("blocks", "text", "patch")) and name.endswith("weight") and "norm" not in name:
                parameter.copy_(parameter.bfloat16())
    errors = {
        "official, autocast, float32 weights": error(run_official(official, inputs, bfloat16=True), exact),
        "official, autocast, bfloat16 weights": error(run_official(rounded, inputs, bfloat16=True), exact),
        "vidax, bfloat16 weights": error(run_vidax(parameters(official, jnp.bfloat16), inputs), exact),
        "diffusers, bfloat16": error(run_diffusers(official, inputs), exact),
    }
    with capsys.disabled():
        print("\n" + "\n".join(f"  {name:38} {value:.2e}" for name, value in errors.items()))
    wide, narrow, ours, residual = errors.values()
    assert f"{wide:.1e}" == f"{narrow:.1e}"
    assert ours < 1.05 * narrow < residual


def run_diffusers(official, inputs) -> np.ndarray:
    """diffusers' class with the same weights, loaded as its users do with torch_dtype=torch.bfloat16."""
    from diffusers import WanTransformer3DModel

    from vidax.models.wan.mapping import DIT_DIFFUSERS

    model = WanTransformer3DModel(
        num_attention_heads=CONFIG.heads,
        attention_head_dim=CONFIG.head_size,
        text_dim=CONFIG.text_dim,
        freq_dim=CONFIG.frequency_dim,
        ffn_dim=CONFIG.mlp_dim,
        num_layers=CONFIG.layers,
    )
    spec = DiT.spec(CONFIG)
    pairs = zip(checkpoint_names(spec, DIT_OFFICIAL), checkpoint_names(spec, DIT_DIFFUSERS), strict=True)
    state = official.state_dict()
    names = {theirs: ours for a, b in pairs for ours, theirs in zip(a.names, b.names, strict=True)}
    model.load_state_dict({theirs: state[ours] for theirs, ours in names.items()}, strict=True)
    model = model.eval().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if any(kept in name for kept in model._keep_in_fp32_modules):
            parameter.data = parameter.data.float()
    latents, timestep, text = inputs
    text = np.pad(text, ((0, TEXT_TOKENS - len(text)), (0, 0)))
    with torch.no_grad():
        out = model(
            torch.from_numpy(latents[None]).bfloat16(),
            torch.tensor([timestep]),
            torch.from_numpy(text[None]).bfloat16(),
        ).sample
    return out[0].float().numpy().transpose(1, 2, 3, 0)
