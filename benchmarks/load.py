"""Loading a full-size checkpoint: seconds and peak anonymous memory of vidax and of diffusers, in one run.

    python benchmarks/load.py [--folder DIR] [--layers 30] [--json]

Writes the transformer of Wan 2.1 1.3B with random weights (float32, sharded, 5.7 GB) where there is none yet, and
loads it as bfloat16, each library in a process of its own, in turns; the page cache is warm for both. Anonymous
memory is what the process holds itself, without mapped files; the floor is the destination, 2 bytes a parameter.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CONFIG = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
}
SHARD_BYTES = 2e9


def write(folder: Path, layers: int) -> None:
    """A sharded float32 checkpoint in diffusers layout; every tensor is the start of one random block."""
    import numpy as np
    from safetensors.numpy import save_file

    from vidax.models.wan.config import WAN21_1_3B
    from vidax.models.wan.dit import DiT
    from vidax.models.wan.mapping import DIT_DIFFUSERS
    from vidax.weights import checkpoint_names

    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * 0.02
    spec = DiT.spec(dataclasses.replace(WAN21_1_3B, layers=layers))
    shapes = {n: leaf.spec.stored_shape for leaf in checkpoint_names(spec, DIT_DIFFUSERS) for n in leaf.names}
    shards: list[dict] = [{}]
    size = 0
    for name, shape in shapes.items():
        tensor = noise[: math.prod(shape)].reshape(shape)  # a view: every tensor is smaller than the block
        size += tensor.nbytes
        if size > SHARD_BYTES:
            shards, size = [*shards, {}], tensor.nbytes
        shards[-1][name] = tensor
    stem = "diffusion_pytorch_model"
    files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_layers": layers}))


class PeakAnonymous(threading.Thread):
    """The most anonymous memory this process held, in bytes, seen every two milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.done = 0, False
        self.before = self.now()

    @staticmethod
    def now() -> int:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(fields["RssAnon"].split()[0])

    def run(self):
        while not self.done:
            self.peak = max(self.peak, self.now())
            time.sleep(0.002)


def load_vidax(folder: Path) -> int:
    import jax
    import jax.numpy as jnp

    from vidax.models.wan.config import dit_config
    from vidax.models.wan.dit import DiT
    from vidax.models.wan.mapping import DIT_DIFFUSERS
    from vidax.nn import parameter_bytes
    from vidax.weights import load, open_checkpoint

    jax.devices()
    config = dit_config(json.loads((folder / "config.json").read_text()), "config.json")
    spec = DiT.spec(config, jnp.bfloat16)
    yield
    model = load(spec, open_checkpoint(folder), DIT_DIFFUSERS)
    jax.block_until_ready(model)
    yield parameter_bytes(spec)


def load_diffusers(folder: Path):
    import torch
    from diffusers import WanTransformer3DModel

    yield
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    yield sum(p.numel() * p.element_size() for p in model.parameters())


def measure(library: str, folder: Path) -> None:
    """Runs in a process of its own; prints one line of JSON. Imports are not timed."""
    steps = {"vidax": load_vidax, "diffusers": load_diffusers}[library](folder)
    next(steps)
    memory = PeakAnonymous()
    memory.start()
    start = time.perf_counter()
    destination = next(steps)
    seconds = time.perf_counter() - start
    memory.done = True
    memory.join()
    row = {"library": library, "seconds": round(seconds, 2), "destination_gb": round(destination / 1e9, 2)}
    print(json.dumps(row | {"peak_anonymous_gb": round((memory.peak - memory.before) / 1e9, 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint here (a temporary one is removed)")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--measure", choices=["vidax", "diffusers"], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "config.json").exists():
            write(folder, arguments.layers)
        rows = []
        for _ in range(arguments.repeats):
            for library in ("vidax", "diffusers"):
                words = [sys.executable, __file__, "--measure", library, "--folder", str(folder)]
                result = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                rows.append(json.loads(result.stdout.splitlines()[-1]))
                if not arguments.json:
                    print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ", flush=True)
        if arguments.json:
            print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
