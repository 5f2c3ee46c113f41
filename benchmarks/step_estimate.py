"""Seconds and memory of a denoising step at full size on TPUs, from the compiled program: no TPU, no weights.

    python benchmarks/step_estimate.py                          # the table of CASES; one to two minutes a row
    python benchmarks/step_estimate.py --only v6e --json
    python benchmarks/step_estimate.py --case wan2.1-t2v-14b 1280x720 v4:2x2x1 seq=4

Compiles `denoise_step`, both guidance branches, for a topology with libtpu (extra: plan) and adds up `program`,
`attention` and `links` as `vidax.planner.schedule` estimates them, which also says what is left out. `moves` stands
beside them.

Cycles of matrix products are within 5 to 30 % of their floor, which the table gives as `floor`: FLOPs of the model over
the peak of all chips.
"""

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

import jax.numpy as jnp
from jax.sharding import Mesh

from vidax.engine.request import card_sampler
from vidax.models.interface import Video
from vidax.models.locate import describe
from vidax.models.wan.dit import step_flops
from vidax.parallel import mesh as meshes
from vidax.planner.chips import devices, parse_topology
from vidax.planner.schedule import collectives, operations, seconds_of
from vidax.weights.memory import program_bytes

TEXT_TOKENS = 512


# (model, size, topology, mesh, published seconds per step and whose)
CASES = (
    ("wan2.1-t2v-14b", "1280x720", "v4:2x2x1", "seq=4", "published engine 111.3 to 141.7"),
    ("wan2.1-t2v-14b", "1280x720", "v4:2x2x1", "tensor=4", ""),
    ("wan2.1-t2v-14b", "1280x720", "v6e:2x4", "seq=8", "MaxDiffusion 6.3 (I2V A14B, Ulysses), 6.7 (T2V)"),
    ("wan2.1-t2v-14b", "1280x720", "v6e:2x4", "data=2,seq=4", ""),
    ("wan2.1-t2v-14b", "832x480", "v4:2x2x1", "seq=4", "published engine 26.1"),
    ("wan2.1-t2v-14b", "832x480", "v6e:2x4", "seq=8", "MaxDiffusion 2.2"),
    ("wan2.1-t2v-14b", "1280x720", "tpu7x:2x2x1", "seq=8", "MaxDiffusion 5.0, T2V A14B 2-D ring 2.6"),
    ("wan2.1-t2v-14b", "1280x720", "v5p:2x2x1", "seq=4", ""),
    ("wan2.1-t2v-14b", "1280x720", "v5e:2x4", "seq=8", ""),
    ("wan2.1-t2v-1.3b", "832x480", "v5e:2x4", "data=2,seq=4", ""),
    ("wan2.1-t2v-1.3b", "832x480", "v4:2x2x1", "seq=4", "published engine 7.0"),
)


def mesh_of(topology: str, mesh: str) -> Mesh:
    """A mesh of a topology's devices, of which it may leave some out."""
    return meshes.make(meshes.parse(mesh), devices(parse_topology(topology)))


def compile_step(
    model: str, size: tuple[int, int], topology: str, mesh: str, frames: int = 81, *, streamed: bool = False
) -> Any:
    """The compiled denoising step of a video of this (width, height) for a topology such as "v4:2x2x1"."""
    card, architecture = describe(model)
    table, video = card_sampler(card, card.steps, card.flow_shift).table(), Video(*size, frames, branches=2)
    return architecture.lower_step(video, table, jnp.bfloat16, mesh_of(topology, mesh), streamed=streamed).compile()


def estimate(model: str, size: str, topology: str, mesh: str, published: str = "") -> dict[str, Any]:
    """One row of the table."""
    (card, _), slice_ = describe(model), parse_topology(topology)
    width, height = map(int, size.split("x"))
    start = time.perf_counter()
    compiled = compile_step(model, (width, height), topology, mesh)
    compile_seconds = time.perf_counter() - start
    text = compiled.as_text()
    seconds = seconds_of(text, slice_, (parts := meshes.parse(mesh).devices))
    flops = 2 * step_flops(card.dit, 21 * (height // 16) * (width // 16), TEXT_TOKENS)
    row = {
        "model": model,
        "size": size,
        "topology": topology,
        "mesh": mesh,
        "program_seconds": seconds.program,
        "attention_seconds": seconds.attention,
        "links_seconds": seconds.links,
        "step_seconds": seconds.total,
        "moves_seconds": seconds.moves,
        "floor_seconds": flops / slice_.chip.flops / parts,
        "device_gb": program_bytes(compiled) / 1e9,
        "limit_gb": slice_.chip.memory_bytes / 1e9,
        "collectives_per_layer": collectives(operations(text)),
        "compile_seconds": compile_seconds,
        "published": published,
    }
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, metavar=("MODEL", "SIZE", "TOPOLOGY", "MESH"), help="this one alone")
    parser.add_argument("--only", default="", help="cases of the table that contain this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [arguments.case] if arguments.case else [case for case in CASES if arguments.only in " ".join(case)]
    rows = []
    if not arguments.json:
        print(
            "model size | slice mesh | program + attention + links = seconds a step (floor) | GB of limit | published"
        )
    for case in cases:
        rows.append(row := estimate(*case))
        if not arguments.json:
            print(
                "{model} {size} | {topology} {mesh} | {program_seconds} + {attention_seconds} + {links_seconds} = "
                "{step_seconds} ({floor_seconds}) | {device_gb} of {limit_gb} | {published} | {collectives_per_layer}, "
                "moves {moves_seconds} s, compiled in {compile_seconds} s".format(**row),
                flush=True,
            )
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
