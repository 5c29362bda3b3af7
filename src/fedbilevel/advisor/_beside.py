"""What other methods have of the hypergradient at the point of a diagnosis, by their own rounds.

FBO-AggITD   one outer iteration with N = 10 and λ = 1/L_g: eleven terms of the series, for one x
FedSOBA      its v after some rounds at this x from v = 0, with ρ = 1/L_g. It is one term a round, and unlike a
             series it is not begun anew when x moves: in a run v goes on from the iteration before
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..algorithms import AggITD, FedSOBA
from ..algorithms.local import State
from ..algorithms.single import SingleState
from ..federation import Federation
from ._lanczos import Vector
from ._truth import Truth
from ._upper import NOTED

TERMS = 10
CARRIED = (10, 100)  # the rounds after which v is looked at


class Rival(NamedTuple):
    """Another method at the point: what it is, its rounds, and its estimate of the hypergradient."""

    label: str
    rounds: int
    estimate: Vector


def rivals_at(fed: Federation, x: Any, truth: Truth) -> list[Rival]:
    """The estimates of other methods at (x, y*(x)), with full batches of the clients that were measured."""
    step = 1 / max(truth.measured.spectrum.safe_L, 1e-30)
    y = jnp.asarray(truth.y, jnp.float32)
    common: dict[str, Any] = dict(participation=1.0, beta=step)
    series = AggITD(
        N=TERMS, lam=step, estimator="summed", lower_steps=1, batch_zeta_local="full", alpha=1e-9, **common
    )
    before = fed.ledger.rounds
    series.step(fed, State(x, y))
    found = [Rival(f"fbo-aggitd, N = {TERMS}, lam = 1/L_g", fed.ledger.rounds - before, _noted(fed))]
    single, state = FedSOBA(alpha=1e-9, **common), SingleState(x, y, jnp.zeros_like(y))
    for rounds in range(1, max(CARRIED) + 1):
        state = single.step(fed, state)._replace(x=x, y=y)
        if rounds in CARRIED:
            single.step(fed, state)
            found.append(Rival(f"fedsoba, v after {rounds} rounds", rounds, _noted(fed)))
    return found


def _noted(fed: Federation) -> Vector:
    return np.asarray(fed.noted[NOTED], np.float64)
