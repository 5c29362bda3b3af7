"""The shapes that a step returns for a call, found by abstract evaluation: no data, no arithmetic.

They tell the server which fields every reply must have, and an engine which of a client's own arrays the step
needs. Nothing is inferred from replies, so the first one cannot decide what is expected of the others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import FedBilevelError, StepError
from ..oracle import Shapes
from ..problem import BilevelProblem
from ..rng import Address, Kind
from ..steps import Step, draw, present
from ._call import Call

Struct = jax.ShapeDtypeStruct


class Expected(NamedTuple):
    """The arrays that a step takes from a client and returns.

    fields  the shape of each field that is sent
    asked   the client's own arrays that the step needs
    kept    the arrays that the step returns for the client to keep
    """

    fields: dict[str, tuple[int, ...]]
    asked: dict[str, tuple[Struct, ...]]
    kept: dict[str, tuple[Struct, ...]]


def expect(call: Call, problem: BilevelProblem) -> Expected:
    """Find what the call's step returns for one client of this problem."""
    return _expect(call.step, problem.size_x, problem.size_y, *call.shapes)


@lru_cache(maxsize=1024)
def _expect(
    step: Step[Any, Any], p: int, q: int, held: Any, arrays: Any, rows: Any, constants: Any, samples: Any
) -> Expected:
    oracle: Shapes | None = None

    def one(vectors: Any, sent: Any, own: Any, draws: Any) -> Any:
        nonlocal oracle
        oracle = Shapes(p, q, vectors)
        return step(oracle, **sent, **dict(constants), **own, **draws)

    anywhere = Address(0, Kind.PROBE, 0)
    try:
        reply = jax.eval_shape(
            one,
            {name: Struct(shape, dtype) for name, shape, dtype in held},
            {name: Struct(shape, dtype) for name, shape, dtype in arrays},
            {name: Struct(shape, np.float32) for name, shape in rows},
            {name: draw(d, anywhere, name, 0, 1, 1) for name, d in samples},
        )
    except FedBilevelError:
        raise
    except Exception as error:
        raise StepError(f"step {step.name}: {type(error).__name__}: {error}") from error
    if not isinstance(reply, step.reply_type):
        raise StepError(f"step {step.name} returns {type(reply).__name__}, not {step.reply_type.__name__}")
    assert oracle is not None
    there = present(reply)
    return Expected(
        {name: getattr(reply, name).shape for name in step.sent if name in there},
        oracle.asked,
        {name: tuple(jax.tree.leaves(getattr(reply, name))) for name in step.kept if name in there},
    )
