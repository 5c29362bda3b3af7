"""FBO-AggITD against closed forms, an independent dense implementation, and its own ledger."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import AggITD, Federation, SettingsError, Simulation
from fedbilevel.algorithms.local import State, hypergradient
from fedbilevel.problems import Quadratic, QuadraticTask
from fedbilevel.steps import Sample

EXACT: dict[str, Any] = dict(
    participation=1.0, batch_zeta_local="full", lower_steps=1
)  # with the defaults: full batches


def relative(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def f32(a: Any) -> Any:
    return jnp.asarray(np.asarray(a), jnp.float32)


_engines: dict[int, tuple[QuadraticTask, Simulation]] = {}


def federation(task: QuadraticTask, seed: int = 0) -> Federation:
    """A new federation; those of a task share an engine, so that it compiles once."""
    _, engine = _engines.setdefault(id(task), (task, Simulation(task.problem, task.clients)))
    return Federation(engine, seed=seed)


def estimate(algorithm: AggITD, fed: Federation, x: Any, y: Any, Q: int | None = None) -> tuple[Any, Any, Any]:
    """y^N, p and the hypergradient h of Algorithm AggITD at (x, y)."""
    size = algorithm.batch_xi if isinstance(algorithm.batch_xi, int) else None
    rows = algorithm.batch_chi if isinstance(algorithm.batch_chi, int) else None
    fed.hold(x=f32(x))
    y, p = algorithm.estimate(fed, f32(y), Q=Q)
    return y, p, fed.round(hypergradient, p=p, xi=Sample("upper", size), chi=Sample("lower", rows)).h


# -------------------------------------------------- Algorithm AggITD once more, dense, in float64, full batches


class Dense:
    """FBO-AggITD written from the paper's pseudocode on the matrices of a quadratic, for all clients."""

    def __init__(self, task: QuadraticTask) -> None:
        self.A, self.B, self.J = (m.astype(np.float64) for m in (task.A, task.B, task.J))
        self.b, self.c = (m.astype(np.float64).mean(1) for m in (task.b, task.c))
        self.m, self.q, self.p = self.B.shape

    def grad_g(self, i: int, x: Any, y: Any) -> Any:
        return self.A[i] @ y + self.B[i] @ x + self.b[i]

    def grad_f(self, i: int, x: Any, y: Any) -> tuple[Any, Any]:
        g = self.J[i] @ np.concatenate([x, y]) + self.c[i]
        return g[: self.p], g[self.p :]

    def mean(self, values: Any) -> Any:
        return sum(values) / self.m

    def one_round_lower(self, x: Any, y: Any, beta: Any, tau: Any, svrg: bool) -> Any:
        q = self.mean(self.grad_g(i, x, y) for i in range(self.m))
        ends = []
        for i in range(self.m):
            v = y
            for _ in range(tau[i]):
                step = self.grad_g(i, x, v) - self.grad_g(i, x, y) + q if svrg else self.grad_g(i, x, v)
                v = v - beta[i] * step
            ends.append(v)
        return self.mean(ends)

    def aggitd(self, x: Any, y: Any, N: int, lam: float, beta: Any, tau: Any, Q: int, svrg: bool = True) -> Any:
        path = [y]
        for _ in range(N):
            path.append(self.one_round_lower(x, path[-1], beta, tau, svrg))
        z = self.mean(self.grad_f(i, x, path[Q])[1] for i in range(self.m))
        for _ in range(Q + 1, N + 1):
            z = self.mean(z - lam * self.A[i] @ z for i in range(self.m))
        p = lam * (N + 1) * z
        h = self.mean(self.grad_f(i, x, path[N])[0] - self.B[i].T @ p for i in range(self.m))
        return path, p, h

    def one_round_upper(self, x: Any, y: Any, h: Any, alpha: Any, tau: Any) -> Any:
        ends = []
        for i in range(self.m):
            v = x
            for _ in range(tau[i]):
                v = v - alpha[i] * (h - self.grad_f(i, x, y)[0] + self.grad_f(i, v, y)[0])
            ends.append(v)
        return self.mean(ends)


@pytest.fixture(scope="module")
def small() -> QuadraticTask:
    """Four unlike clients; their minibatches are noisy, their full batches exact."""
    return Quadratic(size_x=4, size_y=3, condition=4.0, heterogeneity=2.0, noise=1.0, rows=4).make(4, seed=0)


