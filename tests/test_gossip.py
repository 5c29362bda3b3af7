"""Methods without a server: the graphs, and Gossip and MA-DSBO against dense numpy and the closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fakes import Watching
from fedbilevel import Agents, Federation, Ledger, Loop, SettingsError, Simulation, load_spec, run
from fedbilevel.algorithms import MADSBO, Gossip
from fedbilevel.algorithms.graphs import (
    Network,
    connected,
    disagreement,
    grid,
    mixing_matrix,
    neighbours,
    own,
    spectral_gap,
)
from fedbilevel.algorithms.madsbo import residual
from fedbilevel.engines._work import prepare
from fedbilevel.problem import Task
from fedbilevel.problems import Quadratic, QuadraticTask

GRAPHS = ["ring", "torus", "erdos-renyi", "complete"]
AGENTS = 5
_engines: dict[int, tuple[Any, Simulation]] = {}


@pytest.fixture(scope="module")
def small() -> QuadraticTask:
    """Five heterogeneous agents with exact gradients; x has 4 components, y 3."""
    return Quadratic(size_x=4, size_y=3, condition=2.0, rows=2).make(clients=AGENTS, seed=1)


def follow(method: Any, task: QuadraticTask | Task, iterations: int, state: Any = None) -> tuple[Any, Federation]:
    if id(task) not in _engines:
        _engines[id(task)] = task, Simulation(task.problem, task.clients)  # one engine a task compiles once
    fed = Federation(_engines[id(task)][1])
    state = method.init(task.problem) if state is None else state
    for _ in range(iterations):
        state = method.step(fed, state)
    return state, fed


def gradient_norm(task: QuadraticTask, x: Any) -> float:
    return float(np.linalg.norm(task.hypergradient(x)))


# Graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("agents", [4, 6, 9, 20])
def test_a_mixing_matrix_is_symmetric_doubly_stochastic_and_of_a_connected_graph(graph: Any, agents: int) -> None:
    W = mixing_matrix(graph, agents, edge_probability=0.4)
    near = neighbours(graph, agents, edge_probability=0.4)
    np.testing.assert_allclose(W, W.T, atol=1e-15)
    np.testing.assert_allclose(W.sum(axis=0), 1.0, atol=1e-12)
    assert (W >= 0).all() and connected(near) and not near.diagonal().any()
    assert ((W > 0) == (near | np.diag(W.diagonal() > 0))).all()
    assert 0 < spectral_gap(W) <= 1 + 1e-12


@pytest.mark.parametrize("agents", [3, 4, 5, 10, 21])
def test_the_gap_of_a_ring_has_its_closed_form(agents: int) -> None:
    expected = 2 / 3 * (1 - np.cos(2 * np.pi / agents))
    assert spectral_gap(mixing_matrix("ring", agents)) == pytest.approx(expected, abs=1e-12)


def test_the_gap_of_the_complete_graph_is_one_and_an_exchange_shrinks_as_the_gap_says() -> None:
    assert spectral_gap(mixing_matrix("complete", 7)) == pytest.approx(1.0)
    W = mixing_matrix("torus", 12)
    rows = np.random.default_rng(0).normal(size=(12, 3))
    assert disagreement(jnp.asarray(W @ rows)) <= (1 - spectral_gap(W)) * disagreement(jnp.asarray(rows)) + 1e-6


def test_small_graphs_and_the_most_square_torus() -> None:
    np.testing.assert_array_equal(mixing_matrix("ring", 1), [[1.0]])
    np.testing.assert_allclose(mixing_matrix("ring", 2), 0.5)
    assert [grid(n) for n in (4, 12, 15, 100)] == [(2, 2), (3, 4), (3, 5), (10, 10)]
    assert neighbours("torus", 16).sum(axis=1).tolist() == [4] * 16


def test_a_torus_of_a_prime_number_names_the_remedy() -> None:
    with pytest.raises(SettingsError, match=r"13 agents do not fill a grid; use 12 or 14 agents.*'ring'"):
        Gossip(graph="torus").check(13)
    with pytest.raises(SettingsError, match=r"algorithm\.graph = 'torus' is wrong"):
        load_spec(None, {"algorithm.name": "ma-dsbo", "algorithm.graph": "torus", "data.clients": 7})


def test_a_random_graph_is_the_same_for_a_seed_and_refused_when_never_connected() -> None:
    one, again, other = (mixing_matrix("erdos-renyi", 20, 0.3, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    with pytest.raises(SettingsError, match=r"none of 200 graphs of 30 agents was connected; use more than"):
        Network(graph="erdos-renyi", edge_probability=0.001).weights(30)


def test_a_graph_of_too_many_agents_is_refused_before_its_matrix_is_made() -> None:
    with pytest.raises(
        SettingsError, match=r"algorithm\.graph = 'ring' is wrong for 1000000 clients: .*at most 10,000"
    ):
        load_spec("paper", {"algorithm.name": "ma-dsbo", "data.clients": 1_000_000, "data.partition": "drawn"})


def test_a_graph_describes_itself() -> None:
    assert Network().describe(10) == "ring of 10 agents: 10 links, 2 neighbours each, spectral gap 0.1273"
    assert "spectral gap 1" in Network(graph="complete").describe(10)


# Gossip -----------------------------------------------------------------------------------------------


class Dense:
    """The agents' exact derivatives of a quadratic, in float64."""

    def __init__(self, task: QuadraticTask) -> None:
        self.A, self.B, self.J = (m.astype(np.float64) for m in (task.A, task.B, task.J))
        self.b, self.c = task.b.astype(np.float64).mean(1), task.c.astype(np.float64).mean(1)
        self.p = task.size_x

    def g_y(self, x: Any, y: Any) -> Any:
        return np.einsum("kij,kj->ki", self.A, y) + np.einsum("kij,kj->ki", self.B, x) + self.b

    def f(self, x: Any, y: Any) -> tuple[Any, Any]:
        both = np.einsum("kij,kj->ki", self.J, np.concatenate([x, y], axis=1)) + self.c
        return both[:, : self.p], both[:, self.p :]


