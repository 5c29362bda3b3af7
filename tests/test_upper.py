"""The server's optimiser, momentum for y and conjugate gradients, against references written by hand."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.conjugate import solve
from fedbilevel.algorithms.local import ServerState, State
from fedbilevel.errors import FedBilevelWarning
from fedbilevel.record import flatten_state
from fedbilevel.spec import parse
from fedbilevel.stepsizes import step_sizes

EXACT: dict[str, Any] = dict(participation=1.0, batch_zeta_local="full", lower_steps=1)
ADAM = {"name": "adam", "learning_rate": 0.05}


def relative(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.fixture(scope="module")
def small() -> Any:
    return fb.Quadratic(size_x=4, size_y=3, condition=1.5, heterogeneity=0.5).make(3, seed=0)


@pytest.fixture(scope="module")
def engine(small: Any) -> fb.Simulation:
    return fb.Simulation(small.problem, small.clients, devices=1)


def iterate(method: Any, engine: fb.Engine, iterations: int, state: Any = None) -> tuple[Any, fb.Federation]:
    fed = fb.Federation(engine)
    state = method.init(engine.problem) if state is None else state
    for _ in range(iterations):
        state = method.step(fed, state)
    return state, fed


# ---------------------------------------------------------------------------------------------- the optimiser


@pytest.mark.parametrize(
    ("upper", "reference"),
    [
        (ADAM, optax.adam(0.05)),
        ({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True}, optax.sgd(0.1, 0.9, True)),
        (optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(0.02)), None),
    ],
    ids=["adam", "momentum", "an object"],
)
def test_it_is_optax_on_the_exact_hypergradients(small: Any, engine: Any, upper: Any, reference: Any) -> None:
    """With a precise estimate, x is what a loop over the closed form gives."""
    method = fb.AggITD(**EXACT, N=12, lam=1.1, beta=1.1, estimator="summed", upper=upper)
    state, fed = iterate(method, engine, 8)
    reference, x = upper if reference is None else reference, np.zeros(4)
    memory = reference.init(jnp.zeros(4))
    for _ in range(8):
        h = jnp.asarray(small.hypergradient(x), jnp.float32)
        move, memory = reference.update(h, memory, jnp.asarray(x, jnp.float32))
        x = x + np.asarray(move, np.float64)
    assert relative(state.x, x) < 1e-3
    assert fed.ledger.rounds == 8 * (2 * 12 + 2) and "upper_steps" not in fed.ledger.steps


def test_with_more_local_steps_it_is_given_the_pseudo_gradient(engine: Any) -> None:
    work: dict[str, Any] = dict(
        EXACT, N=2, lam=0.5, beta=0.5, alpha=0.2, upper_steps=(1, 2, 3), estimator="summed"
    )
    plain = fb.AggITD(**work)
    (mean, _), start = iterate(plain, engine, 1), plain.init(engine.problem).x
    state, fed = iterate(fb.AggITD(**work, upper=ADAM), engine, 1)
    adam = optax.adam(0.05)
    move, memory = adam.update((start - mean.x) / 0.2, adam.init(start), start)
    np.testing.assert_allclose(state.x, start + move, rtol=1e-6)
    np.testing.assert_allclose(state.upper[0].mu, memory[0].mu, rtol=1e-6)
    np.testing.assert_array_equal(state.y, mean.y)
    assert fed.ledger.rounds == 2 * 2 + 3 and fed.ledger.steps["upper_steps"].rounds == 1


def test_plain_sgd_with_the_rate_alpha_is_the_papers_method(engine: Any) -> None:
    """One step or several, the fully local method too."""
    work: dict[str, Any] = dict(EXACT, N=1, lam=0.5, beta=0.5, alpha=0.2)
    sgd = {"name": "sgd", "learning_rate": 0.2}
    for method in (
        fb.AggITD(**work, estimator="summed"),
        fb.AggITD(**work, estimator="summed", upper_steps=3),
        fb.FedNest(**work, estimator="summed", upper_steps=3),
        fb.LFedNest(**work),
        fb.NaiveITD(**work),
    ):
        plain, _ = iterate(method, engine, 3)
        served, _ = iterate(replace(method, upper=sgd), engine, 3)
        assert isinstance(plain, State) and isinstance(served, ServerState)
        np.testing.assert_allclose(served.x, plain.x, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (fb.AggITD(**EXACT, N=2, upper=ADAM), 2 * 2 + 2),
        (fb.AggITD(**EXACT, N=2, upper=ADAM, upper_steps=(1, 1, 1)), 2 * 2 + 2),
        (fb.FedNest(**EXACT, N=2, T=3, upper=ADAM), 2 * 2 + 3 + 2),
        (fb.NaiveITD(**EXACT, N=2, upper=ADAM), 3 * 2 + 1),
        (fb.LFedNest(**EXACT, N=2, upper=ADAM), 2 * 2 + 1),
    ],
    ids=["aggitd", "a list", "fednest", "naive", "lfednest"],
)
def test_the_ledger_has_one_round_fewer_where_the_server_steps(engine: Any, method: Any, rounds: int) -> None:
    assert iterate(method, engine, 1)[1].ledger.rounds == rounds


def test_a_schedule_counts_outer_iterations(engine: Any) -> None:
    rate = {"name": "piecewise_constant_schedule", "init_value": 0.1, "boundaries_and_scales": {"2": 0.0}}
    method = fb.AggITD(**EXACT, N=3, upper={"name": "sgd", "learning_rate": rate})
    found = [iterate(method, engine, k)[0].x for k in range(5)]
    moved = [not np.array_equal(a, b) for a, b in itertools.pairwise(found)]
    assert moved == [True, True, False, False]


def test_it_is_given_the_users_pytree() -> None:
    """Labels name parts of the pytree, and a part that is frozen stays."""

    def loss(x: Any, y: Any, b: fb.Batch) -> Any:
        return jnp.sum((y - x["a"]) ** 2) + jnp.sum((y - x["b"]) ** 2) + 0 * b.mean(b.targets)

    rows = (np.zeros((2, 1), np.float32), np.zeros(2, np.float32))
    own = fb.Problem({"a": jnp.ones(2), "b": jnp.full(2, 3.0)}, jnp.zeros(2), loss, loss)
    frozen = optax.multi_transform(
        {"moves": optax.sgd(0.1), "stays": optax.set_to_zero()}, {"a": "moves", "b": "stays"}
    )
    result = fb.train(
        own, fb.clients_from([(rows, rows)]), fb.AggITD(**EXACT, beta=0.1, upper=frozen), stop={"iterations": 2}
    )
    assert float(result.x["a"][0]) != 1.0
    np.testing.assert_array_equal(result.x["b"], [3.0, 3.0])


def test_a_resumed_run_is_the_same_bit_for_bit(small: Any, engine: Any, tmp_path: Path) -> None:
    method = fb.AggITD(**EXACT, N=2, beta=0.5, upper=ADAM, momentum_y=0.5, estimator="cg", cg_steps=3)

    def trained(out: Path, iterations: int, resume: bool = False) -> Any:
        fb.train(
            small.problem, small.clients, method, stop={"iterations": iterations}, out=out, resume=resume,
            evaluate={"every": 6}, engine=engine,
        )  # fmt: skip
        return fb.load_run(out, small.problem)._saved.arrays

    straight = trained(tmp_path / "straight", 6)
    trained(tmp_path / "resumed", 2)
    resumed = trained(tmp_path / "resumed", 6, resume=True)
    assert {"x", "y", "before", "p", "upper.0.mu", "upper.0.count"} <= set(straight)
    assert straight.keys() == resumed.keys()
    for name, array in straight.items():
        np.testing.assert_array_equal(array, resumed[name], err_msg=name)


def test_without_these_settings_the_state_is_the_papers(small: Any) -> None:
    state = fb.AggITD(estimator="summed").init(small.problem)
    assert type(state) is State and sorted(flatten_state(state)) == ["x", "y"]
    served = fb.AggITD(upper=ADAM).init(small.problem)
    assert sorted(flatten_state(served)) == ["upper.0.count", "upper.0.mu", "upper.0.nu", "x", "y"]


def test_a_run_that_diverges_names_the_learning_rate_and_restarts_with_half(small: Any, engine: Any) -> None:
    """The step size α is not used, and so it is neither blamed nor changed."""
    method = fb.AggITD(**EXACT, N=2, beta=1.0, lam=1.0, upper={"name": "sgd", "learning_rate": 40.0})
    run: dict[str, Any] = dict(stop={"iterations": 30}, evaluate={"checkpoint_every": 1}, engine=engine)
    with pytest.raises(fb.Diverged, match=r"algorithm\.upper\.learning_rate = 40 is likely too large: try 20"):
        fb.train(small.problem, small.clients, method, **run)
    result = fb.train(small.problem, small.clients, method, **run, on_divergence="restart")
    assert {each["setting"] for each in result.summary["restarts"]} == {"upper.learning_rate"}
    assert [each.setting for each in step_sizes(fb.AggITD(estimator="cg"))] == ["alpha", "beta"]
    local = [each.setting for each in step_sizes(fb.AggITD(upper=ADAM, upper_steps=2))]
    assert local == ["upper.learning_rate", "alpha", "beta", "lam"]


# ------------------------------------------------------------------------------------------------------ specs

SPEC: dict[str, Any] = {"problem": {"name": "quadratic"}, "stop": {"rounds": 20}}


def test_a_spec_goes_to_toml_and_back() -> None:
    rate = {"name": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 200}
    spec = parse(SPEC | {"algorithm": {"upper": {"name": "adam", "learning_rate": rate, "b1": 0.8}}})
    again = parse(tomllib.loads(spec.to_toml()))
    assert again.to_mapping() == spec.to_mapping() and again.digest == spec.digest
    assert spec.to_mapping()["algorithm"]["upper"] == {"name": "adam", "learning_rate": rate, "b1": 0.8}
    other = parse(SPEC | {"algorithm": {"upper": {"name": "adam", "learning_rate": 0.1}}})
    assert len({spec.digest, other.digest, parse(SPEC).digest}) == 3
    assert "upper" not in parse(SPEC).to_mapping(changed=True).get("algorithm", {})


def test_it_can_be_set_on_the_command_line() -> None:
    spec = fb.load_spec("demo", ["algorithm.upper.name=adagrad", "algorithm.upper.learning_rate=0.3"])
    assert spec.to_mapping()["algorithm"]["upper"] == {"name": "adagrad", "learning_rate": 0.3}


def halved(rate: float) -> Any:
    """An optimiser of the user's."""
    return optax.sgd(rate / 2)


