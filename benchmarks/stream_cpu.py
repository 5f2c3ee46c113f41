"""Streaming on a CPU: seconds a step and anonymous memory, layers resident, in host memory, and on disk, in one run.

    python benchmarks/stream_cpu.py [--steps 50] [--tokens 64] [--json]

Two stacks: the demo, and one of the shape of Wan 2.1 1.3B (30 layers of width 1536, 2.8 GB in bfloat16, random weights
written once in the form of `vidax convert`). Each case is a process of its own. A CPU's device memory is the host's:
streaming copies every layer at each step and hides that only behind another core, so these ratios say that it works and
what it holds, not what it costs on an accelerator. Anonymous memory is what the process itself holds, without mapped
files; growth is from the 5th step to the last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

from load import PeakAnonymous

CASES = (("resident", "memory"), ("mixed:1/2", "memory"), ("streamed", "memory"), ("streamed", "disk"))
MODELS = ("demo", "1.3b-shaped")


def write(path: Path) -> None:
    """The transformer as `vidax convert` writes it; every parameter is the start of one random block."""
    import ml_dtypes
    import numpy as np

    from vidax.models.wan.config import WAN21_1_3B
    from vidax.models.wan.dit import DiT
    from vidax.models.wan.mapping import DIT_DIFFUSERS
    from vidax.weights import Checkpoint, Tensor, checkpoint_names, held

    spec = DiT.spec(WAN21_1_3B)
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * 0.02
    block = noise.astype(ml_dtypes.bfloat16).tobytes()
    tensors = {
        name: Tensor(path, np.dtype(ml_dtypes.bfloat16), leaf.spec.stored_shape, block, 0)
        for leaf in checkpoint_names(spec, DIT_DIFFUSERS)
        for name in leaf.names
    }
    held.write(spec, Checkpoint(path, tensors, {}), DIT_DIFFUSERS, WAN21_1_3B, path, lambda done: None)


def run(model: str, folder: Path, residency: str, source: str, steps: int, tokens: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import vidax
    from vidax.engine.progress import Silent
    from vidax.models.interface import Inputs, Part
    from vidax.models.wan.config import DEMO, TEXT_TOKENS, WAN21_1_3B
    from vidax.models.wan.dit import DiT
    from vidax.nn import parameter_bytes
    from vidax.weights import open_checkpoint
    from vidax.weights.held import HELD
    from vidax.weights.residency import Residency, Ring, parse

    engine = vidax.load(str(folder / "demo"), residency=residency, stream_from=source)
    config = DEMO if model == "demo" else WAN21_1_3B
    (part,) = engine.model.transformers(jnp.bfloat16)
    if model != "demo":
        part = Part(DiT.spec(config), open_checkpoint(folder / "transformer.safetensors"), HELD)
    way = parse(residency)
    assert way is not None
    memory = PeakAnonymous()
    memory.start()
    dit = engine.loader.load("transformer", part, [], {}, Silent(), Residency(way.resident, way.of, source == "disk"))
    side = 2 * int(tokens**0.5)
    random = np.random.default_rng(0)
    noise = random.standard_normal((1, 1, side, side, config.in_channels), np.float32)
    text = random.standard_normal((1, TEXT_TOKENS, config.text_dim), np.float32)
    seconds: list[float] = []
    held: list[int] = []

    def on_step(done: int) -> None:
        seconds.append(time.perf_counter())
        held.append(memory.now())

    sampler = engine.request("a red circle", steps=steps).sampler
    with jax.set_mesh(engine.mesh):
        engine.model.denoise(dit, sampler.table(), range(steps), noise, Inputs(text), None, on_step)
    memory.done = True
    moved = dit.blocks.bytes_moved / steps if isinstance(dit.blocks, Ring) else 0
    return {
        "model": model,
        "residency": residency,
        "stream_from": source,
        "seconds_per_step": round((seconds[-1] - seconds[0]) / (steps - 1), 4),
        "weights_gb": round(parameter_bytes(part.spec) / 1e9, 3),
        "moved_gb_per_step": round(moved / 1e9, 3),
        "waited_seconds": round(dit.blocks.seconds_waited, 2) if isinstance(dit.blocks, Ring) else 0.0,
        "peak_anonymous_gb": round((memory.peak - memory.before) / 1e9, 3),
        "growth_gb": round((held[-1] - held[4]) / 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="of the video, a square number")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        model, folder, residency, source = arguments.case
        print(json.dumps(run(model, Path(folder), residency, source, arguments.steps, arguments.tokens)))
        return
    rows = []
    from vidax import cli

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "transformer.safetensors")
        cli.main(["convert", "demo", "--output", str(folder / "demo"), "--quiet"])
        for model in MODELS:
            for residency, source in CASES:
                command = [sys.executable, __file__, "--case", model, name, residency, source]
                command += ["--steps", str(arguments.steps), "--tokens", str(arguments.tokens)]
                made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                rows.append(made)
                made["ratio"] = round(
                    made["seconds_per_step"] / rows[-1 - CASES.index((residency, source))]["seconds_per_step"], 3
                )
                if not arguments.json:
                    line = "{model:12} {residency:10} {stream_from:6} {seconds_per_step} s a step ({ratio}), "
                    line += "anonymous memory at most {peak_anonymous_gb} of {weights_gb} GB, grown by {growth_gb} GB"
                    print(line.format(**made), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
