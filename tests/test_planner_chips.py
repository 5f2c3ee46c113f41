"""Chips and slices by name: what is known, what is refused in a sentence, and how many devices there are."""

import json
import os
from importlib import resources
from types import SimpleNamespace

import pytest

from vidax.errors import UserError
from vidax.ops.attention.pallas_tpu import nearest
from vidax.planner import chips as module
from vidax.planner.chips import LARGEST_SLICE, chip_of, chips, devices, parse_topology


@pytest.mark.parametrize(
    ("text", "grid", "count"),
    [
        ("v4:2x2x1", (2, 2, 1), 4),
        ("v4:2x2x3", (2, 2, 3), 12),
        ("v5e:4x2", (4, 2), 8),
        ("tpu7x:2x2x1", (2, 2, 1), 8),  # a chip is two devices
        ("v4-8", (2, 2, 1), 4),  # 8 cores
        ("v4-128", (4, 4, 4), 64),
        ("v5p-8", (2, 2, 1), 4),
        ("tpu7x-8", (2, 2, 1), 8),
        ("tpu7x-64", (2, 4, 4), 64),
        ("v5e-1", (2, 2), 1),  # a part of the smallest grid
        ("v6e-1", (2, 2), 1),
        ("v5e-4", (2, 2), 4),
        ("v5e-8", (2, 4), 8),
        ("v6e-8", (2, 4), 8),
        ("v5e-16", (4, 4), 16),
        ("v6e-64", (8, 8), 64),
    ],
)
def test_a_topology_has_its_devices(text, grid, count):
    topology = parse_topology(text)
    assert (topology.name, topology.grid, topology.devices) == (text, grid, count)
    assert topology.chip is chips()[text.replace("-", ":").partition(":")[0]]


@pytest.mark.parametrize("name", chips())
def test_every_slice_is_a_grid_that_is_described(name):
    for text, topology in chips()[name].slices.items():
        assert parse_topology(text) == topology
        described = parse_topology(topology.described)
        assert described.devices == (topology.devices if topology.devices > 1 else 4)
        assert topology.devices <= LARGEST_SLICE
    assert parse_topology(f"{name}:{chips()[name].smallest}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "v9:2x2",
            "topology 'v9:2x2': 'v9' is no TPU known here; did you mean 'v4'? the known ones are v4, v5e, v5p, v6e, "
            "tpu7x",
        ),
        ("h100", "topology 'h100': 'h100' is no TPU known here; the known ones are v4, v5e, v5p, v6e, tpu7x"),
        ("", "topology '': '' is no TPU known here; the known ones are v4, v5e, v5p, v6e, tpu7x"),
        ("v4:2x2", "topology 'v4:2x2': a grid of v4 has 3 sizes, not 2; give it as in v4:2x2x1"),
        ("v5e:2x2x1", "topology 'v5e:2x2x1': a grid of v5e has 2 sizes, not 3; give it as in v5e:2x2"),
        (
            "v4:2x0x1",
            "topology 'v4:2x0x1': '2x0x1' is no grid of chips; give whole numbers of 1 or more, as in v4:2x2x1",
        ),
        ("v6e:2*4", "topology 'v6e:2*4': '2*4' is no grid of chips; give whole numbers of 1 or more, as in v6e:2x2"),
        ("v4:", "topology 'v4:': '' is no grid of chips; give whole numbers of 1 or more, as in v4:2x2x1"),
        (
            "v5e:1x1",
            "topology 'v5e:1x1': libtpu knows whole hosts of 2x2 chips alone; give even numbers for the first two "
            "sizes, as in v5e:2x2, or v5e-1 for one chip",
        ),
        (
            "v4:2x3x2",
            "topology 'v4:2x3x2': libtpu knows whole hosts of 2x2 chips alone; give even numbers for the first two "
            "sizes, as in v4:2x2x1",
        ),
        ("v5e:32x32", "topology 'v5e:32x32': 1,024 chips, and v5e has at most 256 in one grid; give fewer"),
        (
            "tpu7x-4",
            "topology 'tpu7x-4': the usual slices are tpu7x-8, tpu7x-16, tpu7x-32, tpu7x-64; give one of them, or a "
            "grid as in tpu7x:2x2x1",
        ),
        (
            "v4",
            "topology 'v4': the usual slices are v4-8, v4-16, v4-32, v4-64, v4-128; give one of them, or a grid as in "
            "v4:2x2x1",
        ),
    ],
)
def test_what_is_refused(text, sentence):
    with pytest.raises(UserError) as error:
        parse_topology(text)
    assert str(error.value) == sentence


def test_a_device_that_is_here_is_known_by_its_kind():
    assert chip_of(SimpleNamespace(device_kind="TPU v5 lite")) is chips()["v5e"]
    assert chip_of(SimpleNamespace(device_kind="cpu")) is None


def test_every_number_has_a_source():
    data = json.loads((resources.files("vidax.planner") / "chips.json").read_text())
    sourced = {name for names in data["sources"] for name in names.split(", ")}
    per_chip = [source for source in data["sources"].values() if isinstance(source, dict)]
    for chip, fields in data["chips"].items():
        assert set(fields) - {"dims"} <= sourced, chip
        assert all(chip in source for source in per_chip)


def test_attention_is_counted_on_every_chip():
    assert all(nearest(chip.device_kind, 128, 75_600, 75_600) for chip in chips().values())


def test_without_libtpu_there_is_nothing_to_compile_for(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^topology 'v4-8': libtpu, .* is not installed; pip install 'vidax\[plan\]'"):
        devices(parse_topology("v4-8"))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("text", ["v4-8", "v5e-1", "v5p:2x2x2", "v6e-8", "tpu7x-8"])
def test_libtpu_describes_what_is_counted(text):
    topology = parse_topology(text)
    found = devices(topology)
    assert len(found) == topology.devices
    assert {chip_of(device) for device in found} == {topology.chip}
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
