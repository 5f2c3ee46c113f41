"""What `step_estimate.py` and `stream_overlap.py` of benchmarks/ read from a compiled program, on lines recorded from
libtpu 0.0.42.
"""

from pathlib import Path

import pytest
from step_estimate import CHIPS, HOST_DONE, HOST_START, collectives, link_seconds, operations
from stream_overlap import overlap

SCHEDULES = Path(__file__).parent / "schedules"
TEXT = (SCHEDULES / "denoise_step.hlo").read_text()
STREAMED = (SCHEDULES / "streamed_step.hlo").read_text()


def test_operations_count_their_loops():
    """Once for what is outside, 40 times for a layer; the inside of a fusion is part of its estimate."""
    ops = operations(TEXT)
    assert sum(op.times * op.cycles for op in ops) == 40 * 26_730_000 + 1000
    (kernel,) = (op for op in ops if op.kind == "kernel")
    assert kernel.times == 40 and kernel.cycles == 0  # the compiler knows nothing of a kernel's inside
    assert kernel.heads_head_size_queries_keys == (20, 128, 75776, 75776)


def test_collectives_of_a_layer():
    assert collectives(operations(TEXT)) == {"all-to-all": 1, "all-gather": 1}
    gather = next(op for op in operations(TEXT) if op.kind == "all-gather" and op.times == 40)
    assert gather.bytes == 2 * 5120 * 5120  # the result, not the operand beside it


def test_a_collective_beside_the_computation_costs_nothing():
    beside = TEXT.replace("%fusion.196 =", "%async-collective-start.3 =")
    assert collectives(operations(beside))["async-collective"] == 1
    (op,) = (op for op in operations(beside) if op.kind == "async-collective")
    assert link_seconds(op, CHIPS["v5e"], (2, 4), 8) == 0


def test_seconds_on_links():
    """2 x 2 chips: an exchange crosses the middle with half of what each chip sends; a gather brings three quarters."""
    exchange, gather = (op for op in operations(TEXT) if op.times == 40 and op.kind != "kernel" and not op.cycles)
    chip = CHIPS["v4"]
    assert link_seconds(exchange, chip, (2, 2, 1), 4) == pytest.approx(2 * 2 * 40 * 18944 * 128 / 2 / 45e9)
    assert link_seconds(gather, chip, (2, 2, 1), 4) == pytest.approx(2 * 5120 * 5120 * 0.75 / (2 * 45e9))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ENTRY %main", "%main", "no entry computation"),
        ("estimated_cycles", "cycles", "estimates no cycles"),
        ("direction=LT", "direction=NE", "number of turns is not understood"),
        ("constant(40)", "parameter(1)", "number of turns is not understood"),
        ("condition=%region_1.26_spmd, ", "", "a loop without condition"),
        (" while(%tuple.3)", " conditional(%tuple.3)", "a branch, whose choice is not known"),
    ],
)
def test_another_format_fails(old, new, sentence):
    with pytest.raises(ValueError, match=sentence):
        operations(TEXT.replace(old, new))


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
        ("bf16[1,640,5120]{2,1,0:T(8,128)(2,1)}, u32", "u4[1,640,5120]{2,1,0}, u32", "of unknown size"),
    ],
)
def test_a_program_that_does_not_stream_fails(old, new, sentence):
    with pytest.raises(ValueError, match=sentence):
        cost(STREAMED.replace(old, new))
