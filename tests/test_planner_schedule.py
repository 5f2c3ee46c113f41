"""What `vidax.planner.schedule` and benchmarks/stream_overlap.py read from a compiled program, on lines recorded from
libtpu 0.0.42.
"""

from pathlib import Path

import pytest
from stream_overlap import overlap

from vidax.ops.attention.pallas_tpu import measured_cycles
from vidax.planner.chips import chips, parse_topology
from vidax.planner.schedule import (
    HOST_DONE,
    HOST_START,
    KERNEL,
    MOVED,
    Seconds,
    collectives,
    link_seconds,
    operation_seconds,
    operations,
    seconds_of,
)

SCHEDULES = Path(__file__).parent / "schedules"
TEXT = (SCHEDULES / "denoise_step.hlo").read_text()
STREAMED = (SCHEDULES / "streamed_step.hlo").read_text()
NESTED = (SCHEDULES / "nested_loops.hlo").read_text()  # five turns, each with a loop of three
V4 = parse_topology("v4-8")


def layer(*lines: str) -> str:
    """The step with these operations in its loop of 40 turns."""
    return TEXT.replace("  ROOT %tuple.4 =", "".join(f"  {line}\n" for line in lines) + "  ROOT %tuple.4 =")


def test_operations_count_their_loops():
    """Once for what is outside, 40 times for a layer; the inside of a fusion is part of its estimate."""
    ops = operations(TEXT)
    assert sum(op.times * op.cycles for op in ops) == 40 * 26_730_000 + 1000
    (kernel,) = (op for op in ops if op.kind == KERNEL)
    assert kernel.times == 40 and kernel.cycles == 0  # the compiler knows nothing of a kernel's inside
    assert kernel.heads_head_size_queries_keys == (20, 128, 75776, 75776)


def test_operations_count_loops_in_loops():
    assert [(op.times, op.cycles) for op in operations(NESTED)] == [(5, 44595), (15, 12636), (15, 6336), (5, 8724)]


def test_a_loop_that_does_not_begin_at_zero():
    late = NESTED.replace("%constant.17 = s32[]{:T(128)} constant(0)", "%constant.17 = s32[]{:T(128)} constant(1)")
    assert [op.times for op in operations(late)] == [4, 12, 12, 4]


def test_an_iteration_beside_its_loop_counts_once():
    """The compiler has taken one of 40 layers out of the loop, to copy the next one's weights in time."""
    assert [(op.times, op.cycles) for op in operations(STREAMED) if op.cycles] == [
        (1, 1000),
        (39, 988_827),
        (39, 646_036),
        (1, 2000),
    ]


def test_collectives_of_a_layer():
    assert collectives(operations(TEXT)) == {"all-to-all": 1, "all-gather": 1}
    gather = next(op for op in operations(TEXT) if op.kind == "all-gather" and op.times == 40)
    assert gather.bytes == 2 * 5120 * 5120  # the result, not the operand beside it


def test_a_collective_beside_the_computation_costs_nothing():
    beside = TEXT.replace("%fusion.196 =", "%async-collective-start.3 =")
    assert collectives(operations(beside))["async-collective"] == 1
    (op,) = (op for op in operations(beside) if op.kind == "async-collective")
    assert link_seconds(op, chips()["v5e"], (2, 4), 8) == 0


def test_the_end_of_a_collective_is_not_another_one():
    start = "%collective-permute-start.1 = (f32[6,128]{0,1:T(8,128)S(1)}, f32[6,128]{0,1:T(8,128)S(1)}, u32[]{:S(2)}, "
    start += "u32[]{:S(2)}) collective-permute-start(%fusion.196), channel_id=2"
    done = (
        "%collective-permute-done.1 = f32[6,128]{0,1:T(8,128)S(1)} collective-permute-done(%collective-permute-start.1)"
    )
    beside = (
        "%async-collective-done.9 = f32[1536,9216]{1,0:T(8,128)S(1)} fusion(%async-collective-start.9), kind=kCustom"
    )
    ops = operations(layer(start, done, beside))
    assert collectives(ops)["collective-permute"] == 1 and len(ops) == len(operations(TEXT)) + 1
    assert next(op.bytes for op in ops if op.kind == "collective-permute") == 6 * 128 * 4


def test_seconds_on_links():
    """2 x 2 chips: an exchange crosses the middle with half of what each chip sends; a gather brings three quarters."""
    exchange, gather = (op for op in operations(TEXT) if op.times == 40 and op.kind != KERNEL and not op.cycles)
    chip = chips()["v4"]
    assert link_seconds(exchange, chip, (2, 2, 1), 4) == pytest.approx(2 * 2 * 40 * 18944 * 128 / 2 / 45e9)
    assert link_seconds(gather, chip, (2, 2, 1), 4) == pytest.approx(2 * 5120 * 5120 * 0.75 / (2 * 45e9))


def test_seconds_of_a_program():
    """A sum over its operations, each by who estimates it."""
    found = seconds_of(TEXT, V4, 4)
    assert found.program == pytest.approx((40 * 26_730_000 + 1000) / 1.05e9)
    assert found.attention == pytest.approx(40 * 20 * measured_cycles("TPU v4", 128, 75776, 75776) / 1.05e9)
    links = [op.times * operation_seconds(op, V4, 4).links for op in operations(TEXT)]
    assert found.links == pytest.approx(sum(links)) and sum(map(bool, links)) == 3
    assert found.total == found.program + found.attention + found.links
    assert found.moves == 0 and not found.unknown


