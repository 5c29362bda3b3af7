"""What a round leaves out: single replies, rows drawn one by one, and what devices have. And the engine auto."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fedbilevel as fb
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.engines import Call, Replies, Simulation, prepare
from fedbilevel.engines._draws import Draws
from fedbilevel.engines._placed import Placed
from fedbilevel.federation import Federation
from fedbilevel.problems import QuadraticTask
from fedbilevel.rng import Address, Kind, Root
from fedbilevel.run import _auto
from fedbilevel.steps import Descriptor, Epochs, PerClient, Sample, Samples

METHOD = fb.AggITD(N=2, alpha=0.1, beta=0.05, lam=0.05, batch_zeta=2, participation=0.5)


class OneByOne:
    """An engine whose mean the federation has to take itself."""

    def __init__(self, engine: Simulation) -> None:
        self.engine, self.problem, self.clients = engine, engine.problem, engine.clients
        self.capabilities = engine.capabilities

    def replies(self, call: Call) -> Iterator[Replies]:
        return self.engine.replies(call)

    def close(self) -> None:
        """There is nothing to release."""


def ridge(scales: tuple[float, ...]) -> tuple[fb.Problem, fb.Clients]:
    rng = np.random.default_rng(0)

    def rows(scale: float) -> tuple[np.ndarray, np.ndarray]:
        a = rng.normal(size=(6, 3)) * scale
        return a, a.sum(1)

    problem = fb.Problem(
        x=jnp.zeros(1),
        y=jnp.ones(3),
        lower=lambda x, y, b: b.mean((b.inputs @ y - 2 * b.targets) ** 2) + jnp.exp(x[0]) * jnp.sum(y**2),
        upper=lambda x, y, b: b.mean((b.inputs @ y - b.targets) ** 2),
    )
    return problem, fb.clients_from([(rows(s), rows(s)) for s in scales])


@pytest.mark.slow
def test_the_mean_of_the_program_is_that_of_the_single_replies(quadratic: QuadraticTask) -> None:
    simulation = Simulation(quadratic.problem, quadratic.clients)
    ends = []
    for engine in (simulation, OneByOne(simulation)):
        fed, state = Federation(engine, seed=3, weighting="samples"), METHOD.init(quadratic.problem, 20)
        for _ in range(3):
            state = METHOD.step(fed, state)
        ends.append((state, {name: a.to_mapping() | {"seconds": 0} for name, a in fed.ledger.steps.items()}))
    (one, books), (other, same) = ends
    assert books == same
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("scale", "why"), [(1e30, "q is not finite"), (3e8, "q has an entry beyond 1e+15")])
def test_a_client_whose_reply_is_not_valid_is_named_and_left_out_of_the_mean(scale: float, why: str) -> None:
    problem, clients = ridge((1.0, 2.0, scale, 0.5))
    simulation = Simulation(problem, clients)
    found = []
    for engine in (simulation, OneByOne(simulation)):
        fed = Federation(engine, seed=0)
        fed.hold(x=jnp.zeros(1), y=jnp.ones(3))
        mean = fed.round(lower_gradient, zeta=Sample("lower"))
        assert [(e.client, e.step, e.what) for e in fed.ledger.rejected] == [(2, "lower_gradient", why)]
        assert fed.ledger.steps["lower_gradient"].rejected == 1
        assert list(fed.ledger.silent) == [2] and fed.ledger.conduct.strikes == {2: 1}
        found.append(np.asarray(mean.q))
    np.testing.assert_array_equal(found[0], found[1])
    left, others = ridge((1.0, 2.0, 1.0, 0.5))
    expected = [jax.grad(lambda y, i=i: _loss(left, others, i, y))(jnp.ones(3)) for i in (0, 1, 3)]
    np.testing.assert_allclose(found[0], np.mean(expected, axis=0), rtol=1e-5)


def _loss(problem: fb.Problem, clients: fb.Clients, client: int, y: Any) -> Any:
    inputs, targets = clients.load(client).lower
    return jnp.mean((inputs @ y - 2 * targets) ** 2) + jnp.sum(y**2)


DESCRIPTORS: dict[str, Descriptor] = {
    "epochs": Epochs("lower", 3, 2),
    "samples": Samples("lower", 4, 3),
    "uneven": Samples("upper", 2, PerClient((1, 3, 2, 1, 2))),
    "sample": Sample("upper", 3),
    "all": Samples("lower", None, 2),
}


class Sizes:
    """Clients of unequal size, without data."""

    count, capacity = 5, fb.ClientSize(9, 6)

    def size(self, client: int) -> fb.ClientSize:
        return fb.ClientSize(5 + client, 2 + client)


@pytest.mark.parametrize("root", [7, b"s" * 32])
def test_rows_that_are_drawn_ahead_are_those_of_each_address(quadratic: QuadraticTask, root: Root) -> None:
    problem, clients, sent = quadratic.problem, Sizes(), 0

    def send(tree: Any) -> Any:
        nonlocal sent
        sent += 1
        return tree

    draws = Draws(problem, clients, spread=send, send=lambda tree: tree)  # type: ignore[arg-type]
    for drawn, cohort in ((0, (0, 1, 2, 3, 4)), (6, (0, 1, 2, 3, 4)), (12, (1, 4)), (18, (4, 1, 4))):
        before = sent
        for place in (drawn, drawn + 2, drawn + 3, drawn + 5 if drawn else 7):
            samples = DESCRIPTORS | {"again": Samples("lower", 4, 2, of=max(place - 1, 0))}
            call = Call(
                step=lower_gradient,
                address=Address(root, Kind.ROUND, place),
                clients=cohort,
                samples=samples,
                drawn=drawn,
            )
            made = draws.of(call, cohort)
            each = [prepare(call, problem, c, clients.size(c), clients.capacity) for c in cohort]
            expected = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
            assert str(jax.tree.structure(made)) == str(jax.tree.structure(expected))
            for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype
        assert drawn != 6 or sent == before, "what is the same in every call is put on the devices once"


def test_nothing_is_put_on_all_devices_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[Any] = []
    put = jax.device_put

    def counted(value: Any, to: Any) -> Any:
        puts.append(value)
        return put(value, to)

    monkeypatch.setattr(jax, "device_put", counted)
    everywhere = NamedSharding(jax.make_mesh((1,), ("clients",)), PartitionSpec())
    placed, vector, mean = Placed(everywhere), jnp.arange(3.0), put(jnp.ones(2), everywhere)
    for _ in range(2):
        placed.everywhere(vector)
        placed.everywhere(np.float32(0.5))
    assert len(puts) == 2
    first = placed.on_one_device(mean)
    assert placed.everywhere(first) is mean, "a mean that is sent as it came is there already"
    assert len(puts) == 2
    changed = np.arange(2, dtype=np.float32)
    assert placed.everywhere(changed)[1] == 1
    changed[1] = 5.0
    assert placed.everywhere(changed)[1] == 5, "an array of the host is known by its content"


def test_an_iteration_like_the_one_before_puts_no_data_on_the_devices(
    quadratic: QuadraticTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = dataclasses.replace(METHOD, participation=1.0)
    engine, spread = Simulation(quadratic.problem, quadratic.clients), list[Any]()
    fed, state = Federation(engine, seed=0), method.init(quadratic.problem, 20)
    for _ in range(4):  # AggITD has a program for each place of its random Q
        state = method.step(fed, state)
    monkeypatch.setattr(engine._draws, "_spread", spread.append)
    monkeypatch.setattr(engine, "load", spread.append)
    for _ in range(3):
        state = method.step(fed, state)
    assert spread == []


@pytest.mark.slow
def test_auto_is_fused_for_a_small_problem_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, clients = ridge((1.0, 2.0, 0.5))
    method = fb.AggITD(N=1, alpha=0.1, beta=0.05, lam=0.05, participation=1.0)

    def trained(engine: str, iterations: int = 4, **more: Any) -> fb.Result:
        return fb.train(problem, clients, method, stop={"iterations": iterations}, engine=engine, **more)

    plain, auto = trained("simulation"), trained("auto", out=tmp_path / "whole")
    assert auto.summary["engine"]["name"] == "fused"
    assert 0 < auto.summary["engine"]["operations_a_round"] < 1e4
    assert "engine" not in plain.summary
    np.testing.assert_allclose(auto.y, plain.y, rtol=1e-5)
    trained("auto", 2, out=tmp_path / "parts")
    resumed = trained("auto", out=tmp_path / "parts", resume=True)
    assert resumed.summary["engine"] == auto.summary["engine"]
    np.testing.assert_array_equal(resumed.y, auto.y)
    told: list[fb.Progress] = []
    monkeypatch.setattr(_auto, "MOST", 1.0)
    large = trained("auto", observers=[told.append])
    assert large.summary["engine"]["name"] == "simulation" and "more than" in large.summary["engine"]["why"]
    assert told[-1].notes[0].startswith("engine: simulation; a round has")
    np.testing.assert_array_equal(large.y, plain.y)


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [
        ({}, {"federation": {"aggregator": "geometric-median"}}, "federation.aggregator = 'geometric-median'"),
        ({"estimator": "cg"}, {}, "it looks at values within an iteration"),
    ],
)
@pytest.mark.slow
def test_auto_is_the_simulation_where_a_run_cannot_be_fused(settings: Any, more: Any, why: str) -> None:
    problem, clients = ridge((1.0, 2.0, 0.5))
    method = fb.AggITD(N=1, alpha=0.1, beta=0.05, participation=1.0, **settings)
    ends = [
        fb.train(problem, clients, method, stop={"iterations": 2}, engine=engine, **more)
        for engine in ("auto", "simulation")
    ]
    chosen = ends[0].summary["engine"]
    assert chosen["name"] == "simulation" and why in chosen["why"]
    np.testing.assert_array_equal(ends[0].y, ends[1].y)
    assert [r["rounds"] for r in ends[0].history] == [r["rounds"] for r in ends[1].history]
