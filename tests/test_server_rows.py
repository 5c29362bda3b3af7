"""Upper rows that only the server has: the same numbers as if every client had them, and no bytes for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data import Part, lower_only
from fedbilevel.engines import Fused
from fedbilevel.engines.flare import Flare, Site
from fedbilevel.oracle import Oracle
from fedbilevel.steps import Own, Y, client_step
from wires import Wires, in_process_sites

CLIENTS, FEATURES = 4, 3
FULL: dict[str, Any] = dict(participation=2)
METHODS: list[Any] = [
    fb.FedSOBA(alpha=0.5, beta=0.2, momentum=0.5, **FULL),
    fb.FedSOBA(alpha=0.5, steps="adagrad", beta=0.2, batch_zeta=4, **FULL),
    fb.AggITD(N=2, alpha=0.5, beta=0.2, lam=0.2, lower_steps=1, upper_steps=1, estimator="summed", **FULL),
    fb.AggITD(N=2, alpha=0.5, beta=0.2, lam=0.2, lower_steps=2, upper_steps=1, estimator="sampled", **FULL),
    fb.AggITD(N=2, alpha=0.5, beta=0.2, estimator="cg", cg_steps=3, upper_steps=1, **FULL),
    fb.FedNest(N=2, T=2, alpha=0.5, beta=0.2, lower_steps=1, upper_steps=1, **FULL),
    fb.SimFBO(alpha=0.5, beta=0.2, tau=1, **FULL),
    fb.FedF2SA(alpha=0.05, beta=0.1, **FULL),
    fb.FedAvg(control="joint", alpha=0.1, beta=0.1, **FULL),
]


class Remembered(NamedTuple):
    y: Y
    r: Own[Y]


@client_step
def remembers(c: Oracle) -> Remembered:
    r = c.own("r", c.y)
    return Remembered(r, r + 1)


def rows(seed: int, count: int) -> Part:
    g = np.random.default_rng(seed)
    a = g.normal(size=(count, FEATURES)).astype(np.float32)
    return Part(a, (a @ np.array([2.0, -1.0, 0.5]) + 0.3 * g.normal(size=count)).astype(np.float32))


SERVER, OWN = rows(99, 12), [rows(i, 6 + i) for i in range(CLIENTS)]


def squares(y: Any, batch: fb.Batch) -> Any:
    return batch.mean((batch.inputs @ y - batch.targets) ** 2) / 2


def made(server: Any) -> fb.Problem:
    return fb.Problem(
        x=jnp.zeros(FEATURES),
        y=jnp.zeros(FEATURES),
        lower=lambda x, y, batch: squares(y, batch) + jnp.sum(jnp.exp(x) * y**2) / 2,
        upper=lambda x, y, batch: squares(y, batch) + 0.1 * jnp.sum(x**2),
        server=server,
    )


AT_SERVER, AT_CLIENTS = made(SERVER), made(None)
LOWER, COPIES = (
    fb.ListedClients([lower_only(own) for own in OWN]),
    fb.ListedClients([fb.ClientData(own, SERVER) for own in OWN]),
)


def steps(fed: fb.Federation, method: Any, count: int = 4) -> Any:
    state = method.init(fed.engine.problem, CLIENTS)
    for _ in range(count):
        state = method.step(fed, state)
    return state


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{type(m).__name__}-{METHODS.index(m)}")
def test_rows_at_the_server_are_as_good_as_a_copy_of_them_at_every_client_and_cost_no_bytes(method: Any) -> None:
    here = fb.Federation(fb.Loop(AT_SERVER, LOWER), seed=1)
    there = fb.Federation(fb.Loop(AT_CLIENTS, COPIES), seed=1)
    ours, theirs = steps(here, method), steps(there, method)
    assert np.linalg.norm(theirs.x) > 0.005
    np.testing.assert_allclose(ours.x, theirs.x, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(ours.y, theirs.y, rtol=2e-4, atol=2e-5)
    assert (here.ledger.rounds, here.ledger.bytes_up, here.ledger.bytes_down) == (
        there.ledger.rounds,
        there.ledger.bytes_up,
        there.ledger.bytes_down,
    )


def closed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y*(x) and the hypergradient of the upper loss at the server, by matrices."""
    a = np.mean([own.inputs.T @ own.inputs / own.rows for own in OWN], 0) + np.diag(np.exp(x))
    y = np.linalg.solve(a, np.mean([own.inputs.T @ own.targets / own.rows for own in OWN], 0))
    v = np.linalg.solve(a, SERVER.inputs.T @ (SERVER.inputs @ y - SERVER.targets) / SERVER.rows)
    return y, 0.2 * x - np.exp(x) * y * v


