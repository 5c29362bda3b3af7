"""Feasible sets: each projection, the hypergradient at active bounds, and runs that end at constrained minima."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import lsq_linear, minimize

import fedbilevel as fb
from fedbilevel.algorithms.local import hypergradient
from fedbilevel.errors import FedBilevelWarning
from fedbilevel.steps import Sample

EXACT: dict[str, Any] = dict(participation=1.0, batch_zeta_local="full", lower_steps=1)


def relative(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


# ---------------------------------------------------------------------------------------------------- the sets


def test_a_box_clips_leaf_by_leaf_and_none_is_no_bound() -> None:
    tree = {"a": jnp.array([-2.0, 0.5, 2.0]), "b": jnp.array([[-9.0, 9.0]])}
    got = fb.Box(low={"a": jnp.array([-1.0, 0.0, 0.0]), "b": None}, high=1.0)(tree)
    np.testing.assert_array_equal(got["a"], [-1.0, 0.5, 1.0])
    np.testing.assert_array_equal(got["b"], [[-9.0, 1.0]])


def test_a_simplex_and_a_ball_are_the_nearest_points_over_all_leaves() -> None:
    g = np.random.default_rng(0)
    for _ in range(5):
        v = 2 * g.normal(size=3)
        tree = {"a": jnp.asarray(v[:1], jnp.float32), "b": jnp.asarray(v[1:], jnp.float32)}
        got = fb.Simplex(total=2.0)(tree)
        # brute force: the nearest of the solutions on all faces
        faces = []
        for size in (1, 2, 3):
            for free in map(list, itertools.combinations(range(3), size)):
                point = np.zeros(3)
                point[free] = v[free] + (2.0 - v[free].sum()) / size
                faces += [point] if (point >= 0).all() else []
        nearest = min(faces, key=lambda point: float(np.linalg.norm(point - v)))
        np.testing.assert_allclose(np.concatenate([got["a"], got["b"]]), nearest, atol=1e-6)
        ball = fb.Ball(radius=0.5)(tree)
        np.testing.assert_allclose(
            np.concatenate([ball["a"], ball["b"]]), v * min(1.0, 0.5 / float(np.linalg.norm(v))), rtol=1e-5
        )
    inside = {"a": jnp.array([0.1]), "b": jnp.zeros(2)}
    np.testing.assert_array_equal(fb.Ball(radius=0.5)(inside)["a"], inside["a"])


def test_the_tangent_directions_are_those_of_the_face() -> None:
    d = jnp.array([1.0, 2.0, 4.0])
    np.testing.assert_array_equal(fb.Box(0.0, 1.0).tangent(jnp.array([0.0, 0.5, 1.0]), d), [0.0, 2.0, 0.0])
    np.testing.assert_array_equal(fb.Simplex().tangent(jnp.array([0.0, 0.5, 0.5]), d), [0.0, -1.0, 1.0])


def zero(x: Any, y: Any, b: fb.Batch) -> Any:
    return jnp.zeros(())


def problem(x: Any, y: Any = None, **sets: Any) -> fb.Problem:
    return fb.Problem(x, jnp.zeros(2) if y is None else y, zero, zero, **sets)


def test_a_set_works_on_a_module_and_on_a_part_of_a_pytree() -> None:
    """A module keeps its constants; a user's function applies a set of the library to a part."""
    module = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    made = problem(module, feasible_x=fb.Box(-0.1, 0.1))
    assert float(jnp.abs(made.flat_x.vector).max()) == np.float32(0.1)
    assert made.flat_x.restore(made.flat_x.vector).activation is module.activation
    part = problem(
        {"w": jnp.zeros(4), "b": jnp.full(1, 7.0)}, feasible_x=lambda x: {**x, "w": fb.Simplex()(x["w"])}
    )
    start = part.flat_x.restore(part.flat_x.vector)
    np.testing.assert_allclose(start["w"], np.full(4, 0.25), rtol=1e-6)
    assert start["b"] == 7.0
    assert part.regions.x.tangent is None and made.regions.x.tangent is not None


