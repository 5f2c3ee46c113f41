"""Solvers as tables of coefficients.

Every solver here is linear in the sample and the predictions so far. A solver's config makes a `SolverTable` from a schedule, on the host
in float64; `step` applies one row of it. A row is a handful of scalars, so the step index may be traced: one compiled program serves all
steps and all solvers with the same number of past predictions.

    table = UniPC(order=2).table(schedule)
    state = initial_state(table, noise)
    for i in range(table.steps):                                       # or a traced loop
        row = table.row(i)
        state = step(row, state, network(state.sample, row.timestep))
    latents = state.sample

One step, with `clean` the network's prediction of the noise-free latents:

    clean     = denoise . (sample, model output)
    corrected = correct . (sample, last corrected sample, clean, earlier clean predictions, newest first)
    sample    = advance . (corrected, clean, earlier clean predictions, newest first)

Only products with scalars and sums touch the latents, so any shape and any sharding passes through. Everything is float32 on the device.
A solver that adds noise (DDIM with eta, ancestral DPM++) is one more column, the weight of fresh noise in `advance`; a network that
predicts the noise or v changes `denoise`.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vidax.errors import UserError
from vidax.nn import module
from vidax.sampling.schedules import Schedule


@module
class SolverTable:
    """Coefficients of every step; with `past` earlier predictions. A row of it is the same class without the leading axis."""

    timestep: Any  # [steps], as given to the network
    denoise: Any  # [steps, 2]
    correct: Any  # [steps, 3 + past]
    advance: Any  # [steps, 2 + past]

    @property
    def steps(self) -> int:
        return self.timestep.shape[0]

    @property
    def past(self) -> int:
        return self.advance.shape[-1] - 2

    def row(self, i: jax.Array | int) -> "SolverTable":
        """The coefficients of step `i`, which may be traced."""
        return jax.tree.map(lambda column: jax.lax.dynamic_index_in_dim(column, i, keepdims=False), self)


@module
class SolverState:
    """What a solver carries from step to step; every array has the shape of the latents and is float32."""

    sample: Any  # what the network sees next; after the last step, the result
    corrected: Any  # the sample that the last step started from, after its correction
    past: tuple[Any, ...]  # clean predictions of earlier steps, newest first


def initial_state(table: SolverTable, sample: jax.Array) -> SolverState:
    """State before the first step. `sample` is the noise, any shape."""
    sample = jnp.asarray(sample, jnp.float32)
    return SolverState(sample, sample, tuple(jnp.zeros_like(sample) for _ in range(table.past)))


def step(row: SolverTable, state: SolverState, output: jax.Array) -> SolverState:
    """Apply one row of a table. `output` is the network's output for `state.sample` at `row.timestep`, in the shape of the sample."""
    clean = _combine(row.denoise, state.sample, output.astype(jnp.float32))
    corrected = _combine(row.correct, state.sample, state.corrected, clean, *state.past)
    sample = _combine(row.advance, corrected, clean, *state.past)
    return SolverState(sample, corrected, (clean, *state.past)[: len(state.past)])