def test_a_method_ends_at_the_stationary_point_of_the_closed_form() -> None:
    method = fb.FedSOBA(alpha=0.3, beta=0.3, participation=1.0)
    result = fb.train(AT_SERVER, LOWER, method, stop={"iterations": 400}, evaluate={"every": 400}, engine="fused")
    x = np.asarray(result.x, np.float64)
    y, h = closed(x)
    np.testing.assert_allclose(h, 0, atol=2e-6)
    np.testing.assert_allclose(result.y, y, atol=2e-5)
    upper = np.mean((SERVER.inputs @ y - SERVER.targets) ** 2) / 2 + 0.1 * np.sum(x**2)
    assert result.history[-1]["upper_loss"] == pytest.approx(upper, rel=1e-4)  # measured at the server
    assert np.linalg.norm(closed(np.zeros(FEATURES))[1]) > 0.01


@pytest.mark.parametrize("make", [fb.Simulation, Fused, in_process_sites], ids=["simulation", "fused", "flare"])
@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]], ids=["FedSOBA", "AggITD"])
def test_every_engine_gives_the_numbers_of_the_loop(make: Any, method: Any) -> None:
    reference = steps(fb.Federation(fb.Loop(AT_SERVER, LOWER), seed=0), method)
    how: dict[str, Any] = dict(stop={"iterations": 4}, evaluate={"every": 4}, seed=0)
    result = fb.train(AT_SERVER, LOWER, method, engine=make(AT_SERVER, LOWER), **how)
    np.testing.assert_allclose(result.x, reference.x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.y, reference.y, rtol=1e-5, atol=1e-6)


def test_a_site_does_not_have_the_rows_and_no_message_has_them() -> None:
    reference = steps(fb.Federation(fb.Loop(AT_SERVER, LOWER), seed=1), METHODS[0])
    names = [f"site-{i}" for i in range(CLIENTS)]
    wires = Wires({name: Site(made("elsewhere"), LOWER.load(i)) for i, name in enumerate(names)})
    found = steps(fb.Federation(Flare(AT_SERVER, names, wires), seed=1), METHODS[0])
    np.testing.assert_allclose(found.x, reference.x, rtol=1e-5)
    sent = b"".join(wires.seen)
    assert len(sent) > 1000 and np.asarray(SERVER.inputs).tobytes()[:16] not in sent


def test_many_runs_in_one_program_measure_the_upper_loss_of_the_server() -> None:
    how: dict[str, Any] = dict(stop={"iterations": 6}, evaluate={"every": 3}, engine="fused")
    method = fb.FedSOBA(alpha=0.3, beta=0.3, participation=1.0)
    many = fb.train_many(AT_SERVER, LOWER, method, settings=[{"alpha": 0.1}, {"alpha": 0.3}], **how)
    alone = fb.train(AT_SERVER, LOWER, method, **how)
    for a, b in zip(many[1].history, alone.history, strict=True):
        assert a["upper_loss"] == pytest.approx(b["upper_loss"], rel=1e-5) and a["upper_loss"] > 0.01
    np.testing.assert_allclose(many[1].x, alone.x, rtol=1e-5)


def test_a_robust_rule_judges_clients_only() -> None:
    rule = fb.Median()
    fed = fb.Federation(fb.Loop(AT_SERVER, LOWER), gather=fb.aggregate.gather_by(rule))
    one = steps(fed, fb.FedSOBA(alpha=0.5, beta=0.2, participation=1.0), 1)
    slope = SERVER.inputs.T @ -SERVER.targets / SERVER.rows  # ∇_y f at zero
    np.testing.assert_allclose(one.v, 0.2 * slope, rtol=1e-4)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(fb.SettingsError, match="server is wrong with lower_is = 'local'"):
        replace(AT_SERVER, lower_is="local")
    with pytest.raises(fb.SettingsError, match="server is of type int"):
        made(3)
    with pytest.raises(fb.SettingsError, match="the upper rows of this problem are at the server"):
        fb.train(AT_SERVER, LOWER, fb.Gossip(), stop={"iterations": 1})
    fed = fb.Federation(fb.Loop(AT_SERVER, LOWER))
    with pytest.raises(fb.SettingsError, match="clients are given values of their own"):
        steps(fed, fb.FedAvg(control="joint", tau=(1, 2, 1, 2), participation=1.0), 1)
    fed.hold(x=jnp.zeros(FEATURES), y=jnp.zeros(FEATURES))
    with pytest.raises(fb.SettingsError, match="clients keep a state from round to round"):
        fed.round(remembers)