def not_a_projection(x: Any) -> Any:
    return x + 1.0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((0.0, 1.0), "feasible_x is of type tuple; give fb.Box, fb.Simplex, fb.Ball, or a function that projects"),
        (not_a_projection, "feasible_x is not a projection: what it returns for the start is changed when"),
        (lambda x: x[:1], "feasible_x returns one floating-point number, and was given 2 floating-point numbers"),
        (lambda x: x * jnp.nan, "feasible_x gives a number that is not finite at the start"),
        (lambda x: x["w"], "feasible_x raises TypeError"),
        (fb.Box(1.0, 0.0), "Box is empty: a number of low is above the one of high"),
        (fb.Box(low={"w": 0.0}), "Box.low does not fit the parameters"),
        (fb.Box(high=jnp.zeros(3)), "Box.high does not fit the parameters"),
    ],
)
def test_what_is_not_a_set_is_refused_in_one_line(given: Any, told: str) -> None:
    with pytest.raises(fb.SettingsError) as error:
        problem(jnp.zeros(2), feasible_x=given)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("make", [lambda: fb.Ball(radius=0.0), lambda: fb.Simplex(total=-1.0)])
def test_a_set_without_size_is_refused(make: Any) -> None:
    with pytest.raises(fb.SettingsError, match="is wrong"):
        make()


def test_the_regions_travel_with_a_problem_to_another_process() -> None:
    made = problem(jnp.zeros(2), feasible_x=fb.Box(low=1.0))
    assert "regions" not in made.__getstate__() and made.__getstate__()["feasible_x"] == fb.Box(low=1.0)


# --------------------------------------------------------------------- the hypergradient at the boundary of y


@pytest.fixture(scope="module")
def small() -> Any:
    return fb.Quadratic(size_x=4, size_y=5, condition=3.0, heterogeneity=1.0).make(3, seed=0)


X = np.random.default_rng(1).normal(size=4)


class Dense:
    """The lower solution in a set and the exact hypergradient, from the matrices of a quadratic."""

    def __init__(self, task: Any) -> None:
        self.A, self.B, self.b, self.J, self.c = (np.asarray(m, np.float64) for m in task.means)

    def in_box(self, x: Any, low: float, high: float) -> Any:
        root = np.linalg.cholesky(self.A).T  # 1/2 yᵀAy + yᵀv = 1/2 ||root y + root^{-T} v||² + const
        target = -np.linalg.solve(root.T, self.B @ x + self.b)
        return lsq_linear(root, target, (low, high), method="bvls", tol=1e-14).x

    def hypergradient(self, x: Any, y: Any, Z: Any) -> Any:
        """∇_x f - B̄ᵀ Z (Zᵀ A Z)^{-1} Zᵀ ∇_y f, where y can move in the directions of the columns of Z."""
        g = self.J @ np.concatenate([x, y]) + self.c
        p = Z @ np.linalg.solve(Z.T @ self.A @ Z, Z.T @ g[x.size :])
        return g[: x.size] - self.B.T @ p


def estimates(method: Any, engine: fb.Engine, y: Any) -> Any:
    """The hypergradient that a method finds at X, from y."""
    fed = fb.Federation(engine)
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    fed.hold(x=x)
    if isinstance(method, fb.NaiveITD):
        path = [y]
        for _ in range(method.N):
            path.append(method.descend(fed, path[-1]))
        return path[-1], method.differentiate(fed, path)
    if isinstance(method, fb.FedNest):
        fed.hold(y=y)
        p = method.estimate(fed, y=y)
    else:
        y, p = method.estimate(fed, y)
    return y, fed.round(hypergradient, p=p, xi=Sample("upper"), chi=Sample("lower")).h


@pytest.fixture(scope="module")
def boxed(small: Any) -> fb.Simulation:
    return fb.Simulation(replace(small.problem, feasible_y=fb.Box(-0.4, 0.5)), small.clients, devices=1)


