"""Sampling against diffusers and PyTorch, live: grids, whole runs with a nonlinear stand-in for the network, and noise.

`python tests/parity/test_sampling.py` records what the references give into tests/goldens/sampling.npz, for
tests/test_sampling.py, which runs without them.
"""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vidax.sampling.guidance import dynamic, guide
from vidax.sampling.noise import Stream, fresh_noise, normal
from vidax.sampling.sampler import Sampler, from_diffusers_config
from vidax.sampling.schedules import make_schedule, training_alphas
from vidax.sampling.solvers import DDIM, DPM, Euler, UniPC, initial_state, step

torch = pytest.importorskip("torch")
schedulers = pytest.importorskip("diffusers.schedulers")
diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.parity

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "sampling.npz"
TOLERANCE = 1e-5  # of the largest value after a whole run; measured: 2e-6
NOISE_SEED = 7  # of the fresh noise of a recorded run; the goldens know it too

STEPS = (1, 2, 3, 5, 10, 20, 50)
SHIFTS = (1.0, 3.0, 3.3, 5.0, 8.0)
UNIPC_RUNS = list(itertools.product(("official", "diffusers"), (1, 2, 3)))
NOISE = [
    (shape, seed)
    for seed in (0, 42, 2**32 - 1)
    for shape in ((1,), (7,), (15,), (16,), (17,), (2, 3, 5), (1, 4, 2, 3, 5))
]

DRAWS = ("7,3,1", "1,1,15,2,16,1,1", "5,17,5,0,33,1,100,16,2", "48,47,15,64,15,96")  # sizes drawn one after another


def velocity(library, sample, timestep):
    """A nonlinear stand-in for the network, for torch and jax.numpy alike."""
    return library.tanh(1.5 * sample + 0.3) - 0.4 * library.cos(2 * sample) + sample * (timestep / 1000)


@functools.cache
def matrices() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return (random.standard_normal((36, 36)) / 6).astype(np.float32), random.standard_normal(36).astype(np.float32)


def linear(library, sample, timestep):
    """Another stand-in: a fixed linear map of all the sample's values and the timestep."""
    weights, bias = (library.asarray(array) for array in matrices())
    return (sample.reshape(-1) @ weights + bias * (timestep / 1000)).reshape(sample.shape)


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


def cogvideox(solver: str, steps: int, shift: float):
    scheduler = {"ddim": schedulers.CogVideoXDDIMScheduler, "dpm": schedulers.CogVideoXDPMScheduler}[solver](
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        snr_shift_scale=shift,
    )
    scheduler.set_timesteps(steps)
    return scheduler


def cogvideox_run(scheduler, network, generator) -> np.ndarray:
    """As in `CogVideoXPipeline`."""
    sample, clean = torch.from_numpy(noise()), None
    timesteps = scheduler.timesteps
    for i, timestep in enumerate(timesteps):
        output = network(torch, sample, timestep.float())
        if isinstance(scheduler, schedulers.CogVideoXDPMScheduler):
            before = timesteps[i - 1] if i > 0 else None
            sample, clean = scheduler.step(
                output, clean, timestep, before, sample, generator=generator, return_dict=False
            )
        else:
            sample = scheduler.step(output, timestep, sample, generator=generator, return_dict=False)[0]
    return sample.numpy()


def reference_run(scheduler) -> np.ndarray:
    if not hasattr(scheduler, "set_begin_index"):
        return cogvideox_run(scheduler, velocity, torch.Generator("cpu").manual_seed(NOISE_SEED))
    scheduler.set_begin_index(0)
    sample = torch.from_numpy(noise())
    for timestep in scheduler.timesteps:
        sample = scheduler.step(velocity(torch, sample, timestep.float()), timestep, sample, return_dict=False)[0]
    return sample.numpy()


@functools.partial(jax.jit, static_argnames="network")
def advance(table, i, state, fresh, network):
    row = table.row(i)
    return step(row, state, network(jnp, state.sample, row.timestep), fresh)


