"""The planner's arithmetic against published timings: other engines' set-ups, priced as the planner prices our own.

    python benchmarks/plan_calibration.py                # a table; the first time half an hour, then seconds
    python benchmarks/plan_calibration.py --only 5B --json
    python benchmarks/plan_calibration.py --markdown     # the tables of docs/planner.md

A step is compiled with libtpu (extra: plan) as this package computes it, on the other engine's mesh, and

    attention   is replaced by the other engine's kernel: the counted cycles (ops/attention/tiles.json) of JAX's flash
                attention at its default tiles, with the segment ids that mask its padding, by queries x keys in whole
                tiles; for MaxDiffusion, of splash attention
    transfer    is added for weights that are sent anew in every step: bytes over the host link, hidden by nothing
    modulation  is added where it is one for each token (Wan 2.2): bytes over the memory's rate, read once in a layer
    decode      is operations over the peak (`phases.SHARE_OF_PEAK`) of one chip, on which it runs as on all others, in
                bfloat16; with it, for image-to-video, the encoding of the conditioning video

The published engine counts the first call of every jitted function as compilation and divides the rest by all steps;
so do we (`published_seconds`). Nothing is fitted to the measured values.

Image-to-video models are compiled as text-to-video ones of their size: of their 20 further input channels the patch
embedding alone knows.

What was compiled is kept in the system's temporary folder.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported

import jax
import jax.numpy as jnp
from step_estimate import mesh_of

from vidax.models.programs import Known, lower_layer, lower_step
from vidax.models.towers.t5 import T5Config, T5Encoder
from vidax.models.wan.config import TEXT_TOKENS, WAN21_1_3B, WAN21_14B, WAN21_VAE
from vidax.models.wan.dit import Block, DiT, DiTConfig
from vidax.models.wan.vae import Decoder, Encoder, VAEConfig
from vidax.nn import abstract, named_leaves, placement
from vidax.ops.attention import pallas_tpu
from vidax.ops.flops import flops
from vidax.parallel import mesh as meshes
from vidax.planner import store
from vidax.planner.chips import Chip, parse_topology
from vidax.planner.phases import SHARE_OF_PEAK
from vidax.planner.plan import versions
from vidax.planner.schedule import seconds_of
from vidax.weights.memory import program_bytes, split_bytes

# Wan-Video/Wan2.2, wan/configs and wan/modules/vae2_2.py, whose decoder is 8 times the latents' size inside.
WAN22_5B = DiTConfig(dim=3072, layers=30, heads=24, mlp_dim=14336, in_channels=48, out_channels=48)
WAN22_VAE = dataclasses.replace(
    WAN21_VAE, base_dim=256, latent_channels=48, latents_mean=(0.0,) * 48, latents_std=(1.0,) * 48
)
IMAGE_TOKENS = 257  # of CLIP, which Wan 2.1's image-to-video models attend to beside the text
BRANCHES = 2
NEAR = 0.25

Record = dict[str, float]  # what a compiled step takes, see `compiled`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What was timed, and the published figures.

    chunk: layers that are sent to the device together, in every step; None where all stay on it.
    token_modulation: it is computed for each token. measured_seconds: for each step, or of the whole run over them.
    first_call_counts: the first call of each program is part of the figure. why: it is far from the estimate.
    """

    name: str
    config: DiTConfig
    latents: tuple[int, int, int]  # frames, height, width
    steps: int
    measured_seconds: float
    measured_gb: float | None = None
    mesh: str = "tensor=4"
    topology: str = "v4:2x2x1"
    kernel: str = "flash_default_segments"
    weight_bytes: int = 2
    chunk: int | None = None
    image_tokens: int = 0
    encoded_frames: int = 0  # latent frames of a conditioning video
    token_modulation: bool = False
    vae: VAEConfig = WAN21_VAE
    decode_parts: int = 1
    first_call_counts: bool = False
    why: str = ""

    @property
    def chip(self) -> Chip:
        return parse_topology(self.topology).chip

    @property
    def devices(self) -> int:
        return meshes.parse(self.mesh).devices

    @property
    def tokens(self) -> int:
        return math.prod(size // patch for size, patch in zip(self.latents, self.config.patch, strict=True))


def padded(length: int, tile: int) -> int:
    return -(-length // tile) * tile


def kernel_cycles(row: dict[str, Any], queries: int, keys: int) -> float:
    """Of one head, from a counted row of tiles.json: by queries x keys in whole tiles."""

    def area(queries: int, keys: int) -> int:
        return padded(queries, row["tiles"][0]) * padded(keys, row["tiles"][1])

    return row["cycles"] * area(queries, keys) / area(row["tokens"], row["keys"])


def attention_seconds(
    row: dict[str, Any], config: DiTConfig, tokens: int, others: list[int], devices: int, clock_hz: float
) -> float:
    """Of a step on each device, which has its part of the heads of both branches. others: keys of cross-attention."""
    cycles = sum(kernel_cycles(row, tokens, keys) for keys in (tokens, *others))
    return config.layers * BRANCHES * config.heads / devices * cycles / clock_hz


def transfer_seconds(layer_bytes: float, layers: int, bytes_per_second: float) -> float:
    """All layers sent to a device in a step, whatever the chunk, while nothing else happens."""
    return layers * layer_bytes / bytes_per_second


def modulation_bytes(config: DiTConfig, tokens: int, seq: int) -> int:
    """Six float32 vectors for each token of a device, in both branches."""
    return 6 * 4 * BRANCHES * tokens // seq * config.dim


def published_seconds(
    step: float, steps: int, calls: int, once: float, once_calls: int, first_call_counts: bool = False
) -> float:
    """What is published for each step: the seconds of all calls but the first of each program, over the steps.

    calls: of a step's program in the whole run. once: seconds of the decoder, in once_calls.
    """
    if first_call_counts:
        return step + once / steps
    return (step * steps * (calls - 1) / calls + once * (once_calls - 1) / max(once_calls, 1)) / steps


def peak_bytes(
    activations: float, layer_bytes: float, resident_layers: int, ends_bytes: float, others_bytes: float
) -> float:
    """Of a device while it denoises: layers that are there, the rest of the network, and what else is held."""
    return activations + resident_layers * layer_bytes + ends_bytes + others_bytes


def parameters(spec: Any) -> int:
    return sum(leaf.size for _, leaf in named_leaves(spec))


def text_encoder_bytes(tensor: int) -> float:
    """bfloat16, layers split over `tensor`, and a table of embeddings on every device."""
    config = T5Config()
    table = config.vocabulary * config.dim
    return 2 * ((parameters(T5Encoder.spec(config, jnp.bfloat16)) - table) / tensor + table)


def frame_flops(network: Any, chunks: tuple[tuple[int, ...], ...]) -> float:
    """Of a decoder or encoder for the second of two chunks of these shapes."""
    first, second = (jax.ShapeDtypeStruct((1, *chunk), jnp.float32) for chunk in chunks)
    _, cache = jax.eval_shape(lambda model, x: model(x, None), network, first)
    return sum(flops(lambda model, *inputs: model(*inputs), network, second, cache).values())


def coding_seconds(setup: Setup) -> float:
    return coding_flops(setup) / setup.decode_parts / (SHARE_OF_PEAK * setup.chip.flops)


def coding_flops(setup: Setup) -> float:
    """Decoding the video, and encoding the one it is conditioned on; every latent frame as one after the first."""
    frames, height, width = setup.latents
    latent = (1, height, width, setup.vae.latent_channels)
    found = frames * frame_flops(abstract(Decoder.spec(setup.vae)), (latent, latent))
    if setup.encoded_frames:
        space, time = setup.vae.space_factor, setup.vae.time_factor
        pixels = (height * space, width * space, 3)
        found += setup.encoded_frames * frame_flops(abstract(Encoder.spec(setup.vae)), ((1, *pixels), (time, *pixels)))
    return found


def compiled(setup: Setup) -> Record:
    """Seconds of a step by what they are spent on, without attention, and bytes of a device beside the weights. Where
    layers are sent in chunks, from the program of one of them, as the planner has it for streamed layers.
    """
    streamed = setup.chunk is not None
    key = (setup.config, setup.latents, setup.topology, setup.mesh, streamed, versions(), store.code())
    folder = Path(tempfile.gettempdir()) / "vidax-plan-calibration"
    folder.mkdir(exist_ok=True)
    file = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"
    if file.exists():
        return json.loads(file.read_text())
    config, mesh, topology = setup.config, mesh_of(setup.topology, setup.mesh), parse_topology(setup.topology)
    latents, place = (1, *setup.latents, config.in_channels), placement(mesh)
    known = Known((TEXT_TOKENS, config.text_dim))
    if streamed:
        program = lower_layer(DiT.spec(config), latents, BRANCHES, known, mesh).compile()
        own = program_bytes(program) - split_bytes(Block.spec(config, jnp.bfloat16), place)
    else:
        program = lower_step(DiT.spec(config), latents, BRANCHES, known, mesh, past=0).compile()
        own = program_bytes(program) - split_bytes(DiT.spec(config, jnp.bfloat16), place)
    seconds = seconds_of(program.as_text(), topology, setup.devices) * (config.layers if streamed else 1)
    record = {"program": seconds.program, "links": seconds.links, "moves": seconds.moves, "activations": own}
    file.write_text(json.dumps(record))
    return record


def estimate(setup: Setup, record: Record) -> dict[str, Any]:
    """A row of the table. told: with what the published engine's runs tell of its own decoding."""
    chip, config, shape = setup.chip, setup.config, meshes.parse(setup.mesh)
    rows = json.loads(Path(pallas_tpu.__file__).with_name("tiles.json").read_text())["rows"]
    (counted,) = (
        row
        for row in rows
        if (row["chip"], row["kernel"], row["head_size"]) == (chip.device_kind, setup.kernel, config.head_size)
    )
    cross = [TEXT_TOKENS, *([setup.image_tokens] if setup.image_tokens else [])]
    spent = {
        "program": record["program"],
        "attention": attention_seconds(counted, config, setup.tokens, cross, setup.devices, chip.clock_hz),
        "links": record["links"],
    }
    layer = parameters(Block.spec(config, jnp.float32)) * setup.weight_bytes / shape.tensor
    ends = parameters(dataclasses.replace(DiT.spec(config), blocks=None)) * setup.weight_bytes
    calls = setup.steps
    if setup.chunk is not None:
        spent["transfer"] = transfer_seconds(layer, config.layers, chip.host_link_bytes_per_second)
        calls *= config.layers // setup.chunk
    modulation = modulation_bytes(config, setup.tokens, shape.seq) if setup.token_modulation else 0
    spent["modulation"] = config.layers * modulation / chip.hbm_bytes_per_second
    once = coding_seconds(setup)
    step = sum(spent.values())
    seconds, told = (
        published_seconds(step, setup.steps, calls, slower * once, setup.latents[0], setup.first_call_counts)
        for slower in (1, decoding_slower() if setup in PUBLISHED else 1)
    )
    held = text_encoder_bytes(shape.tensor) + modulation
    peak = peak_bytes(record["activations"], layer, setup.chunk or config.layers, ends, held)
    return {
        "name": setup.name,
        "mesh": setup.mesh,
        "steps": setup.steps,
        "chunk": setup.chunk,
        "weights": {2: "bfloat16", 4: "float32"}[setup.weight_bytes],
        **{f"{part}_seconds": round(value, 2) for part, value in spent.items()},
        "step_seconds": round(step, 2),
        "decode_seconds": round(once, 2),
        "seconds": round(seconds, 2),
        "measured_seconds": setup.measured_seconds,
        "ratio": round(seconds / setup.measured_seconds, 2),
        "told_seconds": round(told, 2),
        "told_ratio": round(told / setup.measured_seconds, 2),
        "gb": round(peak / 1e9, 1),
        "measured_gb": setup.measured_gb,
        "gb_ratio": round(peak / 1e9 / setup.measured_gb, 2) if setup.measured_gb else None,
        "near": abs(seconds / setup.measured_seconds - 1) <= NEAR,
        "told_near": abs(told / setup.measured_seconds - 1) <= NEAR,
        "why": setup.why,
    }


# Why a row is more than NEAR off; docs/planner.md argues each.
SHORT = "of a run of 5 steps decoding is a tenth, and operations over the peak see a fifteenth of it."
SMALL = "decoding takes as long as for 14B at this size, so it is a larger part of each step."
HEAVY = "the decoder of Wan 2.2 has 2.5 times the operations of 2.1's, all on every chip."
SENT = "28 GB of weights go to every chip in every step, as it seems at a ninth of the link's rate."
HD, SD = (21, 90, 160), (21, 60, 104)
T2V_14B = Setup(
    name="Wan 2.1 14B T2V 1280x720x81",
    config=WAN21_14B,
    latents=HD,
    steps=50,
    weight_bytes=4,
    chunk=20,
    measured_seconds=123.011,
    measured_gb=23.0,
)
A14B = Setup(
    name="Wan 2.2 A14B T2V 832x480x81",
    config=WAN21_14B,
    latents=SD,
    steps=50,
    mesh="tensor=2,seq=2",
    weight_bytes=4,
    chunk=10,
    token_modulation=True,
    measured_seconds=43.182,
    measured_gb=28.38,
    why=SENT,
)
FIVE = Setup(
    name="Wan 2.2 5B T2V 1280x704x121",
    config=WAN22_5B,
    latents=(31, 44, 80),
    steps=50,
    weight_bytes=4,
    token_modulation=True,
    vae=WAN22_VAE,
    measured_seconds=10.518,
    measured_gb=18.29,
    why=HEAVY,
)
OFFLOADED = (
    (1, 141.7, 15.2),
    (2, 136.3, 15.2),
    (4, 133.8, 15.2),
    (8, 131.3, 15.3),
    (20, 123.7, 23.0),
    (40, 111.3, 26.1),
)
SWEEP = {
    chunk: dataclasses.replace(
        T2V_14B,
        name=f"the same, chunk {chunk}",
        steps=5,
        chunk=chunk,
        measured_seconds=seconds,
        measured_gb=gb,
        why=SHORT,
    )
    for chunk, seconds, gb in OFFLOADED
}
PUBLISHED = (
    T2V_14B,
    *SWEEP.values(),
    Setup(
        name="Wan 2.1 14B T2V 832x480x81",
        config=WAN21_14B,
        latents=SD,
        steps=50,
        measured_seconds=26.136,
        measured_gb=17.17,
    ),
    dataclasses.replace(
        T2V_14B,
        name="Wan 2.1 14B I2V 832x1104x81",
        latents=(21, 104, 138),
        steps=40,
        image_tokens=IMAGE_TOKENS,
        encoded_frames=21,
        measured_seconds=127.249,
        measured_gb=32.70,
    ),
    Setup(
        name="Wan 2.1 14B I2V 544x720x81",
        config=WAN21_14B,
        latents=(21, 68, 90),
        steps=40,
        image_tokens=IMAGE_TOKENS,
        encoded_frames=21,
        measured_seconds=28.132,
        measured_gb=22.08,
    ),
    Setup(
        name="Wan 2.1 1.3B T2V 832x480x81",
        config=WAN21_1_3B,
        latents=SD,
        steps=50,
        measured_seconds=6.965,
        measured_gb=10.19,
        why=SMALL,
    ),
    A14B,
    dataclasses.replace(
        A14B,
        name="Wan 2.2 A14B T2V 1280x720x33",
        latents=(9, 90, 160),
        chunk=1,
        measured_seconds=46.4,
        measured_gb=18.1,
    ),
    dataclasses.replace(
        A14B,
        name="Wan 2.2 A14B I2V 544x720x81",
        latents=(21, 68, 90),
        steps=40,
        encoded_frames=21,
        measured_seconds=44.499,
        measured_gb=28.35,
    ),
    dataclasses.replace(
        A14B,
        name="Wan 2.2 A14B I2V 832x1104x33",
        latents=(9, 104, 138),
        steps=40,
        chunk=1,
        encoded_frames=9,
        measured_seconds=49.062,
        measured_gb=20.52,
    ),
    FIVE,
    dataclasses.replace(
        FIVE,
        name="Wan 2.2 5B I2V 800x1088x121",
        latents=(31, 50, 68),
        steps=40,
        measured_seconds=12.068,
        measured_gb=18.26,
    ),
)
# github.com/AI-Hypercomputer/maxdiffusion, pull request 376: 251.45 s for 40 steps, batch 1, and the v6e tiles of its
# configs, 3024 x 2048 x 1024.
MAXDIFFUSION = (
    Setup(
        name="MaxDiffusion on v6e-8, Wan 2.2 A14B I2V 1280x720x81",
        config=WAN21_14B,
        latents=HD,
        steps=40,
        mesh="data=2,seq=4",
        topology="v6e:2x4",
        kernel="splash",
        encoded_frames=21,
        decode_parts=8,
        first_call_counts=True,
        measured_seconds=251.45 / 40,
    ),
)


def counted(setup: Setup) -> float:
    """Steps that are in the published figure."""
    calls = setup.steps * (setup.config.layers // setup.chunk if setup.chunk else 1)
    return setup.steps * (calls - 1) / calls


def apart(long: Setup, short: Setup) -> tuple[float, float]:
    """Seconds of a step, and of what does not depend on the steps, from two published runs that differ in steps."""
    runs = [setup.steps * setup.measured_seconds for setup in (long, short)]
    step = (runs[0] - runs[1]) / (counted(long) - counted(short))
    return step, runs[0] - counted(long) * step


@functools.cache
def decoding_slower() -> float:
    """How many times as long as operations over the peak takes what the published engine does once in a run, from its
    two runs that differ in nothing but their steps.
    """
    _, once = apart(T2V_14B, SWEEP[T2V_14B.chunk])
    calls = T2V_14B.latents[0]
    return once / (coding_seconds(T2V_14B) * (calls - 1) / calls)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The tables of the page, and what is said of the rows that are far off."""
    lines = [
        "| set-up | mesh, weights | operations + attention + links + transfer + modulation | decode | seconds a step | "
        "published | ratio | ratio with their decoding | GB | published | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        parts = ("program", "attention", "links", "transfer", "modulation")
        spent = " + ".join(f"{row.get(f'{part}_seconds', 0):.2f}" for part in parts)
        sent = f", chunk {row['chunk']}" if row["chunk"] else ""
        memory = f"{row['gb']} | {row['measured_gb']} | {row['gb_ratio']:.2f}" if row["measured_gb"] else " | | "
        lines.append(
            f"| {row['name']}, {row['steps']} steps | `{row['mesh']}`, {row['weights']}{sent} | {spent} | "
            f"{row['decode_seconds']:.1f} | {row['seconds']:.1f} | {row['measured_seconds']:.1f} | "
            f"{row['ratio']:.2f} | {row['told_ratio']:.2f} | {memory} |"
        )
    near, told = (sum(row[key] for row in rows) for key in ("near", "told_near"))
    held = [row for row in rows if row["measured_gb"]]
    fits = sum(abs(row["gb_ratio"] - 1) <= NEAR for row in held)
    far: dict[str, list[str]] = {}
    for row in rows:
        if not row["near"]:
            far.setdefault(row["why"], []).append(f"{row['name']} ({row['ratio']:.2f})")
    lines += [
        "",
        f"Within 25 %: {near} of {len(rows)} rows; {told} with their decoding; by memory {fits} of {len(held)}.",
        "",
        *(f"- {', '.join(names)}: {why}" for why, names in far.items()),
    ]
    return "\n".join(lines)


def sweep_markdown(step_seconds: float) -> str:
    """The sweep's steps without what the counting and the decoding add. step_seconds: ours."""
    _, once = apart(T2V_14B, SWEEP[T2V_14B.chunk])
    lines = [
        "| chunk | published | steps counted of 5 | seconds of a step | estimate | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for chunk, setup in SWEEP.items():
        step = (setup.steps * setup.measured_seconds - once) / counted(setup)
        lines.append(
            f"| {chunk} | {setup.measured_seconds} | {counted(setup):.3f} | {step:.1f} | {step_seconds:.1f} | "
            f"{step_seconds / step:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for setup in (*PUBLISHED, *MAXDIFFUSION):
        if arguments.only in setup.name:
            rows.append(row := estimate(setup, compiled(setup)))
            if not (arguments.json or arguments.markdown):
                print(row, flush=True)
    if arguments.markdown:
        print(markdown(rows))
        if steps := [row["step_seconds"] for row in rows if row["name"] == T2V_14B.name]:
            print(f"\n{sweep_markdown(steps[0])}")
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
