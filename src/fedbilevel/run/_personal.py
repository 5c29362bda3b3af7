"""What clients have for themselves: metrics on their own test rows, their own y, and clients that join later.

A metric is measured by every probed client on its own test rows. The history has its mean over these clients under
its name, the worst value as `worst_NAME` (the smallest, or for losses and errors the largest), and the standard
deviation over the clients as `spread_NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._fitting import metric_names
from .._probes import personal, tested
from ..algorithms import SolvesAtClients
from ..data import clients_from, test_rows
from ..engines import ClientStates, Loop
from ..errors import SettingsError
from ..federation import Federation
from ..problem import BilevelProblem, Measured, Task
from ..record import direction
from ..steps import Sample

NEWCOMER = 200  # the lower steps of a client that joins after a run


class Newcomer(NamedTuple):
    """A client that joined after a run: its own y, and its metrics and losses by name."""

    y: Any
    metrics: dict[str, float]


def client_metrics(task: Task) -> tuple[str, ...]:
    """The metrics that clients measure on test rows of their own; none if they have no such rows."""
    problem, clients = task.problem, task.clients
    if not isinstance(problem, Measured) or test_rows(clients) == 0:
        return ()
    test = clients.load(0).test
    return () if test is None else metric_names(problem, test)


def over_clients(names: Sequence[str]) -> list[str]:
    """The names of the figures over clients that an evaluation has for these metrics."""
    return [figure for name in names for figure in (name, f"worst_{name}", f"spread_{name}")]


def at_own_lower(
    fed: Federation, algorithm: SolvesAtClients, x: Array, clients: Sequence[int], names: tuple[str, ...]
) -> dict[str, Any]:
    """The mean losses, and the figures of the metrics, where every client takes its own y for x.

    A client makes the lower steps of a round from the y that it has kept, or from the start. It keeps nothing of
    them, so that an evaluation does not change the run.
    """
    own = _asked(fed, algorithm, x, clients, names, None, False)
    losses = {"upper_loss": own.upper.mean(), "lower_loss": own.lower.mean()}
    return losses | _figures(names, own.metrics)


def at_shared_lower(fed: Federation, state: Any, clients: Sequence[int], names: tuple[str, ...]) -> dict[str, Any]:
    """The figures of the metrics at the y that all clients share."""
    if not names:
        return {}
    found = fed.probe(tested, clients, at={"x": state.x, "y": state.y}, apart=True, names=names)
    return _figures(names, np.asarray(found.metrics))


def own_lowers(problem: BilevelProblem, states: ClientStates, clock: int) -> dict[int, Any]:
    """The y of every client that has kept one of its own before a clock, in the user's structure."""
    kept = {client: states.read(client, clock).get("y") for client in states}
    return {i: problem.flat_y.restore(jnp.asarray(y[0])) for i, y in kept.items() if y is not None}


def join(
    problem: BilevelProblem,
    algorithm: Any,
    x: Any,
    rows: Any,
    test: Any = None,
    *,
    steps: int = NEWCOMER,
    seed: int = 0,
) -> Newcomer:
    """A client that joins after a run: its own y at the trained x, and its metrics."""
    if not isinstance(algorithm, SolvesAtClients):
        raise SettingsError(
            f"{type(algorithm).__name__} trains one y for all clients, so a client that joins has it already; "
            "join is for problems with lower_is = 'local'"
        )
    clients = clients_from([(rows, rows) if test is None else (rows, rows, test)])
    fed = Federation(Loop(problem, clients), seed=seed)
    names = client_metrics(Task(problem, clients))
    found = _asked(fed, algorithm, jnp.asarray(x), (0,), names, steps, True)
    metrics = {"lower_loss": float(found.lower[0])}
    metrics |= {name: float(value) for name, value in zip(names, found.metrics[0] if names else (), strict=True)}
    return Newcomer(problem.flat_y.restore(jnp.asarray(found.y[0])), metrics)


def _asked(
    fed: Federation,
    algorithm: SolvesAtClients,
    x: Array,
    clients: Sequence[int],
    names: tuple[str, ...],
    steps: int | None,
    shown: bool,
) -> Any:
    """What clients say at their own y, each as a row."""
    beta, zeta, kept, shared = algorithm.own_lower(steps)
    return fed.probe(
        personal,
        clients,
        at={"x": x},
        apart=True,
        beta=beta,
        shared=shared,
        kept=kept,
        names=names,
        shown=shown,
        solving=zeta,
        xi=Sample("upper"),
        zeta=Sample("lower"),
    )


def _figures(names: Sequence[str], values: np.ndarray | None) -> dict[str, Any]:
    if values is None:
        return {}
    figures: dict[str, Any] = {}
    for name, column in zip(names, values.T, strict=True):
        worst = column.max() if direction(name) == "min" else column.min()
        figures |= dict(zip(over_clients([name]), (column.mean(), worst, column.std()), strict=True))
    return figures
