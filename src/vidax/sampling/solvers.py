"""Solvers as tables of coefficients.

Every solver here is linear in the sample and the predictions so far. A solver's config makes a `SolverTable` from a
schedule, on the host in float64; `step` applies one row of it on the device, in float32. A row is a handful of scalars,
so the step index may be traced: one compiled program serves every step.

    table = UniPC(order=2).table(schedule)
    state = initial_state(table, noise)
    for i in range(table.steps):                                       # or a traced loop
        row = table.row(i)
        state = step(row, state, network(state.sample, row.timestep))
    latents = state.sample

One step, with `clean` the prediction of the noise-free latents and `past` those of earlier steps, newest first:

    clean     = denoise . (sample, output of the network)
    corrected = correct . (sample, previous corrected sample, clean, *past)
    sample    = advance . (corrected, clean, *past)

A solver that adds noise has one more column, its weight in `sample`, and each step is given fresh noise. What the
network predicts only shows in `denoise`: the flow velocity, which is noise - clean, or v, which is
sqrt(alpha) * noise - sqrt(1 - alpha) * clean.

Latents only meet scalars and each other elementwise, so any shape and any sharding passes through.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vidax.errors import UserError
from vidax.nn import module
from vidax.sampling.schedules import AlphaSchedule, Schedule


@module
class SolverTable:
    """The coefficients of every step, float32; a row of it is the same class without the leading axis."""

    timestep: Any  # [steps], as given to the network
    denoise: Any  # [steps, 2]
    correct: Any  # [steps, 3 + past]
    advance: Any  # [steps, 2 + past]
    noise: Any = None  # [steps], the weight of fresh noise; None of solvers that add none

    @property
    def steps(self) -> int:
        return self.timestep.shape[0]

    @property
    def past(self) -> int:
        """How many earlier predictions the solver keeps."""
        return self.advance.shape[-1] - 2

    def row(self, i: jax.Array | int) -> "SolverTable":
        """The coefficients of step `i`, which may be traced."""
        return jax.tree.map(lambda column: jax.lax.dynamic_index_in_dim(column, i, keepdims=False), self)


@module
class SolverState:
    """What a solver carries from step to step: arrays of the latents' shape, float32, no two of them sharing memory."""

    sample: Any  # what the network sees next; after the last step, the result
    corrected: Any  # the corrected sample that the previous step started from
    past: tuple[Any, ...]  # clean predictions of earlier steps, newest first


def initial_state(table: SolverTable, sample: jax.Array | np.ndarray) -> SolverState:
    """State before the first step, from noise of any shape. Its rows give no weight to what is not there yet."""
    sample = jnp.asarray(sample, jnp.float32)
    return SolverState(sample, jnp.zeros_like(sample), tuple(jnp.zeros_like(sample) for _ in range(table.past)))


def step(row: SolverTable, state: SolverState, output: jax.Array, noise: jax.Array | None = None) -> SolverState:
    """Apply one row of a table to the network's output for `state.sample` at `row.timestep`.

    noise: standard normal, of the sample's shape, where the table has weights for it.
    """
    assert (noise is None) == (row.noise is None), "fresh noise is for solvers that add it"
    clean = _combine(row.denoise, state.sample, output.astype(jnp.float32))
    corrected = _combine(row.correct, state.sample, state.corrected, clean, *state.past)
    sample = _combine(row.advance, corrected, clean, *state.past)
    if noise is not None:
        sample = sample + row.noise * noise.astype(jnp.float32)
    return SolverState(sample, corrected, (clean, *state.past)[: len(state.past)])


