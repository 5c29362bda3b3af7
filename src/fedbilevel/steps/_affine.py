"""Whether a function is affine, which its operations can show before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

PyTree = Any
FREE, AFFINE, OTHER = range(3)  # of the point: does not depend on it, is affine in it, may be anything

# Operations that are linear in all of their operands together.
LINEAR = {"add", "add_any", "sub", "neg", "reduce_sum", "broadcast_in_dim", "reshape", "squeeze", "transpose"}
LINEAR |= {"concatenate", "stack", "split", "slice", "pad", "rev", "copy", "copy_p", "expand_dims", "cumsum"}
PRODUCTS = {"mul", "dot_general"}  # linear in one operand if the other one is free
FIRST = {"div", "gather", "dynamic_slice"}  # linear in the first operand if the others are free


def is_affine(function: Callable[[PyTree], PyTree], at: PyTree) -> bool:
    """Whether all operations between the point and the result are linear. False says only that some may not be.

    A derivative that is the same everywhere would not be enough: that of a step function is zero everywhere.
    """
    traced = jax.make_jaxpr(function)(at)
    return OTHER not in _kinds(traced.jaxpr, [AFFINE] * len(traced.jaxpr.invars))


def _kinds(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """How each output depends on the point, from how the inputs do."""
    known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def kind(variable: Any) -> int:
        return FREE if isinstance(variable, Literal) else known.get(variable, FREE)

    for equation in jaxpr.eqns:
        given = [kind(v) for v in equation.invars]
        known |= zip(equation.outvars, _made(equation, given), strict=True)
    return [kind(v) for v in jaxpr.outvars]


def _made(equation: Any, given: list[int]) -> list[int]:
    """How the results of an operation depend on the point."""
    name, count, most = equation.primitive.name, len(equation.outvars), max(given, default=FREE)
    if name == "jit":
        return _kinds(equation.params["jaxpr"].jaxpr, given)
    linear = name in LINEAR
    linear = linear or (name in PRODUCTS and FREE in given)
    linear = linear or (name in FIRST and max(given[1:], default=FREE) == FREE)
    linear = linear or (name == "select_n" and given[0] == FREE)
    linear = linear or (name == "integer_pow" and equation.params["y"] == 1)
    linear = linear or (name == "convert_element_type" and "float" in str(equation.params["new_dtype"]))
    return [most if linear or most == FREE else OTHER] * count
