"""The engine `fused`: the numbers and the books of the simulation, with the rounds inside of a program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS, lower_kinds
from fedbilevel.algorithms.local import State, lower_gradient
from fedbilevel.fused._single import for_one_function
from fedbilevel.problems import Quadratic, QuadraticTask
from fedbilevel.rng import Address, Kind
from fedbilevel.steps import (
    Calls,
    Chances,
    Descriptor,
    Epochs,
    PerClient,
    Rows,
    Sample,
    Samples,
    draw,
    draw_ahead,
    moving_part,
)
from fedbilevel.studies.trace import Traced

ITERATIONS = 6


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    """Six clients, whose rows differ, so that a minibatch matters."""
    return Quadratic(size_x=3, size_y=4, noise=1.0).make(clients=6, seed=0)


Engines = dict[str, fb.Engine]


def both(problem: Any, clients: Any) -> Engines:
    """The engines that are compared. They keep their programs from one run to the next."""
    return {"fused": fb.Fused(problem, clients), "simulation": fb.Simulation(problem, clients, devices=1)}


@pytest.fixture(scope="module")
def engines(task: QuadraticTask) -> Engines:
    return both(task.problem, task.clients)


def train(engine: fb.Engine, method: Any, **more: Any) -> fb.Result:
    options: dict[str, Any] = dict(stop={"iterations": ITERATIONS}, evaluate={"every": 4}, seed=3) | more
    return fb.train(engine.problem, engine.clients, method, engine=engine, **options)


def books(result: fb.Result) -> Any:
    """The ledger without its seconds."""
    return {
        book: {step: {k: v for k, v in account.items() if k != "seconds"} for step, account in accounts.items()}
        for book in ("ledger", "probes")
        if (accounts := result.summary.get(book)) is not None
    }


def agree(engines: Engines, method: Any, **more: Any) -> None:
    """The same parameters, books and history on both engines, up to rounding."""
    one, other = (train(engine, method, **more) for engine in engines.values())
    for a, b in zip(jax.tree.leaves((one.x, one.y)), jax.tree.leaves((other.x, other.y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert books(one) == books(other)
    assert len(one.history) == len(other.history) > 2
    for line, same in zip(one.history, other.history, strict=True):
        assert line.keys() == same.keys()
        for name, value in line.items():
            if name != "seconds" and not (value is None and same[name] is None):
                assert value == pytest.approx(same[name], rel=1e-4, abs=1e-5), name


SETTINGS: dict[str, dict[str, Any]] = {
    "fbo-aggitd": dict(N=3, alpha=0.1, beta=0.1, lam=0.3, participation=1.0),
    "fednest": dict(N=1, T=3, alpha=0.1, beta=0.1, lam=0.3, participation=1.0),
    "lfednest": dict(N=1, T=3, alpha=0.1, beta=0.1, lam=0.3, participation=1.0, lower_solver="sgd"),
    "naive-itd": dict(N=2, alpha=0.1, beta=0.1, lam=0.3, participation=1.0),
    "gossip": dict(alpha=0.1, gamma=0.1, b=2, L_g=2.0),
    "ma-dsbo": dict(alpha=0.1, beta=0.1, gamma=0.3, T=2, N=3),
    "fedsoba": dict(alpha=0.1, beta=0.3, momentum=0.5, steps="adagrad", participation=1.0),
    "simfbo": dict(alpha=0.1, beta=0.1, tau=2, participation=1.0),
    "fedbio": dict(alpha=0.1, beta=0.1, tau=2, participation=1.0),
    "shrofbo": dict(alpha=0.1, beta=0.1, tau=2, participation=1.0),
    "fedmsa": dict(alpha=0.1, beta=0.1, tau=2, renewal=0.5, participation=0.5),
    "fedbioacc": dict(alpha=0.1, beta=0.1, tau=2, renewal=0.5, schedule="paper", participation=0.5),
    "fed-f2sa": dict(alpha=0.1, beta=0.1, nu=0.1, difference="symmetric", participation=1.0),
    "fedavg": dict(alpha=0.1, beta=0.1, tau=2, participation=1.0),
    "q-fedavg": dict(alpha=0.1, tau=2, participation=0.5),
}


TRACEABLE = [fb.Median(), fb.TrimmedMean(share=0.3), fb.NormBound(), fb.CentredClipping(radius=0.5)]
CHANCES: tuple[Chances | None, ...] = (None, "step")
OURS = [
    name
    for name, kind in ALGORITHMS.items()
    if kind.__module__.startswith("fedbilevel.") and "global" in lower_kinds(kind)
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.slow
def test_every_method_agrees_with_the_simulation(engines: Engines, name: str) -> None:
    agree(engines, ALGORITHMS[name](**SETTINGS[name]))


def test_an_optimiser_of_the_server_and_momentum_agree(engines: Engines) -> None:
    agree(
        engines, fb.AggITD(**SETTINGS["fbo-aggitd"], upper={"name": "adam", "learning_rate": 0.05}, momentum_y=0.3)
    )


def test_steps_that_change_and_variables_of_clients_are_refused_by_name(engines: Engines) -> None:
    with pytest.raises(
        fb.SettingsError, match=r"algorithm.beta = 'auto' is wrong with federation.engine = 'fused'"
    ):
        train(engines["fused"], fb.AggITD(**SETTINGS["fbo-aggitd"] | {"beta": "auto"}))
    with pytest.raises(
        fb.SettingsError, match=r"it looks at values within an iteration .* use engine = 'simulation'"
    ):
        train(engines["fused"], fb.AggITD(**SETTINGS["fbo-aggitd"], estimator="cg"))

    def loss(x: Any, y: Any, b: fb.Batch) -> Any:
        return b.mean((b.inputs @ y + b.own - b.targets) ** 2)

    rows = np.ones((4, 2), np.float32), np.ones(4, np.float32)
    problem, clients = (
        fb.Problem(None, jnp.zeros(2), loss, loss, own=jnp.zeros(1)),
        fb.clients_from([(rows, rows)]),
    )
    with pytest.raises(fb.SettingsError, match="the clients of this problem have own variables, which they keep"):
        fb.train(problem, clients, fb.AggITD(participation=1.0), stop={"iterations": 1}, engine="fused")


HALF = fb.AggITD(
    N=2,
    alpha=0.1,
    beta=0.1,
    lam=0.3,
    participation=3,
    lower_steps=(1, 2, 3, 1, 2, 3),
    batch_zeta_local=3,
    batch_xi=4,
    same_samples=True,
)


@pytest.mark.parametrize("cohort", ["iteration", "phase", "round"])
@pytest.mark.slow
def test_half_of_the_clients_on_minibatches_agree_for_every_kind_of_cohort(engines: Engines, cohort: str) -> None:
    agree(engines, HALF, federation={"cohort": cohort, "weighting": "samples"})


def test_iterations_of_different_lengths_agree_and_keep_to_the_budget(engines: Engines) -> None:
    early = fb.FedNest(N=1, T=3, alpha=0.1, beta=0.1, lam=0.3, participation=3, stop_early=True)
    agree(engines, early, stop={"rounds": 40})


def test_several_cohorts_in_an_iteration_and_vectors_that_are_released_agree(engines: Engines) -> None:
    agree(engines, fb.FedNest(N=2, T=2, alpha=0.1, beta=0.1, participation=3, mode="released_code"))


def embedded(**options: Any) -> Engines:
    """A problem with an embedding, on four clients of different sizes."""
    g = np.random.default_rng(0)
    rows = [(g.normal(size=(n, 3)).astype(np.float32), g.normal(size=n).astype(np.float32)) for n in (5, 6, 7, 8)]

    def error(x: Any, y: Any, b: fb.Batch) -> Any:
        kept = 1.0 if b.key is None else jax.random.bernoulli(b.key, 0.8, b.features.shape)
        return b.mean(((b.features * kept) @ y - b.targets) ** 2) + 0.1 * jnp.sum(y**2)

    problem = fb.Problem(
        x=jnp.ones((3, 2)) / 3,
        y=jnp.zeros(2),
        lower=error,
        upper=error,
        embed=lambda x, inputs: jnp.tanh(inputs @ x),
        **options,
    )
    return both(problem, fb.clients_from(list(zip(rows, reversed(rows), strict=True))))


@pytest.mark.slow
def test_an_embedding_is_remembered_within_an_iteration() -> None:
    agree(embedded(), fb.AggITD(N=1, alpha=0.1, beta=0.1, lam=0.3, participation=4, batch_zeta_local=3))


@pytest.mark.slow
def test_random_losses_of_clients_that_are_served_in_turn_agree() -> None:
    method = fb.AggITD(N=1, alpha=0.1, beta=0.1, lam=0.3, participation=2, batch_zeta_local=3, estimator="summed")
    agree(embedded(over="map", chances="step"), method)


def test_a_run_that_is_killed_and_resumed_has_the_same_history(engines: Engines, tmp_path: Path) -> None:
    """Without the checkpoints it would be one block, and the run is resumed in the middle of it."""

    def run(iterations: int, folder: str, **more: Any) -> fb.Result:
        rules = {"every": 8, "checkpoint_every": 3}
        stop = {"iterations": iterations}
        return train(engines["fused"], HALF, stop=stop, evaluate=rules, out=tmp_path / folder, **more)

    whole = run(8, "whole")
    run(5, "killed")
    resumed = run(8, "killed", resume=True)
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in r.history] for r in (whole, resumed)]
    assert lines[0] == lines[1]
    assert books(whole)["ledger"] == books(resumed)["ledger"]


def test_a_divergence_is_told_as_by_the_simulation(engines: Engines) -> None:
    """A reply that is not finite is found after the block, and located round by round."""
    wild = fb.AggITD(N=3, alpha=0.1, beta=90.0, lam=0.3, participation=1.0)
    told = []
    for engine in engines.values():
        with pytest.raises(fb.Diverged) as error:
            train(engine, wild, stop={"iterations": 40}, evaluate={"every": 40})
        told.append(str(error.value))
    assert "beta" in told[0]
    assert told[0] == told[1]


@pytest.mark.slow
def test_a_client_whose_replies_are_not_finite_is_left_out_as_by_the_simulation() -> None:
    """The run goes on without the client, round by round as long as its conduct has to be noted."""
    g = np.random.default_rng(0)
    rows = [(g.normal(size=(6, 2)).astype(np.float32), np.full(6, i, np.float32)) for i in range(4)]

    def error(x: Any, y: Any, b: fb.Batch) -> Any:
        fails = jnp.sqrt(jnp.where(b.targets[0] > 2, 0.05 - jnp.abs(y[1]), 1.0))  # the last client, after a while
        return b.mean((b.inputs @ y - b.targets) ** 2) + jnp.exp(x[0]) * jnp.sum(y**2) + 0.0 * fails

    problem = fb.Problem(x=jnp.zeros(1), y=jnp.zeros(2), lower=error, upper=error)
    engines = both(problem, fb.clients_from([(each, each) for each in rows]))
    method = fb.LFedNest(N=1, T=1, alpha=0.01, beta=0.01, participation=1.0, lower_solver="sgd", lower_steps=1)
    rules = {"strikes": 2, "exclusion_rounds": 4}
    one, other = (
        train(engine, method, federation=rules, stop={"iterations": 24}, evaluate={"every": 12})
        for engine in engines.values()
    )
    assert one.summary["rejected"] == other.summary["rejected"] != {}
    assert one.summary["exclusions"] == other.summary["exclusions"]
    assert books(one) == books(other)
    np.testing.assert_allclose(one.y, other.y, rtol=1e-5)


def test_an_observer_is_told_of_every_iteration_and_may_end_the_run(engines: Engines) -> None:
    seen = []

    def watch(progress: fb.Progress) -> bool:
        seen.append((progress.iteration, progress.rounds))
        return progress.iteration == 3

    method = ALGORITHMS["naive-itd"](**SETTINGS["naive-itd"])
    train(engines["fused"], method, observers=[watch])
    assert seen == [(1, 8), (2, 16), (3, 24)]


def test_a_layer_around_the_engine_sees_every_round(engines: Engines) -> None:
    """Something that only wraps the engine is not fused, so that it is not passed over."""
    engine = Traced(engines["fused"])
    train(engine, ALGORITHMS["naive-itd"](**SETTINGS["naive-itd"]), stop={"iterations": 2})
    assert len(engine.noted) == 16


@pytest.mark.parametrize("rule", TRACEABLE, ids=lambda rule: type(rule).__name__)
def test_rules_that_can_be_traced_have_the_results_of_the_simulation(engines: Engines, rule: Any) -> None:
    """Of vectors, and of next values of vectors, for which a rule is given differences."""
    method = ALGORITHMS["fbo-aggitd"](**SETTINGS["fbo-aggitd"] | dict(participation=5))
    agree(engines, method, federation={"aggregator": rule})


def test_a_rule_is_not_taken_for_the_mean_of_an_earlier_run(engines: Engines) -> None:
    one, other = (train(engines["fused"], HALF, federation={"aggregator": r}) for r in ("mean", "median"))
    assert float(np.linalg.norm(one.y - other.y)) > 1e-3


def test_what_needs_the_host_in_a_round_is_refused_by_name(engines: Engines) -> None:
    for more, named in (
        ({"federation": {"aggregator": "geometric-median"}}, "federation.aggregator = 'geometric-median'"),
        ({"federation": {"aggregator": {"name": "centred-clipping", "start": "last"}}}, "federation.aggregator"),
        ({"federation": {"oversample": 0.5}}, "federation.oversample"),
        ({"federation": {"deadline": 1.0}}, "federation.deadline"),
        ({"privacy": {"mode": "local"}}, "privacy.mode"),
        ({"attack": {"kind": "sign-flip"}}, "attack.kind"),
        ({"chaos": {"drop": 0.1}}, "chaos"),
    ):
        with pytest.raises(fb.SettingsError, match=f"{named}.*simulation"):
            train(engines["fused"], HALF, **more)


def test_a_problem_that_is_too_large_is_refused(task: QuadraticTask) -> None:
    with pytest.raises(fb.SettingsError, match="memory_limit is 0; use 'simulation'"):
        fb.Fused(task.problem, task.clients, memory_limit=0)


class Kept(NamedTuple):
    q: fb.Y
    last: fb.Own[fb.Y]


@fb.client_step
def remembering(c: fb.Oracle, zeta: fb.Draw) -> Kept:
    q = c.g_y(c.y, zeta)
    return Kept(q + c.own("last", jnp.zeros_like(q)), q)


@dataclass
class Method:
    """A method with a flaw, which a traced iteration shows."""

    flaw: str
    needs_server: ClassVar[bool] = True

    def init(self, problem: fb.BilevelProblem, clients: int) -> State:
        return State(problem.flat_x.vector, problem.flat_y.vector)

    def step(self, fed: fb.Federation, s: State) -> State:
        fed.hold(x=s.x, y=s.y)
        step: Any = remembering if self.flaw == "keeps" else lower_gradient
        q = fed.round(step, zeta=fb.Sample("lower")).q
        if self.flaw == "looks" and float(q[0]) > 0:
            q = -q
        if self.flaw == "leaves":
            fed.hold(q=q)
        if self.flaw == "draws":
            q = q + fed.rng("noise").normal(size=q.shape).astype(np.float32)
        return State(s.x, s.y[:2] if self.flaw == "shrinks" else s.y - 0.1 * q)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("keeps", "clients keep a state of their own in step remembering"),
        ("looks", "it looks at values within an iteration"),
        ("leaves", "its clients still hold q in the first round of the next iteration"),
        ("draws", "perhaps in values that the server draws"),
        ("shrinks", "its state changes its structure or its shapes"),
    ],
)
def test_a_method_that_cannot_be_fused_is_refused_by_name(engines: Engines, flaw: str, message: str) -> None:
    with pytest.raises(fb.SettingsError, match=f"engine = 'fused' is wrong for this method: .*{message}"):
        train(engines["fused"], Method(flaw), stop={"iterations": 1000}, evaluate={"every": 1000})


def test_every_draw_ahead_is_the_draw_of_its_address() -> None:
    sizes = np.asarray([9, 4, 9])
    calls = Calls(2**33 + 1, Kind.ROUND, np.asarray([3, 8]), np.asarray([[0, 1], [1, 2]]))
    kinds: tuple[Descriptor, ...] = (
        Sample("lower", 3),
        Samples("lower", 6, PerClient((1, 3, 2))),
        Samples("lower", 3, 2, of=0),
        Epochs("lower", 4, 2),
    )
    for descriptor in kinds:
        for chances in CHANCES:
            ahead = draw_ahead(descriptor, "u", calls, Rows(sizes, 9), chances)
            for k, place in enumerate((3, 8)):
                own, address = descriptor, Address(2**33 + 1, Kind.ROUND, place)
                if isinstance(descriptor, Samples) and descriptor.of is not None:
                    own = Samples("lower", 3, 2, of=place)
                for i, client in enumerate(calls.clients[k]):
                    one = draw(own, address, "u", int(client), int(sizes[client]), 9, chances)
                    for a, b in zip(moving_part(one), ahead, strict=True):
                        assert (a is None) == (b is None)
                        assert a is None or np.array_equal(a, b[k, i])


def test_a_loss_with_an_operation_that_was_not_tried_in_one_function_is_compiled_as_usual(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The gradient of `take_along_axis` is a scatter, with which XLA cannot make a single function."""

    def loss(x: Any, y: Any, b: fb.Batch) -> Any:
        scores = b.inputs @ y
        return b.mean(jnp.take_along_axis(scores, b.targets[:, None], 1)[:, 0] ** 2) + jnp.sum((y - x) ** 2)

    rows = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])
    problem, clients = fb.Problem(jnp.ones(1), jnp.ones((2, 2)), loss, loss), fb.clients_from([(rows, rows)])
    method = fb.AggITD(alpha=0.1, beta=0.1, lam=0.1, participation=1.0, lower_steps=1)
    results = [
        fb.train(problem, clients, method, stop={"iterations": 2}, engine=e) for e in ("fused", "simulation")
    ]
    np.testing.assert_allclose(results[0].y, results[1].y, atol=1e-6)
    assert capfd.readouterr().err == "", "XLA complains where it gives up"


