"""Faults on purpose: each is noticed, counted and named, and what is computed comes from the other replies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedbilevel import AggITD, Federation, Loop, Simulation, load_spec, run
from fedbilevel.algorithms import FedNest, LFedNest, NaiveITD
from fedbilevel.algorithms.aggitd import gradients
from fedbilevel.engines import Call, Engine, Fault, Reason, Replies
from fedbilevel.errors import Diverged, SettingsError, TooFewReplies
from fedbilevel.layers import Chaos, ChaosSettings, load_chaos
from fedbilevel.layers._chaos import KINDS
from fedbilevel.ledger import Event, Exclusion, Ledger
from fedbilevel.policies import Conduct, Policies
from fedbilevel.problems import QuadraticTask

WORDS = {
    "drop": "no answer",
    "late": "late: after 5 s",
    "twice": "answered twice",
    "nan": "q is not finite",
    "infinity": "q is not finite",
    "shape": "q has shape (7,) instead of (8,)",
    "dtype": "q has type float64 instead of float32",
    "step": "fields ['other'] instead of ['q', 'z']",
    "stale": "a reply to round -1",
    "enormous": "q has an entry beyond 1e+15",
}


def first_round(fed: Federation, quadratic: QuadraticTask) -> Any:
    """The gradient round of AggITD."""
    algorithm = AggITD()
    state = algorithm.init(quadratic.problem)
    fed.hold(x=state.x, y=state.y)
    asked = dict(z=None, lam=0.1, source=True, last=False, zeta=algorithm.zeta, xi=algorithm.xi, u=algorithm.u)
    return fed.round(gradients, **asked)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_is_noticed_counted_and_named_and_does_not_enter_the_mean(
    quadratic: QuadraticTask, kind: str
) -> None:
    loop = Loop(quadratic.problem, quadratic.clients)
    chaos = Chaos(loop, ChaosSettings(**{kind: 0.3}, seed=1))
    fed = Federation(chaos, policies=Policies(deadline=5.0))
    found = first_round(fed, quadratic)
    hit = {event.client for event in fed.ledger.injected}
    assert 2 <= len(hit) <= 12, "of 20 clients"
    assert fed.ledger.injected == Counter(Event(c, "gradients", kind) for c in hit)
    assert fed.ledger.rejected == Counter(Event(c, "gradients", WORDS[kind]) for c in hit)
    sound = Federation(loop)
    sound.clients = tuple(c for c in range(20) if c not in hit or kind == "twice")
    wanted = first_round(sound, quadratic)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_without_a_deadline_a_late_reply_counts(quadratic: QuadraticTask) -> None:
    fed = Federation(Chaos(Loop(quadratic.problem, quadratic.clients), ChaosSettings(late=1.0)))
    first_round(fed, quadratic)
    assert not fed.ledger.rejected and len(fed.ledger.injected) == 20


def test_clients_that_did_not_answer_are_asked_again_and_billed_again(quadratic: QuadraticTask) -> None:
    loop = Loop(quadratic.problem, quadratic.clients)
    fed = Federation(Chaos(loop, ChaosSettings(drop=0.5)), policies=Policies(retries=30))
    found, wanted = first_round(fed, quadratic), first_round(Federation(loop), quadratic)
    np.testing.assert_allclose(found.q, wanted.q, rtol=1e-5)
    (account,) = fed.ledger.steps.values()
    assert account.rounds == 1
    assert account.retries > 5
    assert account.rejected == sum(fed.ledger.injected.values()) == account.retries, "each one was asked once more"
    alone = Federation(loop)
    first_round(alone, quadratic)
    (clean,) = alone.ledger.steps.values()
    assert account.bytes_down == clean.bytes_down * (20 + account.retries) // 20


def test_of_more_clients_than_needed_the_first_valid_replies_count(quadratic: QuadraticTask) -> None:
    loop = Loop(quadratic.problem, quadratic.clients)
    fed = Federation(Chaos(loop, ChaosSettings(drop=0.2, seed=1)), policies=Policies(oversample=0.5)).cohort(10)
    assert len(fed.clients) == 15
    first_round(fed, quadratic)
    (account,) = fed.ledger.steps.values()
    assert account.rejected > 0 and account.rejected + account.surplus == 5
    without = Federation(loop).cohort(10)
    assert len(without.clients) == 10


def test_a_share_of_those_asked_can_be_demanded(quadratic: QuadraticTask) -> None:
    chaos = Chaos(Loop(quadratic.problem, quadratic.clients), ChaosSettings(drop=0.5))
    first_round(Federation(chaos, min_replies=0.2), quadratic)
    with pytest.raises(TooFewReplies, match="of 20, 18 needed"):
        first_round(Federation(chaos, min_replies=0.9), quadratic)


# Clients that answer badly again and again ---------------------------------------------------------------------


class Liar:
    """An engine whose client 2 always answers with NaN."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.problem, self.clients = engine, engine.problem, engine.clients
        self.capabilities = engine.capabilities

    def replies(self, call: Call) -> Iterator[Replies]:
        for replies in self._engine.replies(call):
            if replies.clients == (2,):
                replies = dataclasses.replace(replies, reply=jax.tree.map(lambda a: a * np.nan, replies.reply))
            yield replies

    def close(self) -> None: ...


