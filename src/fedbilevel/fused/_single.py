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
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

MARKS = dict(xla_cpu_small_call="true", inlineable="false")
INSIDE = dict(xla_cpu_small_call="false", inlineable="true")  # without any, loops inside inherit those outside
FEW = 8  # so many clients or fewer lie beside each other: a register of a processor has 4, 8 or 16 numbers
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


def for_one_function(traced: ClosedJaxpr) -> ClosedJaxpr:
    """The program as XLA computes it fastest in a single function, where all operations are loops over numbers.

    A matrix product is written as a sum of products. XLA writes a product as loops of their own, which first wait
    for their operands to be in memory, and merges a sum with the operations around it. And the rows that are taken
    from the data of a few clients lie in memory with the clients as the innermost axis, so that one operation of
    the processor computes for all of them.
    """
    return jax.make_jaxpr(lambda *values: _evaluated(traced, *values))(*traced.in_avals)


def _evaluated(traced: ClosedJaxpr, *values: Any) -> list[Any]:
    known: dict[Any, Any] = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    known |= zip(traced.jaxpr.invars, values, strict=True)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in traced.jaxpr.eqns:
        name, operands = equation.primitive.name, list(map(read, equation.invars))
        if name == "dot_general":
            made = [_sum_of_products(operands[0], operands[1], equation.params["dimension_numbers"])]
        elif name == "custom_jvp_call":
            made = _evaluated(equation.params["call_jaxpr"], *operands)
        elif name == "gather":
            rows = equation.primitive.bind(*operands, **equation.params)
            clients = operands[0].shape[0]
            own = equation.params["dimension_numbers"].operand_batching_dims == (0,) and rows.shape[0] == clients
            made = [_clients_last(rows) if own and clients <= FEW else rows]
        else:
            own = {name: _inner(value) for name, value in equation.params.items()}
            out = equation.primitive.bind(*operands, **own)
            made = list(out) if equation.primitive.multiple_results else [out]
        known |= zip(equation.outvars, made, strict=True)
    return list(map(read, traced.jaxpr.outvars))


def _inner(value: Any) -> Any:
    """A parameter of an operation; if it is a program, or several of them, they are rewritten too."""
    if isinstance(value, tuple | list):
        return type(value)(map(_inner, value)) if any(isinstance(v, ClosedJaxpr) for v in value) else value
    return for_one_function(value) if isinstance(value, ClosedJaxpr) else value


def _clients_last(rows: Array) -> Array:
    """The same array, in memory with its first axis as the innermost one."""
    return with_layout_constraint(rows, Layout((*range(1, rows.ndim), 0)))


def _sum_of_products(a: Array, b: Array, numbers: Any) -> Array:
    """A product of two arrays: its axes are those of the batch, those of `a` alone, and those of `b` alone."""
    (summed_a, summed_b), (batch_a, batch_b) = numbers
    own_a = [i for i in range(a.ndim) if i not in (*summed_a, *batch_a)]
    own_b = [i for i in range(b.ndim) if i not in (*summed_b, *batch_b)]
    a = lax.transpose(a, (*batch_a, *own_a, *summed_a))
    b = lax.transpose(b, (*batch_b, *own_b, *summed_b))
    shared, first, second = len(batch_a), len(own_a), len(own_b)
    a = lax.expand_dims(a, range(shared + first, shared + first + second))
    b = lax.expand_dims(b, range(shared, shared + first))
    return jnp.sum(a * b, axis=tuple(range(shared + first + second, a.ndim)))


def compiled(traced: ClosedJaxpr, small: bool) -> Callable[..., Any]:
    """Compile a traced program. One that is small becomes a single function where that is possible."""
    plain = jax.jit(jaxpr_as_fun(traced))
    operations = list(_operations(traced.jaxpr))
    if not small or jax.default_backend() != "cpu" or len(operations) > MOST or not TRIED.issuperset(operations):
        return plain

    def inner(*arguments: Any) -> Any:
        with set_xla_metadata(**INSIDE):
            # A call that is marked has to use all of its arguments, or XLA ends the process.
            used = sum(jnp.ravel(a)[0].astype(jnp.float32) for a in arguments if jnp.size(a))
            return function(*arguments), used

    function = jaxpr_as_fun(for_one_function(traced))
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