def _combine(weights: jax.Array, *terms: jax.Array) -> jax.Array:
    """Sum of weight * term, written out: as a matrix product a TPU would round it to bfloat16."""
    assert weights.shape == (len(terms),), (weights.shape, len(terms))
    return sum((weights[k] * term for k, term in enumerate(terms[1:], 1)), start=weights[0] * terms[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Euler:
    """Euler's method on the flow: sample + (next sigma - sigma) * velocity, here written with the clean prediction."""

    def table(self, schedule: Schedule) -> SolverTable:
        """Coefficients for a network that predicts the flow velocity (noise - clean)."""
        ratio = schedule.sigmas[1:] / schedule.sigmas[:-1]
        correct = np.tile([1.0, 0.0, 0.0], (schedule.steps, 1))
        return _flow_table(schedule, correct, np.stack([ratio, 1 - ratio], axis=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniPC:
    """UniPC, a multistep predictor and corrector (arXiv:2302.04867), predicting clean latents, as in diffusers and in Wan's code.

    order:             of the predictor, 1 to 3; the corrector is one order higher. The first steps use what past there is, the last
                       ones as many orders as there are steps left (`lower_order_final` in diffusers), because the step to sigma = 0 has no
                       finite length in log(1 - sigma) - log(sigma).
    basis:             B(h) of the paper: "bh2" is exp(h) - 1, "bh1" is h.
    uncorrected_steps: step numbers whose result is taken as predicted (`disable_corrector` in diffusers).

    Raises `UserError` for values outside these.
    """

    order: int = 2
    basis: Literal["bh1", "bh2"] = "bh2"
    uncorrected_steps: tuple[int, ...] = ()

    def __post_init__(self):
        if self.order not in (1, 2, 3):
            raise UserError(f"UniPC of order {self.order!r}: orders 1, 2 and 3 are supported")
        if self.basis not in ("bh1", "bh2"):
            raise UserError(f"UniPC with basis {self.basis!r}: bh1 and bh2 are supported")

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
        correct = np.zeros((steps, 3 + self.order))
        advance = np.zeros((steps, 2 + self.order))
        orders = [min(self.order, i + 1, steps - i) for i in range(steps)]
        for i, order in enumerate(orders):
            if i == 0 or i - 1 in self.uncorrected_steps:
                correct[i, 0] = 1
            else:
                weights = _unipc_weights(schedule.sigmas, i - 1, orders[i - 1], self.basis, end_known=True)
                correct[i, 1 : 1 + len(weights)] = weights
            start, _, *cleans = _unipc_weights(schedule.sigmas, i, order, self.basis, end_known=False)
            advance[i, : 1 + order] = start, *cleans
        return _flow_table(schedule, correct, advance)


Solver = Euler | UniPC


def _flow_table(schedule: Schedule, correct: np.ndarray, advance: np.ndarray) -> SolverTable:
    """Round to float32, with the flow's clean prediction: sample - sigma * velocity."""
    denoise = np.stack([np.ones(schedule.steps), -schedule.sigmas[:-1]], axis=1)
    return SolverTable(*(column.astype(np.float32) for column in (schedule.timesteps, denoise, correct, advance)))


def _unipc_weights(sigmas: np.ndarray, i: int, order: int, basis: str, *, end_known: bool) -> np.ndarray:
    """The sample at sigmas[i + 1] as weights [2 + order] over (sample at i, clean at i + 1, clean at i, at i - 1, ...).

    With `end_known` this is the corrector, otherwise the predictor, whose weight for the clean prediction at i + 1 is 0.
    Both add to the first-order update a sum over divided differences to the clean prediction at i (arXiv:2302.04867, equations 3, 9).
    """
    start, end = sigmas[i], sigmas[i + 1]
    weights = np.zeros(2 + order)
    weights[0] = end / start
    weights[2] = 1 - end / start
    if order == 1 and not end_known:
        return weights

    levels = sigmas[i + 1 - order : i + 2][::-1]  # at i + 1, i, i - 1, ...
    times = np.log1p(-levels) - np.log(levels)
    interval = times[0] - times[1]
    columns = np.array(([1] if end_known else []) + list(range(3, 2 + order)))  # of the predictions whose differences count
    nodes = (times[columns - 1] - times[1]) / interval
    scale = np.expm1(-interval) if basis == "bh2" else -interval
    gains = -(1 - end) * scale * _node_weights(nodes, interval, scale) / nodes
    weights[columns] += gains
    weights[2] -= gains.sum()
    return weights


def _node_weights(nodes: np.ndarray, interval: float, scale: float) -> np.ndarray:
    """Weights of the differences at `nodes`, which make the update exact for polynomials of as high a degree as there are nodes.

    With a single node the references use 1/2, its limit for short intervals, instead of solving.
    """
    if len(nodes) == 1:
        return np.array([0.5])
    phi = np.expm1(-interval) / -interval
    moments = []
    for j in range(1, len(nodes) + 1):
        phi = (phi - 1 / math.factorial(j)) / -interval
        moments.append(phi * -interval * math.factorial(j) / scale)
    powers = np.arange(len(nodes))[:, None]
    return np.linalg.solve(nodes**powers, np.array(moments))
