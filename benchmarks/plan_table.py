"""Write the planner's table of decoders and encoders (src/vidax/planner/programs.json): compiled at full size, minutes
each.

    python benchmarks/plan_table.py                 # every case that the table does not have in these versions
    python benchmarks/plan_table.py --only v5e-1    # cases that contain this text

Rows of other versions of JAX and libtpu are dropped.
"""

import argparse
import functools
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

import jax.numpy as jnp

from vidax.models.interface import Video
from vidax.models.locate import describe
from vidax.parallel import mesh as meshes
from vidax.parallel.mesh import MeshShape
from vidax.planner import phases, plan

FILE = Path(phases.__file__).with_name("programs.json")
# One of the models that share an autoencoder.
WAN21, WAN22, COGVIDEOX = "wan2.1-t2v-14b", "wan2.2-ti2v-5b", "cogvideox1.5-5b"
CASES = (
    (WAN21, "v5e-1", (1280, 720)),
    (WAN21, "v4-8", (1280, 720)),
    (WAN22, "v6e-1", (1280, 704)),
    (WAN22, "v5e-4", (1280, 704)),
    (WAN21, "v6e-1", (1280, 720)),
    (WAN21, "v5e-8", (1280, 720)),
    (WAN21, "v6e-8", (1280, 720)),
    (WAN21, "v4-8", (832, 480)),
    (WAN21, "v5e-8", (832, 480)),
    (WAN21, "v6e-1", (832, 480)),
    (COGVIDEOX, "v4-8", (1360, 768)),
    (COGVIDEOX, "v6e-8", (1360, 768)),
    (COGVIDEOX, "v4-8", (720, 480)),
    (COGVIDEOX, "v6e-8", (720, 480)),
    (COGVIDEOX, "v6e-1", (720, 480)),
    (COGVIDEOX, "v6e-1", (360, 240)),  # a tile
)
ENCODERS = (("cogvideox1.5-5b-i2v", "v4-8", (1360, 768)),)  # of one frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    held = json.loads(FILE.read_text())
    rows = held["rows"] if held["versions"] == plan.versions() else []
    cases = [(case, part) for part, cases in (("decoder", CASES), ("encoder", ENCODERS)) for case in cases]
    for (network, name, (width, height)), part in cases:
        card, model = describe(network)
        specs = model.specs(jnp.float32)[part]
        site = plan.there(name)
        assert site.topology is not None
        chip, count = site.topology.chip, len(site.devices)
        key = {"network": phases.digest(specs), "pixels": width * height, "chip": chip.name, "devices": count}
        if arguments.only not in f"{network} {name} {width}x{height} {part}" or any(
            key.items() <= row.items() for row in rows
        ):
            continue
        mesh = meshes.make(MeshShape(seq=count), site.devices)
        target = phases.Target(mesh=mesh, topology=site.topology, budget=None, compiles=True)
        video = Video(width, height, card.frames, branches=2, images=card.images[0])
        lower = model.lower_decode if part == "decoder" else model.lower_encode
        program, _ = phases.compiled(functools.partial(lower, video, mesh), target)
        rows.append(
            key
            | {
                "weights_bytes": phases.device_weights(specs, mesh),
                "device_bytes": program.device_bytes,
                "seconds": program.seconds,
                "compile_seconds": program.compile_seconds,
                "unknown": list(program.unknown),
            }
        )
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        FILE.write_text(f'{{"versions": {json.dumps(plan.versions())}, "rows": [\n  {lines}\n]}}\n')
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
