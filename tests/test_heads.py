"""A softmax head: its closed forms against derivatives by JAX, and its local steps against the general ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel._derivatives import JaxOracle, remember
from fedbilevel.data import ClientData, ClientSize, Part
from fedbilevel.engines._work import pad
from fedbilevel.models import mlp
from fedbilevel.oracle import Arrays
from fedbilevel.problems import representation_problem
from fedbilevel.rng import Address, Kind
from fedbilevel.steps import Chance, Draw, Epochs, Stream, draw, sgd, svrg

INPUTS, FEATURES, CLASSES, SIZE = 6, 5, 3, 4
ALL = Draw(None, None)
REGULARISERS = [("ridge", 1e-3), ("norm", 1e-3), ("norm", 0.0)]
IDS = ["squared", "norm", "norm without smoothing"]


def generic(problem: fb.Problem) -> fb.Problem:
    """The same problem, whose losses are plain functions. JAX then differentiates them."""
    lower, upper = problem.lower, problem.upper
    return dataclasses.replace(problem, lower=lambda x, y, b: lower(x, y, b), upper=lambda x, y, b: upper(x, y, b))


def network(regulariser: Any = "norm", smoothing: float = 1e-3) -> fb.Problem:
    model = mlp(INPUTS, FEATURES, CLASSES, key=jax.random.key(1))
    return representation_problem(model, 0.1, regulariser, smoothing)


def client(lower: int, upper: int, seed: int = 0) -> ClientData:
    g = np.random.default_rng(seed)
    parts = [
        Part(g.normal(size=(n, INPUTS)).astype(np.float32), g.integers(CLASSES, size=n)) for n in (lower, upper)
    ]
    return ClientData(*parts)


def vectors(problem: fb.Problem) -> tuple[Any, ...]:
    g = np.random.default_rng(2)
    sizes = problem.size_x, problem.size_y, problem.size_y
    x, y, v = (jnp.asarray(g.normal(size=n), jnp.float32) for n in sizes)
    return 0.5 * x, 0.5 * y, v


def same(one: Any, other: Any, rtol: float = 1e-5) -> None:
    one, other = np.asarray(one), np.asarray(other)
    assert np.linalg.norm(other) > 1e-3  # otherwise the comparison would prove nothing
    assert np.linalg.norm(one - other) <= rtol * np.linalg.norm(other)


def derivatives(problem: fb.Problem, *point: Any) -> dict[str, Any]:
    """All derivatives at the held x, from stored features, and two of them at another x."""

    @jax.jit
    def compute(x: Any, y: Any, v: Any, data: Arrays, rows: Draw, moved: Any) -> dict[str, Any]:
        c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data))
        return {
            "f": c.f(y, rows),
            "g": c.g(y, rows),
            "f_x": c.f_x(y, rows),
            "f_y": c.f_y(y, rows),
            "g_y": c.g_y(y, rows),
            "g_yy": c.g_yy(y, v, rows),
            "g_xy": c.g_xy(y, v, rows),
            "f_x elsewhere": c.f_x(y, rows, at=moved),
            "g_xy elsewhere": c.g_xy(y, v, rows, at=moved),
        }

    return compute(*point)


@pytest.mark.parametrize(
    ("regulariser", "smoothing", "rows"),
    [*((*each, None) for each in REGULARISERS), ("norm", 1e-3, [4, 1, 2, 0])],
    ids=[*IDS, "norm, a short minibatch"],
)
def test_the_closed_forms_are_the_derivatives_of_the_loss(regulariser: Any, smoothing: float, rows: Any) -> None:
    problem = network(regulariser, smoothing)
    assert problem.head("lower") is not None and problem.head("upper") is not None
    x, y, v = vectors(problem)
    data = pad(client(7, 6), ClientSize(9, 9))  # padded, so that some rows do not count
    taken = ALL if rows is None else Draw(jnp.asarray(rows), jnp.asarray([1.0, 1.0, 1.0, 0.0]))
    point = x, y, v, data, taken, x + 0.1
    expected = derivatives(generic(problem), *point)
    for name, value in derivatives(problem, *point).items():
        same(value, expected[name])


@pytest.mark.parametrize(("regulariser", "smoothing"), REGULARISERS, ids=IDS)
def test_at_a_head_of_zeros_the_derivatives_are_those_of_the_loss(regulariser: Any, smoothing: float) -> None:
    problem = network(regulariser, smoothing)
    x, y, v = vectors(problem)
    data = pad(client(7, 6), ClientSize(7, 6))

    def products(problem: fb.Problem) -> Any:
        c = JaxOracle(problem, {"x": x, "y": 0 * y}, data, remember(problem, x, data))
        return c.g_y(0 * y, ALL), c.g_yy(0 * y, v, ALL)

    for made, expected in zip(products(problem), products(generic(problem)), strict=True):
        same(made, expected)


def stream(rows: int, capacity: int, epochs: int = 2) -> Stream:
    """The minibatches of a client, padded to those of the largest."""
    return draw(Epochs("lower", SIZE, epochs), Address(3, Kind.ROUND, 0), "zeta", 0, rows, capacity)


def walked(problem: fb.Problem, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """The ends of SVRG and SGD steps of several clients, which are batched and have unequal numbers of rows."""
    x, y, q = vectors(problem)
    capacity = ClientSize(max(sizes), 5)
    data = [pad(client(n, 5, seed=n), capacity) for n in sizes]
    streams = [stream(n, capacity.lower, **more) for n in sizes]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(data, streams, strict=True))

    @jax.jit
    @jax.vmap
    def steps(data: Arrays, rows: Stream) -> dict[str, Any]:
        c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data))
        return {"svrg": svrg(c.g_y, y, q, 0.1, rows), "sgd": sgd(c.g_y, y, 0.1 / rows.steps, rows)}

    return steps(*stacked)


@pytest.mark.parametrize(("regulariser", "smoothing"), REGULARISERS, ids=IDS)
def test_local_steps_of_unequal_clients_are_those_by_general_derivatives(
    regulariser: Any, smoothing: float
) -> None:
    problem = network(regulariser, smoothing)
    made, expected = (walked(each, (13, 3, 8)) for each in (problem, generic(problem)))
    for name in ("svrg", "sgd"):
        for one, other in zip(made[name], expected[name], strict=True):
            same(one, other)


def test_steps_in_several_blocks_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 13 rows and minibatches of four a block has three steps, and 19 steps are not a multiple of that."""
    problem = network()
    whole = walked(problem, (13, 3), epochs=5)
    monkeypatch.setattr(fb.heads, "LEAST", 1)
    for name, ends in walked(problem, (13, 3), epochs=5).items():
        same(ends, whole[name])


