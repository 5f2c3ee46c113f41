"""Whether streamed layers arrive in time on TPUs: a layer's seconds of computation against those of its copy.

    python benchmarks/stream_overlap.py                  # every case: half a minute each
    python benchmarks/stream_overlap.py --only v6e --json

For the ring (`weights/residency.py`), whose copy of a layer has the whole computation of the layer before it. Seconds
of computation are those of the compiled layer (`step_estimate.py` says how); a copy is the layer's bytes of one device
over its host link. exposed = 40 layers x what of a copy is longer than a layer; the first layer's copy starts in the
step before. The bound is the larger of both sums. No row is measured: on a TPU a record's `streaming` says what was
waited for.
"""

import argparse
import json
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

import jax.numpy as jnp
from step_estimate import mesh_of, seconds_of

from vidax.models.wan.config import WAN21_14B
from vidax.models.wan.dit import Block
from vidax.models.wan.programs import lower_layer
from vidax.nn import placement
from vidax.weights.memory import split_bytes

# Bytes per second from the host to one chip: jax-ml.github.io/scaling-book/tpus counts 1.5e10 for v5e and v6e; the same
# is taken for v4.
HOST_LINK = 1.5e10

CASES = (("v4:2x2x1", "seq=4"), ("v5e:2x4", "seq=8"), ("v6e:2x4", "seq=8"))
SIZES = ("832x480", "1280x720")
FRAMES = (81, 17)


def row(size: str, frames: int, topology: str, mesh: str) -> dict[str, Any]:
    width, height = map(int, size.split("x"))
    made = mesh_of(topology, mesh)
    latents = (1, (frames - 1) // 4 + 1, height // 8, width // 8, WAN21_14B.in_channels)
    compiled = lower_layer(WAN21_14B, latents, 2, made).compile()
    compute = sum(seconds_of(compiled.as_text(), topology, made.size))
    copy = split_bytes(Block.spec(WAN21_14B, jnp.bfloat16), placement(made)) / HOST_LINK
    layers = WAN21_14B.layers
    exposed = layers * max(0.0, copy - compute)
    return {
        "model": "wan2.1-t2v-14b",
        "size": size,
        "frames": frames,
        "topology": f"{topology.partition(':')[0]}-{made.size}",
        "residency": "streamed",
        "mechanism": "ring",
        "default": True,
        "step_seconds": round(layers * compute + exposed, 3),
        "transfer_seconds": round(layers * copy, 3),
        "exposed_seconds": round(exposed, 3),
        "bound_seconds": round(layers * max(copy, compute), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases that contain this text, as in 'v5e' or '832x480 17'")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for topology, mesh in CASES:
        for size in SIZES:
            for frames in FRAMES:
                if arguments.only in f"{size} {frames} {topology} {mesh}":
                    rows.append(found := row(size, frames, topology, mesh))
                    if not arguments.json:
                        line = (
                            "{topology} {size} {frames:2} frames: a step {step_seconds} s, copies {transfer_seconds} s"
                        )
                        print((line + ", of them exposed {exposed_seconds} s").format(**found), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