@pytest.mark.parametrize(
    "method",
    [
        fb.AggITD(**EXACT, N=60, lam=0.9, beta=0.9, estimator="summed"),
        fb.AggITD(**EXACT, N=1, beta=0.9, estimator="cg", cg_tolerance=1e-6),
        fb.NaiveITD(**EXACT, N=60, lam=0.9, beta=0.9),
        fb.FedNest(**EXACT, T=60, lam=0.9, estimator="summed"),
    ],
    ids=["summed", "cg", "naive", "fednest"],
)
def test_with_active_bounds_on_y_the_hypergradient_is_the_dense_one(small: Any, boxed: Any, method: Any) -> None:
    dense, (low, high) = Dense(small), (-0.4, 0.5)
    y = dense.in_box(X, low, high)
    free = (y > low + 1e-6) & (y < high - 1e-6)
    assert 0 < free.sum() < len(y), "some bounds are active, and some are not"
    y = np.clip(np.where(free, y, np.round(y, 3)), low, high)
    exact = dense.hypergradient(X, y, np.eye(len(y))[:, free])
    assert relative(dense.hypergradient(X, y, np.eye(len(y))), exact) > 0.05, "the bounds matter"
    yN, h = estimates(method, boxed, y)
    np.testing.assert_allclose(yN, y, atol=1e-5)
    assert relative(h, exact) < 1e-4


def test_on_a_simplex_too(small: Any) -> None:
    dense = Dense(small)
    bounds, total = [(0.0, None)] * 5, {"type": "eq", "fun": lambda y: y.sum() - 1.0}

    def g(y: Any) -> Any:
        return 0.5 * y @ dense.A @ y + y @ (dense.B @ X + dense.b)

    y = minimize(g, np.full(5, 0.2), method="SLSQP", bounds=bounds, constraints=[total], options={"ftol": 1e-14}).x
    free = y > 1e-6
    assert 1 < free.sum() < 5
    Z = np.linalg.svd(np.ones((1, int(free.sum()))))[2][1:].T  # what is orthogonal to (1, ..., 1)
    exact = dense.hypergradient(X, y, np.eye(5)[:, free] @ Z)
    engine = fb.Simulation(replace(small.problem, feasible_y=fb.Simplex()), small.clients, devices=1)
    method = fb.AggITD(**EXACT, N=60, lam=0.9, beta=0.9, estimator="summed")
    yN, h = estimates(method, engine, np.where(free, y, 0.0))
    np.testing.assert_allclose(yN, y, atol=1e-4)
    assert relative(h, exact) < 1e-3


def test_a_y_that_cannot_move_costs_no_products(small: Any) -> None:
    bound = replace(small.problem, feasible_y=fb.Box(0.0, 0.0))
    method = fb.AggITD(**EXACT, N=1, estimator="cg")
    fed = fb.Federation(fb.Simulation(bound, small.clients, devices=1))
    state = method.step(fed, method.init(bound))
    assert fed.ledger.rounds == 2 * 1 + 3
    np.testing.assert_array_equal(state.p, np.zeros(5))
    f_x = (Dense(small).J @ np.zeros(9) + Dense(small).c)[:4]
    assert relative(state.x, -method.alpha * f_x) < 1e-5


