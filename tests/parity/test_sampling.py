"""Sampling against diffusers and PyTorch, live: grids, whole runs with a nonlinear stand-in for the network, and noise.

`python tests/parity/test_sampling.py` records what the references give into tests/goldens/sampling.npz, for
tests/test_sampling.py, which runs without them.
"""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vidax.sampling.noise import normal
from vidax.sampling.sampler import Sampler, from_diffusers_config
from vidax.sampling.schedules import make_schedule
from vidax.sampling.solvers import Euler, UniPC, initial_state, step

torch = pytest.importorskip("torch")
schedulers = pytest.importorskip("diffusers.schedulers")

pytestmark = pytest.mark.parity

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "sampling.npz"
TOLERANCE = 1e-5  # of the largest value after a whole run; measured: 2e-6

STEPS = (1, 2, 3, 5, 10, 20, 50)
SHIFTS = (1.0, 3.0, 3.3, 5.0, 8.0)
UNIPC_RUNS = list(itertools.product(("official", "diffusers"), (1, 2, 3)))
NOISE = [
    (shape, seed)
    for seed in (0, 42, 2**32 - 1)
    for shape in ((1,), (7,), (15,), (16,), (17,), (2, 3, 5), (1, 4, 2, 3, 5))
]


def velocity(library, sample, timestep):
    """A nonlinear stand-in for the network, for torch and jax.numpy alike."""
    return library.tanh(1.5 * sample + 0.3) - 0.4 * library.cos(2 * sample) + sample * (timestep / 1000)


def noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, 2, 3, 2, 3)).astype(np.float32)


def unipc(grid: str, steps: int, shift: float, **settings):
    """diffusers' UniPC on its own grid, or on that of Wan's code, which is passed as sigmas."""
    scheduler = schedulers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, **settings
    )
    if grid == "official":
        training_levels = 1 - torch.linspace(0.001, 1, 1000, dtype=torch.float64)
        scheduler.set_timesteps(sigmas=np.linspace(training_levels.float()[0].item(), 0, steps + 1)[:-1])
    else:
        scheduler.set_timesteps(steps)
    return scheduler


def euler(steps: int, shift: float):
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler


def reference_run(scheduler) -> np.ndarray:
    scheduler.set_begin_index(0)
    sample = torch.from_numpy(noise())
    for timestep in scheduler.timesteps:
        sample = scheduler.step(velocity(torch, sample, timestep.float()), timestep, sample, return_dict=False)[0]
    return sample.numpy()


@jax.jit
def advance(table, i, state):
    row = table.row(i)
    return step(row, state, velocity(jnp, state.sample, row.timestep))


def run(sampler: Sampler) -> np.ndarray:
    table = sampler.table()
    state = initial_state(table, noise())
    for i in range(table.steps):
        state = advance(table, i, state)
    return np.asarray(state.sample)


def difference(ours: np.ndarray, reference: np.ndarray) -> float:
    assert np.isfinite(reference).all()
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("grid", ["official", "diffusers", "flow_match_euler"])
def test_grids_are_bitwise_equal(grid, steps):
    for shift in (*SHIFTS, 12.0, 16.0):
        reference = euler(steps, shift) if grid == "flow_match_euler" else unipc(grid, steps, shift)
        schedule = make_schedule(grid, steps, shift)
        np.testing.assert_array_equal(schedule.sigmas, reference.sigmas.numpy())
        np.testing.assert_array_equal(schedule.timesteps, reference.timesteps.numpy())


@pytest.mark.parametrize(("grid", "order"), UNIPC_RUNS)
def test_unipc_runs(grid, order):
    for steps, shift in itertools.product(STEPS, SHIFTS):
        sampler = Sampler(solver=UniPC(order=order), grid=grid, steps=steps, shift=shift)
        reference = reference_run(unipc(grid, steps, shift, solver_order=order))
        assert difference(run(sampler), reference) < TOLERANCE, (steps, shift)


def test_euler_runs():
    for steps, shift in itertools.product(STEPS, SHIFTS):
        sampler = Sampler(solver=Euler(), grid="flow_match_euler", steps=steps, shift=shift)
        assert difference(run(sampler), reference_run(euler(steps, shift))) < TOLERANCE, (steps, shift)


def test_a_disabled_corrector():
    reference = reference_run(unipc("diffusers", 10, 5.0, disable_corrector=[0, 4]))
    sampler = Sampler(solver=UniPC(uncorrected_steps=(0, 4)), grid="diffusers", steps=10, shift=5.0)
    assert difference(run(sampler), reference) < TOLERANCE


def test_a_saved_scheduler_config_makes_the_same_run():
    for scheduler in (unipc("diffusers", 7, 3.0, solver_order=3, disable_corrector=[0]), euler(7, 3.0)):
        sampler = from_diffusers_config(json.loads(scheduler.to_json_string()), steps=7)
        assert difference(run(sampler), reference_run(scheduler)) < TOLERANCE


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (2,), (7,), (15,), (16,), (17,), (31,), (2, 3, 5), (1, 16, 3, 9, 11)]
)
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, 2**32 + 42, 2**64 - 1])
def test_noise(shape, seed):
    reference = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()
    ours = normal(shape, seed)
    assert ours.dtype == reference.dtype == np.float32
    assert ours.shape == reference.shape
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-6)


def test_noise_of_a_video():
    shape = (16, 21, 90, 160)
    reference = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(3)).numpy()
    np.testing.assert_allclose(normal(shape, 3), reference, rtol=0, atol=1e-6)


def goldens() -> dict[str, np.ndarray]:
    """What the references give, under names that say what was asked (tests/test_sampling.py reads them)."""
    arrays = {"noise": noise()}
    for steps, shift in ((1, 5.0), (2, 3.0), (5, 8.0), (20, 5.0), (50, 3.0)):
        runs = {f"unipc/{order}/{grid}": unipc(grid, steps, shift, solver_order=order) for grid, order in UNIPC_RUNS}
        runs["euler/1/flow_match_euler"] = euler(steps, shift)
        for name, scheduler in runs.items():
            arrays[f"result/{name}/{steps}/{shift}"] = reference_run(scheduler)
            grid = name.split("/")[-1]
            arrays[f"sigmas/{grid}/{steps}/{shift}"] = scheduler.sigmas.numpy()
            arrays[f"timesteps/{grid}/{steps}/{shift}"] = scheduler.timesteps.numpy().astype(np.float32)
    for shape, seed in NOISE:
        name = f"normal/{seed}/{'x'.join(map(str, shape))}"
        arrays[name] = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()
    return arrays


def test_the_recorded_goldens_are_current():
    live = goldens()
    with np.load(GOLDENS) as recorded:
        assert sorted(recorded) == sorted(live)
        for name, value in live.items():
            np.testing.assert_allclose(recorded[name], value, rtol=0, atol=1e-6, err_msg=name)


if __name__ == "__main__":
    np.savez_compressed(GOLDENS, **goldens())
