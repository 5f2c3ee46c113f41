"""Full-width pieces of Wan 2.1 on a CPU, vidax against PyTorch (diffusers, transformers), alternating in one process.

    python benchmarks/cpu_vs_diffusers.py [--repeats 3] [--json]

Pieces: four transformer blocks of the 1.3B model at 832x480x17 (7,800 tokens, one sample), two layers of UMT5-XXL
    over 512 tokens, the VAE decoder at 256x256x5 (two latent frames). Random weights. The ratio is PyTorch's best
    time over vidax's: above 1 vidax is faster. The floor is the piece's operations over what this machine reaches in
    a large float32 matrix product of NumPy.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from vidax.models.towers.t5 import T5Encoder
from vidax.models.wan.config import UMT5_XXL, WAN21_1_3B, WAN21_VAE
from vidax.models.wan.dit import DiT, step_flops
from vidax.models.wan.vae import Decoder
from vidax.nn import abstract, map_specs

Run = Callable[[], None]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def random_parameters(spec):
    """Small random values, quickly."""
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32) * 0.02, s.dtype)  # noqa: E731
    return map_specs(draw, spec)


def dit_blocks(dtype: str) -> tuple[Run, Run, float]:
    import dataclasses

    config = dataclasses.replace(WAN21_1_3B, layers=4)
    model = random_parameters(DiT.spec(config, jnp.dtype(dtype)))
    latents, context = jnp.ones((1, 5, 60, 104, 16)), jnp.ones((1, 512, config.dim), jnp.dtype(dtype))
    step = jax.jit(lambda m, z, t, c: m(z, t, c))
    theirs = diffusers.WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=4
    ).to(TORCH_DTYPES[dtype])
    z = torch.ones(1, 16, 5, 60, 104, dtype=TORCH_DTYPES[dtype])
    text = torch.ones(1, 512, 4096, dtype=TORCH_DTYPES[dtype])
    return (
        lambda: step(model, latents, jnp.array([500.0]), context).block_until_ready(),
        lambda: theirs(z, torch.tensor([500.0]), text, return_dict=False),
        step_flops(config, 5 * 30 * 52),
    )


def umt5_layers(dtype: str) -> tuple[Run, Run, float]:
    import dataclasses

    config = dataclasses.replace(UMT5_XXL, layers=2, vocabulary=1024)
    model = random_parameters(T5Encoder.spec(config, jnp.dtype(dtype)))
    ids, lengths = jnp.ones((1, 512), jnp.int32), jnp.array([512])
    encode = jax.jit(lambda m, i, n: m(i, n))
    theirs = transformers.UMT5EncoderModel(
        transformers.UMT5Config(vocab_size=1024, d_model=4096, d_kv=64, d_ff=10240, num_layers=2, num_heads=64)
    ).to(TORCH_DTYPES[dtype])
    tokens, mask = torch.ones(1, 512, dtype=torch.long), torch.ones(1, 512, dtype=torch.long)
    flops = 2 * 2 * 512 * (4 * 4096**2 + 3 * 4096 * 10240 + 2 * 512 * 4096)
    return (
        lambda: encode(model, ids, lengths).block_until_ready(),
        lambda: theirs(tokens, mask),
        flops,
    )


def vae_decoder(dtype: str) -> tuple[Run, Run, float]:
    """Float32 always, as the official code runs it."""
    model = random_parameters(Decoder.spec(WAN21_VAE))
    latents = jnp.ones((1, 2, 32, 32, 16))
    decode = jax.jit(lambda m, z, cache: m(z, cache))

    def ours():
        _, cache = decode(model, latents[:, :1], None)
        decode(model, latents[:, 1:], cache)[0].block_until_ready()

    theirs = diffusers.AutoencoderKLWan()
    z = torch.ones(1, 16, 2, 32, 32)
    shapes = abstract(Decoder.spec(WAN21_VAE))
    _, cache = jax.eval_shape(lambda m, z: m(z), shapes, latents[:, :1])
    lowered = decode.lower(shapes, latents[:, 1:], cache)
    return ours, lambda: theirs.decode(z), 1.25 * lowered.cost_analysis()["flops"]


PIECES = {"dit": dit_blocks, "umt5": umt5_layers, "vae": vae_decoder}


def best_seconds(runs: list[Run], repeats: int) -> list[float]:
    """The best time of each, taken in turns so that what else the machine does hits all of them."""
    for run in runs:
        run()
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def matmul_flops_per_second() -> float:
    a = np.ones((2048, 2048), np.float32)
    return 2 * 2048**3 / best_seconds([lambda: np.matmul(a, a)], 5)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pieces", nargs="+", default=list(PIECES), choices=PIECES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    peak = matmul_flops_per_second()
    rows = []
    with torch.no_grad():
        for piece in arguments.pieces:
            for dtype in ("float32",) if piece == "vae" else TORCH_DTYPES:
                ours, theirs, flops = PIECES[piece](dtype)
                vidax, pytorch = best_seconds([ours, theirs], arguments.repeats)
                row = {"piece": piece, "dtype": dtype, "vidax_seconds": vidax, "torch_seconds": pytorch}
                rows.append(row | {"ratio": pytorch / vidax, "floor_seconds": flops / peak})
                if not arguments.json:
                    print(
                        f"{piece:5} {dtype:9} vidax {vidax:7.2f} s  torch {pytorch:7.2f} s  ratio {pytorch / vidax:.2f}"
                        f"  float32 floor {flops / peak:6.2f} s",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print(f"jax {jax.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, {peak / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
