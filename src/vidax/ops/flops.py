"""Counting the floating-point operations of a function: those of its matrix products and convolutions."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax


def flops(function: Callable, *inputs: Any) -> dict[str, float]:
    """Operations of one call, 2 per multiply-add, by the dtype of the operands. inputs: arrays or described."""
    return dict(count(jax.make_jaxpr(function)(*inputs).jaxpr))


def count(jaxpr: Any) -> Counter[str]:
    """Those of a jaxpr: of branches, which compute the same by other means, the most; of a scan, all turns."""
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        if inner := contracted(eqn):
            found[str(eqn.invars[0].aval.dtype)] += 2 * inner * math.prod(eqn.outvars[0].aval.shape)
        elif branches := [count(branch.jaxpr) for branch in eqn.params.get("branches", ())]:
            found.update(max(branches, key=lambda branch: sum(branch.values())))
        else:
            turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for parameter in eqn.params.values():
                if hasattr(body := getattr(parameter, "jaxpr", parameter), "eqns"):
                    found.update({dtype: turns * number for dtype, number in count(body).items()})
    return found


def contracted(eqn: Any) -> int:
    """How many products are summed for each value of a matrix product or convolution; 0 for anything else."""
    if eqn.primitive.name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
        return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
    if eqn.primitive.name == "conv_general_dilated":
        weight = eqn.invars[1].aval.shape
        return math.prod(weight) // weight[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 0