@settings(max_examples=30)
@given(data=st.data())
def test_a_product_as_a_sum_of_products_is_the_product(data: st.DataObject) -> None:
    """Over any axes, in a loop, in a branch, and under a function with a derivative of its own."""
    letters = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    sizes = {letter: data.draw(st.integers(1, 3)) for letter in letters}
    one, other = (data.draw(st.permutations(letters)) for _ in range(2))
    one, other = (mine[: data.draw(st.integers(1, len(mine)))] for mine in (one, other))
    kept = [letter for letter in letters if letter in {*one, *other} and data.draw(st.booleans())]
    formula = f"{''.join(one)},{''.join(other)}->{''.join(kept)}"
    g = np.random.default_rng(len(letters))
    a, b = (jnp.asarray(g.normal(size=[sizes[letter] for letter in mine]), jnp.float32) for mine in (one, other))

    def function(a: Any, b: Any) -> Any:
        def product(_: Any, total: Any) -> Any:
            return total + jax.nn.silu(jnp.einsum(formula, a, b, precision="highest"))

        start = jnp.zeros([sizes[letter] for letter in kept])
        return jax.lax.cond(a.sum() > -100, lambda s: jax.lax.fori_loop(0, 2, product, s), lambda s: s, start)

    traced = jax.make_jaxpr(function)(a, b)
    changed = for_one_function(traced)
    assert "dot_general" not in str(changed)
    one, other = (jax.jit(jaxpr_as_fun(each))(a, b)[0] for each in (changed, traced))
    np.testing.assert_allclose(one, other, atol=1e-4)