def test_the_head_is_asked_for_its_steps_and_the_labels_cancel_in_svrg() -> None:
    """The closed form of an SVRG step reads no label, so other labels change nothing but the SGD steps."""
    problem = network()
    x, y, q = vectors(problem)
    data = pad(client(8, 5), ClientSize(8, 5))
    other = data._replace(lower=data.lower._replace(targets=(data.lower.targets + 1) % CLASSES))

    def ends(data: Arrays) -> Any:
        c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data))
        return svrg(c.g_y, y, q, 0.1, stream(8, 8)), sgd(c.g_y, y, 0.1, stream(8, 8))

    one, two = ends(data), ends(other)
    np.testing.assert_array_equal(one[0], two[0])
    assert np.linalg.norm(one[1] - two[1]) > 1e-3


def test_a_random_draw_a_full_batch_and_a_missing_memory_keep_the_general_loop() -> None:
    problem = network()
    x, y, q = vectors(problem)
    data = pad(client(8, 5), ClientSize(8, 5))
    c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data))
    rows = stream(8, 8)
    chance = Chance(np.zeros((4, 2), np.uint32), False)
    assert c.g_y.svrg(y, q, 0.1, rows) is not None
    assert c.g_y.svrg(y, q, 0.1, rows._replace(draws=rows.draws._replace(chance=chance))) is None
    assert c.g_y.sgd(y, 0.1, Stream(ALL, np.ones(2, bool))) is None
    assert JaxOracle(problem, {"x": x, "y": y}, data).g_y.sgd(y, 0.1, rows) is None
    assert (
        representation_problem(mlp(6, 5, 3, key=jax.random.key(0)), 0.1, "norm", dropout=0.5).head("lower") is None
    )