def run(sampler: Sampler, network=velocity) -> np.ndarray:
    table = sampler.table()
    state = initial_state(table, noise())
    stream = Stream(NOISE_SEED)
    fresh = itertools.repeat(None) if table.noise is None else fresh_noise(stream, noise().shape, range(1000))
    for i, added in zip(range(table.steps), fresh, strict=False):
        state = advance(table, i, state, added, network)
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


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_alphas(shift):
    reference = cogvideox("ddim", 1, shift).alphas_cumprod.numpy()
    np.testing.assert_allclose(training_alphas(shift), reference, rtol=0, atol=1e-15)  # measured: 3e-16
    for steps in (1, 2, 3, 7, 10, 30, 50, 999, 1000):
        for solver in ("ddim", "dpm"):
            scheduler = cogvideox(solver, steps, shift)
            schedule = make_schedule("cogvideox", steps, shift)
            np.testing.assert_array_equal(schedule.timesteps, scheduler.timesteps.numpy())
            np.testing.assert_allclose(schedule.alphas, reference[scheduler.timesteps.numpy()], rtol=0, atol=1e-15)


def test_timesteps_of_every_number_of_steps():
    scheduler, longer = cogvideox("ddim", 1, 1.0), []
    for steps in range(1, 1001):
        scheduler.set_timesteps(steps)
        reference, ours = scheduler.timesteps.numpy(), make_schedule("cogvideox", steps, 1.0).timesteps
        np.testing.assert_array_equal(ours, reference[:steps])
        if len(reference) > steps:
            assert reference[steps:].tolist() == [-1]
            longer.append(steps)
    assert (longer[0], len(longer)) == (61, 62)


@pytest.mark.parametrize("network", [velocity, linear])
@pytest.mark.parametrize("solver", [DDIM(), DPM()], ids=lambda solver: solver.name)
def test_cogvideox_runs(solver, network):
    for steps, shift in itertools.product((1, 2, 3, 7, 10, 50), (1.0, 3.0)):
        sampler = Sampler(solver=solver, grid="cogvideox", steps=steps, shift=shift)
        generator = torch.Generator("cpu").manual_seed(NOISE_SEED)
        reference = cogvideox_run(cogvideox(solver.name, steps, shift), network, generator)
        assert difference(run(sampler, network), reference) < TOLERANCE, (steps, shift)  # measured: 1.4e-6


