"""Sampling without PyTorch: values checkable by hand, recorded results of diffusers, and what the solvers promise.

tests/parity/test_sampling.py compares live, and records tests/goldens/sampling.npz.
"""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vidax.errors import UserError
from vidax.sampling.guidance import dynamic, guide
from vidax.sampling.noise import Stream, fresh_noise, normal
from vidax.sampling.sampler import Sampler, from_diffusers_config
from vidax.sampling.schedules import AlphaSchedule, Schedule, make_schedule, shift_sigmas, training_alphas
from vidax.sampling.solvers import DDIM, DPM, Euler, UniPC, initial_state, step

with np.load(pathlib.Path(__file__).parent / "goldens" / "sampling.npz") as file:
    GOLDENS = dict(file)

SOLVERS = [Euler(), *(UniPC(order=order) for order in (1, 2, 3))]
UNCORRECTED = tuple(range(1000))
TOLERANCE = 1e-5  # of the largest value after a whole run; measured: 2e-6
NOISE_SEED = 7  # of the fresh noise that the goldens were recorded with

WAN_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.33.0",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "solver_order": 2,
    "solver_p": None,
    "timestep_spacing": "linspace",
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}

COGVIDEOX_SCHEDULER = {
    "_class_name": "CogVideoXDPMScheduler",
    "_diffusers_version": "0.31.0.dev0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "clip_sample_range": 1.0,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "sample_max_value": 1.0,
    "set_alpha_to_one": True,
    "snr_shift_scale": 1.0,
    "steps_offset": 0,
    "timestep_spacing": "trailing",
    "trained_betas": None,
}


def golden(kind: str):
    names = [name.removeprefix(f"{kind}/") for name in GOLDENS if name.startswith(f"{kind}/")]
    assert names
    return pytest.mark.parametrize("name", names)


def velocity(sample, timestep):
    """The stand-in for the network that the goldens were recorded with."""
    return jnp.tanh(1.5 * sample + 0.3) - 0.4 * jnp.cos(2 * sample) + sample * (timestep / 1000)


@jax.jit
def advance(table, i, state, fresh=None):
    row = table.row(i)
    return step(row, state, velocity(state.sample, row.timestep), fresh)


# Schedules


def test_shift_by_hand():
    sigmas = shift_sigmas(np.array([1, 0.75, 0.5, 0.25, 0]), 5.0)
    np.testing.assert_allclose(sigmas, [1, 3.75 / 4, 2.5 / 3, 1.25 / 2, 0], rtol=1e-15)
    np.testing.assert_array_equal(shift_sigmas(sigmas, 1.0), sigmas)


def test_official_grid_by_hand():
    schedule = make_schedule("official", 3, 1.0)
    np.testing.assert_allclose(schedule.sigmas, [0.999, 0.666, 0.333, 0], atol=1e-7)
    np.testing.assert_array_equal(schedule.timesteps, [999, 666, 333])


def test_diffusers_grid_by_hand():
    schedule = make_schedule("diffusers", 4, 1.0)
    np.testing.assert_allclose(schedule.sigmas, [1 - 1e-6, 0.75025, 0.5005, 0.25075, 0], atol=1e-7)
    np.testing.assert_array_equal(schedule.timesteps, [999, 750, 500, 250])


def test_flow_match_euler_grid_by_hand():
    schedule = make_schedule("flow_match_euler", 3, 1.0)
    np.testing.assert_allclose(schedule.sigmas, [1, 0.5005, 0.001, 0], atol=1e-7)
    np.testing.assert_allclose(schedule.timesteps, [1000, 500.5, 1], atol=1e-3)


@golden("sigmas")
def test_grids_equal_diffusers(name):
    grid, steps, shift = name.split("/")
    schedule = make_schedule(grid, int(steps), float(shift))
    np.testing.assert_array_equal(schedule.sigmas, GOLDENS[f"sigmas/{name}"])
    np.testing.assert_array_equal(schedule.timesteps, GOLDENS[f"timesteps/{name}"])