def test_a_client_that_misbehaves_again_and_again_is_excluded_for_a_while_and_named(
    quadratic: QuadraticTask,
) -> None:
    policies = Policies(strikes=2, exclusion_rounds=6)
    fed = Federation(Liar(Loop(quadratic.problem, quadratic.clients)), policies=policies)
    there = []
    for _ in range(12):
        cohort = fed.cohort(1.0)
        there.append(2 in cohort.clients)
        first_round(cohort, quadratic)
    assert there == [True] * 2 + [False] * 6 + [True] * 2 + [False] * 2
    assert fed.ledger.exclusions == [Exclusion(2, 2, 8), Exclusion(2, 10, 16)]
    again = Ledger.from_mapping(fed.ledger.to_mapping())
    assert again == fed.ledger, "a resumed run goes on excluding it"


def test_a_round_in_which_nobody_answers_well_accuses_nobody(quadratic: QuadraticTask) -> None:
    fed = Federation(Chaos(Loop(quadratic.problem, quadratic.clients), ChaosSettings(nan=1.0)))
    for _ in range(4):
        with pytest.raises(Diverged, match="q is not finite"):
            first_round(fed, quadratic)
    assert fed.ledger.exclusions == [] and fed.ledger.conduct == Conduct()


# Every pair of rounds of every algorithm ----------------------------------------------------------------


class Losing:
    """An engine that loses some clients in two of its rounds."""

    def __init__(self, engine: Engine, losses: dict[int, set[int]]) -> None:
        self._engine, self.problem, self.clients, self._losses = engine, engine.problem, engine.clients, losses
        self.capabilities = engine.capabilities

    def replies(self, call: Call) -> Iterator[Replies]:
        lost = self._losses.get(call.address.place, set())
        for replies in self._engine.replies(call):
            if replies.clients[0] in lost:
                yield Replies(refused={replies.clients[0]: Reason(Fault.ABSENT, "no answer")})
            else:
                yield replies

    def close(self) -> None: ...