TAU = (1, 3, 2, 4)


@pytest.fixture(scope="module")
def away() -> tuple[Any, Any]:
    """A point away from every solution."""
    g = np.random.default_rng(8)
    return g.normal(size=4), 3 * g.normal(size=3)


@pytest.mark.parametrize("solver", ["svrg", "sgd"])
@pytest.mark.parametrize("shared", [False, True])
def test_it_is_the_dense_algorithm_for_every_q(small: QuadraticTask, away: Any, solver: Any, shared: bool) -> None:
    dense, (x, y) = Dense(small), away
    algorithm = AggITD(
        **{**EXACT, "lower_steps": TAU}, N=3, lam=0.7, beta=0.3, lower_solver=solver, share_steps=shared
    )
    beta = [0.3 / tau if shared else 0.3 for tau in TAU]
    fed = federation(small)
    path = dense.aggitd(x, y, 3, 0.7, beta, TAU, 0, solver == "svrg")[0]
    assert min(relative(a, b) for a, b in zip(path[1:], path[:-1], strict=True)) > 1e-2, "y moves"
    for N in (1, 2, 3):
        for Q in range(N + 1):
            expected = dense.aggitd(x, y, N, 0.7, beta, TAU, Q, solver == "svrg")
            yN, p, h = estimate(replace(algorithm, N=N), fed, x, y, Q)
            assert relative(yN, path[N]) < 1e-5
            assert relative(p, expected[1]) < 1e-5
            assert relative(h, expected[2]) < 1e-5


def force_q(monkeypatch: pytest.MonkeyPatch, Q: int) -> None:
    monkeypatch.setattr(Federation, "rng", lambda self, name: SimpleNamespace(integers=lambda end: Q))