def test_a_function_of_the_users_makes_an_optimiser(engine: Any) -> None:
    work: dict[str, Any] = dict(EXACT, N=1, beta=0.5)
    own = {"name": "python", "function": f"{__name__}:halved", "rate": 0.4}
    spec = parse(SPEC | {"algorithm": {"upper": own}})
    assert list(spec.plan.sources) == ["algorithm.upper.function"]
    expected = iterate(fb.AggITD(**work, upper=optax.sgd(0.2)), engine, 1)[0].x
    np.testing.assert_array_equal(iterate(fb.AggITD(**work, upper=own), engine, 1)[0].x, expected)


def test_an_object_is_told_by_its_class_in_the_folder(small: Any, engine: Any, tmp_path: Path) -> None:
    method = fb.AggITD(**EXACT, upper=optax.sgd(0.1))
    fb.train(small.problem, small.clients, method, stop={"iterations": 1}, out=tmp_path / "run", engine=engine)
    told = tomllib.loads((tmp_path / "run" / "spec.toml").read_text())["algorithm"]["upper"]
    assert told["name"] == "python" and "GradientTransformation" in told["class"]


RATE = {"name": "cosine_decay_schedule", "init_value": 0.1}


@pytest.mark.parametrize(
    ("upper", "told"),
    [
        ("adm", "algorithm.upper.name = 'adm' is wrong: did you mean adam?"),
        ("adam", "algorithm.upper.learning_rate is missing; adam needs it"),
        ({"learning_rate": 1.0}, "algorithm.upper.name is missing; name an optimiser of Optax, such as adam"),
        (
            {**ADAM, "momentu": 1},
            "algorithm.upper.momentu is not an argument of adam; use one of: learning",
        ),
        (
            {**ADAM, "learning_rate": -1.0},
            "algorithm.upper.learning_rate = -1.0 is wrong: use a number above",
        ),
        ({**ADAM, "learning_rate": "x"}, "algorithm.upper.learning_rate = 'x' is wrong: use a number above zero"),
        ({**ADAM, "b1": "x"}, "'b1': 'x'} is wrong: Optax raises TypeError"),
        ({**ADAM, "learning_rate": RATE}, "algorithm.upper.learning_rate.decay_steps is missing; cosine_decay"),
        ({**ADAM, "learning_rate": {**RATE, "decay_steps": -1}}, "Optax raises ValueError"),
        ({**ADAM, "learning_rate": {"name": "cosine"}}, "algorithm.upper.learning_rate.name = 'cosine' is wrong"),
        ({"name": "lbfgs"}, "algorithm.upper.name = 'lbfgs' is wrong: its line search needs values of the loss"),
        (
            {"name": "noisy_sgd", "learning_rate": 0.1},
            "algorithm.upper.name = 'noisy_sgd' is wrong: its state",
        ),
        ({"name": "python"}, "algorithm.upper.function is missing, and algorithm.upper.name is 'python'"),
        (
            {"name": "python", "function": "optax:l2_loss", "predictions": 1.0},
            "return an optax.GradientTransformation",
        ),
        (3, "algorithm.upper = 3 is wrong: give a table such as { name = 'adam'"),
        (optax.lbfgs(), "algorithm.upper is wrong: for the x of this problem it raises TypeError"),
        (
            optax.add_noise(0.1, 0.5, jax.random.key(0)),
            "its state has a random key, which a checkpoint cannot",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_not_an_optimiser_is_refused_in_one_line(small: Any, upper: Any, told: str) -> None:
    with pytest.raises(fb.SettingsError) as error:
        fb.AggITD(upper=upper).init(small.problem)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gossip", "ma-dsbo"])
def test_a_method_without_a_server_has_no_such_setting(name: str) -> None:
    with pytest.raises(fb.SettingsError, match=r"algorithm\.upper is not a setting"):
        parse(SPEC | {"algorithm": {"name": name, "upper": ADAM}})


# -------------------------------------------------------------------------------------- conjugate gradients


def test_conjugate_gradients_are_the_dense_solution_at_their_cost(small: Any, engine: Any) -> None:
    A, _, _, J, c = small.means
    x, y = np.arange(4.0), np.array([1.0, -1.0, 2.0])
    method = fb.AggITD(**EXACT, N=2, beta=1.0, estimator="cg", cg_steps=5, cg_tolerance=1e-7)
    fed = fb.Federation(engine)
    fed.hold(x=jnp.asarray(x, jnp.float32))
    yN, p = method.estimate(fed, jnp.asarray(y, jnp.float32))
    f_y = (J @ np.concatenate([x, np.asarray(yN, np.float64)]) + c)[4:]
    assert relative(p, np.linalg.solve(A, f_y)) < 1e-5
    T = fed.ledger.steps["system"].rounds - 1  # one of its rounds brings the right-hand side
    assert 3 <= T <= 5, "three dimensions, and rounding"
    assert fed.ledger.rounds == 2 * 2 + 1 + T


def test_the_rounds_are_at_most_2n_3_t_and_the_warm_start_saves_some(engine: Any) -> None:
    method = fb.AggITD(**EXACT, N=2, beta=1.0, alpha=0.01, estimator="cg", cg_steps=2, cg_tolerance=1e-2)
    fed, state, taken = fb.Federation(engine), method.init(engine.problem), list[int]()
    for _ in range(4):
        before = fed.ledger.rounds
        state = method.step(fed, state)
        taken.append(fed.ledger.rounds - before)
    assert taken[0] == 2 * 2 + 3 + 2 and min(taken) < taken[0] and max(taken) == taken[0]
    assert relative(state.p, state.p * 0 + 1) > 0


def test_a_budget_of_rounds_holds_with_conjugate_gradients(small: Any, engine: Any) -> None:
    """The rounds depend on replies, so the most of them are counted before an iteration is begun."""
    method = fb.AggITD(**EXACT, N=1, beta=1.0, estimator="cg", cg_steps=3, cg_tolerance=1e-6)
    run: dict[str, Any] = dict(evaluate={"every": 10}, engine=engine)
    result = fb.train(small.problem, small.clients, method, stop={"rounds": 20}, **run)
    assert 0 < result.summary["rounds"] <= 20
    assert fb.train(small.problem, small.clients, method, stop={"rounds": 7}, **run).summary["rounds"] == 0


def test_conjugate_gradients_end_well_where_there_is_no_solution() -> None:
    H = np.diag([2.0, 1.0, -1.0])
    b = np.array([1.0, 1.0, 0.1])

    def product(matrix: Any) -> Any:
        return lambda d: jnp.asarray(matrix @ np.asarray(d, np.float64), jnp.float32)

    with pytest.warns(FedBilevelWarning, match=r"ended after \d products: a direction has the curvature -"):
        p = solve(product(H), jnp.asarray(b), jnp.zeros(3), None, 10, 1e-6)
    assert np.linalg.norm(b - H @ np.asarray(p)) < np.linalg.norm(b)
    skew = np.eye(3) + 1e5 * np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 0]])  # no Hessian, but of positive curvature
    with pytest.warns(FedBilevelWarning, match="ended after 1 products: the residual grew to"):
        p = solve(product(skew), jnp.asarray(b), jnp.zeros(3), None, 5, 1e-6)
    np.testing.assert_array_equal(p, np.zeros(3))