def mean(a: Any) -> Any:
    """What a server would send back to everybody."""
    return np.broadcast_to(a.mean(0), a.shape)


def test_gossip_on_the_complete_graph_is_the_update_with_a_server(small: QuadraticTask) -> None:
    method = Gossip(graph="complete", alpha=0.1, beta=0.3, gamma=0.2, b=6, L_g=1.2)
    got, _ = follow(method, small, 25)

    d, q = Dense(small), small.A.shape[1]
    x, y = np.zeros((AGENTS, d.p)), np.zeros((AGENTS, q))
    s, h, u, v = np.zeros_like(x), np.zeros_like(y), np.zeros((AGENTS, d.p, q)), np.zeros((AGENTS, q, q))
    for _ in range(25):
        inverse = np.zeros_like(v)
        for k in range(AGENTS):
            Q = np.eye(q)
            for _ in range(6):
                Q = np.eye(q) + (np.eye(q) - v[k] / 1.2) @ Q
            inverse[k] = Q / 1.2
        step = s - np.einsum("kij,kjl,kl->ki", u, inverse, h)
        f_x, f_y = d.f(x, y)
        x, y, s, h, u, v = (
            mean(x) - 0.1 * step,
            mean(y) - 0.2 * d.g_y(x, y),
            0.7 * mean(s) + 0.3 * f_x,
            0.7 * mean(h) + 0.3 * f_y,
            0.7 * mean(u) + 0.3 * d.B.transpose(0, 2, 1),
            0.7 * mean(v) + 0.3 * d.A,
        )
    assert np.abs(x).max() > 0.1
    for name, expected in dict(xs=x, ys=y, s=s, h=h, u=u, v=v[:, None], x=x.mean(0), y=y.mean(0)).items():
        np.testing.assert_allclose(getattr(got, name), expected, atol=1e-5, err_msg=name)


