"""One evaluation of a run: measurements at the server, probes of clients, and figures of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._probes import losses
from ..algorithms import Algorithm, Reporting, SolvesAtClients
from ..federation import Federation
from ..ledger import BY, Ledger, counted
from ..privacy import Accountant, Privacy
from ..problem import Task
from ..record import number
from ..spec import EvaluateSettings
from ..steps import Sample
from ._personal import at_own_lower, at_shared_lower, client_metrics, over_clients

# The norms that describe the last iteration. Not every method computes a hypergradient and a residual.
FIGURES = ("update_x", "update_y", "hypergradient_estimate", "lower_residual")


def evaluate(
    fed: Federation,
    task: Task,
    algorithm: Algorithm,
    accountant: Accountant | None,
    state: Any,
    iteration: int,
    probed: tuple[int, ...],
    training: bool,
    figures: Mapping[str, float | None],
) -> dict[str, Any]:
    """The line of the history for this state. `figures` are those of the iteration that led to it."""
    under_way = dict(task.measure(state.x, state.y))  # its result is awaited only after the probe
    if training and task.measure_train is not None:
        under_way |= task.measure_train(state.x, state.y)
    upper = lower = None
    if accountant is None:  # in a private run, the clients' losses would be uploads without noise
        names = client_metrics(task)
        if isinstance(algorithm, SolvesAtClients):
            own = at_own_lower(fed, algorithm, state.x, probed, names)
            upper, lower = number(own.pop("upper_loss")), number(own.pop("lower_loss"))
            under_way |= own
        else:
            rows: dict[str, Any] = dict(xi=Sample("upper"), zeta=Sample("lower"))
            means = fed.probe(losses, clients=probed, x=state.x, y=state.y, **rows)
            upper, lower = number(means.upper), number(means.lower)
            under_way |= at_shared_lower(fed, state, probed, names)
    measured = {name: number(value) for name, value in under_way.items()}
    ledger = fed.ledger
    return {
        "iteration": iteration,
        "rounds": ledger.rounds,
        "bytes_up": ledger.bytes_up,
        "bytes_down": ledger.bytes_down,
        "seconds": round(ledger.seconds, 4),
        "test_accuracy": measured.pop("test_accuracy", None),
        "test_loss": measured.pop("test_loss", None),
        "upper_loss": upper,
        "lower_loss": lower,
        **figures,
        **measured,
        **({} if accountant is None else {"epsilon": number(accountant.epsilon(fed.engine.clients.count))}),
        **_refused(ledger),
        **_reported(algorithm, state),
    }


def available(
    task: Task, algorithm: Algorithm, rules: EvaluateSettings, privacy: Privacy, state: Any
) -> list[str]:
    """The metrics that an evaluation may have: those of one measurement at the start, and the library's own."""
    names = [*task.measure(state.x, state.y)]
    if rules.train and task.measure_train is not None:
        names += task.measure_train(state.x, state.y)
    if privacy.mode is not None:
        names += ["epsilon"]
    else:
        names += ["upper_loss", "lower_loss", *over_clients(client_metrics(task))]
    names += [*_reported(algorithm, state), *FIGURES]
    return list(dict.fromkeys(names))


def figures_of(before: Any, after: Any, fed: Federation) -> dict[str, float | None]:
    """The sizes of the updates of the last iteration, and the norms of the vectors that the method noted in it."""
    vectors = {
        "update_x": np.asarray(after.x, np.float64) - np.asarray(before.x),
        "update_y": np.asarray(after.y, np.float64) - np.asarray(before.y),
        **fed.noted,
    }
    return {name: number(np.linalg.norm(np.asarray(vector, np.float64))) for name, vector in vectors.items()}


def spent(accountant: Accountant | None, fed: Federation) -> dict[str, Any]:
    """The privacy that a run has spent, for its summary."""
    if accountant is None:
        return {}
    privacy, releases = accountant.privacy, accountant.releases
    uploads: Any = max(releases.values(), default=0)
    if privacy.mode == "central":
        uploads = [{**key._asdict(), "cohorts": count} for key, count in releases.items()]
    told = {
        "mode": privacy.mode,
        "epsilon": number(accountant.epsilon(fed.engine.clients.count)),
        "delta": privacy.delta,
    }
    return {"privacy": told | {"noise": privacy.noise, "uploads": uploads}}


def _refused(ledger: Ledger) -> dict[str, Any]:
    """The counts of replies that were not used so far, by reason and by client; empty if all were used."""
    if not ledger.rejected:
        return {}
    return {"rejected": {by: counted(ledger.rejected, by) for by in BY}}


def _reported(algorithm: Algorithm, state: Any) -> dict[str, float | None]:
    """The algorithm's own figures for its state, such as the disagreement of agents."""
    report = algorithm.report(state) if isinstance(algorithm, Reporting) else {}
    return {name: number(value) for name, value in report.items()}
