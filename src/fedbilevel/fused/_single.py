"""Compilation of a program of many small operations.

XLA runs a program on a CPU operation by operation, which costs more than the operations themselves if these are
small. It compiles a call that is marked as small into a single function, which takes a fifth of the time. XLA
itself marks only loops over very few bytes, so the mark is set here, on the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

MARKS = dict(xla_cpu_small_call="true", inlineable="false")
OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}  # no calls of a library for matrix products
MOST = 8000  # the most operations of a single function; the time to compile it grows faster than their number
# The operations that were tried in a single function. The others are left to XLA's usual way. Those that call a
# library fail to compile in one function, and nobody knows of all operations that they fail without an abort.
TRIED = {
    *("add", "add_any", "sub", "mul", "div", "neg", "abs", "sign", "square", "sqrt", "pow", "integer_pow", "max"),
    *(
        "exp",
        "log",
        "log1p",
        "logistic",
        "tanh",
        "sin",
        "cos",
        "clamp",
        "convert_element_type",
        "iota",
        "select_n",
    ),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "is_finite", "reduce_sum", "reduce_max", "reduce_and"),
    *("dot_general", "gather", "broadcast_in_dim", "reshape", "squeeze", "transpose", "concatenate", "stack"),
    *("split", "pad", "slice", "dynamic_slice", "dynamic_update_slice", "cond", "scan", "while", "jit"),
    *("custom_jvp_call", "stop_gradient", "iota"),
}


def compiled(traced: ClosedJaxpr, small: bool) -> Callable[..., Any]:
    """Compile a traced program. One that is small becomes a single function where that is possible."""
    function = jaxpr_as_fun(traced)
    plain = jax.jit(function)
    operations = list(_operations(traced.jaxpr))
    if not small or jax.default_backend() != "cpu" or len(operations) > MOST or not TRIED.issuperset(operations):
        return plain

    def inner(*arguments: Any) -> Any:
        with set_xla_metadata(**dict.fromkeys(MARKS)):  # the operations inside have no marks
            # A call that is marked has to use all of its arguments, or XLA ends the process.
            used = sum(jnp.ravel(a)[0].astype(jnp.float32) for a in arguments if jnp.size(a))
            return function(*arguments), used

    call = jax.jit(inner, inline=False)

    def marked(*arguments: Any) -> Any:
        with set_xla_metadata(**MARKS):
            return call(*arguments)

    single = jax.jit(marked, compiler_options=OPTIONS)
    chosen: list[Callable[..., Any]] = [lambda *arguments: single(*arguments)[0]]

    def run(*arguments: Any) -> Any:
        try:
            return chosen[0](*arguments)
        except jax.errors.JaxRuntimeError:  # another version of XLA may not know the marks or the options
            if chosen[0] is plain:
                raise
            chosen[0] = plain
            return plain(*arguments)

    return run


def _operations(jaxpr: Jaxpr) -> Iterable[str]:
    """The names of all operations, also of those within loops and branches."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from _operations(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