def test_gossip_on_a_ring_converges_and_agents_come_together(small: QuadraticTask) -> None:
    method = Gossip(alpha=0.05, beta=0.2, gamma=0.05, b=15, L_g=1.0)
    start = method.init(small.problem, AGENTS)
    apart = start.xs + np.random.default_rng(0).normal(size=start.xs.shape).astype(np.float32)
    start = start._replace(xs=apart, x=apart.mean(0))
    end, _ = follow(method, small, 300, start)
    assert gradient_norm(small, end.x) < gradient_norm(small, start.x) / 20
    assert method.report(end)["disagreement"] < method.report(start)["disagreement"] / 10


def test_smaller_steps_bring_gossip_closer_to_the_stationary_point(small: QuadraticTask) -> None:
    large, little = (
        follow(Gossip(alpha=a, beta=4 * a, gamma=a, b=15, L_g=1.0), small, n)[0]
        for a, n in ((0.1, 150), (0.025, 600))
    )
    assert gradient_norm(small, little.x) < gradient_norm(small, large.x) / 2
    assert disagreement(little.xs) < disagreement(large.xs) / 2


@pytest.mark.slow
def test_minibatches_keep_b_independent_hessians_and_engines_agree() -> None:
    task = Quadratic(size_x=3, size_y=2, noise=0.5, rows=6).make(clients=3, seed=0)
    method = Gossip(batch_u=2, batch_zeta=2, batch_xi=2, batch_chi=2, b=4, L_g=1.0, alpha=0.1, gamma=0.1)
    ends = []
    for engine in (Simulation(task.problem, task.clients), Loop(task.problem, task.clients)):
        fed, state = Federation(engine), method.init(task.problem)
        for _ in range(3):
            state = method.step(fed, state)
        assert state.v.shape == (3, 4, 2, 2)
        ends.append(state)
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("batch", ["full", 2])
def test_the_running_hessians_start_at_mu_g_times_the_identity(small: QuadraticTask, batch: Any) -> None:
    method = Gossip(graph="complete", beta=0.3, b=4, L_g=1.2, mu_g=0.4, batch_u=batch)
    kept = 1 if batch == "full" else 4
    start = method.init(small.problem, AGENTS)
    np.testing.assert_allclose(start.v, np.tile(0.4 * np.eye(3), (AGENTS, kept, 1, 1)), rtol=1e-6)
    for name in ("s", "h", "u"):
        assert not np.any(getattr(start, name)), "the other estimates start at zero"
    end, _ = follow(method, small, 1, start)
    expected = 0.7 * 0.4 * np.eye(3) + 0.3 * Dense(small).A[:, None]
    np.testing.assert_allclose(end.v, np.tile(expected, (1, kept, 1, 1)), atol=1e-6)
    assert not np.any(Gossip(batch_u=batch).init(small.problem, AGENTS).v), "by default it is zero"


def test_the_first_hypergradient_uses_the_hessians_of_the_start(small: QuadraticTask) -> None:
    """With h known and all v_i = mu_g I, Q_b h / L_g is a geometric series of 1 - mu_g / L_g."""
    method = Gossip(graph="complete", alpha=0.1, b=4, L_g=1.2, mu_g=0.4)
    g = np.random.default_rng(2)
    h, u = (g.normal(size=(AGENTS, *shape)).astype(np.float32) for shape in ((3,), (4, 3)))
    start = method.init(small.problem, AGENTS)._replace(h=jnp.asarray(h), u=jnp.asarray(u))
    end, _ = follow(method, small, 1, start)
    series = sum((1 - 0.4 / 1.2) ** k for k in range(5)) / 1.2
    np.testing.assert_allclose(end.xs, 0.1 * np.einsum("kij,kj->ki", u, series * h), rtol=1e-4, atol=1e-6)


def test_a_start_of_the_hessians_above_their_bound_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"mu_g = 2\.0 is wrong: it must be at most L_g, which is 1\.5"):
        Gossip(mu_g=2.0, L_g=1.5).check(4)
    Gossip(mu_g=1.5, L_g=1.5).check(4)