def test_cogvideox_grid_by_hand():
    alphas, schedule = training_alphas(1.0), make_schedule("cogvideox", 3, 1.0)
    assert (schedule.steps, schedule.timesteps.tolist()) == (3, [999, 666, 332])
    np.testing.assert_array_equal(schedule.alphas, alphas[[999, 666, 332]])
    np.testing.assert_array_equal(schedule.next_alphas, [alphas[666], alphas[333], 1])
    assert make_schedule("cogvideox", 7, 1.0).next_alphas[-1] == alphas[0] < 1
    assert make_schedule("cogvideox", 61, 1.0).steps == 61


def test_alphas_by_hand():
    alphas, shifted = training_alphas(1.0), training_alphas(3.0)
    assert alphas[-1] == shifted[-1] == 0 and (np.diff(alphas) < 0).all()
    np.testing.assert_allclose(alphas[0], 1 - 0.00085, rtol=1e-15)
    np.testing.assert_allclose(shifted[0] / (1 - shifted[0]), alphas[0] / (1 - alphas[0]) / 3, rtol=1e-12)


def test_impossible_schedules_are_refused():
    with pytest.raises(
        UserError, match="sigma grid 'karras' is unknown: choose one of official, diffusers, flow_match"
    ):
        make_schedule("karras", 4, 1.0)
    for steps in (0, -1, 2.5, True):
        with pytest.raises(UserError, match=f"{steps} steps: the number of steps is a whole number, 1 or more"):
            make_schedule("official", steps, 1.0)
    for shift in (0, -1.0, float("nan"), float("inf"), "3"):
        with pytest.raises(UserError, match=f"flow shift {shift!r}: the shift is a number above 0"):
            make_schedule("official", 4, shift)
    with pytest.raises(UserError, match="SNR shift 0: the shift is a number above 0; 1 leaves the noise levels as"):
        make_schedule("cogvideox", 4, 0)
    with pytest.raises(UserError, match="1001 steps: the cogvideox grid has 1000 timesteps, so at most as many steps"):
        make_schedule("cogvideox", 1001, 1.0)


# Solvers


def run(sampler: Sampler) -> np.ndarray:
    table, noise = sampler.table(), GOLDENS["noise"]
    state = initial_state(table, noise)
    fresh = [None] * table.steps
    if table.noise is not None:
        fresh = fresh_noise(Stream(NOISE_SEED), noise.shape, range(table.steps))
    for i, added in enumerate(fresh):
        state = advance(table, i, state, added)
    return np.asarray(state.sample)


def difference(result: np.ndarray, name: str) -> float:
    """Largest difference from the recorded result of diffusers, relative to its largest value."""
    reference = GOLDENS[f"result/{name}"]
    return float(np.abs(result - reference).max() / np.abs(reference).max())


@golden("result")
def test_runs_equal_diffusers(name):
    solver, order, grid, steps, shift = name.split("/")
    chosen = {"unipc": UniPC(order=int(order)), "euler": Euler(), "ddim": DDIM(), "dpm": DPM()}[solver]
    result = run(Sampler(solver=chosen, grid=grid, steps=int(steps), shift=float(shift)))
    assert difference(result, name) < TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        {"shift": 5.01},
        {"grid": "official"},
        {"solver": UniPC(order=3)},
        {"solver": UniPC(order=1)},
        {"solver": UniPC(uncorrected_steps=(9,))},
        {"solver": Euler()},
    ],
    ids=str,
)
def test_the_tolerance_would_catch(other):
    right = {"solver": UniPC(order=2), "grid": "diffusers", "steps": 20, "shift": 5.0}
    assert difference(run(Sampler(**right)), "unipc/2/diffusers/20/5.0") < TOLERANCE
    assert difference(run(Sampler(**(right | other))), "unipc/2/diffusers/20/5.0") > 2 * TOLERANCE


def test_euler_by_hand():
    schedule = Schedule(sigmas=np.array([1, 0.75, 0.25, 0]), timesteps=np.array([1000, 750, 250]))
    table = Euler().table(schedule)
    state = initial_state(table, np.array([8.0]))
    for i, expected in enumerate([8 - 0.25 * 4, 7 - 0.5 * 4, 5 - 0.25 * 4]):
        state = step(table.row(i), state, jnp.array([4.0]))
        assert float(state.sample[0]) == expected