METHODS: dict[str, Any] = {
    "fbo-aggitd": AggITD(N=2, participation=1.0),
    "fednest": FedNest(N=2, T=2, participation=1.0),
    "lfednest": LFedNest(participation=1.0),
    "naive-itd": NaiveITD(N=2, participation=1.0),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_losing_clients_in_any_two_rounds_of_an_iteration_does_not_corrupt_the_state(
    quadratic: QuadraticTask, name: str
) -> None:
    """Half of the clients in one round, the other half in another: the step goes where the clean one goes."""
    algorithm, loop = METHODS[name], Loop(quadratic.problem, quadratic.clients)
    start = algorithm.init(quadratic.problem)
    clean = Federation(loop)
    wanted = algorithm.step(clean.cohort(1.0), start)
    rounds = clean.ledger.rounds
    moved = {k: np.linalg.norm(np.asarray(a) - np.asarray(b)) for k, a, b in zip("xy", wanted, start, strict=True)}
    for one in range(rounds):
        for other in range(one + 1, rounds):
            losses = {one: set(range(0, 20, 2)), other: set(range(1, 20, 2))}
            fed = Federation(Losing(loop, losses))
            found = algorithm.step(fed.cohort(1.0), start)
            assert fed.ledger.rounds == rounds
            assert sum(fed.ledger.rejected.values()) == 20
            for k, a, b in zip("xy", found, wanted, strict=True):
                apart = np.linalg.norm(np.asarray(a) - np.asarray(b))
                assert apart < 1.0 * moved[k] + 1e-6, (one, other, k)


# Runs ---------------------------------------------------------------------------------------------------

RUN = {
    "problem.name": "quadratic",
    "data.clients": 20,
    "algorithm.participation": 1.0,
    "federation.deadline": 5.0,
    "stop.rounds": None,
    "stop.iterations": 6,
    "evaluate.checkpoint_every": 1,
}
FAULTS = ChaosSettings(drop=0.2, nan=0.05, shape=0.05, late=0.05, twice=0.05, stale=0.05)


def added_up(nested: dict[str, dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The counts of a summary, {step: {client: {what: count}}}, by reason and by client."""
    by_reason, by_client = Counter[str](), Counter[str]()
    for clients in nested.values():
        for client, counts in clients.items():
            by_reason.update(counts)
            by_client[client] += sum(counts.values())
    return {"reason": dict(by_reason), "client": dict(by_client)}


@pytest.mark.slow
def test_a_run_with_faults_counts_in_history_and_summary_what_was_injected(tmp_path: Path) -> None:
    result = run(load_spec("paper", RUN), tmp_path / "run", chaos=FAULTS)
    injected, rejected = (added_up(result.summary[k]) for k in ("injected", "rejected"))
    assert injected["client"] == rejected["client"] and sum(injected["client"].values()) > 20
    assert set(injected["reason"]) == {"drop", "nan", "shape", "late", "twice", "stale"}
    assert result.history[-1]["rejected"] == rejected


@pytest.mark.slow
def test_a_run_with_faults_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = run(load_spec("paper", RUN), tmp_path / "whole", chaos=FAULTS)
    run(load_spec("paper", RUN | {"stop.iterations": 3}), tmp_path / "run", chaos=FAULTS)
    resumed = run(load_spec("paper", RUN), tmp_path / "run", chaos=FAULTS, resume=True)
    without = [{**line, "seconds": 0} for line in resumed.history]
    assert without == [{**line, "seconds": 0} for line in whole.history]
    assert resumed.summary["injected"] == whole.summary["injected"]


@pytest.mark.parametrize(
    "text", ["drop = 1.5", "drop = 0.6\nnan = 0.6", "dorp = 0.1", "drop = 'much'", "drop", "seed = -1"]
)
def test_a_wrong_file_of_faults_is_refused_with_its_field(tmp_path: Path, text: str) -> None:
    (tmp_path / "chaos.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"chaos|faults"):
        load_chaos(tmp_path / "chaos.toml")


@hypothesis_settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(KINDS), st.floats(0, 0.1), max_size=10), st.integers(0, 2**31))
@pytest.mark.slow
def test_whatever_the_faults_injected_and_noticed_are_as_many(
    quadratic: QuadraticTask, shares: dict[str, float], seed: int
) -> None:
    chaos = Chaos(Loop(quadratic.problem, quadratic.clients), ChaosSettings(**shares, seed=seed))
    fed = Federation(chaos, policies=Policies(deadline=5.0))
    try:
        mean = first_round(fed, quadratic)
        assert np.isfinite(mean.q).all()
    except TooFewReplies:
        pass
    assert sum(fed.ledger.rejected.values()) == sum(fed.ledger.injected.values())


# Divergence ---------------------------------------------------------------------------------------------

WILD = RUN | {"algorithm.alpha": 50.0, "stop.iterations": 12, "evaluate.checkpoint_every": 2}


def test_divergence_ends_a_run_with_the_step_the_setting_and_a_value_to_try(tmp_path: Path) -> None:
    wild = WILD | {"algorithm.alpha": 4.0, "evaluate.checkpoint_every": 1}
    told = r"outer iteration 2: upper_loss exploded from .* after round 10; algorithm\.alpha = 4 .*: try 2, or"
    with pytest.raises(Diverged, match=told):
        run(load_spec("paper", wild), tmp_path / "run")
    good = run(load_spec("paper", wild | {"stop.iterations": 1}), tmp_path / "run", resume=True)
    assert good.summary["iterations"] == 1 and good.history[-1]["upper_loss"] < 1e6, "the last good checkpoint"


@pytest.mark.slow
def test_a_run_told_to_restart_halves_the_step_until_it_goes_and_says_so(tmp_path: Path) -> None:
    result = run(load_spec("paper", WILD), tmp_path / "run", on_divergence="restart")
    restarts = result.summary["restarts"]
    assert restarts and all(r["after"] == r["before"] / 2 and r["reason"] for r in restarts)
    assert restarts[0]["before"] == 50.0 and restarts[0]["rounds_lost"] > 0
    assert result.summary["iterations"] == 12 and result.history[-1]["restarts"] == len(restarts)
    assert result.history[-1]["upper_loss"] < 1e6 * max(1, abs(result.history[0]["upper_loss"]))
    longer = WILD | {"stop.iterations": 14}
    resumed = run(load_spec("paper", longer), tmp_path / "run", resume=True)
    assert resumed.history[-1]["restarts"] == len(restarts), "a resumed run goes on with the smaller step"


def test_the_simulation_and_the_loop_fail_alike(quadratic: QuadraticTask) -> None:
    found = []
    for engine in (
        Loop(quadratic.problem, quadratic.clients),
        Simulation(quadratic.problem, quadratic.clients, devices=1),
    ):
        fed = Federation(Chaos(engine, FAULTS), policies=Policies(deadline=5.0))
        found.append((first_round(fed, quadratic), fed.ledger.injected))
    (one, a), (other, b) = found
    assert a == b
    np.testing.assert_allclose(one.q, other.q, rtol=1e-5)
