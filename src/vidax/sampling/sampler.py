"""The choice of solver, grid of noise levels, steps and shift: by a card or by diffusers' `scheduler_config.json`."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from vidax.errors import UserError
from vidax.sampling.schedules import TRAIN_TIMESTEPS, AlphaSchedule, Grid, Schedule, make_schedule
from vidax.sampling.solvers import DDIM, DPM, Euler, Solver, SolverTable, UniPC


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """A sampler that exists can be run: the constructor raises `UserError` for what is unknown or does not fit.

    shift: the flow shift, or CogVideoX's SNR shift; above 1 it spends more of the steps on noisy latents.
    """

    solver: Solver
    grid: Grid
    steps: int
    shift: float

    def __post_init__(self):
        self.table()

    @property
    def variance_preserving(self) -> bool:
        """Whether the noise levels are those of a variance-preserving model, not of a flow."""
        return isinstance(self.schedule(), AlphaSchedule)

    def schedule(self) -> Schedule | AlphaSchedule:
        return make_schedule(self.grid, self.steps, self.shift)

    def table(self) -> SolverTable:
        schedule, solver = self.schedule(), self.solver
        if isinstance(schedule, Schedule) and isinstance(solver, Euler | UniPC):
            return solver.table(schedule)
        if isinstance(schedule, AlphaSchedule) and isinstance(solver, DDIM | DPM):
            return solver.table(schedule)
        fitting = "ddim and dpm are for" if isinstance(schedule, AlphaSchedule) else "euler and unipc are for"
        raise UserError(f"solver {solver.name} does not fit the {self.grid} grid of noise levels: {fitting} that one")


def from_diffusers_config(config: Mapping[str, Any], *, steps: int, shift: float | None = None) -> Sampler:
    """The sampler that diffusers 0.42.1 makes of a `scheduler_config.json`; `shift` replaces the file's shift.

    Raises `UserError` for every setting that would change the result and is not supported, be it in the file or the
    default where the file has none, and for settings that are unknown.
    """
    name = config.get("_class_name")
    if name == "UniPCMultistepScheduler":
        values = _read(config, UNIPC, FLOW_UNUSED)
        unipc = UniPC(order=values["solver_order"], uncorrected_steps=tuple(values["disable_corrector"] or ()))
        shift = values["flow_shift"] if shift is None else shift
        return Sampler(solver=unipc, grid="diffusers", steps=steps, shift=shift)
    if name == "FlowMatchEulerDiscreteScheduler":
        values = _read(config, FLOW_MATCH_EULER, FLOW_UNUSED)
        shift = values["shift"] if shift is None else shift
        return Sampler(solver=Euler(), grid="flow_match_euler", steps=steps, shift=shift)
    if name in ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"):
        values = _read(config, COGVIDEOX, COGVIDEOX_UNUSED)
        shift = values["snr_shift_scale"] if shift is None else shift
        solver = DDIM() if name == "CogVideoXDDIMScheduler" else DPM()
        return Sampler(solver=solver, grid="cogvideox", steps=steps, shift=shift)
    raise UserError(
        f"scheduler {name!r} is not supported: choose a solver and a sigma grid by name, or use a checkpoint with "
        "UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler, CogVideoXDDIMScheduler or CogVideoXDPMScheduler"
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """A key of `scheduler_config.json`: diffusers' value where the file has none, and the values supported here."""

    default: Any
    supported: tuple[Any, ...] | None = None  # None: the config that it goes into checks it


UNIPC = {
    "flow_shift": Setting(1.0),
    "disable_corrector": Setting(None),
    "solver_order": Setting(2),
    "solver_type": Setting("bh2", ("bh2",)),  # bh1 and a last sigma of 0 give NaN in diffusers
    "prediction_type": Setting("epsilon", ("flow_prediction",)),
    "use_flow_sigmas": Setting(False, (True,)),
    "num_train_timesteps": Setting(1000, (TRAIN_TIMESTEPS,)),
    "predict_x0": Setting(True, (True,)),
    "lower_order_final": Setting(True, (True,)),
    "final_sigmas_type": Setting("zero", ("zero",)),
    "thresholding": Setting(False, (False,)),
    "solver_p": Setting(None, (None,)),
    "use_karras_sigmas": Setting(False, (False,)),
    "use_exponential_sigmas": Setting(False, (False,)),
    "use_beta_sigmas": Setting(False, (False,)),
    "use_dynamic_shifting": Setting(False, (False,)),
    "shift_terminal": Setting(None, (None,)),
}

FLOW_MATCH_EULER = {
    "shift": Setting(1.0),
    "num_train_timesteps": Setting(1000, (TRAIN_TIMESTEPS,)),
    "use_dynamic_shifting": Setting(False, (False,)),
    "shift_terminal": Setting(None, (None,)),
    "invert_sigmas": Setting(False, (False,)),
    "stochastic_sampling": Setting(False, (False,)),
    "use_karras_sigmas": Setting(False, (False,)),
    "use_exponential_sigmas": Setting(False, (False,)),
    "use_beta_sigmas": Setting(False, (False,)),
}

COGVIDEOX = {
    "snr_shift_scale": Setting(3.0),
    "prediction_type": Setting("epsilon", ("v_prediction",)),
    "rescale_betas_zero_snr": Setting(False, (True,)),
    "timestep_spacing": Setting("leading", ("trailing",)),
    "set_alpha_to_one": Setting(True, (True,)),
    "num_train_timesteps": Setting(1000, (TRAIN_TIMESTEPS,)),
    "beta_schedule": Setting("scaled_linear", ("scaled_linear",)),
    "beta_start": Setting(0.00085, (0.00085,)),
    "beta_end": Setting(0.012, (0.012,)),
    "trained_betas": Setting(None, (None,)),
}

# Without effect under the settings above: they serve other grids, thresholding, or dynamic shifting.
FLOW_UNUSED = {
    *("beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"),
    *("timestep_spacing", "steps_offset", "sigma_min", "sigma_max"),
    *("dynamic_thresholding_ratio", "sample_max_value"),
    *("time_shift_type", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
}

# Without effect at all: those schedulers do not clip, and the offset is for leading timesteps.
COGVIDEOX_UNUSED = {"clip_sample", "clip_sample_range", "sample_max_value", "steps_offset"}


def _read(config: Mapping[str, Any], settings: Mapping[str, Setting], unused: Collection[str]) -> dict[str, Any]:
    """The value of each setting. Keys with a leading underscore are the file's notes about itself."""
    name = config["_class_name"]
    for key in config:
        if key not in settings and key not in unused and not key.startswith("_"):
            raise UserError(f"{name}: the setting {key} = {config[key]!r} is unknown; known are {', '.join(settings)}")
    values = {key: config.get(key, setting.default) for key, setting in settings.items()}
    for key, setting in settings.items():
        if setting.supported is not None and values[key] not in setting.supported:
            source = "" if key in config else " (diffusers' default; the file has none)"
            supported = " or ".join(repr(value) for value in setting.supported)
            raise UserError(f"{name}: {key} = {values[key]!r}{source} is not supported, only {supported} is")
    return values
