"""The meter of attention kernels: it counts what a compiled schedule runs, and refuses what it cannot know.

`schedules/` holds two kernels' final bundles without their vector arithmetic: a grid of 10 heads, 592 query blocks and
296 key blocks; at the first key block one region, at the last another, and a loop of two turns in every step.
"""

import json
from pathlib import Path

import attention_cycles
import pytest
from attention_cycles import KERNELS, UNITS, Case, row_of
from llo_schedule import DataDependentError, MeterError, parse_bundles, schedule_cycles, stretches

SCHEDULES = Path(__file__).parent / "schedules"
STEPS, QUERY_BLOCKS = 10 * 592 * 296, 10 * 592
UNIT = UNITS["v5e"].unit


def schedule(chip: str) -> str:
    return (SCHEDULES / f"flash_{chip}.txt").read_text()


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_every_stretch_counts_as_often_as_it_runs(chip):
    found = stretches(schedule(chip), UNITS[chip].unit)
    assert sum(s.bundles for s in found) == len(parse_bundles(schedule(chip)))
    # before the loop; copies, in two more turns than there are steps; the step; initial values; scores of the first
    # keys; two turns of the inner loop; the last key block's test; the result; the step's end; copies; after the loop
    expected = [1, STEPS + 2, STEPS, QUERY_BLOCKS, STEPS, 2 * STEPS, STEPS, QUERY_BLOCKS, STEPS, STEPS + 2, 1]
    assert [s.executions for s in found] == expected


def test_matrix_unit_passes_of_a_128_x_128_block():
    inner = max(stretches(schedule("v5e"), UNIT), key=lambda s: s.bundles)
    assert inner.passes == 2 * 128 // 4  # two products of 128 rows over four units, a row a cycle
    assert inner.cycles == inner.executions * inner.bundles  # here the bundles take longer


def test_a_stretch_with_fewer_bundles_than_passes_counts_its_passes():
    multiplications = "  ;;  ".join(f" %{i} = vmatmul.bf16.gmra.mxu0" for i in range(4))
    text = loop_of(5, f"{multiplications}  ;;  %9 = vmatmul.f32.vlgmr.msra.gmra.mxu1")
    assert schedule_cycles(text, UNIT) - schedule_cycles(loop_of(5), UNIT) == 5 * (4 * 16 - 5)


def loop_of(turns: int, work: str = "", guard: str = "", step: int = 1) -> str:
    """A loop of five bundles; `guard`, if any, is the scalar code of a branch around a sixth."""
    lines = [
        ("", "%s1_s0 = smov 0", "End region 9"),
        ("LB", "%s2_s0 = sphi %s1_s0, %s3_s0 /* phi copy */", "Start region 7"),
        ("", f"%s3_s0 = sadd.s32 {step}, %s2_s0  ;; {work}" if work else f"%s3_s0 = sadd.s32 {step}, %s2_s0", ""),
        ("", f"%p4_p0 = scmp.ge.s32.totalorder %s3_s0, {turns} /* loop exit test */", ""),
        *([("", guard, ""), ("", "%5 = sbr.rel (%p6_p0) target = $region8", "End region 5")] if guard else []),
        *([("", "%7 = vst", ""), ("PF", "", "Start/End empty region 8")] if guard else []),
        ("", "%8 = sbr.rel (!%p4_p0) target = $region7", ""),
        ("", "", "End region 7"),
        ("", "", ""),
    ]
    return "".join(
        f"  {i:#x} {label}: {'>' * (i > 0)} {{ {code} }}" + (f" /* {note} */" if note else "") + "\n"
        for i, (label, code, note) in enumerate(lines)
    ).replace("0x0 ", "0 ", 1)


def test_a_plain_loop():
    assert [s.executions for s in stretches(loop_of(7), UNIT)] == [1, 7, 1]


