"""Full-size programs compiled for TPU topologies from descriptions alone: no weights, no TPU."""

import json

import jax.numpy as jnp
import pytest
from step_estimate import compile_step, mesh_of

from vidax import cli
from vidax.models.interface import Video
from vidax.models.locate import describe
from vidax.models.wan.dit import step_flops
from vidax.planner.chips import parse_topology
from vidax.planner.schedule import KERNEL, collectives, operations
from vidax.weights.memory import program_bytes

pytestmark = pytest.mark.tpu_compile

# A layer on seq: q, k, v and o of self-attention change places, and 10 matrices are gathered: one by one; on v5e
# nine of them beside the computation; on TPU7x piece by piece while they are multiplied.
ULYSSES = {"all-to-all": 4, "all-gather": 10}
BESIDE = {"all-to-all": 4, "all-gather": 1, "async-collective": 9}
PIECEWISE = {"all-to-all": 4, "collective-permute": 40}
# On tensor: three sums of the residual stream, and those of the norms over all heads, some of them combined.
TENSOR = {"all-reduce": 5}


@pytest.mark.parametrize(
    ("model", "size", "topology", "mesh", "expected", "gigabytes"),
    [
        ("wan2.1-t2v-14b", (1280, 720), "v4:2x2x1", "seq=4", ULYSSES, 13),
        ("wan2.1-t2v-14b", (1280, 720), "v5p:2x2x1", "tensor=4", TENSOR, 40),
        ("wan2.1-t2v-14b", (1280, 720), "tpu7x:2x2x1", "seq=8", PIECEWISE, 15),
        ("wan2.1-t2v-14b", (832, 480), "v6e:2x4", "data=2,seq=4", ULYSSES, 10),
        ("wan2.1-t2v-1.3b", (832, 480), "v5e:2x4", "data=2,seq=4", BESIDE, 5),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_denoise_step(model, size, topology, mesh, expected, gigabytes):
    """81 frames, both guidance branches, bfloat16 weights. No collective but the expected, no call to the host."""
    compiled = compile_step(model, size, topology, mesh)
    text = compiled.as_text()
    assert "host-call" not in text  # XLA has been seen to gather weights there
    ops = operations(text)
    assert collectives(ops) == expected
    assert sum(op.kind == KERNEL for op in ops) == 2  # self- and cross-attention
    assert program_bytes(compiled) < min(gigabytes * 1e9, parse_topology(topology).chip.memory_bytes)


def test_a_layer_of_an_expert():
    """Image to video at 1280x720: its 20 channels more are the patch embedding's alone, and the layer fits."""
    _, model = describe("wan2.2-i2v-a14b")
    compiled = model.lower_layer(
        Video(1280, 720, 81, 2, images=1), jnp.bfloat16, mesh_of("v4:2x2x1", "seq=4")
    ).compile()
    text = compiled.as_text()
    assert "host-call" not in text
    assert sum(op.kind == KERNEL for op in operations(text)) == 2
    assert program_bytes(compiled) < 7e9


@pytest.mark.parametrize(
    ("name", "topology", "mesh", "exchanged", "gathered", "gigabytes"),
    [
        ("cogvideox-2b", "v6e:2x4", "data=2,seq=4", 0, 2, 1.5),  # 30 heads, which 4 does not divide
        ("cogvideox1.5-5b-i2v", "v4:2x2x1", "seq=4", 4, 0, 6),
    ],
)
def test_a_layer_of_joint_attention(name, topology, mesh, exchanged, gathered, gigabytes):
    """One attention; where its heads divide, tokens are exchanged for heads, else keys and values are gathered."""
    card, model = describe(name)
    video = Video(*card.size, card.frames, 2, images=card.images[0])
    compiled = model.lower_layer(video, jnp.bfloat16, mesh_of(topology, mesh)).compile()
    ops = operations(compiled.as_text())
    assert "host-call" not in compiled.as_text()
    assert sum(op.kind == KERNEL for op in ops) == 1
    assert sum(op.kind == "all-to-all" for op in ops) == exchanged
    assert sum(op.kind == "all-gather" and len(op.shapes[0][1]) == 4 for op in ops) == gathered  # of [B N S K]
    assert program_bytes(compiled) < gigabytes * 1e9


def test_a_clean_first_frame_takes_no_modulation_of_each_token():
    """Of two timesteps nothing [L 6 D] is held: a layer of TI2V-5B takes as much with an image as without."""
    card, model = describe("wan2.2-ti2v-5b")
    mesh, video = mesh_of("v5e:2x2", "seq=4"), Video(1280, 704, 121, branches=2)
    without, clean = (
        model.lower_layer(video._replace(images=images), jnp.bfloat16, mesh).compile().memory_analysis()
        for images in (0, 1)
    )
    length, _, _ = model.attention_shape(1280, 704, 121)
    modulation = 2 * length * 6 * card.dit.dim * 4 // 4  # of both branches, float32, on each of four devices
    assert clean.temp_size_in_bytes - without.temp_size_in_bytes < 0.1 * modulation


def test_decode_chunk_720p():
    """Four frames of 1280x720 in float32 with the caches of the frames before them, in strips on four v4 chips."""
    _, model = describe("wan2.1-t2v-14b")
    compiled = model.lower_decode(Video(1280, 720, 81, branches=2), mesh_of("v4:2x2x1", "seq=4")).compile()
    text = compiled.as_text()
    assert text.count(" collective-permute") > 0
    assert program_bytes(compiled) < 7.2e9  # 6.8; on one v5e 12.7, of which the caches and weights are 9.0


@pytest.mark.parametrize(
    ("model", "topology", "words"),
    [
        ("wan2.1-t2v-1.3b", "v6e-8", ("--mesh", "data=2,seq=4")),
        ("wan2.1-t2v-14b", "v5e-1", ("--size", "832x480", "--frames", "17")),  # streamed, all that fit resident
    ],
)
def test_plan(model, topology, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("VIDAX_CACHE_DIR", str(tmp_path))
    assert cli.main(["plan", model, "--topology", topology, *words, "--json", "--quiet"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    text, step, frames = made["phases"]
    assert made["fits"] and step["known_as"] == "compiled" and frames["known_as"] in ("table", "modelled")
    chip = parse_topology(topology)
    card, architecture = describe(model)
    width, height = map(int, made["size"].split("x"))
    length, _, _ = architecture.attention_shape(width, height, made["frames"])
    floor = 2 * step_flops(card.dit, length) / chip.chip.flops / chip.devices
    assert floor < made["step_seconds"] < 4 * floor
    assert made["peak_device_gb"] == max(phase["device_gb"] for phase in made["phases"]) <= 0.97 * made["limit_gb"]
    streamed = made["residency"] != "resident"
    assert streamed == (topology == "v5e-1") == (step["host_gb"] > 1) and text["known_as"] in ("compiled", "modelled")
