"""A run that diverges blames the setting that was made too large, whichever vector overflows first."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel._divergence import largest_curvature, suspect
from fedbilevel.problem import Task
from fedbilevel.problems import QuadraticTask
from fedbilevel.stepsizes import Moves, StepSize, step_sizes


@functools.cache
def ridge() -> tuple[fb.Problem, fb.Clients]:
    """The example of the README."""
    rng = np.random.default_rng(0)

    def rows(noise: float) -> Any:
        a = rng.normal(size=(50, 5))
        return a, a @ np.arange(5.0) + noise * rng.normal(size=50)

    problem = fb.Problem(
        x=jnp.zeros(1),
        y=jnp.zeros(5),
        lower=lambda x, y, b: b.mean((b.inputs @ y - b.targets) ** 2) + jnp.exp(x[0]) * jnp.sum(y**2),
        upper=lambda x, y, b: b.mean((b.inputs @ y - b.targets) ** 2),
    )
    return problem, fb.clients_from([(rows(n), rows(n)) for n in (0.1, 1.0, 3.0, 5.0)])


@functools.cache
def small() -> QuadraticTask:
    return fb.Quadratic(size_x=4, size_y=5).make(6, 0)


ALL: Any = dict(participation=1.0)
README = fb.AggITD(N=10, alpha=0.5, beta=0.05, lam=0.05, **ALL)
RIDGE = {
    "fbo-aggitd": README,
    "summed, sgd": dataclasses.replace(README, estimator="summed", lower_solver="sgd"),
    "fednest": fb.FedNest(N=10, T=10, alpha=0.5, beta=0.05, lam=0.05, **ALL),
    "lfednest": fb.LFedNest(N=10, T=10, alpha=0.5, beta=0.05, lam=0.05, **ALL),
    "gossip": fb.Gossip(alpha=0.1, gamma=0.05, L_g=15.0),
    "ma-dsbo": fb.MADSBO(alpha=0.2, beta=0.05, gamma=0.02, T=10, N=10),
}
QUADRATIC = {
    "fbo-aggitd": fb.AggITD(N=5, alpha=0.1, beta=0.2, lam=0.5, **ALL),
    "fednest": fb.FedNest(N=5, T=5, alpha=0.1, beta=0.2, lam=0.5, **ALL),
    "lfednest": fb.LFedNest(N=5, T=5, alpha=0.1, beta=0.2, lam=0.5, **ALL),
    "gossip": fb.Gossip(alpha=0.05, gamma=0.2, L_g=1.5),
    "ma-dsbo": fb.MADSBO(alpha=0.1, beta=0.2, gamma=0.2, T=5, N=5),
}
DIGITS = {
    ("fednest", "alpha", 1000): fb.FedNest(N=3, T=3, alpha=0.1, beta=0.01, lam=0.05, **ALL),
    ("fbo-aggitd", "lam", 1000): fb.AggITD(N=3, alpha=0.1, beta=0.01, lam=0.05, **ALL),
    ("lfednest", "alpha", 1000): fb.LFedNest(N=3, T=3, alpha=0.1, beta=0.01, lam=0.05, **ALL),
    ("gossip", "L_g", 1000): fb.Gossip(alpha=0.05, gamma=0.1, L_g=20.0),
    ("ma-dsbo", "alpha", 1000): fb.MADSBO(alpha=0.1, beta=0.1, gamma=0.05, T=3, N=3),
}
FACTORS = (10, 100, 1000)


def too_large(method: Any, each: StepSize, factor: float) -> Any:
    value = getattr(method, each.setting)
    changed = {each.setting: value / factor if each.inverse else value * factor}
    if isinstance(method, fb.MADSBO):
        changed["theta"] = method.alpha  # otherwise alpha is a weight too, which is at most 1
    return dataclasses.replace(method, **changed)


def blamed(engine: fb.Engine, method: Any, iterations: int = 30) -> str | None:
    """The setting that is blamed for the divergence of a method; None if it does not diverge."""
    try:
        fb.train(engine.problem, engine.clients, method, stop={"iterations": iterations}, engine=engine)
    except fb.Diverged as error:
        found = [each.setting for each in step_sizes(method) if f"; algorithm.{each.setting} = " in str(error)]
        assert len(found) == 1 and "--on-divergence restart" in str(error), str(error)
        assert f"algorithm.{found[0]} = {getattr(method, found[0]):g} is " in str(error)
        return found[0]
    return None


@pytest.mark.parametrize("name", RIDGE)
@pytest.mark.slow
def test_on_the_ridge_of_the_readme_the_setting_that_was_changed_is_blamed(name: str) -> None:
    engine, method = fb.Simulation(*ridge()), RIDGE[name]
    assert blamed(engine, method, 10) is None
    found = {
        each.setting: [blamed(engine, too_large(method, each, k), 10) for k in FACTORS]
        for each in step_sizes(method)
    }
    for setting, names in found.items():
        assert set(names) <= {setting, None}, found
    lower = next(each.setting for each in step_sizes(method) if each.moves is Moves.LOWER)
    assert found[lower] == [lower] * 3, found


@pytest.mark.parametrize("name", QUADRATIC)
@pytest.mark.slow
def test_on_the_quadratic_the_setting_that_was_changed_is_blamed(name: str) -> None:
    engine, method = fb.Simulation(small().problem, small().clients), QUADRATIC[name]
    assert blamed(engine, method) is None
    for each in step_sizes(method):
        found = [blamed(engine, too_large(method, each, k)) for k in FACTORS]
        assert set(found) <= {each.setting, None} and found[2] == each.setting, (each, found)


@pytest.mark.parametrize(("name", "setting", "factor"), DIGITS, ids=map(str, DIGITS))
@pytest.mark.slow
def test_on_digits_the_setting_that_was_changed_is_blamed(
    digits: Task, name: str, setting: str, factor: int
) -> None:
    method = DIGITS[name, setting, factor]
    each = next(each for each in step_sizes(method) if each.setting == setting)
    engine = fb.Simulation(digits.problem, digits.clients)
    assert blamed(engine, too_large(method, each, factor), 30) == setting


@pytest.mark.parametrize("beta", [0.5, 5.0])
@pytest.mark.slow
def test_a_restart_touches_beta_alone_and_ends_well(beta: float) -> None:
    problem, clients = ridge()
    method = dataclasses.replace(README, beta=beta)
    result = fb.train(problem, clients, method, stop={"iterations": 50}, on_divergence="restart")
    restarts = result.summary["restarts"]
    assert {r["setting"] for r in restarts} == {"beta"} and restarts[0]["before"] == beta
    assert result.summary["iterations"] == 50
    assert result.history[-1]["upper_loss"] == pytest.approx(8.57, abs=0.05)


def test_the_message_has_the_value_and_the_one_to_try() -> None:
    problem, clients = ridge()
    with pytest.raises(fb.Diverged) as raised:
        fb.train(problem, clients, dataclasses.replace(README, beta=0.5), stop={"iterations": 5})
    assert str(raised.value).endswith(
        "; algorithm.beta = 0.5 is too large for a lower loss of curvature 5.03, where it must stay below 0.398: "
        "try 0.19, or --on-divergence restart"
    )
    assert "lam" not in str(raised.value)


def test_a_run_that_restarts_is_not_told_to_restart(quadratic: QuadraticTask) -> None:
    method = fb.AggITD(N=2, alpha=1e6, beta=0.1, lam=0.3, **ALL)
    with pytest.raises(fb.Diverged) as raised:
        fb.train(quadratic.problem, quadratic.clients, method, stop={"iterations": 9}, on_divergence="restart")
    assert str(raised.value).endswith(
        f"algorithm.alpha = {1e6 / 2**8:g} is likely too large: try {1e6 / 2**9:g}; the run has restarted 8 times"
    )


def test_the_curvature_is_that_of_the_client_with_the_largest(quadratic: QuadraticTask) -> None:
    fed = fb.Federation(fb.Loop(quadratic.problem, quadratic.clients))
    state = README.init(quadratic.problem)
    clients = range(quadratic.clients.count)
    exact = max(float(np.linalg.norm(A, 2)) for A in quadratic.A)
    L = largest_curvature(fed, state, clients, 0)
    assert L is not None and 0.8 * exact <= L <= exact * 1.0001
    assert fed.ledger.rounds == 0 and fed.ledger.probes["curvature"].rounds == len(clients)


# The rule itself ------------------------------------------------------------------------------------------

METHOD = fb.AggITD(alpha=1.0, beta=0.1, lam=0.1)


@pytest.mark.parametrize(
    ("changed", "moved", "L", "x_moved", "setting", "suggested"),
    [
        ({}, Moves.LOWER, 30.0, True, "lam", 0.033),  # lam L = 3 of 1, and beta L = 3 of 2
        ({"beta": 9.0}, Moves.PRODUCT, 4.0, True, "beta", 0.25),  # whatever overflows
        ({}, Moves.PRODUCT, 1.0, True, "alpha", 0.5),  # both far from their limits, so x is to blame
        ({}, Moves.LOWER, 1.0, False, "beta", 0.05),  # x has not moved
        ({}, Moves.PRODUCT, 1.0, False, "lam", 0.05),
        ({}, Moves.PRODUCT, 8.0, True, "lam", 0.05),  # close to its limit, and its own vector overflows
        ({}, Moves.LOWER, None, True, "beta", 0.05),  # not measured: by the vector that overflows
        ({}, None, None, True, "alpha", 0.5),
        ({"share_steps": True, "lower_steps": 50, "beta": 9.0}, Moves.LOWER, 8.0, True, "beta", 4.5),  # β/τ
    ],
)
def test_whom_the_rule_blames(
    changed: dict[str, Any], moved: Moves, L: float | None, x_moved: bool, setting: str, suggested: float
) -> None:
    method = dataclasses.replace(METHOD, **changed)
    found = suspect(method, fb.Diverged("", ["a"], moved=moved), L, x_moved, 10)
    assert found is not None and (found.setting, found.suggested) == (setting, suggested)


class Sent(NamedTuple):
    d: fb.X


class Plain:
    """A method that is no settings class; one of its step sizes is declared."""

    needs_server: ClassVar[bool] = True
    eta: Annotated[float, fb.Moves.UPPER]
    rate: float

    def __init__(self) -> None:
        self.eta, self.rate = 0.4, 0.2


class Undeclared:
    def __init__(self) -> None:
        self.rate = 0.2


def test_a_method_of_ones_own_declares_its_step_sizes_or_is_judged_by_what_it_sends() -> None:
    error = fb.Diverged("", ["d"], {"rate": 0.2})
    own, other = suspect(Plain(), error, None, True, 4), suspect(Undeclared(), error, None, True, 4)
    assert own is not None and own.setting == "eta"
    assert other is not None and (other.setting, other.value, other.suggested) == ("rate", 0.2, 0.1)
    assert suspect(Undeclared(), fb.Diverged("", ["d"], {"lam": 0.2}), None, True, 4) is None


# The start ------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_at_the_start_is_not_blamed_on_a_step_size() -> None:
    problem, clients = ridge()
    broken = dataclasses.replace(problem, lower=lambda x, y, b: jnp.sum(jnp.sqrt(y)))  # its slope is infinite at 0
    with pytest.raises(
        fb.Diverged, match=r"client 0: q is not finite.*, at the start, where no step size"
    ) as raised:
        fb.train(broken, clients, README, stop={"iterations": 5}, on_divergence="restart")
    assert raised.value.at_start and "algorithm." not in str(raised.value)