def test_what_depends_on_data_is_an_error_unless_it_is_known():
    text = loop_of(7, guard="%s9_s0 = sld [smem:[#allocation4]]  ;;  %p6_p0 = scmp.le.s32.totalorder %s9_s0, 0")
    with pytest.raises(DataDependentError, match="reads the kernel's data"):
        stretches(text, UNIT)
    assert [s.executions for s in stretches(text, UNIT, all_blocks_run=True)] == [1, 7, 7, 7, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing", "no bundles"),
        ("  0 : { %1 = vst }\n", "no loop"),
        ("  0 : { %1 = vst }\n  0x2 : { %2 = vst }\n", "bundle 0x2 stands where"),
        (loop_of(7, step=2), "does not count by one"),
        (loop_of(7).replace("/* loop exit test */", ""), "not understood as a loop's exit test"),
        (loop_of(7).replace("Start region 7", ""), "region 7, which starts nowhere"),
        (loop_of(7, guard="%p6_p0 = scmp.eq.s32.totalorder %s2_s0, 0"), "changes in a loop, and how is not known"),
        (loop_of(7, guard="%p6_p0 = pfoo %p4_p0, %p4_p0"), "pfoo .* is not understood"),
        (loop_of(7, "%9 = vmatmul.s8.gmra.mxu0"), "how long vmatmul.s8.gmra holds"),
        (loop_of(7, "%9 = vmatmul.bf16"), "a matrix instruction is not understood"),
    ],
)
def test_what_is_not_understood_is_an_error(text, reason):
    with pytest.raises(MeterError, match=reason):
        stretches(text, UNIT)


def case(**changes) -> Case:
    fields = {"chip": "v5e", "queries": 75_600, "keys": 75_600, "head_size": 128, "kernel": "splash"}
    return Case(**fields | {"tiles": (1024, 2048, 1024)} | changes)


def test_the_bound_allows_what_the_head_size_fills():
    """Half of the work is at K / W of the peak, half at all of it."""
    allowed = {
        (chip, size): 4 * size / UNITS[chip].bound(1, 1, size) for chip in ("v4", "v5e", "v6e") for size in (128, 64)
    }
    assert allowed == pytest.approx(
        {
            ("v4", 128): 262_144,
            ("v4", 64): 262_144 * 2 / 3,
            ("v5e", 128): 131_072,
            ("v5e", 64): 131_072 * 2 / 3,
            ("v6e", 128): 524_288 * 2 / 3,
            ("v6e", 64): 524_288 * 2 / 5,
        }
    )


def test_a_share_over_the_bound_is_an_error_of_the_meter():
    bound = round(UNITS["v5e"].bound(75_600, 75_600, 128))
    assert row_of(case(), 4 * bound + 4)["share_of_bound"] == 1
    with pytest.raises(MeterError, match="the meter is wrong"):
        row_of(case(), 4 * bound - 400)


def test_tiles_are_cut_to_the_keys():
    found = KERNELS["splash"].candidates(case(keys=512))
    assert (1024, 512, 512) in found and all(key <= 512 for _, key, _ in found)
    assert len(set(found)) == len(found)


def test_the_data_file_keeps_other_rows_and_the_best_of_each(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_cycles, "versions", lambda: {"jax": "1", "libtpu": "2"})
    path = tmp_path / "tiles.json"
    slow, fast = row_of(case(), 200_000_000), row_of(case(tiles=(512, 512, 512)), 100_000_000)
    other = row_of(case(head_size=64), 200_000_000)
    attention_cycles.write([other], path)
    attention_cycles.write([fast, slow], path)
    assert json.loads(path.read_text()) == {"versions": {"jax": "1", "libtpu": "2"}, "rows": [other, fast]}
    monkeypatch.setattr(attention_cycles, "versions", lambda: {"jax": "2", "libtpu": "2"})
    attention_cycles.write([slow], path)
    assert json.loads(path.read_text())["rows"] == [slow]


def test_token_counts():
    assert attention_cycles.token_counts("75600") == (75_600, 75_600)
    assert attention_cycles.token_counts("75600x512") == (75_600, 512)