def test_what_does_not_fit_the_memory_is_refused_with_its_size(small: QuadraticTask, digits: Task) -> None:
    large = load_spec(None, {"problem.hidden": 200, "data.name": "digits", "algorithm.name": "gossip"})
    problem = large.task().problem
    # 20 agents: 4 copies of 4 bytes x (13000 x 2010 + 2010 x 2010) each
    with pytest.raises(SettingsError, match=r"20 agents .* 13000 x 2010 .* need 9\.65 GB .*use ma-dsbo"):
        Gossip().init(problem, 20)
    with pytest.raises(SettingsError, match=r"memory_limit = 1 MB .*: a single agent"):
        Gossip(memory_limit=1).init(digits.problem)
    with pytest.raises(SettingsError, match=r"memory_limit = 10 MB .*: 20 agents"):
        follow(Gossip(memory_limit=10), digits, 1, Gossip(memory_limit=100).init(digits.problem))


# MA-DSBO ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [None, 0.6])
def test_ma_dsbo_on_the_complete_graph_is_the_update_with_a_server(
    small: QuadraticTask, theta: float | None
) -> None:
    T, N, alpha, beta, gamma = 3, 4, 0.3, 0.2, 0.4
    got, _ = follow(
        MADSBO(graph="complete", alpha=alpha, beta=beta, gamma=gamma, T=T, N=N, theta=theta), small, 20
    )

    d, rate = Dense(small), alpha if theta is None else theta
    x, y = np.zeros((AGENTS, d.p)), np.zeros((AGENTS, small.A.shape[1]))
    r = np.zeros_like(x)
    for _ in range(20):
        for _ in range(T):
            y = mean(y) - beta * d.g_y(x, y)
        f_x, f_y = d.f(x, y)
        z, residual, track = np.zeros_like(y), -f_y, -f_y
        for _ in range(N):
            z = mean(z) - gamma * track
            new = np.einsum("kij,kj->ki", d.A, z) - f_y
            track, residual = mean(track) + new - residual, new
        u = f_x - np.einsum("kji,kj->ki", d.B, z)
        x, r = mean(x) - alpha * r, (1 - rate) * r + rate * u
    assert np.abs(x).max() > 0.1
    for name, expected in dict(xs=x, ys=y, r=r, x=x.mean(0), y=y.mean(0)).items():
        np.testing.assert_allclose(getattr(got, name), expected, atol=1e-5, err_msg=name)


def test_the_tracked_residual_solves_the_mean_system_on_a_ring(small: QuadraticTask) -> None:
    method, d = MADSBO(N=300, gamma=0.2), Dense(small)
    fed = follow(method, small, 0)[1]
    g = np.random.default_rng(0)
    x, y = (g.normal(size=(AGENTS, n)).astype(np.float32) for n in (4, 3))
    z = method.inverse_product(Agents(fed), method.weights(AGENTS), own(jnp.asarray(x)), own(jnp.asarray(y)))
    expected = np.linalg.solve(d.A.mean(0), d.f(x, y)[1].mean(0))
    np.testing.assert_allclose(z, np.tile(expected, (AGENTS, 1)), atol=1e-4)
    assert fed.ledger.rounds == 299


def test_the_residuals_of_ma_dsbo_draw_new_rows_every_time() -> None:
    """The first two come with no exchange between them; that once gave them the same rows."""
    task = Quadratic(size_x=3, size_y=2, noise=1.0, rows=30).make(clients=3, seed=0)
    engine = Watching(Loop(task.problem, task.clients))
    method = MADSBO(T=1, N=3, batch_zeta=5, batch_u=5, batch_xi=5, batch_chi=5)
    fed = Federation(engine, seed=4)
    state = method.init(task.problem, 3)
    for _ in range(2):
        state = method.step(fed, state)
    residuals = [call for call in engine.calls if call.step is residual]
    assert len(residuals) == 2 * 3
    assert len({call.address for call in engine.calls}) == len(engine.calls) == fed.ledger.local
    for client in range(3):
        draws = [
            prepare(call, task.problem, client, task.clients.size(client), task.clients.capacity)
            for call in residuals
        ]
        for name in ("xi", "u"):
            rows = [tuple(d[name].index.tolist()) for d in draws]
            assert rows[0] != rows[1] and len(set(rows)) == len(rows)
            assert all(len(set(r)) == 5 for r in rows)


