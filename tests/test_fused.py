"""The engine `fused`: the numbers and the books of the simulation, with the rounds inside of a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
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

ITERATIONS = 6


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    """Six clients, whose rows differ, so that a minibatch matters."""
    return Quadratic(size_x=3, size_y=4, noise=1.0).make(clients=6, seed=0)


def train(task: Any, method: Any, engine: Any, **more: Any) -> fb.Result:
    options: dict[str, Any] = dict(stop={"iterations": ITERATIONS}, evaluate={"every": 4}, seed=3) | more
    return fb.train(task.problem, task.clients, method, engine=engine, **options)


def books(result: fb.Result) -> Any:
    """The ledger without its seconds."""
    return {
        book: {step: {k: v for k, v in account.items() if k != "seconds"} for step, account in accounts.items()}
        for book in ("ledger", "probes")
        if (accounts := result.summary.get(book)) is not None
    }


def agree(one: fb.Result, other: fb.Result) -> None:
    """The same parameters, books and history, up to rounding."""
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
}


CHANCES: tuple[Chances | None, ...] = (None, "step")
OURS = [name for name in ALGORITHMS if ALGORITHMS[name].__module__.startswith("fedbilevel.")]


@pytest.mark.parametrize("name", OURS)
def test_every_method_agrees_with_the_simulation(task: QuadraticTask, name: str) -> None:
    method = ALGORITHMS[name](**SETTINGS[name])
    agree(train(task, method, "fused"), train(task, method, "simulation"))


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
def test_half_of_the_clients_on_minibatches_agree_for_every_kind_of_cohort(
    task: QuadraticTask, cohort: str
) -> None:
    rules = {"cohort": cohort, "weighting": "samples"}
    results = [train(task, HALF, engine, federation=rules) for engine in ("fused", "simulation")]
    agree(*results)


def test_stopping_early_and_the_released_code_agree(task: QuadraticTask) -> None:
    early = fb.FedNest(N=1, T=4, alpha=0.1, beta=0.1, lam=0.3, participation=3, stop_early=True)
    results = [train(task, early, engine, stop={"rounds": 40}) for engine in ("fused", "simulation")]
    agree(*results)
    released = fb.FedNest(N=2, T=2, alpha=0.1, beta=0.1, participation=3, mode="released_code")
    agree(train(task, released, "fused"), train(task, released, "simulation"))


def test_a_problem_with_an_embedding_and_random_losses_agrees() -> None:
    g = np.random.default_rng(0)
    rows = [(g.normal(size=(n, 3)).astype(np.float32), g.normal(size=n).astype(np.float32)) for n in (5, 6, 7, 8)]
    clients = fb.clients_from([(one, other) for one, other in zip(rows, reversed(rows), strict=True)])

    def error(x: Any, y: Any, b: fb.Batch) -> Any:
        kept = 1.0 if b.key is None else jax.random.bernoulli(b.key, 0.8, b.features.shape)
        return b.mean(((b.features * kept) @ y - b.targets) ** 2) + 0.1 * jnp.sum(y**2)

    for over, participation in (("vmap", 4), ("map", 2)):
        problem = fb.Problem(
            x=jnp.ones((3, 2)) / 3,
            y=jnp.zeros(2),
            lower=error,
            upper=error,
            embed=lambda x, inputs: jnp.tanh(inputs @ x),
            over=over,  # type: ignore[arg-type]
            chances="step",
        )
        method = fb.AggITD(N=2, alpha=0.1, beta=0.1, lam=0.3, participation=participation, batch_zeta_local=3)
        results = [train(fb.Task(problem, clients), method, engine) for engine in ("fused", "simulation")]
        agree(*results)


def test_a_run_that_is_killed_and_resumed_has_the_same_history(task: QuadraticTask, tmp_path: Path) -> None:
    """Checkpoints are inside of what would be one block, and the run is resumed from one of them."""
    rules = {"every": 8, "checkpoint_every": 3}
    whole = train(task, HALF, "fused", stop={"iterations": 8}, evaluate=rules, out=tmp_path / "whole")
    train(task, HALF, "fused", stop={"iterations": 5}, evaluate=rules, out=tmp_path / "killed")
    resumed = train(
        task, HALF, "fused", stop={"iterations": 8}, evaluate=rules, out=tmp_path / "killed", resume=True
    )
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in r.history] for r in (whole, resumed)]
    assert lines[0] == lines[1]
    assert books(whole)["ledger"] == books(resumed)["ledger"]


def test_a_divergence_is_told_as_by_the_simulation(task: QuadraticTask) -> None:
    """A reply that is not finite is found after the block, and located round by round."""
    wild = fb.AggITD(N=3, alpha=0.1, beta=90.0, lam=0.3, participation=1.0)
    told = []
    for engine in ("fused", "simulation"):
        with pytest.raises(fb.Diverged) as error:
            train(task, wild, engine, stop={"iterations": 40}, evaluate={"every": 40})
        told.append(str(error.value))
    assert "beta" in told[0]
    assert told[0] == told[1]


def test_what_needs_the_host_in_a_round_is_refused_by_name(task: QuadraticTask) -> None:
    for more, named in (
        ({"federation": {"aggregator": "median"}}, "federation.aggregator = 'median'"),
        ({"federation": {"oversample": 0.5}}, "federation.oversample"),
        ({"federation": {"deadline": 1.0}}, "federation.deadline"),
        ({"privacy": {"mode": "local"}}, "privacy.mode"),
        ({"attack": {"kind": "sign-flip"}}, "attack.kind"),
        ({"chaos": {"drop": 0.1}}, "chaos"),
    ):
        with pytest.raises(fb.SettingsError, match=f"{named}.*simulation"):
            train(task, HALF, "fused", **more)


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