def test_a_hypergradient_that_ignores_a_set_says_so(small: Any) -> None:
    box, ball = (replace(small.problem, feasible_y=each) for each in (fb.Box(-1.0, 1.0), fb.Ball(radius=1.0)))
    for method, bound in ((fb.AggITD(), ball), (fb.LFedNest(), box)):
        with pytest.warns(FedBilevelWarning, match="the hypergradient ignores feasible_y"):
            method.init(bound)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.AggITD().init(box)


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("upper", [None, {"name": "adam", "learning_rate": 0.1}], ids=["paper", "adam"])
@pytest.mark.slow
def test_a_run_ends_at_the_constrained_minimum_that_scipy_finds(upper: Any) -> None:
    """Ridge with a log-penalty for each feature, kept in a box; SciPy solves the reduced problem in x."""
    g = np.random.default_rng(8)
    truth = np.array([1.0, -1.0, 0.3, 0.0])

    def rows() -> Any:
        a = g.normal(size=(12, 4)).astype(np.float32)
        return a, (a @ truth + g.normal(size=12)).astype(np.float32)

    data = [(rows(), rows()) for _ in range(3)]

    def error(y: Any, b: fb.Batch) -> Any:
        return 0.5 * b.mean((b.inputs @ y - b.targets) ** 2)

    ridge = fb.Problem(
        x=jnp.zeros(4),
        y=jnp.zeros(4),
        lower=lambda x, y, b: error(y, b) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        upper=lambda x, y, b: error(y, b),
        feasible_x=fb.Box(-2.0, 1.0),
    )
    method = fb.AggITD(
        **EXACT, N=2, alpha=8.0, beta=0.4, estimator="cg", cg_steps=4, cg_tolerance=1e-4, upper=upper
    )
    result = fb.train(
        ridge,
        fb.clients_from(data),
        method,
        stop={"iterations": 120},
        evaluate={"every": 120},
        engine="simulation",
    )
    (A, a), (V, v) = (
        (np.concatenate([pair[k][0] for pair in data]), np.concatenate([pair[k][1] for pair in data]))
        for k in (0, 1)
    )

    def reduced(x: Any) -> float:
        w = np.linalg.solve(A.T @ A / len(A) + np.diag(np.exp(x)), A.T @ a / len(A))
        return float(0.5 * np.mean((V @ w - v) ** 2))

    found = minimize(reduced, np.zeros(4), bounds=[(-2.0, 1.0)] * 4, tol=1e-12)
    active = (found.x == -2.0) | (found.x == 1.0)
    assert active.any() and not active.all(), "the box matters"
    assert reduced(np.asarray(result.x, np.float64)) - found.fun < 1e-4 * found.fun
    np.testing.assert_array_equal(np.asarray(result.x)[active], found.x[active])


def test_every_method_with_a_server_keeps_both_sets(small: Any) -> None:
    bound = replace(small.problem, feasible_x=fb.Ball(radius=0.1), feasible_y=fb.Box(-0.05, 0.05))
    fed = fb.Federation(fb.Simulation(bound, small.clients, devices=1))
    work: dict[str, Any] = dict(alpha=1.0, beta=0.5, lam=0.5, N=2)
    sgd: dict[str, Any] = dict(lower_solver="sgd", momentum_y=0.5)
    for method in (fb.AggITD(**EXACT, **work, **sgd), fb.FedNest(**EXACT, **work), fb.NaiveITD(**EXACT, **work)):
        s = method.step(fed, method.init(bound))
        assert 0.099 < float(jnp.linalg.norm(s.x)) < 0.100001
        assert float(jnp.abs(s.y).max()) == np.float32(0.05)


@pytest.mark.parametrize("method", [fb.Gossip(graph="ring"), fb.MADSBO(graph="ring")], ids=["gossip", "ma-dsbo"])
def test_a_method_that_does_not_project_is_refused(small: Any, method: Any) -> None:
    bound = replace(small.problem, feasible_x=fb.Box(0.0), feasible_y=fb.Box(0.0))
    with pytest.raises(fb.SettingsError, match=r"(Gossip|MADSBO) would not keep feasible_x and feasible_y"):
        fb.train(bound, small.clients, method, stop={"iterations": 1})


def test_the_released_mode_of_fednest_has_no_set_for_y(small: Any) -> None:
    bound = replace(small.problem, feasible_y=fb.Box(0.0))
    method = fb.FedNest(**EXACT, mode="released_code")
    fed = fb.Federation(fb.Simulation(bound, small.clients, devices=1))
    with pytest.raises(fb.SettingsError, match=r"algorithm\.mode = 'released_code' is wrong with feasible_y"):
        method.step(fed, method.init(bound))


def test_derivatives_are_checked_inside_of_the_sets() -> None:
    """The lower loss is defined for positive x only, and x starts at its bound."""

    def lower(x: Any, y: Any, b: fb.Batch) -> Any:
        return b.mean(b.targets) + jnp.sum(jnp.sqrt(x) * y**2 + y)

    rows = (np.zeros((2, 1), np.float32), np.zeros(2, np.float32))
    made = fb.Problem(jnp.zeros(3), jnp.ones(3), lower, zero, feasible_x=fb.Box(low=1e-3))
    assert fb.check(made, fb.clients_from([(rows, rows)])).ok
    assert not fb.check(replace(made, feasible_x=None), fb.clients_from([(rows, rows)])).ok


def test_a_problem_of_another_library_needs_no_sets() -> None:
    assert fb.regions_of(object()) == fb.Regions()
