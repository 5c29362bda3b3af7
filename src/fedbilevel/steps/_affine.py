"""Whether a function is affine, which its operations can show before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

PyTree = Any


def is_affine(function: Callable[[PyTree], PyTree], at: PyTree) -> bool:
    """Whether the derivative of a function along a direction is computed without the point it is taken at.

    JAX finds the operations of the derivative. A False says only that these operations do not show it.
    """
    traced = jax.make_jaxpr(lambda v, d: jax.jvp(function, (v,), (d,))[1])(at, at)
    points = len(jax.tree.leaves(at))
    return not any(_depend(traced.jaxpr, [i < points for i in range(len(traced.jaxpr.invars))]))


def _depend(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on the inputs that are marked. Calls are looked into, loops and branches are not."""
    marked = {variable for variable, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for equation in jaxpr.eqns:
        known = [not isinstance(v, Literal) and v in marked for v in equation.invars]
        outputs = [any(known)] * len(equation.outvars)
        if equation.primitive.name == "jit" and any(known):
            outputs = _depend(equation.params["jaxpr"].jaxpr, known)
        marked |= {variable for variable, mark in zip(equation.outvars, outputs, strict=True) if mark}
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.outvars]
