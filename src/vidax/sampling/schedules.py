"""Grids of noise levels, made on the host.

Of flow-matching models a noisy latent is (1 - sigma) * clean + sigma * noise, so sigma runs from about 1 (noise) to 0
(clean). The grids that people use for one and the same checkpoint differ by up to 7e-3 in sigma, which changes the
video, so each has its name. Of variance-preserving ones, here CogVideoX, it is sqrt(alpha) * clean +
sqrt(1 - alpha) * noise, and alpha (the alpha bar of arXiv:2006.11239, `alphas_cumprod` in diffusers) runs from 0 to 1.

Sigmas are computed in float64 and rounded to float32 exactly where the reference rounds. This matters next to sigma 1:
solvers take log(1 - sigma), and rounding 1 - 1e-6 to float32 changes its distance from 1 by one per cent.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from vidax.errors import UserError

TRAIN_TIMESTEPS = 1000  # of every model here; a flow network's timestep is sigma * 1000

Grid = Literal["official", "diffusers", "flow_match_euler", "cogvideox"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise levels of one run of a flow model.

    sigmas:    [steps + 1], float64 (of float32 values), falling to 0; step i goes from sigmas[i] to sigmas[i + 1].
    timesteps: [steps], float64, as given to the network at step i.
    """

    sigmas: np.ndarray
    timesteps: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.timesteps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlphaSchedule:
    """The noise levels of one run of a variance-preserving model, float64.

    alphas:      [steps], at the beginning of each step.
    next_alphas: [steps], at its end; 1 is clean. Not always the beginning of the next step (see `cogvideox`).
    timesteps:   [steps], as given to the network at step i.
    """

    alphas: np.ndarray
    next_alphas: np.ndarray
    timesteps: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.timesteps)


def shift_sigmas(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Move sigmas towards 1 (for shift > 1); 0 and 1 stay (arXiv:2403.03206, section 5.3.2)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def official(steps: int, shift: float) -> Schedule:
    """The grid of Wan's own code (Wan2.1, wan/utils/fm_solvers_unipc.py): even from 0.999 to 0, then shifted.

    0.999 is the noisiest of the 1000 training levels. That code holds it in float32, which decides some timesteps, as
    they are cut to whole numbers: three steps with shift 1 give 999, 666, 333, not 999, 665, 332.
    """
    noisiest = float(np.float32(1 - 1 / TRAIN_TIMESTEPS))
    sigmas = shift_sigmas(np.linspace(noisiest, 0, steps + 1)[:-1], shift)
    return _schedule(sigmas, np.trunc(sigmas * TRAIN_TIMESTEPS))


def diffusers(steps: int, shift: float) -> Schedule:
    """The grid of diffusers' `UniPCMultistepScheduler` with `use_flow_sigmas` (0.42.1), as in its Wan pipelines.

    Even from 1 to 0.001, without that end, then shifted. A first sigma of 1 becomes 1 - 1e-6, because the solver takes
    log(1 - sigma). Timesteps are cut to whole numbers.
    """
    sigmas = shift_sigmas(np.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1)[:-1], shift)
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6
    return _schedule(sigmas, np.trunc(sigmas * TRAIN_TIMESTEPS))


def flow_match_euler(steps: int, shift: float) -> Schedule:
    """The grid of diffusers' `FlowMatchEulerDiscreteScheduler` when asked for a number of steps (0.42.1).

    That class shifts twice: first the ends of the training range, in float32, then the even grid between them. The last
    sigma before 0 is therefore small, and the step before it long. Pipelines that pass sigmas of their own shift once.
    Timesteps keep their fractions.
    """
    ends = np.array([TRAIN_TIMESTEPS, 1], np.float32) / np.float32(TRAIN_TIMESTEPS)
    ends = np.float32(shift) * ends / (1 + np.float32(shift - 1) * ends)
    noisiest, cleanest = ends.astype(np.float64) * TRAIN_TIMESTEPS
    sigmas = shift_sigmas(np.linspace(noisiest, cleanest, steps) / TRAIN_TIMESTEPS, shift)
    return _schedule(sigmas, sigmas.astype(np.float32) * np.float32(TRAIN_TIMESTEPS))


def training_alphas(snr_shift: float) -> np.ndarray:
    """Alpha of each of CogVideoX's training timesteps [1000], from clean to exactly 0.

    Those of Stable Diffusion, their signal-to-noise ratio divided by `snr_shift`, and sqrt(alpha) rescaled so that the
    last is 0 and the first stays (arXiv:2305.08891, algorithm 1).
    """
    betas = np.linspace(0.00085**0.5, 0.012**0.5, TRAIN_TIMESTEPS) ** 2
    alphas = np.cumprod(1 - betas)
    roots = np.sqrt(alphas / (snr_shift + (1 - snr_shift) * alphas))
    return ((roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))) ** 2


def cogvideox(steps: int, shift: float) -> AlphaSchedule:
    """The grid of diffusers' `CogVideoXDDIMScheduler` and `CogVideoXDPMScheduler` (0.42.1), as CogVideoX sets them.

    Timesteps are even from 999 down ("trailing"). A step goes to its timestep less 1000 // steps, which need not be the
    next one, and to alpha 1 below timestep 0, which some numbers of steps do not reach: 7 steps end at timestep 0.

    For some numbers of steps (61 is the smallest) rounding gives diffusers another step, at timestep -1, where it takes
    the latents for pure noise; it is left out here.
    """
    if steps > TRAIN_TIMESTEPS:
        raise UserError(f"{steps} steps: the cogvideox grid has {TRAIN_TIMESTEPS} timesteps, so at most as many steps")
    timesteps = np.round(np.arange(TRAIN_TIMESTEPS, 0, -TRAIN_TIMESTEPS / steps))[:steps].astype(np.int64) - 1
    alphas = training_alphas(shift)
    following = timesteps - TRAIN_TIMESTEPS // steps
    next_alphas = np.where(following < 0, 1.0, alphas[following])
    return AlphaSchedule(alphas=alphas[timesteps], next_alphas=next_alphas, timesteps=timesteps.astype(np.float64))


GRIDS: dict[Grid, Callable[[int, float], Schedule | AlphaSchedule]] = {
    "official": official,
    "diffusers": diffusers,
    "flow_match_euler": flow_match_euler,
    "cogvideox": cogvideox,
}


def make_schedule(grid: Grid, steps: int, shift: float) -> Schedule | AlphaSchedule:
    """The named grid. Raises `UserError` for an unknown name, less than one step, or a shift that is not above 0."""
    if grid not in GRIDS:
        raise UserError(f"sigma grid {grid!r} is unknown: choose one of {', '.join(GRIDS)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UserError(f"{steps!r} steps: the number of steps is a whole number, 1 or more")
    if isinstance(shift, bool) or not isinstance(shift, int | float) or not 0 < shift < np.inf:
        kind, levels = ("SNR shift", "noise levels") if grid == "cogvideox" else ("flow shift", "sigmas")
        raise UserError(f"{kind} {shift!r}: the shift is a number above 0; 1 leaves the {levels} as they are")
    return GRIDS[grid](steps, float(shift))


def _schedule(sigmas: np.ndarray, timesteps: np.ndarray) -> Schedule:
    """Append the final 0 and round to the float32 values that the references' solvers see."""
    sigmas = np.append(sigmas, 0.0).astype(np.float32).astype(np.float64)
    return Schedule(sigmas=sigmas, timesteps=timesteps.astype(np.float64))