def test_outer_iterations_are_the_dense_algorithm_with_a_warm_start(
    small: QuadraticTask, away: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, (x, y) = Dense(small), away
    upper_tau = (2, 1, 3, 1)
    algorithm = AggITD(
        **{**EXACT, "lower_steps": TAU}, N=2, lam=0.7, beta=0.6, alpha=0.4, upper_steps=upper_tau, share_steps=True
    )
    algorithm.check(small.clients.count)
    state, fed = State(f32(x), f32(y)), federation(small)
    for Q in (1, 0, 2):
        force_q(monkeypatch, Q)
        state = algorithm.step(fed, state)
        path, _, h = dense.aggitd(x, y, 2, 0.7, [0.6 / t for t in TAU], TAU, Q)
        y = path[-1]  # the next iteration starts where the lower loop of this one ended
        x = dense.one_round_upper(x, y, h, [0.4 / t for t in upper_tau], upper_tau)
        assert relative(state.x, x) < 1e-5 and relative(state.y, y) < 1e-5


def test_it_starts_at_the_problems_parameters(small: QuadraticTask) -> None:
    state = AggITD().init(small.problem)
    np.testing.assert_array_equal(state.x, small.problem.flat_x.vector)
    np.testing.assert_array_equal(state.y, small.problem.flat_y.vector)


def test_sharing_the_steps_divides_them_by_each_clients_count(small: QuadraticTask, away: Any) -> None:
    x, y = away
    fed = federation(small)
    common = {**EXACT, "N": 1, "lower_solver": "svrg"}
    shared = estimate(AggITD(**{**common, "lower_steps": 5}, beta=0.5, share_steps=True), fed, x, y, 0)[0]
    whole = estimate(AggITD(**{**common, "lower_steps": 5}, beta=0.1, share_steps=False), fed, x, y, 0)[0]
    undivided = estimate(AggITD(**{**common, "lower_steps": 5}, beta=0.5, share_steps=False), fed, x, y, 0)[0]
    assert relative(shared, whole) < 1e-6 < 1e-2 < relative(shared, undivided)


@pytest.mark.parametrize("name", ["lower_steps", "upper_steps"])
def test_a_list_of_steps_must_have_one_for_each_client(name: str) -> None:
    steps: dict[str, Any] = {name: (1, 2, 3)}
    algorithm = AggITD(**steps)
    algorithm.check(3)
    with pytest.raises(
        SettingsError, match=f"{name} has 3 numbers for 4 clients; give one number, or one for each"
    ):
        algorithm.check(4)


@pytest.mark.parametrize(
    "wrong", [{"N": 0}, {"lam": 0.0}, {"beta": float("inf")}, {"lower_steps": ()}, {"tau": 3}]
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"AggITD.{next(iter(wrong))}"):
        AggITD(**wrong)


# ------------------------------------------------------------------------------------------- (a) the hypergradient


def test_summed_is_the_closed_form_hypergradient(quadratic: QuadraticTask) -> None:
    x = np.random.default_rng(0).normal(size=quadratic.size_x)
    lam = 1 / quadratic.constants(1.0).L_g
    algorithm = AggITD(**EXACT, N=300, lam=lam, beta=0.1, estimator="summed")
    y, p, h = estimate(algorithm, federation(quadratic), x, quadratic.solution(x))
    assert relative(h, quadratic.hypergradient(x)) < 1e-4
    assert relative(y, quadratic.solution(x)) < 1e-4
    A, _, _, J, c = quadratic.means
    f_y = (J @ np.concatenate([x, quadratic.solution(x)]) + c)[x.size :]
    assert relative(p, np.linalg.solve(A, f_y)) < 1e-4
    assert (
        relative(
            quadratic.hypergradient(x), Dense(quadratic).aggitd(x, np.zeros(8), 1, lam, [0.1] * 20, [1] * 20, 0)[2]
        )
        > 0.1
    )


def test_the_average_of_sampled_over_all_q_is_summed(quadratic: QuadraticTask) -> None:
    g = np.random.default_rng(1)
    x, y = g.normal(size=quadratic.size_x), 3 * g.normal(size=8)
    N = 12
    common = {**EXACT, "lower_steps": 3, "N": N, "lam": 0.5, "beta": 0.2}
    fed = federation(quadratic)
    each = [estimate(AggITD(**common), fed, x, y, Q) for Q in range(N + 1)]
    yN, p, h = estimate(AggITD(**common, estimator="summed"), fed, x, y)
    assert relative(yN, y) > 0.1, "y moves"
    assert relative(each[0][2], each[N][2]) > 0.1, "Q matters"
    assert relative(np.mean([e[1] for e in each], axis=0, dtype=np.float64), p) < 1e-5
    assert relative(np.mean([e[2] for e in each], axis=0, dtype=np.float64), h) < 1e-5
    # and both are what the dense algorithm says
    dense = Dense(quadratic)
    expected = [dense.aggitd(x, y, N, 0.5, [0.2] * 20, [3] * 20, Q)[2] for Q in range(N + 1)]
    assert relative(h, np.mean(expected, axis=0)) < 1e-5


def monte_carlo(task: QuadraticTask, x: Any, y: Any, draws: int) -> tuple[Any, Any]:
    """Stochastic estimates h with minibatches of one row and random Q, and their exact expectation.

    The noise is additive and the Hessians are exact, so h is affine in every draw: its expectation is the mean
    over Q of the full-batch value.
    """
    N, lam, beta = 1, 0.8, 0.3
    algorithm = AggITD(
        N=N,
        lam=lam,
        beta=beta,
        participation=1.0,
        lower_steps=2,
        batch_zeta=1,
        batch_zeta_local=1,
        batch_u=1,
        batch_xi=1,
        batch_chi=1,
    )
    fed = federation(task, seed=5)
    h = np.stack([np.asarray(estimate(algorithm, fed, x, y)[2], np.float64) for _ in range(draws)])
    dense = Dense(task)
    taus, betas = [2] * dense.m, [beta] * dense.m
    return h, np.mean([dense.aggitd(x, y, N, lam, betas, taus, Q)[2] for Q in range(N + 1)], axis=0)


@pytest.mark.slow
def test_the_mean_of_600_stochastic_draws_is_the_expectation() -> None:
    task = Quadratic(size_x=3, size_y=2, condition=2.0, heterogeneity=1.0, noise=1.0, rows=3).make(2, seed=4)
    g = np.random.default_rng(3)
    x, y = 2 * g.normal(size=3), 3 * g.normal(size=2)
    h, expected = monte_carlo(task, x, y, 600)
    error = h.std(axis=0, ddof=1) / np.sqrt(len(h))
    score = np.abs(h.mean(axis=0) - expected) / error
    assert np.all(error > 0) and np.all(score < 4), score
    # the test can tell: an indirect part that is off by a third would be seen
    B = task.B.astype(np.float64).mean(0)
    indirect = np.mean([Dense(task).aggitd(x, y, 1, 0.8, [0.3] * 2, [2] * 2, Q)[1] @ B for Q in range(2)], axis=0)
    assert np.max(np.abs(indirect) / 3 / error) > 8


# --------------------------------------------------------------------------------------- (b) the stationary point


@pytest.fixture(scope="module")
def round_bowl() -> QuadraticTask:
    """Twenty unlike clients with a well-conditioned lower problem, so that a short Hessian product suffices."""
    return Quadratic(size_x=6, size_y=5, condition=2.0, heterogeneity=3.0).make(clients=20, seed=2)


def norms(task: QuadraticTask, algorithm: AggITD, iterations: int) -> list[float]:
    """||∇f(x_k)|| along a run."""
    fed, state = federation(task), algorithm.init(task.problem)
    found = []
    for _ in range(iterations):
        found.append(float(task.measure(state.x, state.y)["hypergradient_norm"]))
        state = algorithm.step(fed, state)
    return found


@pytest.mark.slow
def test_with_all_clients_and_full_batches_it_reaches_the_stationary_point(round_bowl: QuadraticTask) -> None:
    algorithm = AggITD(
        **{**EXACT, "lower_steps": 2}, N=10, lam=1.3, alpha=0.6, beta=0.4, estimator="summed", upper_steps=2
    )
    found = norms(round_bowl, algorithm, 60)
    assert found[-1] < 1e-4 * found[0]


@pytest.mark.slow
def test_with_half_of_the_clients_halving_the_steps_lowers_the_floor(round_bowl: QuadraticTask) -> None:
    def floor(scale: float) -> tuple[float, float]:
        common = {**EXACT, "participation": 0.5, "estimator": "summed", "N": 4, "lam": 1.3}
        found = norms(round_bowl, AggITD(**common, alpha=0.4 * scale, beta=0.8 * scale), 130)
        return found[0], float(np.mean(found[50:]))

    (start, whole), (_, half) = floor(1.0), floor(0.5)
    assert 0.01 * start < whole < 0.5 * start, "it falls, to a floor"
    assert half < 0.85 * whole


# --------------------------------------------------------------------------------- (c) rounds and bytes measured


@pytest.mark.parametrize("N", [1, 2, 5, 10])
def test_the_ledger_measures_the_papers_rounds_and_floats(
    small: QuadraticTask, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q, m = small.problem.size_x, small.problem.size_y, small.clients.count
    for Q in range(N + 1):
        force_q(monkeypatch, Q)
        cases: list[tuple[dict[str, Any], int, int]] = [
            ({}, 2 * N + 3, 2 * p + (3 * N - Q + 1) * q),
            ({"estimator": "summed"}, 2 * N + 3, 2 * p + (3 * N + 1) * q),
            # the q round is merged into the local steps: N fewer rounds, and no q goes up
            ({"lower_solver": "sgd"}, N + 3, 2 * p + (2 * N - Q + 1) * q),
        ]
        for changes, rounds, floats in cases:
            algorithm = AggITD(**EXACT, N=N, **changes)
            fed = federation(small)
            algorithm.step(fed, algorithm.init(small.problem))
            assert fed.ledger.rounds == rounds
            assert fed.ledger.bytes_up == m * 4 * floats
            by_step = {name: account.rounds for name, account in fed.ledger.steps.items()}
            lower = (
                {"descend": N, "gradients": 1}
                if "lower_solver" in changes
                else {"gradients": N + 1, "lower_steps": N}
            )
            assert by_step == {**lower, "hypergradient": 1, "upper_steps": 1}


def test_the_downlink_is_that_of_a_hand_count(small: QuadraticTask, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, m, N, Q = 4, 3, 4, 5, 2
    force_q(monkeypatch, Q)
    fed, algorithm = federation(small), AggITD(**EXACT, N=N)
    algorithm.step(fed, algorithm.init(small.problem))
    # x once; y at every t = 0..N; q in every lower round; z from t = Q+1 to N; p; h
    assert fed.ledger.bytes_down == m * 4 * (p + (N + 1) * q + N * q + (N - Q) * q + q + p)