def test_what_moves_without_an_estimate_stands_beside_the_total():
    """Of an update in place only the update moves; scalars, and names for what is there, take no time."""
    found = layer(
        "%reshape.503 = bf16[3,128,32768]{2,1,0:T(8,128)(2,1)} reshape(%bitcast.1)",
        "%dynamic_update_slice.14 = bf16[3,128,32768]{2,1,0} dynamic-update-slice(%reshape.503, %all-to-all.8, %c, %c)",
        '%custom-call.40 = bf16[8192,1536]{0,1} custom-call(%a, %b), custom_call_target="ConcatBitcast"',
        "%copy.214 = s32[]{:T(128)S(6)} copy(%get-tuple-element.1)",
    )
    moved = [op.bytes for op in operations(found) if op.kind == MOVED]
    assert moved == [2 * 3 * 128 * 32768, 2 * 2 * 4 * 10 * 18944 * 128]
    assert seconds_of(found, V4, 4).moves == pytest.approx(40 * 2 * sum(moved) / 1228e9)
    assert seconds_of(found, V4, 4).total == seconds_of(TEXT, V4, 4).total


GATHER = (
    '%gather_fusion = f32[262144,16]{1,0} fusion(%a, %b), kind=kCustom, metadata={op_name="jit(encode)/while/gather"}'
)
KERNEL_CALL = '%other = bf16[8192,128]{1,0} custom-call(%a), custom_call_target="tpu_custom_call"'
SUM = '%all_fusion = f32[] fusion(%fusion.196), kind=kCustom, metadata={op_name="jit(f)/reduce"}'
SORT = "%sort.3 = f32[65536]{0} sort(%a), dimensions={0}, to_apply=%compare"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (layer(GATHER), "jit(encode)/while/gather"),
        (layer(KERNEL_CALL), "other"),
        (layer(KERNEL_CALL.replace("tpu_custom_call", "TopK")), "other"),
        (layer(SORT), "sort.3"),
        (layer(SUM), "jit(f)/reduce"),
        (TEXT.replace("bf16[20,128,75776]", "f32[20,128,75776]"), "vidax_attention/pallas_call"),
    ],
    ids=["a gather", "another kernel", "a custom call", "a sort", "a sum", "attention in float32"],
)
def test_what_nobody_estimates_is_named(text, name):
    found = seconds_of(text, V4, 4)
    (unknown,) = found.unknown
    assert unknown.endswith(name) and found.known > 0
    with pytest.raises(ValueError, match="nobody estimates the seconds of "):
        _ = found.total


def test_seconds_add_up():
    one = Seconds(1, 2, 3, 4, ("a",))
    assert one * 2 + Seconds(1, unknown=("a", "b")) == Seconds(3, 4, 6, 8, ("a", "b"))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ENTRY %main", "%main", "no entry computation"),
        ("estimated_cycles", "cycles", "estimates no cycles"),
        ("direction=LT", "direction=NE", "number of turns is not understood"),
        ("constant(40)", "parameter(1)", "number of turns is not understood"),
        ("condition=%region_1.26_spmd, ", "", "a loop without condition"),
        ("bf16[2,4,10,18944,128]", "f4[2,4,10,18944,128]", "all-to-all of unknown size, of type f4"),
        (" while(%tuple.3)", " conditional(%tuple.3)", "a branch or a call, whose cost is not known"),
    ],
)
def test_another_format_fails(old, new, sentence):
    with pytest.raises(ValueError, match=sentence):
        seconds_of(TEXT.replace(old, new), V4, 4)


def cost(text: str):
    """Overlap at a cycle a second, over a link of the bytes of one [640, 5120] matrix in a million seconds."""
    return overlap(operations(text), lambda op: op.cycles, 2 * 640 * 5120 / 1e6)


def test_copies_from_the_host():
    """Once outside of the loop and twice in a layer, each with its bytes; copies within the device do not count."""
    ops = operations(STREAMED)
    starts = [op for op in ops if op.kind == HOST_START]
    assert [(op.times, op.bytes) for op in starts] == [(1, 6_553_600), (39, 6_553_600), (39, 17_694_720)]
    assert [op.copy for op in ops if op.kind == HOST_DONE] == [op.copy for op in starts]


def test_what_of_a_copy_is_exposed():
    """The link brings one copy after the other: each waits for those before it, and then for its own bytes."""
    found = cost(STREAMED)
    layer = 1e6 + 2.7e6
    assert found.transfer == pytest.approx(1e6 + 39 * layer)
    assert found.compute == 1000 + 39 * (988_827 + 646_036) + 2000
    assert found.exposed == pytest.approx((1e6 - 1000) + 39 * (layer - 646_036))
    assert (found.after_begin, found.before_done) == (988_827, 646_036)


def test_a_copy_shorter_than_the_computation_costs_nothing():
    found = cost(STREAMED.replace('"646036"', '"3700001"').replace('"1000"', '"1000001"'))
    assert found.exposed == 0 and found.transfer > 0


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("S(5)", "", "no copy from host memory in the loop over layers"),
        ("dynamic-slice-done(%dynamic-slice-start.10)", "parameter(1)", "not awaited where they start: dynamic-slice-"),
        (" dynamic-slice-start(", " custom-call-start(", "host memory is used by custom-call-start, which is no copy"),
        ("bf16[1,640,5120]{2,1,0:T(8,128)(2,1)}, u32", "u4[1,640,5120]{2,1,0}, u32", "of unknown size, of type u4"),
    ],
)
def test_a_program_that_does_not_stream_fails(old, new, sentence):
    with pytest.raises(ValueError, match=sentence):
        cost(STREAMED.replace(old, new))