def linear() -> fb.Problem:
    """A problem of a user: a scaled logistic regression, whose features are the scaled inputs."""
    return fb.Problem(
        x=jnp.ones(INPUTS),
        y=eqx.nn.Linear(INPUTS, CLASSES, key=jax.random.key(0)),
        embed=lambda x, inputs: inputs * x,
        lower=fb.heads.softmax(decay=0.1),
        upper=fb.heads.softmax(),
    )


def test_a_problem_of_a_user_trains_like_the_general_one() -> None:
    problem, clients = linear(), fb.clients_from([client(9, 6, seed) for seed in range(3)])
    method = fb.AggITD(N=1, alpha=0.1, beta=0.1, lam=0.1, participation=1.0, batch_zeta_local=4, lower_epochs=2)
    ends = [fb.train(each, clients, method, stop={"iterations": 2}) for each in (problem, generic(problem))]
    same(ends[0].x, ends[1].x)
    same(ends[0].y.weight, ends[1].y.weight)
    same(ends[0].y.bias, ends[1].y.bias)


WITHOUT_BIAS = {"weight": jnp.ones((CLASSES, INPUTS))}


@pytest.mark.parametrize("y", [WITHOUT_BIAS, {"a_bias": jnp.arange(3.0), **WITHOUT_BIAS}], ids=["none", "first"])
def test_a_bias_may_be_missing_or_come_first(y: Any) -> None:
    problem = dataclasses.replace(linear(), y=y)
    data, x = jax.tree.map(jnp.asarray, pad(client(7, 6), ClientSize(7, 6))), jnp.ones(INPUTS)
    flat = problem.flat_y.vector
    v = jnp.arange(1.0, 1 + flat.size) / flat.size

    def products(problem: fb.Problem) -> Any:
        c = JaxOracle(problem, {"x": x, "y": flat}, data, remember(problem, x, data))
        return c.g_y(flat, ALL), c.g_yy(flat, v, ALL), svrg(c.g_y, flat, v, 0.1, stream(7, 7))

    for made, expected in zip(products(problem), products(generic(problem)), strict=True):
        same(made, expected)


def test_a_label_that_is_no_class_gives_no_number() -> None:
    problem = linear()
    data = pad(client(7, 6), ClientSize(7, 6))
    data = data._replace(lower=data.lower._replace(targets=np.full(7, CLASSES)))
    x, y = problem.flat_x.vector, problem.flat_y.vector
    c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data))
    assert np.isnan(c.g(y, ALL)) and np.isnan(c.g_y(y, ALL)).any()


def test_what_is_no_softmax_head_is_refused() -> None:
    with pytest.raises(fb.SettingsError, match=r"one linear layer.*this y has \(5,\)"):
        dataclasses.replace(linear(), y=jnp.zeros(5))
    with pytest.raises(fb.SettingsError, match=r"regulariser = 'lasso' is wrong; use 'ridge' or 'norm'"):
        fb.heads.softmax(0.1, "lasso")  # type: ignore[arg-type]
    with pytest.raises(fb.SettingsError, match="neither may be negative"):
        fb.heads.softmax(-0.1)
    images = dataclasses.replace(linear(), embed=lambda x, inputs: (inputs * x).reshape(-1, 2, 3))
    data, x, y = pad(client(7, 6), ClientSize(7, 6)), images.flat_x.vector, images.flat_y.vector
    with pytest.raises(fb.SettingsError, match=r"features of rows x numbers, and they are \(7, 2, 3\)"):
        JaxOracle(images, {"x": x, "y": y}, data, remember(images, x, data)).g_y(y, ALL)
