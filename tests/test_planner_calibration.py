"""The arithmetic that prices another engine's set-up, on numbers small enough to follow; no compiler is needed."""

import dataclasses

import pytest
from plan_calibration import (
    Setup,
    apart,
    attention_seconds,
    counted,
    kernel_cycles,
    modulation_bytes,
    peak_bytes,
    published_seconds,
    transfer_seconds,
)

from vidax.models.wan.dit import DiTConfig

ROW = {"tiles": [128, 128, 128], "tokens": 250, "keys": 250, "cycles": 400}  # two tiles each way, 100 cycles each
TINY = DiTConfig(dim=8, layers=3, heads=4, mlp_dim=16)


@pytest.mark.parametrize(
    ("queries", "keys", "cycles"), [(256, 256, 400), (250, 250, 400), (257, 256, 600), (128, 1, 100), (1, 300, 300)]
)
def test_a_kernel_takes_its_cycles_for_each_tile_that_is_begun(queries, keys, cycles):
    assert kernel_cycles(ROW, queries, keys) == cycles


def test_attention_of_a_step_is_that_of_both_branches_over_the_devices():
    # 400 cycles for the tokens and 200 for the text; 3 layers, 2 branches of 4 heads on 2 devices
    assert attention_seconds(ROW, TINY, 256, [100], 2, clock_hz=600) == 3 * 2 * 4 / 2 * 600 / 600


def test_weights_are_sent_once_a_step_whatever_the_chunk():
    assert transfer_seconds(layer_bytes=50, layers=4, bytes_per_second=100) == 2


def test_a_modulation_for_each_token_is_six_vectors_in_float32():
    assert modulation_bytes(TINY, tokens=10, seq=2) == 6 * 4 * 2 * 5 * 8


def test_first_calls_are_not_in_what_is_published():
    # 10 steps in one call each, of which 9 count; a decoder's 5 calls take 5 seconds, of which 4 count
    assert published_seconds(step=2, steps=10, calls=10, once=5, once_calls=5) == pytest.approx((18 + 4) / 10)
    assert published_seconds(step=2, steps=10, calls=10, once=5, once_calls=5, first_call_counts=True) == 2.5


def test_two_runs_that_differ_in_steps_tell_a_step_from_the_rest():
    run = Setup(name="", config=TINY, latents=(1, 2, 2), steps=10, chunk=1, measured_seconds=0)
    assert counted(run) == pytest.approx(10 * 29 / 30)  # three calls a step
    assert counted(dataclasses.replace(run, chunk=None)) == 9
    long, short = (
        dataclasses.replace(run, steps=steps, measured_seconds=(7 * (steps - 1 / 3) + 20) / steps) for steps in (10, 4)
    )
    assert apart(long, short) == pytest.approx((7, 20))


def test_peak_memory_is_what_is_there_while_a_chunk_computes():
    assert peak_bytes(activations=100, layer_bytes=10, resident_layers=2, ends_bytes=3, others_bytes=4) == 127
