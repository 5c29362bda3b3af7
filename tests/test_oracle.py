"""The oracle's derivatives against dense formulas, on flat vectors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel._derivatives import JaxOracle, remember
from fedbilevel.batch import Batch
from fedbilevel.data import ClientData, ClientSize, ListedClients, Part
from fedbilevel.engines._work import pad
from fedbilevel.errors import SettingsError
from fedbilevel.heads import norm, ridge
from fedbilevel.models import mlp
from fedbilevel.oracle import Arrays, moved
from fedbilevel.problem import Problem
from fedbilevel.problems import HyperRepresentation, Quadratic, QuadraticTask, representation_problem
from fedbilevel.steps import Draw

ALL = Draw(None, None)
INPUTS, HIDDEN, CLASSES, DECAY = 5, 4, 3, 0.1
NAMES = ("f_x", "f_y", "g_y", "g_yy", "g_xy")


def derivatives(problem: Problem, stored: bool) -> Any:
    """A compiled function (x, y, v, data, lower rows, upper rows) -> the five derivatives by name."""

    @jax.jit
    def compute(x: Any, y: Any, v: Any, data: Arrays, lower: Draw, upper: Draw) -> dict[str, Any]:
        c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data) if stored else None)
        values = (
            c.f_x(y, upper),
            c.f_y(y, upper),
            c.g_y(y, lower),
            c.g_yy(y, v, lower),
            c.g_xy(y, v, lower),
        )
        return dict(zip(NAMES, values, strict=True))

    return compute


def assert_equal_derivatives(one: dict[str, Any], other: dict[str, Any], rtol: float = 1e-5) -> None:
    for name in NAMES:
        a, b = np.asarray(one[name]), np.asarray(other[name])
        assert np.linalg.norm(b) > 1e-3, f"{name} is all but zero: the comparison would prove nothing"
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b), name


# ---------------------------------------------------------------- the quadratic: dense formulas in float64


@pytest.fixture(scope="module")
def noisy() -> QuadraticTask:
    return Quadratic(size_x=4, size_y=3, heterogeneity=2.0, noise=1.0, rows=6).make(clients=2, seed=3)


@pytest.mark.parametrize("rows", [None, [4, 1, 2]], ids=["all rows", "sampled rows"])
def test_on_the_quadratic_the_derivatives_are_the_dense_formulas(noisy: QuadraticTask, rows: Any) -> None:
    g = np.random.default_rng(0)
    x, y, v = g.normal(size=4), g.normal(size=3), g.normal(size=3)
    draw = ALL if rows is None else Draw(np.asarray(rows, np.int32), np.ones(len(rows), np.float32))
    data = pad(noisy.clients.load(1), ClientSize(6, 6))
    got = derivatives(noisy.problem, True)(*(jnp.asarray(a, jnp.float32) for a in (x, y, v)), data, draw, draw)

    chosen = slice(None) if rows is None else rows
    A, B, J = (m[1].astype(np.float64) for m in (noisy.A, noisy.B, noisy.J))
    b, c = (m[1][chosen].astype(np.float64).mean(0) for m in (noisy.b, noisy.c))
    f = J @ np.concatenate([x, y]) + c
    expected = {"f_x": f[:4], "f_y": f[4:], "g_y": A @ y + B @ x + b, "g_yy": A @ v, "g_xy": B.T @ v}
    assert_equal_derivatives(got, expected)


# ------------------------------------------------------------------------ a small network: dense derivatives


def network(regulariser: Any = "ridge") -> Problem:
    return representation_problem(mlp(INPUTS, HIDDEN, CLASSES, key=jax.random.key(1)), DECAY, regulariser)


def make_data(lower: int = 7, upper: int = 5) -> ClientData:
    g = np.random.default_rng(5)

    def part(rows: int) -> Part:
        return Part(g.normal(size=(rows, INPUTS)).astype(np.float32), g.integers(CLASSES, size=rows))

    return ClientData(part(lower), part(upper))


DATA = make_data()
SIZE = ClientSize(7, 5)


def point(problem: Problem) -> tuple[Any, Any, Any]:
    g = np.random.default_rng(6)
    x = problem.flat_x.vector + 0.1 * jnp.asarray(g.normal(size=problem.size_x), jnp.float32)
    y = problem.flat_y.vector + 0.3 * jnp.asarray(g.normal(size=problem.size_y), jnp.float32)
    return x, y, jnp.asarray(g.normal(size=problem.size_y), jnp.float32)


def plain_loss(x: Any, y: Any, inputs: Any, targets: Any, decay: float) -> Any:
    """The same losses, written out from the flat vectors: no Problem, no Batch, no Oracle."""
    w, b = x[: HIDDEN * INPUTS].reshape(HIDDEN, INPUTS), x[HIDDEN * INPUTS :]
    u, a = y[: CLASSES * HIDDEN].reshape(CLASSES, HIDDEN), y[CLASSES * HIDDEN :]
    scores = jnp.maximum(inputs @ w.T + b, 0) @ u.T + a
    chosen = scores[jnp.arange(len(targets)), targets]
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(scores), axis=1)) - chosen) + decay / 2 * jnp.sum(y**2)


def test_on_a_network_the_products_are_those_of_the_dense_second_derivatives() -> None:
    problem = network()
    x, y, v = point(problem)
    got = derivatives(problem, True)(x, y, v, pad(DATA, SIZE), ALL, ALL)

    @jax.jit
    def dense(x: Any, y: Any) -> dict[str, Any]:
        def g(x: Any, y: Any) -> Any:
            return plain_loss(x, y, *DATA.lower, DECAY)

        def f(x: Any, y: Any) -> Any:
            return plain_loss(x, y, *DATA.upper, 0.0)

        return {
            "f_x": jax.jacobian(f, 0)(x, y),
            "f_y": jax.jacobian(f, 1)(x, y),
            "g_y": jax.jacobian(g, 1)(x, y),
            "g_yy": jax.hessian(g, 1)(x, y) @ v,
            "g_xy": jax.jacobian(jax.jacobian(g, 1), 0)(x, y).T @ v,
        }

    assert_equal_derivatives(got, dense(x, y), rtol=1e-4)


@pytest.fixture(scope="module")
def hessian_product() -> Any:
    problem = network()
    x, y, _ = point(problem)
    data = pad(DATA, SIZE)
    memory = remember(problem, x, data)
    product = jax.jit(lambda v: JaxOracle(problem, {"x": x, "y": y}, data, memory).g_yy(y, v, ALL))
    return lambda v: np.asarray(product(np.asarray(v, np.float32)), np.float64)


vectors = st.lists(
    st.floats(-1, 1, width=32), min_size=CLASSES * (HIDDEN + 1), max_size=CLASSES * (HIDDEN + 1)
).map(np.asarray)


@settings(max_examples=50)
@given(v=vectors, w=vectors, a=st.floats(-2, 2))
def test_the_hessian_product_is_symmetric_and_linear(hessian_product: Any, v: Any, w: Any, a: float) -> None:
    hv, hw = hessian_product(v), hessian_product(w)
    assert abs(hv @ w - hw @ v) <= 1e-5
    np.testing.assert_allclose(hessian_product(a * v + w), a * hv + hw, atol=1e-5)


SAMPLED = (
    Draw(np.asarray([6, 0, 3], np.int32), np.ones(3, np.float32)),
    Draw(np.asarray([4, 2], np.int32), np.ones(2, np.float32)),
)


@pytest.mark.parametrize("rows", [(ALL, ALL), SAMPLED], ids=["all rows", "sampled rows"])
def test_stored_live_and_absent_embedding_give_the_same(rows: tuple[Draw, Draw]) -> None:
    problem = network()
    x, y, v = point(problem)
    data = pad(DATA, SIZE)
    live = derivatives(problem, False)(x, y, v, data, *rows)
    assert_equal_derivatives(derivatives(problem, True)(x, y, v, data, *rows), live)

    def whole(loss: Any) -> Any:
        return lambda body, head, batch: loss(body, head, batch._replace(features=body(batch.inputs)))

    bare = dataclasses.replace(problem, embed=None, lower=whole(problem.lower), upper=whole(problem.upper))
    assert remember(bare, x, data) is None
    assert_equal_derivatives(derivatives(bare, False)(x, y, v, data, *rows), live)


def test_a_point_other_than_the_held_one_does_not_use_what_is_stored() -> None:
    problem = network()
    x, y, _ = point(problem)
    data = pad(DATA, SIZE)
    other = x + 0.5

    @jax.jit
    def at(x: Any, other: Any) -> tuple[Any, Any, Any]:
        c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data))
        there = JaxOracle(problem, {"x": other, "y": y}, data)
        return c.f_x(y, ALL, at=other), there.f_x(y, ALL), c.f_x(y, ALL)

    got, expected, here = at(x, other)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    assert np.linalg.norm(got - here) > 1e-2 * np.linalg.norm(here)


def test_a_client_that_has_moved_has_the_derivatives_of_the_other_point_from_one_pass() -> None:
    problem, passes = network(), list[Any]()
    assert problem.embed is not None
    counted = dataclasses.replace(problem, embed=lambda x, rows: passes.append(rows) or problem.embed(x, rows))  # type: ignore[misc,func-returns-value]
    x, y, v = point(problem)
    data, other = pad(DATA, SIZE), x + 0.5
    there, at = moved(JaxOracle(counted, {"x": x, "y": y}, data), other, ALL, ALL)
    first = (there.f_x(y, ALL, at), there.f_y(y, ALL, at), there.g_y(y, ALL, at))
    got = (*first, there.g_yy(y, v, ALL, at), there.g_xy(y, v, ALL, at))
    assert len(passes) == 2  # one for the rows of each level
    expected = derivatives(problem, False)(other, y, v, data, ALL, ALL)
    assert_equal_derivatives(dict(zip(NAMES, got, strict=True)), expected)


def test_a_client_does_not_move_for_the_sake_of_a_few_rows() -> None:
    problem = network()
    x, y, _ = point(problem)
    c = JaxOracle(problem, {"x": x, "y": y}, pad(DATA, SIZE))
    assert moved(c, x + 0.5, ALL, SAMPLED[0])[0] is c


def test_padding_never_changes_a_derivative() -> None:
    problem = network()
    x, y, v = point(problem)
    bare = derivatives(problem, True)(x, y, v, pad(DATA, SIZE), ALL, ALL)
    padded = pad(DATA, ClientSize(12, 9))
    for part, rows in zip((padded.lower, padded.upper), SIZE, strict=True):
        part.inputs[rows:] = 37.0  # whatever is there
    wide = derivatives(problem, True)
    assert_equal_derivatives(wide(x, y, v, padded, ALL, ALL), bare)

    short = [Draw(np.append(d.index, 0).astype(np.int32), np.append(d.weight, 0).astype("f4")) for d in SAMPLED]
    assert_equal_derivatives(wide(x, y, v, padded, *short), wide(x, y, v, padded, *SAMPLED))


# ------------------------------------------------------------------------------------------ problems and batches


def test_the_mnist_network_has_the_papers_157000_and_2010_parameters() -> None:
    rows = np.zeros((2, 784), np.float32)
    dataset = SimpleNamespace(shape=(28, 28, 1), classes=10, test_inputs=rows, test_targets=np.zeros(2, np.int32))
    part = Part(rows, np.zeros(2, np.int32))
    data: Any = SimpleNamespace(load=lambda seed: (dataset, ListedClients([ClientData(part, part)])))
    problem = HyperRepresentation().task(data, 0).problem
    assert (problem.size_x, problem.size_y) == (157_000, 2_010)


def test_the_norm_is_not_squared_and_the_ridge_is() -> None:
    w = {"a": jnp.asarray([3.0, 4.0]), "b": jnp.asarray([[6.0], [8.0]])}
    assert float(norm(w, 1e-3)) == pytest.approx(5 + 10)
    assert float(norm({"w": jnp.zeros(3)}, 1e-3)) == pytest.approx(1e-3)
    assert float(ridge(w)) == pytest.approx((25 + 100) / 2)
    for regulariser, by_factor in (("norm", 2.0), ("ridge", 4.0)):
        lower, upper = network(regulariser).lower, network(regulariser).upper
        body, head = network().x, network().y
        batch = Batch(*DATA.lower, jnp.zeros(7), body(DATA.lower.inputs))  # no rows: the penalty alone is left
        one = float(lower(body, head, batch))
        two = float(lower(body, jax.tree.map(lambda a: 2 * a, head), batch))
        assert one > 0 and two / one == pytest.approx(by_factor, rel=1e-5)
        assert float(upper(body, head, batch)) == 0.0


def test_smoothing_bounds_the_curvature_of_the_norm_at_zero() -> None:
    """The bias goes to zero in training; a Hessian product with λ = 0.01 must not grow there."""
    zero, smoothing, decay, lam = jnp.zeros(3), 1e-3, 0.05, 0.01
    assert np.all(np.isfinite(jax.grad(norm)(zero, smoothing)))
    curvature = np.linalg.eigvalsh(jax.hessian(norm)(zero, smoothing)).max()
    assert curvature == pytest.approx(1 / smoothing, rel=1e-5)
    assert 0 <= 1 - lam * decay * curvature < 1


def test_the_mean_of_a_batch_is_weighted_and_zero_without_rows() -> None:
    values = jnp.asarray([[1.0, 10.0], [2.0, 20.0], [300.0, 3000.0]])
    batch = Batch(None, None, jnp.asarray([1.0, 3.0, 0.0]), None)
    np.testing.assert_allclose(batch.mean(values), [7 / 4, 70 / 4])
    np.testing.assert_array_equal(batch._replace(weights=jnp.zeros(3)).mean(values), [0.0, 0.0])


def test_parameters_without_a_floating_point_array_are_refused() -> None:
    with pytest.raises(SettingsError, match="x has no floating-point array"):
        Problem({"n": "three"}, jnp.zeros(2), lambda x, y, b: jnp.sum(y), lambda x, y, b: jnp.sum(y))