def _combine(weights: jax.Array, *terms: jax.Array) -> jax.Array:
    """Sum of weight * term, written out because a matrix product would round to bfloat16 on a TPU."""
    assert weights.shape == (len(terms),), (weights.shape, len(terms))
    total = weights[0] * terms[0]
    for weight, term in zip(weights[1:], terms[1:], strict=True):
        total = total + weight * term
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Euler:
    """Euler's method on the flow: sample + (next sigma - sigma) * velocity, written with the clean prediction."""

    name = "euler"

    def table(self, schedule: Schedule) -> SolverTable:
        """Coefficients for a network that predicts the flow velocity (noise - clean)."""
        ratio = schedule.sigmas[1:] / schedule.sigmas[:-1]
        correct = np.tile([1.0, 0.0, 0.0], (schedule.steps, 1))
        return _flow_table(schedule, correct, np.stack([ratio, 1 - ratio], axis=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniPC:
    """UniPC, a multistep predictor and corrector on clean predictions (arXiv:2302.04867), with B(h) = exp(h) - 1.

    As in diffusers' `UniPCMultistepScheduler` and Wan's `FlowUniPCMultistepScheduler`: the first steps use what past
    there is, the last ones at most the order that equals the steps left, because the step to sigma 0 is infinitely long
    in log(1 - sigma) - log(sigma), the solver's time.

    order:             1 to 3; the corrector makes the result accurate to one order more.
    uncorrected_steps: numbers of steps whose result is kept as predicted (`disable_corrector` in diffusers).

    Raises `UserError` for other values.
    """

    order: int = 2
    uncorrected_steps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"unipc{self.order}"

    def __post_init__(self):
        if self.order not in (1, 2, 3):
            raise UserError(f"UniPC of order {self.order!r}: orders 1, 2 and 3 are supported")
        if not all(isinstance(number, int) and number >= 0 for number in self.uncorrected_steps):
            raise UserError(f"UniPC without correction of steps {self.uncorrected_steps!r}: steps are counted from 0")

    def table(self, schedule: Schedule) -> SolverTable:
        """Coefficients for a network that predicts the flow velocity (noise - clean).

        Raises `UserError` if the schedule starts at sigma 1.
        """
        if schedule.sigmas[0] >= 1:
            raise UserError(
                "UniPC cannot start at sigma 1, where log(1 - sigma) is infinite: "
                "choose the official or the diffusers sigma grid, or the Euler solver"
            )
        steps = schedule.steps
        orders = [min(self.order, i + 1, steps - i) for i in range(steps)]
        correct = np.zeros((steps, 3 + self.order))
        advance = np.zeros((steps, 2 + self.order))
        for i, order in enumerate(orders):
            if i == 0 or i - 1 in self.uncorrected_steps:
                correct[i, 0] = 1
            else:
                corrector = _unipc_weights(schedule.sigmas, i - 1, orders[i - 1], end_known=True)
                correct[i, 1 : 1 + len(corrector)] = corrector
            predictor = np.delete(_unipc_weights(schedule.sigmas, i, order, end_known=False), 1)
            advance[i, : len(predictor)] = predictor
        return _flow_table(schedule, correct, advance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIM:
    """DDIM without added noise (arXiv:2010.02502, eta 0), as in diffusers' `CogVideoXDDIMScheduler`."""

    name = "ddim"

    def table(self, schedule: AlphaSchedule) -> SolverTable:
        """Coefficients for a network that predicts v: what the prediction takes for noise keeps its direction."""
        ratio = np.sqrt((1 - schedule.next_alphas) / (1 - schedule.alphas))
        clean = np.sqrt(schedule.next_alphas) - np.sqrt(schedule.alphas) * ratio
        return _v_table(schedule, np.stack([ratio, clean], axis=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPM:
    """SDE-DPM-Solver++ of second order (arXiv:2211.01095), as in diffusers' `CogVideoXDPMScheduler`.

    A step replaces part of the noise with fresh noise. The first has no past and is of first order; so is a step to
    alpha 1, whose result is the clean prediction itself.
    """

    name = "dpm"

    def table(self, schedule: AlphaSchedule) -> SolverTable:
        """Coefficients for a network that predicts v.

        Of the noise after a step, `kept` is the part of the variance that was there before: exp(-2h), with h the length
        of the step in the solver's time, log(alpha / (1 - alpha)) / 2. Written with alphas it is finite where h is not:
        0 for steps from alpha 0 (pure noise) and to alpha 1.
        """
        alphas, ends = schedule.alphas, schedule.next_alphas
        ratio = (1 - ends) / (1 - alphas)
        kept = ratio * alphas / ends
        clean = np.sqrt(ends) * (1 - kept)
        extrapolated = np.zeros(schedule.steps)  # by how much of the difference from the previous prediction
        for i in range(1, schedule.steps):
            if ends[i] < 1:
                before, start, end = _log_snr(alphas[i - 1]), _log_snr(alphas[i]), _log_snr(ends[i])
                extrapolated[i] = (end - start) / (2 * (start - before))
        sample = ratio * np.sqrt(alphas / ends)
        advance = np.stack([sample, clean * (1 + extrapolated), -clean * extrapolated], axis=1)
        return _v_table(schedule, advance, np.sqrt((1 - ends) * (1 - kept)))


Solver = Euler | UniPC | DDIM | DPM


def _v_table(schedule: AlphaSchedule, advance: np.ndarray, noise: np.ndarray | None = None) -> SolverTable:
    """Round to float32; the clean prediction of v is sqrt(alpha) * sample - sqrt(1 - alpha) * v."""
    denoise = np.stack([np.sqrt(schedule.alphas), -np.sqrt(1 - schedule.alphas)], axis=1)
    correct = np.zeros((schedule.steps, 1 + advance.shape[1]))
    correct[:, 0] = 1
    return jax.tree.map(np.float32, SolverTable(schedule.timesteps, denoise, correct, advance, noise))


def _log_snr(alpha: float) -> float:
    """Half the logarithm of the signal-to-noise ratio, the solver's time; minus infinity where there is no signal."""
    return -math.inf if alpha == 0 else (math.log(alpha) - math.log1p(-alpha)) / 2


def _flow_table(schedule: Schedule, correct: np.ndarray, advance: np.ndarray) -> SolverTable:
    """Round to float32; the clean prediction of a flow is sample - sigma * velocity."""
    denoise = np.stack([np.ones(schedule.steps), -schedule.sigmas[:-1]], axis=1)
    return SolverTable(*(columns.astype(np.float32) for columns in (schedule.timesteps, denoise, correct, advance)))


def _unipc_weights(sigmas: np.ndarray, i: int, order: int, *, end_known: bool) -> np.ndarray:
    """Weights [2 + order] that give the sample at i + 1 from (sample at i, clean at i + 1, clean at i, at i - 1, ...).

    Corrector if `end_known`, otherwise predictor, which gives no weight to clean at i + 1. Both are the first-order
    step plus a weighted sum of differences from clean at i, divided by their distance in the solver's time
    (arXiv:2302.04867, section 3 and appendix on data prediction).
    """
    start, end = sigmas[i], sigmas[i + 1]
    weights = np.zeros(2 + order)
    weights[0] = end / start
    weights[2] = 1 - end / start
    differences = [1, *range(3, 2 + order)] if end_known else [*range(3, 2 + order)]
    if not differences:
        return weights

    levels = sigmas[i + 1 - order : i + 2][::-1]  # at i + 1, i, i - 1, ...: weights[k] belongs to levels[k - 1]
    times = np.log1p(-levels) - np.log(levels)
    length = times[0] - times[1]
    distances = (times[np.array(differences) - 1] - times[1]) / length
    gains = -(1 - end) * np.expm1(-length) * _difference_weights(distances, length) / distances
    weights[differences] += gains
    weights[2] -= gains.sum()
    return weights


def _difference_weights(distances: np.ndarray, length: float) -> np.ndarray:
    """Weights of the divided differences at `distances`, in units of the step, for a step of this length.

    With n differences they make the step exact for clean predictions that are polynomials of degree n in the solver's
    time. For a single one the references take 1/2, the limit for short steps.
    """
    if len(distances) == 1:
        return np.array([0.5])
    first = phi = np.expm1(-length) / -length
    moments = []
    for degree in range(1, len(distances) + 1):
        phi = (phi - 1 / math.factorial(degree)) / -length  # the functions of exponential integrators
        moments.append(math.factorial(degree) * phi / first)
    powers = np.arange(len(distances))[:, None]
    return np.linalg.solve(distances**powers, np.array(moments))