@pytest.mark.slow
def test_ma_dsbo_on_a_ring_ends_near_the_stationary_point(small: QuadraticTask) -> None:
    method = MADSBO(alpha=0.05, theta=0.3, beta=0.03, gamma=0.25, T=5, N=20)
    start = method.init(small.problem, AGENTS)
    apart = start.xs + np.random.default_rng(0).normal(size=start.xs.shape).astype(np.float32)
    start = start._replace(xs=apart, x=apart.mean(0))
    end, _ = follow(method, small, 150, start)
    assert gradient_norm(small, end.x) < gradient_norm(small, start.x) / 20
    far, near = (np.linalg.norm(np.asarray(s.x) - small.stationary_point) for s in (start, end))
    assert near < far / 20
    assert method.report(end)["disagreement"] < method.report(start)["disagreement"] / 2


def test_alpha_above_one_needs_a_theta() -> None:
    with pytest.raises(SettingsError, match=r"alpha = 1\.5 is wrong: .* set theta"):
        MADSBO(alpha=1.5).check(4)
    MADSBO(alpha=1.5, theta=0.5).check(4)


# The ledger, and runs ---------------------------------------------------------------------------------


def test_the_ledger_counts_exchanges_and_bytes_for_each_neighbour(small: QuadraticTask) -> None:
    p, q, links = 4, 3, 2 * AGENTS
    _, fed = follow(Gossip(L_g=1.0), small, 2)
    account = fed.ledger.steps["mix"]
    floats = 2 * (p + q) + p * q + q * q
    assert (fed.ledger.rounds, account.bytes_up) == (2, 2 * links * 4 * floats)
    assert account.bytes_down == account.bytes_up == fed.ledger.bytes_up

    T, N = 3, 4
    _, fed = follow(MADSBO(T=T, N=N), small, 2)
    steps = fed.ledger.steps
    assert (steps["mix_lower"].rounds, steps["mix_product"].rounds) == (2 * T, 2 * (N - 1))
    assert fed.ledger.rounds == 2 * (T + N - 1)
    assert fed.ledger.bytes_up == 2 * links * 4 * (p + T * q + 2 * (N - 1) * q)

    _, fed = follow(MADSBO(T=T, N=1, graph="complete"), small, 1)
    assert fed.ledger.rounds == T
    assert fed.ledger.bytes_up == AGENTS * (AGENTS - 1) * 4 * (p + T * q)


@pytest.mark.parametrize("method", [Gossip(L_g=1.0, batch_u=1, b=2), MADSBO(batch_zeta=1, T=2, N=2)])
def test_a_state_that_was_saved_as_arrays_goes_on_as_if_nothing_had_happened(
    method: Any, small: QuadraticTask
) -> None:
    engine = follow(method, small, 0)[1].engine
    fed, state = Federation(engine, seed=3), method.init(small.problem)
    for _ in range(2):
        state = method.step(fed, state)
    saved, ledger = {k: np.asarray(v) for k, v in state._asdict().items()}, fed.ledger.to_mapping()
    resumed = type(state)(**{k: jnp.asarray(v) for k, v in saved.items()})
    again = method.step(Federation(engine, seed=3, ledger=Ledger.from_mapping(ledger)), resumed)
    for one, other in zip(method.step(fed, state), again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("name", "more"), [("gossip", {"algorithm.b": 2}), ("ma-dsbo", {"algorithm.T": 2})])
def test_a_run_on_digits_learns_and_reports_disagreement(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    changes = {
        "problem.hidden": 4,
        "data.name": "digits",
        "data.clients": 6,
        "algorithm.name": name,
        "algorithm.graph": "torus",
        "algorithm.batch_u": 8,
        "stop.rounds": None,
        "stop.iterations": 4,
    }
    history = run(load_spec(None, changes | more), tmp_path / "run").history
    first, last = history[0], history[-1]
    assert first["disagreement"] < 1e-6 < last["disagreement"]
    assert last["iteration"] == 4 and last["upper_loss"] < first["upper_loss"]
