"""Upper rows that only the server has: what they add to the result of a round.

    min_x  f(x, y*(x))    subject to    y*(x) = argmin_y 1/m Σ_i g_i(x, y)

f is taken at the server, on its own rows, and the clients have the lower losses alone: for them f_i = 0. A step
asks an oracle for derivatives of both losses, and methods use the means of replies. So the server runs the step as
well, as a member whose lower loss is zero, once with f and once without it, and adds the difference to the mean of
the clients' replies:

    mean_i reply(0, g_i) + reply(f, 0) - reply(0, 0)

If the reply is affine in the losses, as directions, gradients, Hessian products and one local step are, that is
the reply for the losses (f, mean_i g_i) itself. With several local steps the clients walk along g_i alone and the
server along f alone, each from the common point, so f is one more client's drift.

The server always uses all of its rows. It sends nothing for them, so the ledger has no bytes for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .data import ClientData, ClientSize, Part
from .engines import Call, ClientStates, expect, pad, perform, recalled
from .errors import SettingsError
from .problem import BilevelProblem, Problem, nothing
from .steps import PerClient, draw

REFUSED = "the upper rows of this problem are at the server"


def server_of(problem: BilevelProblem) -> Server | None:
    """The part of the server in every round, if the problem has upper rows there."""
    rows = problem.server if isinstance(problem, Problem) else None
    return Server(problem, rows) if isinstance(problem, Problem) and isinstance(rows, Part) else None


class Server:
    """The server as a member of its federation that has the upper loss alone."""

    def __init__(self, problem: Problem, rows: Part) -> None:
        self._with = dataclasses.replace(problem, lower=nothing, server=None)
        self._without = dataclasses.replace(problem, lower=nothing, upper=nothing, server=None)
        self._size = ClientSize(rows.rows, rows.rows)
        self._data = pad(ClientData(rows, rows), self._size)
        self._programs: dict[Any, Any] = {}

    def added(self, call: Call, result: Any) -> Any:
        """The result of a call with what the server's rows add to it."""
        self._check(call)
        draws = {
            name: draw(
                dataclasses.replace(each, size=None), call.address, name, 0, *[getattr(self._size, each.part)] * 2
            )
            for name, each in call.samples.items()
        }
        kept = recalled(call, self._with, ClientStates(), 0, self._size)
        if call.program not in self._programs:
            self._programs[call.program] = jax.jit(self._program(call))
        parts = self._programs[call.program](call.vectors, call.arrays, draws, kept, self._data)
        return jax.tree.map(jnp.add, result, parts)

    def _program(self, call: Call) -> Any:
        def difference(*given: Any) -> Any:
            vectors, arrays, draws, kept, data = given
            made = (
                perform(problem, call, vectors, arrays, {}, draws, kept, data, None)[0]
                for problem in (self._with, self._without)
            )
            return jax.tree.map(_minus, *made)

        return difference

    def _check(self, call: Call) -> None:
        """Raise for a call that the server could not take part in."""
        if call.rows or any(isinstance(getattr(each, "count", None), PerClient) for each in call.samples.values()):
            raise SettingsError(
                f"step {call.step.name}: clients are given values of their own, and {REFUSED}, which has none; "
                "use one value for all clients, or give the upper rows to clients"
            )
        if expect(call, self._with).asked:
            raise SettingsError(
                f"step {call.step.name}: clients keep a state from round to round, and {REFUSED}, which keeps "
                "none; use another method, such as fedsoba or fbo-aggitd, or give the upper rows to clients"
            )


def _minus(a: Array, b: Array) -> Array:
    return a - b