@pytest.mark.parametrize("solver", ["ddim", "dpm"])
@pytest.mark.parametrize("steps", [3, 10, 50])
def test_a_whole_pipeline_of_cogvideox(solver, steps):
    """Initial noise, order of draws, dynamic guidance and solver, with a stand-in for the transformer."""
    sizes = {"in_channels": 4, "out_channels": 4, "sample_width": 4, "sample_height": 4, "sample_frames": 5}
    small = {"num_attention_heads": 1, "attention_head_dim": 16, "num_layers": 1, "max_text_seq_length": 4}
    transformer = diffusers.CogVideoXTransformer3DModel(time_embed_dim=4, text_embed_dim=8, **sizes, **small)
    conditional, unconditional = 1.0, 0.7

    def forward(hidden_states, encoder_hidden_states, timestep, **_):
        strength = encoder_hidden_states.mean((1, 2))[:, None, None, None, None]
        return (velocity(torch, hidden_states, timestep.float()[:, None, None, None, None]) * strength,)

    transformer.forward = forward
    scheduler, scales = cogvideox(solver, steps, 3.0), []
    pipeline = diffusers.CogVideoXPipeline(None, None, None, transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    reference = pipeline(
        prompt_embeds=torch.full((1, 4, 8), conditional),
        negative_prompt_embeds=torch.full((1, 4, 8), unconditional),
        **{"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": steps},
        **{"guidance_scale": 2.0, "use_dynamic_cfg": True, "output_type": "latent"},
        generator=torch.Generator("cpu").manual_seed(NOISE_SEED),
        callback_on_step_end=lambda pipeline, i, timestep, tensors: scales.append(pipeline.guidance_scale) or {},
    ).frames.numpy()

    table = Sampler(solver={"ddim": DDIM(), "dpm": DPM()}[solver], grid="cogvideox", steps=steps, shift=3.0).table()
    ours = dynamic(2.0, table.timestep, steps)
    np.testing.assert_array_equal(ours, np.float32(scales))
    stream, shape = Stream(NOISE_SEED), (1, 2, 4, 4, 4)
    state = initial_state(table, stream.normal(shape))
    fresh = itertools.repeat(None) if table.noise is None else fresh_noise(stream, shape, range(steps))
    for i, added in zip(range(steps), fresh, strict=False):
        output = velocity(jnp, state.sample, table.timestep[i])
        guided = guide(jnp.concatenate([conditional * output, unconditional * output]), ours[i])
        state = step(table.row(i), state, guided, added)
    assert difference(np.asarray(state.sample), reference) < TOLERANCE  # measured: 2.2e-6


def test_a_disabled_corrector():
    reference = reference_run(unipc("diffusers", 10, 5.0, disable_corrector=[0, 4]))
    sampler = Sampler(solver=UniPC(uncorrected_steps=(0, 4)), grid="diffusers", steps=10, shift=5.0)
    assert difference(run(sampler), reference) < TOLERANCE


def test_a_saved_scheduler_config_makes_the_same_run():
    unipc3 = unipc("diffusers", 7, 3.0, solver_order=3, disable_corrector=[0])
    for scheduler in (unipc3, euler(7, 3.0), cogvideox("ddim", 7, 1.0), cogvideox("dpm", 7, 3.0)):
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


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_draws_of_one_generator(seed):
    shapes = np.random.default_rng(0)
    sizes = [[int(size) for size in draws.split(",")] for draws in DRAWS]
    sizes += [list(shapes.integers(0, 40, 60)), list(shapes.integers(0, 16, 60)), list(shapes.integers(0, 3000, 20))]
    for draws in sizes:
        generator, stream = torch.Generator("cpu").manual_seed(seed), Stream(seed)
        for i, size in enumerate(draws):
            reference = torch.randn(int(size), generator=generator).numpy()
            if i % 3 == 1:
                stream.skip((size,))
            else:
                np.testing.assert_allclose(stream.normal((size,)), reference, rtol=0, atol=1e-6)


def test_draws_of_a_video():
    generator, stream = torch.Generator("cpu").manual_seed(3), Stream(3)
    for shape in ((1, 13, 16, 60, 90), (1, 13, 16, 60, 90), (1, 3, 5, 7, 9), (1, 13, 16, 60, 90)):
        reference = torch.randn(shape, generator=generator).numpy()
        np.testing.assert_allclose(stream.normal(shape), reference, rtol=0, atol=1e-6)


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
    for solver, (steps, shift) in itertools.product(("ddim", "dpm"), ((1, 3.0), (3, 3.0), (7, 1.0), (50, 3.0))):
        arrays[f"result/{solver}/1/cogvideox/{steps}/{shift}"] = reference_run(cogvideox(solver, steps, shift))
    for shape, seed in NOISE:
        name = f"normal/{seed}/{'x'.join(map(str, shape))}"
        arrays[name] = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()
    for draws, seed in itertools.product(DRAWS, (0, 42)):
        generator = torch.Generator("cpu").manual_seed(seed)
        values = [torch.randn(int(size), generator=generator).numpy() for size in draws.split(",")]
        arrays[f"stream/{seed}/{draws}"] = np.concatenate(values)
    return arrays


def test_the_recorded_goldens_are_current():
    live = goldens()
    with np.load(GOLDENS) as recorded:
        assert sorted(recorded) == sorted(live)
        for name, value in live.items():
            np.testing.assert_allclose(recorded[name], value, rtol=0, atol=1e-6, err_msg=name)


if __name__ == "__main__":
    np.savez_compressed(GOLDENS, **goldens())