def test_the_first_unipc_step_and_its_correction_by_hand():
    schedule = Schedule(sigmas=np.array([0.75, 0.5, 0]), timesteps=np.array([750, 500]))
    table = UniPC(order=2).table(schedule)
    state = initial_state(table, np.array([6.0]))
    state = step(table.row(0), state, jnp.array([4.0]))  # clean: 6 - 0.75 * 4 = 3; predicted: 2/3 of 6 + 1/3 of 3
    np.testing.assert_allclose(state.sample, [5.0], rtol=1e-6)
    # clean: 5 - 0.5 * 2 = 4. The solver's time goes from log(1/3) to log(1), so 1 - exp(-h) is 2/3, and the correction
    # 0.5 * 2/3 * 1/2 * (4 - 3). The last step gives the clean prediction itself.
    state = step(table.row(1), state, jnp.array([2.0]))
    np.testing.assert_allclose(state.corrected, [5 + 1 / 6], rtol=1e-6)
    np.testing.assert_allclose(state.sample, [4.0], rtol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_straight_flows_are_exact(solver, steps):
    schedule = make_schedule("official", steps, 3.0)
    table = solver.table(schedule)
    clean, noise = np.array([2.0, -1.0]), np.array([0.5, 3.0])
    state = initial_state(table, clean + schedule.sigmas[0] * (noise - clean))
    for i in range(steps):
        state = step(table.row(i), state, jnp.asarray(noise - clean, jnp.float32))
        np.testing.assert_allclose(state.sample, clean + schedule.sigmas[i + 1] * (noise - clean), atol=2e-6)


def test_unipc_of_order_one_without_correction_is_euler():
    schedule = make_schedule("official", 7, 3.0)
    ours, euler = UniPC(order=1, uncorrected_steps=UNCORRECTED).table(schedule), Euler().table(schedule)
    np.testing.assert_array_equal(ours.advance[:, :2], euler.advance)
    np.testing.assert_array_equal(ours.correct[:, :3], euler.correct)
    assert not ours.advance[:, 2:].any() and not ours.correct[:, 3:].any()


@pytest.mark.parametrize("steps", [1, 2, 10, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_ddim_is_exact_for_one_video(steps, shift):
    schedule = make_schedule("cogvideox", steps, shift)
    table = DDIM().table(schedule)
    clean, noise = np.array([2.0, -1.0]), np.array([0.5, 3.0])
    state = initial_state(table, noise)
    for i, (alpha, end) in enumerate(zip(schedule.alphas, schedule.next_alphas, strict=True)):
        v = np.sqrt(alpha) * noise - np.sqrt(1 - alpha) * clean
        state = step(table.row(i), state, jnp.asarray(v, jnp.float32))
        np.testing.assert_allclose(state.sample, np.sqrt(end) * clean + np.sqrt(1 - end) * noise, atol=2e-6)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 50, 1000])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_dpm_keeps_the_law_of_noisy_latents(steps, shift):
    """With the clean latents known, mean and variance of the noisy ones are those that the network was trained with."""
    schedule = make_schedule("cogvideox", steps, shift)
    table = DPM().table(schedule)
    assert all(np.isfinite(column).all() for column in jax.tree.leaves(table))
    sample, clean, past = table.advance.T
    np.testing.assert_allclose(
        sample * np.sqrt(schedule.alphas) + clean + past, np.sqrt(schedule.next_alphas), atol=1e-6
    )
    variance = sample**2 * (1 - schedule.alphas) + table.noise**2
    np.testing.assert_allclose(variance, 1 - schedule.next_alphas, atol=1e-6)


def test_tables_at_both_ends():
    ddim, dpm = (Sampler(solver=solver, grid="cogvideox", steps=50, shift=1.0).table() for solver in (DDIM(), DPM()))
    for table in (ddim, dpm):  # from pure noise the clean prediction is that of v, and the sample says nothing else
        np.testing.assert_array_equal(table.denoise[0], [0, -1])
        np.testing.assert_array_equal(table.advance[-1, :2], [0, 1])
        np.testing.assert_array_equal(table.correct[:, 0], 1)
        assert not table.correct[:, 1:].any()
    assert (ddim.past, dpm.past, ddim.noise, dpm.noise.shape) == (0, 1, None, (50,))
    assert dpm.advance[0, 0] == dpm.advance[0, 2] == dpm.advance[1, 2] == dpm.advance[-1, 2] == dpm.noise[-1] == 0
    assert (dpm.advance[2:-1, 2] < 0).all() and (dpm.noise[:-1] > 0).all()


def test_a_dpm_step_by_hand():
    alphas = 1 / (1 + np.exp(-2 * np.array([-1.0, 0.0, 1.0])))  # steps of length 1 in the solver's time
    table = DPM().table(AlphaSchedule(alphas=alphas[:2], next_alphas=alphas[1:], timesteps=np.array([800, 400])))
    kept = np.exp(-2.0)
    clean = np.sqrt(alphas[2]) * (1 - kept)
    sample = np.sqrt((1 - alphas[2]) / (1 - alphas[1]) * kept)
    np.testing.assert_allclose(table.advance[1], [sample, 1.5 * clean, -0.5 * clean], rtol=1e-6)
    np.testing.assert_allclose(table.noise[1], np.sqrt((1 - alphas[2]) * (1 - kept)), rtol=1e-6)


def test_fresh_noise_is_for_solvers_that_add_it():
    for solver, fresh in ((DDIM(), jnp.ones(3)), (DPM(), None)):
        table = solver.table(make_schedule("cogvideox", 4, 1.0))
        with pytest.raises(AssertionError, match="fresh noise is for solvers that add it"):
            step(table.row(0), initial_state(table, np.ones(3)), jnp.ones(3), fresh)


def gaussian_error(solver, steps: int) -> float:
    """Relative error half way through a run whose exact solution is known: clean data normal with deviation 1/2.

    Then the network's best velocity is linear in the sample, and the sample stays in proportion to its deviation.
    """
    schedule = make_schedule("official", steps, 3.0)
    table = solver.table(schedule)
    state = initial_state(table, np.ones(1))
    deviation = np.sqrt((0.5 * (1 - schedule.sigmas)) ** 2 + schedule.sigmas**2)
    for i in range(steps // 2):
        sigma = schedule.sigmas[i]
        slope = (sigma - 0.25 * (1 - sigma)) / deviation[i] ** 2
        state = step(table.row(i), state, state.sample * slope)
    return abs(float(state.sample[0]) * deviation[0] / deviation[steps // 2] - 1)


@pytest.mark.parametrize(
    ("solver", "order"),
    [(Euler(), 1), (UniPC(order=2, uncorrected_steps=UNCORRECTED), 2), (UniPC(order=1), 2), (UniPC(order=2), 3)],
    ids=str,
)
def test_errors_fall_with_the_steps(solver, order):
    ratio = gaussian_error(solver, 16) / gaussian_error(solver, 32)
    assert 2 ** (order - 0.3) < ratio < 2 ** (order + 0.3)


def test_errors_fall_with_the_order():
    errors = [gaussian_error(solver, 16) for solver in SOLVERS]
    assert all(better < worse / 2 for worse, better in itertools.pairwise(errors))


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_one_compilation_for_all_steps_and_a_donated_state(solver):
    traces = []

    def update(table, i, state):
        traces.append(i)
        return step(table.row(i), state, state.sample)

    update = jax.jit(update, donate_argnums=2)
    for shift in (1.0, 5.0):
        table = solver.table(make_schedule("official", 6, shift))
        state = initial_state(table, np.ones((2, 3)))
        for i in range(table.steps):
            state = update(table, i, state)
    assert len(traces) == 1


def test_one_compilation_for_all_steps_with_fresh_noise():
    traces = []

    @jax.jit
    def update(table, i, state, fresh):
        traces.append(i)
        return step(table.row(i), state, state.sample, fresh)

    for shift in (1.0, 3.0):
        table = DPM().table(make_schedule("cogvideox", 6, shift))
        state = initial_state(table, np.ones((2, 3)))
        for i, fresh in enumerate(fresh_noise(Stream(0), (2, 3), range(table.steps))):
            state = update(table, i, state, fresh)
    assert len(traces) == 1


def test_a_traced_loop_gives_the_same():
    sampler = Sampler(solver=UniPC(order=3), grid="diffusers", steps=6, shift=5.0)
    table = sampler.table()
    state = jax.lax.fori_loop(0, 6, lambda i, state: advance(table, i, state), initial_state(table, GOLDENS["noise"]))
    np.testing.assert_allclose(state.sample, run(sampler), atol=1e-6)


def test_a_step_keeps_the_sharding_without_communication():
    mesh = jax.make_mesh((8,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "seq"))
    table = UniPC(order=3).table(make_schedule("official", 4, 3.0))
    state = initial_state(table, jax.device_put(np.ones((2, 8, 3), np.float32), sharding))
    compiled = advance.lower(table, 1, state).compile()
    assert not re.search("all-|collective-", compiled.as_text())
    for leaf in jax.tree.leaves((state, compiled(table, 1, state))):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_bfloat16_network_leaves_the_state_in_float32():
    table = UniPC().table(make_schedule("official", 4, 3.0))
    state = step(table.row(0), initial_state(table, np.ones(3)), jnp.ones(3, jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}


def test_impossible_solvers_are_refused():
    for order in (0, 4):
        with pytest.raises(UserError, match=f"UniPC of order {order}: orders 1, 2 and 3 are supported"):
            UniPC(order=order)
    with pytest.raises(UserError, match=r"UniPC without correction of steps \(-1,\): steps are counted from 0"):
        UniPC(uncorrected_steps=(-1,))
    with pytest.raises(
        UserError, match=r"UniPC cannot start at sigma 1, where .* choose the official or the diffusers"
    ):
        Sampler(solver=UniPC(), grid="flow_match_euler", steps=4, shift=3.0)
    with pytest.raises(
        UserError, match="solver dpm does not fit the official grid of noise levels: euler and unipc are"
    ):
        Sampler(solver=DPM(), grid="official", steps=4, shift=3.0)
    with pytest.raises(UserError, match="solver unipc2 does not fit the cogvideox grid of noise levels: ddim and dpm"):
        Sampler(solver=UniPC(), grid="cogvideox", steps=4, shift=3.0)


# Scheduler configs


def test_the_scheduler_config_of_wan():
    sampler = from_diffusers_config(WAN_SCHEDULER, steps=50)
    assert sampler == Sampler(solver=UniPC(order=2), grid="diffusers", steps=50, shift=3.0)
    assert from_diffusers_config(WAN_SCHEDULER, steps=50, shift=5.0).shift == 5.0
    changed = WAN_SCHEDULER | {"solver_order": 3, "disable_corrector": [0, 1]}
    assert from_diffusers_config(changed, steps=4).solver == UniPC(order=3, uncorrected_steps=(0, 1))


def test_a_flow_match_euler_config():
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0, "base_shift": 0.5}
    sampler = from_diffusers_config(config, steps=4)
    assert sampler == Sampler(solver=Euler(), grid="flow_match_euler", steps=4, shift=7.0)
    with pytest.raises(UserError, match=r"Euler.*: invert_sigmas = True is not supported, only False is"):
        from_diffusers_config(config | {"invert_sigmas": True}, steps=4)


def test_the_scheduler_configs_of_cogvideox():
    sampler = from_diffusers_config(COGVIDEOX_SCHEDULER, steps=50)
    assert sampler == Sampler(solver=DPM(), grid="cogvideox", steps=50, shift=1.0)
    assert from_diffusers_config(COGVIDEOX_SCHEDULER, steps=50, shift=3.0).shift == 3.0
    config = COGVIDEOX_SCHEDULER | {"_class_name": "CogVideoXDDIMScheduler"}
    del config["snr_shift_scale"]
    sampler = from_diffusers_config(config, steps=10)
    assert sampler == Sampler(solver=DDIM(), grid="cogvideox", steps=10, shift=3.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction_type": "epsilon"}, "prediction_type = 'epsilon' is not supported, only 'v_prediction' is"),
        ({"rescale_betas_zero_snr": False}, "rescale_betas_zero_snr = False is not supported, only True is"),
        ({"timestep_spacing": "linspace"}, "timestep_spacing = 'linspace' is not supported, only 'trailing' is"),
        ({"set_alpha_to_one": False}, "set_alpha_to_one = False is not supported, only True is"),
        ({"beta_schedule": "linear"}, "beta_schedule = 'linear' is not supported, only 'scaled_linear' is"),
        ({"beta_start": 0.0001}, "beta_start = 0.0001 is not supported, only 0.00085 is"),
        ({"beta_end": 0.02}, "beta_end = 0.02 is not supported, only 0.012 is"),
        ({"trained_betas": [0.1]}, "trained_betas = [0.1] is not supported, only None is"),
        ({"num_train_timesteps": 500}, "num_train_timesteps = 500 is not supported, only 1000 is"),
        ({"snr_shift_scale": 0}, "SNR shift 0: the shift is a number above 0"),
        ({"flow_shift": 3.0}, "the setting flow_shift = 3.0 is unknown; known are snr_shift_scale, "),
        ({"thresholding": False}, "the setting thresholding = False is unknown"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"])
def test_what_is_not_supported_of_cogvideox_is_refused(name, change, message):
    with pytest.raises(UserError) as raised:
        from_diffusers_config(COGVIDEOX_SCHEDULER | change | {"_class_name": name}, steps=4)
    assert message in str(raised.value)


@pytest.mark.parametrize("key", ["prediction_type", "rescale_betas_zero_snr", "timestep_spacing"])
def test_an_unsupported_default_of_cogvideox_is_refused(key):
    config = {name: value for name, value in COGVIDEOX_SCHEDULER.items() if name != key}
    with pytest.raises(UserError, match=rf"{key} = .* \(diffusers' default; the file has none\) is not supported"):
        from_diffusers_config(config, steps=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"_class_name": "DDIMScheduler"},
            "scheduler 'DDIMScheduler' is not supported: choose a solver and a sigma grid",
        ),
        ({"use_karras_sigmas": True}, "use_karras_sigmas = True is not supported, only False is"),
        ({"use_exponential_sigmas": True}, "use_exponential_sigmas = True is not supported, only False is"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas = True is not supported, only False is"),
        ({"use_flow_sigmas": False}, "use_flow_sigmas = False is not supported, only True is"),
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting = True is not supported, only False is"),
        ({"shift_terminal": 0.1}, "shift_terminal = 0.1 is not supported, only None is"),
        ({"prediction_type": "epsilon"}, "prediction_type = 'epsilon' is not supported, only 'flow_prediction' is"),
        ({"predict_x0": False}, "predict_x0 = False is not supported, only True is"),
        ({"solver_type": "bh1"}, "solver_type = 'bh1' is not supported, only 'bh2' is"),
        ({"solver_order": 4}, "UniPC of order 4: orders 1, 2 and 3 are supported"),
        ({"solver_p": {}}, "solver_p = {} is not supported, only None is"),
        ({"lower_order_final": False}, "lower_order_final = False is not supported, only True is"),
        ({"final_sigmas_type": "sigma_min"}, "final_sigmas_type = 'sigma_min' is not supported, only 'zero' is"),
        ({"thresholding": True}, "thresholding = True is not supported, only False is"),
        ({"num_train_timesteps": 500}, "num_train_timesteps = 500 is not supported, only 1000 is"),
        ({"flow_shift": None}, "flow shift None: the shift is a number above 0"),
        ({"new_setting": 1}, "the setting new_setting = 1 is unknown; known are flow_shift, "),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(change, message):
    with pytest.raises(UserError) as raised:
        from_diffusers_config(WAN_SCHEDULER | change, steps=4)
    assert message in str(raised.value)


def test_an_unsupported_default_is_refused():
    config = {key: value for key, value in WAN_SCHEDULER.items() if key != "use_flow_sigmas"}
    with pytest.raises(UserError, match=r"use_flow_sigmas = False \(diffusers' default; the file has none\) is not"):
        from_diffusers_config(config, steps=4)


# Noise


@golden("normal")
def test_noise_equals_torch(name):
    seed, shape = name.split("/")
    noise = normal([int(size) for size in shape.split("x")], int(seed))
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, GOLDENS[f"normal/{name}"], rtol=0, atol=1e-6)


def test_seeds():
    np.testing.assert_array_equal(normal((20,), 2**32 + 5), normal((20,), 5))
    assert (normal((20,), 6) != normal((20,), 5)).all()
    for seed in (-1, 2**64, 1.5, None, True):
        with pytest.raises(UserError, match=f"seed {seed}: a seed is a whole number from 0 to 18446744073709551615"):
            normal((20,), seed)


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_noise_is_standard_normal(kind):
    noise = normal((16, 3, 50, 40), 0, kind)
    assert isinstance(noise, np.ndarray) and noise.dtype == np.float32 and noise.shape == (16, 3, 50, 40)
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01


def test_noise_of_jax():
    np.testing.assert_array_equal(normal((3, 4), 7, "jax"), jax.random.normal(jax.random.key(7), (3, 4)))
    with pytest.raises(UserError, match="noise kind 'numpy' is unknown: choose torch or jax"):
        normal((3, 4), 7, "numpy")


@golden("stream")
def test_successive_draws_equal_torch(name):
    seed, draws = name.split("/")
    sizes = [int(size) for size in draws.split(",")]
    expected = np.split(GOLDENS[f"stream/{name}"], np.cumsum(sizes)[:-1])
    for skipped in (set(), {0}, {1, 2}, set(range(len(sizes) - 1))):
        stream = Stream(int(seed))
        for i, size in enumerate(sizes):
            if i in skipped:
                stream.skip((size,))
            else:
                np.testing.assert_allclose(stream.normal((size,)), expected[i], rtol=0, atol=1e-6)


def test_successive_draws_of_jax():
    key, stream = jax.random.key(7), Stream(7, "jax")
    np.testing.assert_array_equal(stream.normal((3, 4)), jax.random.normal(key, (3, 4)))
    np.testing.assert_array_equal(stream.normal((5,)), jax.random.normal(jax.random.fold_in(key, 1), (5,)))
    stream.skip((8,))
    np.testing.assert_array_equal(stream.normal((5,)), jax.random.normal(jax.random.fold_in(key, 3), (5,)))


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_fresh_noise_is_every_second_draw_after_the_first(kind):
    drawn = Stream(7, kind)
    draws = [drawn.normal((3, 5)) for _ in range(6)]
    stream = Stream(7, kind)
    np.testing.assert_array_equal(stream.normal((3, 5)), draws[0])
    np.testing.assert_array_equal(list(fresh_noise(stream, (3, 5), range(3))), [draws[1], draws[3], draws[5]])
    later = Stream(7, kind)
    later.skip((3, 5))
    np.testing.assert_array_equal(list(fresh_noise(later, (3, 5), range(1, 3))), [draws[3], draws[5]])


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_the_order_of_axes_in_which_noise_is_drawn(kind):
    drawn, stream = Stream(7, kind), Stream(7, kind, order=(0, 3, 1, 2))
    stream.skip((2, 3, 4, 5))
    drawn.skip((2, 5, 3, 4))
    np.testing.assert_array_equal(stream.normal((2, 3, 4, 5)), drawn.normal((2, 5, 3, 4)).transpose(0, 2, 3, 1))


# Guidance


def test_guidance():
    prediction = jnp.array([[3.0], [1.0], [2.0], [1.0]], jnp.bfloat16)  # two conditional, two unconditional
    guided = jax.jit(guide)(prediction, 5.0)
    assert guided.dtype == jnp.float32
    np.testing.assert_array_equal(guided, [[2 + 5 * (3 - 2)], [1]])
    np.testing.assert_array_equal(guide(prediction, 1.0), [[3], [1]])


def test_dynamic_guidance_by_hand():
    np.testing.assert_array_equal(
        dynamic(6.0, [1000, 500, 0], 1000), np.float32([1, 1 + 3 * (1 - np.cos(np.pi / 32)), 7])
    )
    scales = dynamic(6.0, make_schedule("cogvideox", 50, 1.0).timesteps, 50)
    assert scales.shape == (50,) and scales.dtype == np.float32 and 1 <= scales.min() < 1.1 and 6.9 < scales.max() <= 7
    np.testing.assert_allclose(scales[-1], 1 + 3 * (1 - np.cos(np.pi * (31 / 50) ** 5)), rtol=1e-6)