def test_a_start_that_is_worse_than_none_is_not_used() -> None:
    b, far = jnp.ones(2), jnp.full(2, 100.0)
    asked = list[Any]()

    def product(d: Any) -> Any:
        asked.append(d)
        return 2 * d

    np.testing.assert_allclose(solve(product, b, far, 2 * far, 3, 1e-6), [0.5, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(asked[0], b)
    assert len(asked) == 1


# ------------------------------------------------------------------------------------------ bad conditioning


@pytest.fixture(scope="module")
def steep() -> Any:
    """A lower problem of condition 1,000."""
    return fb.Quadratic(size_x=3, size_y=8, condition=1e3, heterogeneity=0.0).make(2, seed=1)


def test_cg_and_momentum_reach_what_the_series_does_not_at_equal_rounds(steep: Any) -> None:
    engine = fb.Simulation(steep.problem, steep.clients, devices=1)
    x = np.ones(3)
    exact, rounds = steep.hypergradient(x), 201
    work: dict[str, Any] = dict(EXACT, lam=1.0, beta=1.0)

    def error(method: Any) -> tuple[float, float]:
        """The distances from the solution of the lower problem, and from the hypergradient."""
        fed = fb.Federation(engine)
        fed.hold(x=jnp.asarray(x, jnp.float32))
        y, p = method.estimate(fed, jnp.zeros(8))
        assert fed.ledger.rounds <= rounds
        g = steep.means[3] @ np.concatenate([x, np.asarray(y, np.float64)]) + steep.means[4]
        return relative(y, steep.solution(x)), relative(g[:3] - np.asarray(p, np.float64) @ steep.means[1], exact)

    series = error(fb.AggITD(**work, N=100, estimator="summed"))
    fast = (np.sqrt(1e3) - 1) / (np.sqrt(1e3) + 1)
    heavy: dict[str, Any] = dict(work, beta=3.7, momentum_y=fast**2)
    both = error(fb.AggITD(**heavy, N=92, estimator="cg", cg_steps=16, cg_tolerance=1e-5))
    assert series[0] > 0.5 and series[1] > 0.5
    assert both[0] < 0.05 and both[1] < 0.05


def test_momentum_is_the_heavy_ball(small: Any, engine: Any) -> None:
    """Over two outer iterations, so the velocity lives in the state."""
    A, _, b, _, _ = small.means
    method = fb.AggITD(**EXACT, N=2, beta=0.5, momentum_y=0.6, alpha=1e-9)
    state, _ = iterate(method, engine, 2)
    last = y = np.zeros(3)
    for _ in range(4):
        y, last = y - 0.5 * (A @ y + b) + 0.6 * (y - last), y
    assert relative(state.y, y) < 1e-5 and relative(state.before, last) < 1e-5
    for other in (
        fb.FedNest(**EXACT, N=2, beta=0.5, momentum_y=0.6, alpha=1e-9),
        replace(method, lower_solver="sgd"),
    ):
        assert relative(iterate(other, engine, 2)[0].y, y) < 1e-5


@pytest.mark.parametrize(
    "wrong", [{"momentum_y": 1.0}, {"momentum_y": -0.1}, {"cg_tolerance": 0.0}, {"cg_steps": 0}]
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(fb.SettingsError, match=f"AggITD.{next(iter(wrong))} = "):
        fb.AggITD(**wrong)
