"""Device memory of 14B's denoising step with its layers resident, half resident and streamed, on TPUs, without a TPU.

    python benchmarks/residency_memory.py                       # every case: a minute or two each
    python benchmarks/residency_memory.py --only v5e --json

Compiles one layer (`through`), both guidance branches, bfloat16, for a topology with libtpu (extra: plan), and adds
what lies beside it: `models.interface.Footprint`, the one that `--residency auto` uses. Device bytes are arguments +
temporaries + outputs - aliased; weights in pinned host memory are not among them. With --step the resident and the
streamed row are the program of a whole step instead, which copies layers from host memory itself. With --decode the
table is that of `decode_chunk` instead, four frames in float32 with the caches of those before them: several minutes
each; 1280x720 takes 12.7 GB of one v5e, 6.8 GB of each of four v4.

The published engine takes 15.2 GB (streamed layer by layer) to 26.1 GB (resident) of each v4 chip at 1280x720x81.
"""

import argparse
import json
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

import jax.numpy as jnp
from step_estimate import compile_step, mesh_of

from vidax.models.interface import Video
from vidax.models.locate import describe
from vidax.planner.chips import parse_topology
from vidax.weights.memory import program_bytes
from vidax.weights.residency import RESIDENT, STREAMED, Residency

MODEL = "wan2.1-t2v-14b"
SIZES = ("832x480", "1280x720")
SLICES = (
    ("v4-8", "seq=4"),
    ("v5e-1", "seq=1"),
    ("v5e-4", "seq=4"),
    ("v5e-8", "seq=8"),
    ("v6e-1", "seq=1"),
    ("v6e-4", "seq=4"),
    ("v6e-8", "seq=8"),
)
FRAMES = 81


def rows(size: str, topology: str, mesh: str, step: bool) -> list[dict[str, Any]]:
    width, height = map(int, size.split("x"))
    made = mesh_of(topology, mesh)
    (_, model), shape = describe(MODEL), (Video(width, height, FRAMES, branches=2), jnp.bfloat16, made)
    needs = model.footprint(*shape, model.lower_layer(*shape).compile())
    limit = parse_topology(topology).chip.memory_bytes
    found = []
    for residency in (RESIDENT, Residency(1, 2), STREAMED):
        device = needs.total(residency)
        if step and residency in (RESIDENT, STREAMED):
            streams = residency == STREAMED
            device = program_bytes(compile_step(MODEL, (width, height), topology, mesh, FRAMES, streamed=streams))
        streamed = needs.layers - residency.count(needs.layers)
        found.append(
            {
                "model": MODEL,
                "size": size,
                "frames": FRAMES,
                "topology": topology,
                "residency": str(residency),
                "device_gb": round(device / 1e9, 2),
                "host_gb": round(streamed * needs.layer * made.size / 1e9, 2),
                "limit_gb": round(limit / 1e9, 2),
            }
        )
    return found


def decode_row(size: str, topology: str, mesh: str) -> dict[str, Any]:
    width, height = map(int, size.split("x"))
    made, (_, model) = mesh_of(topology, mesh), describe(MODEL)
    program = model.lower_decode(Video(width, height, FRAMES, branches=2), made).compile()
    return {
        "model": "wan2.1-vae",
        "size": size,
        "topology": topology,
        "device_gb": round(program_bytes(program) / 1e9, 2),
        "limit_gb": round(parse_topology(topology).chip.memory_bytes / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases that contain this text, as in 'v5e' or '1280x720'")
    parser.add_argument(
        "--step", action="store_true", help="compile the whole step where the layers are all resident or all streamed"
    )
    parser.add_argument("--decode", action="store_true", help="the autoencoder's decoder instead of the step")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    for size in SIZES:
        for topology, mesh in SLICES:
            if arguments.only in f"{size} {topology} {mesh}":
                decode = arguments.decode
                for row in [decode_row(size, topology, mesh)] if decode else rows(size, topology, mesh, arguments.step):
                    found.append(row)
                    if not arguments.json:
                        line = "{size} {topology:6} {device_gb:6} of {limit_gb} GB"
                        line = line if decode else line + ", {residency}, host {host_gb} GB"
                        print(line.format(**row), flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
