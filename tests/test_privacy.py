"""Differential privacy: what is clipped, where noise comes from, and what an epsilon is charged for."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest

from fakes import FakeEngine, Reply, answer
from fedbilevel import AggITD, Federation, LFedNest, SettingsError, Simulation, load_spec, run
from fedbilevel.aggregate import Median
from fedbilevel.engines import Call, Replies
from fedbilevel.federation import Ledger
from fedbilevel.privacy import ORDERS, Privacy, epsilon_of
from fedbilevel.problem import Task
from fedbilevel.spec import parse

QUIET = 1e-12  # a noise that is none, to see the clipping alone


SENT = np.full(4000, 7.0, np.float32)


def clients(norms: list[float]) -> FakeEngine:
    """Client i contributes a vector of norm `norms[i]` to y and h; nan is a reply that is not finite."""

    def replies(call: Call) -> Iterator[Replies]:
        for client in call.clients:
            u = np.full((1, SENT.size), norms[client] / math.sqrt(SENT.size), np.float32)
            yield Replies((client,), Reply(SENT + u, u))

    return FakeEngine(len(norms), SENT.size, SENT.size, replies)


def contributions(engine: FakeEngine, **privacy: Any) -> tuple[np.ndarray, np.ndarray]:
    fed = Federation(engine, privacy=Privacy(**privacy))
    y, h = fed.round(answer, y=SENT)
    return np.asarray(y) - SENT, np.asarray(h)


# ---------------------------------------------------------------------------------------------- clipping and noise


@pytest.mark.parametrize("mode", ["central", "local"])
def test_contributions_are_clipped_by_norm_and_averaged_over_those_asked(mode: Any) -> None:
    """Norms 0.5, 1 and 30 at C = 2 are a sum of 3.5; y is clipped by its difference to what was sent."""
    for got in contributions(clients([0.5, 1.0, 30.0]), mode=mode, clip=2.0, noise=QUIET):
        assert np.linalg.norm(got) == pytest.approx(3.5 / 3, rel=1e-3)


def test_each_field_may_have_a_bound_of_its_own() -> None:
    y, h = contributions(clients([30.0]), mode="central", clip={"y": 2.0, "h": 0.25}, noise=QUIET)
    assert (np.linalg.norm(y), np.linalg.norm(h)) == (pytest.approx(2, rel=1e-3), pytest.approx(0.25, rel=1e-3))
    with pytest.raises(SettingsError, match=r"privacy.clip = \{'y': 2.0\} is wrong: clients upload h too"):
        contributions(clients([30.0]), mode="central", clip={"y": 2.0}, noise=QUIET)


@pytest.mark.parametrize("norm", [2.0001, 3.0, 1e5, 1e14])
def test_a_clipped_vector_is_never_longer_than_the_bound(norm: float) -> None:
    _, h = contributions(clients([norm]), mode="central", clip=2.0, noise=QUIET)
    assert 2.0 * (1 - 1e-4) < np.linalg.norm(h.astype(float)) <= 2.0


def test_a_reply_that_is_not_finite_contributes_nothing_and_does_not_change_the_denominator() -> None:
    """A mean over those who answered would tell who did not."""
    for mode in ("central", "local"):
        _, h = contributions(clients([1.0, math.nan, 1.0, 1.0]), mode=mode, clip=2.0, noise=QUIET)
        assert np.linalg.norm(h) == pytest.approx(3 / 4, rel=1e-3)


@pytest.mark.parametrize(("mode", "deviation"), [("central", 3 * 2 / 5), ("local", 3 * 2 / math.sqrt(5))])
def test_the_noise_has_the_deviation_that_the_accountant_is_told(mode: Any, deviation: float) -> None:
    """σ C = 6 on the sum of five, or on each of five replies."""
    for got in contributions(clients([0.0] * 5), mode=mode, clip=2.0, noise=3.0):
        assert got.std() == pytest.approx(deviation, rel=0.05)
        assert abs(got.mean()) < 4 * deviation / math.sqrt(got.size)


@pytest.mark.parametrize("mode", ["central", "local"])
def test_noise_is_drawn_at_an_address(mode: Any) -> None:
    """The same for the same seed and round; another for every round, field and seed."""

    def rounds(seed: int) -> list[np.ndarray]:
        fed = Federation(clients([0.0, 0.0]), seed=seed, privacy=Privacy(mode=mode))
        replies = [fed.round(answer, y=SENT) for _ in range(2)]
        return [np.asarray(field) - offset for r in replies for field, offset in ((r.y, SENT), (r.h, 0.0))]

    one, again, other = rounds(0), rounds(0), rounds(1)
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    different = [*one, *other]
    close = [np.corrcoef(a, b)[0, 1] for i, a in enumerate(different) for b in different[:i]]
    assert np.abs(close).max() < 0.1


FORMS = {
    "h has type float64 instead of float32": lambda reply: reply._replace(h=reply.h.astype(np.float64)),
    "h has shape (3,) instead of (4000,)": lambda reply: reply._replace(h=reply.h[:, :3]),
    "y has shape (3,) instead of (4000,)": lambda reply: reply._replace(y=reply.y[:, :3]),
    "fields [] instead of ['h', 'y']": lambda reply: None,
    "late": lambda reply: "late",
}


@pytest.mark.parametrize("why", FORMS)
def test_a_reply_of_a_wrong_form_is_rejected_and_named_as_without_noise(why: str) -> None:
    engine = clients([1.0, 1.0, 1.0])
    honest = engine.replies

    def replies(call: Call) -> Any:
        for chunk in honest(call):
            if chunk.clients != (1,):
                yield chunk
            else:
                wrong = FORMS[why](chunk.reply)
                yield Replies((), None, {1: wrong}) if wrong == "late" else Replies((1,), wrong)

    engine.replies = replies  # type: ignore[method-assign]
    fed = Federation(engine, privacy=Privacy(mode="local", noise=QUIET))
    assert np.linalg.norm(fed.round(answer, y=SENT).h) == pytest.approx(1.0, rel=1e-3)
    assert fed.ledger.rejected == {f"client 1: answer: {why}": 1}


def test_gossip_refuses_privacy_and_aggregators() -> None:
    for more in (dict(privacy=Privacy(mode="central")), dict(aggregator=Median())):
        with pytest.raises(SettingsError, match="mix: gossip has no server"):
            Federation(clients([0.0, 0.0]), **more).exchange("mix", np.eye(2), y=np.ones((2, 3), np.float32))


def test_each_client_has_noise_of_its_own_in_local_privacy() -> None:
    fed = Federation(clients([0.0, 0.0]), privacy=Privacy(mode="local"))
    call = Call(answer, (0, "round", 0), (0, 1), arrays={"y": SENT})
    first, second = (np.asarray(chunk.reply.h[0]) for chunk in fed.engine.replies(call))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


# -------------------------------------------------------------------------------------------------- the accountant

PUBLISHED = {
    # noise, rate, steps, delta, epsilon, by the moments accountant
    "Abadi et al. 2016, section 3.2: 10,000 steps": (4.0, 0.01, 10_000, 1e-5, 1.26),
    "TensorFlow Privacy, first README of the tutorials": (1.12, 256 / 60_000, 60 * 60_000 // 256, 1e-5, 2.92),
    "TensorFlow Privacy, MNIST tutorial: 15 epochs": (1.3, 256 / 60_000, 15 * 60_000 // 256, 1e-5, 1.19),
    "TensorFlow Privacy, MNIST tutorial: 60 epochs": (1.1, 256 / 60_000, 60 * 60_000 // 256, 1e-5, 3.01),
    "TensorFlow Privacy, MNIST tutorial: 45 epochs": (0.7, 256 / 60_000, 45 * 60_000 // 256, 1e-5, 7.10),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_epsilon_agrees_with_published_examples(case: str) -> None:
    """The published values turn a Rényi divergence r of order a into ε = r + log(1/δ)/(a-1), Mironov 2017.

    The accountant has a tighter way since (Canonne, Kamath and Steinke 2020):
    ε = r + log(1-1/a) - log(δa)/(a-1). The r that it used give the published values back.
    """
    noise, rate, steps, delta, published = PUBLISHED[case]
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)

    def classic(a: float) -> float:
        r = (
            epsilon_of(event, delta, "ADD_OR_REMOVE_ONE", (a,))
            - math.log1p(-1 / a)
            + math.log(delta * a) / (a - 1)
        )
        return r + math.log(1 / delta) / (a - 1)

    near = min(range(2, 40), key=classic)
    assert min(classic(near + x / 10) for x in range(-9, 10)) == pytest.approx(published, abs=0.006)
    assert 0.75 * published < epsilon_of(event, delta, "ADD_OR_REMOVE_ONE") < published


def rdp_epsilon(rdp: Any, delta: float = 1e-5) -> float:
    """The accountant's way from Rényi divergences to ε, written out."""
    return min(max(0.0, rdp(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)) for a in ORDERS)


def test_without_sampling_epsilon_is_that_of_one_gaussian_mechanism() -> None:
    """Ten clients of ten, four times, with 3 vectors: 12 uploads of multiplier σ/2, and r = 12 a / (2 (σ/2)²)."""
    private = Privacy(mode="central", noise=40.0)
    expected = rdp_epsilon(lambda a: 12 * a / (2 * 20.0**2))
    assert private.epsilon({"10:3": 4}, 10) == pytest.approx(expected, rel=1e-6)
    assert private.epsilon({"10:12": 1}, 10) == pytest.approx(expected, rel=1e-6)


def test_the_uploads_of_one_cohort_are_one_mechanism_under_one_sample() -> None:
    """k vectors of a cohort are charged as one vector with noise smaller by √k, not as k cohorts."""
    together = Privacy(mode="central", noise=6.0).epsilon({"10:9": 20}, 100)
    one = Privacy(mode="central", noise=2.0).epsilon({"10:1": 20}, 100)
    apart = Privacy(mode="central", noise=6.0).epsilon({"10:1": 180}, 100)
    assert together == pytest.approx(one, rel=1e-9)
    assert together > 1.2 * apart


def test_a_smaller_cohort_amplifies_and_more_noise_costs_less() -> None:
    def epsilon(cohort: int, noise: float, count: int = 10) -> float:
        return Privacy(mode="central", noise=noise).epsilon({f"{cohort}:5": count}, 1000)

    assert epsilon(10, 10) < epsilon(100, 10) < epsilon(1000, 10)
    assert epsilon(100, 20) < epsilon(100, 10) < epsilon(100, 10, 20)
    assert Privacy(mode="central").epsilon({}, 100) == 0.0
    assert epsilon(100, 10) < Privacy(mode="central", noise=10.0, delta=1e-7).epsilon({"100:5": 10}, 1000)


def test_local_privacy_is_charged_for_the_client_that_sent_most_and_is_not_amplified() -> None:
    private = Privacy(mode="local", noise=20.0)
    expected = rdp_epsilon(lambda a: 12 * a / (2 * 10.0**2))
    assert private.epsilon({"3": 5, "8": 12}, 1000) == pytest.approx(expected, rel=1e-6)


# -------------------------------------------------------------------------------------------------- what is booked


@pytest.mark.parametrize("mode", ["central", "local"])
def test_what_an_outer_iteration_uploads_is_booked_by_cohort_or_by_client(mode: Any, digits: Task) -> None:
    """AggITD with N = 1: q, y, h, x, and z once or twice by the Q of the iteration: 5 or 6 vectors in 5 rounds."""
    algorithm = AggITD(
        N=1, alpha=0.1, beta=0.05, lam=0.3, participation=5, lower_epochs=1, upper_steps=2, batch_u=8, batch_xi=4
    )
    engine = Simulation(digits.problem, digits.clients, devices=1)
    fed = Federation(engine, privacy=Privacy(mode=mode, noise=5.0, clip=1.0))
    state, drawn, spent = algorithm.init(digits.problem), [], [0.0]
    for _ in range(3):
        drawn.append(int(fed.rng("Q").integers(2)))
        state = algorithm.step(fed, state)
        assert fed.epsilon is not None and fed.epsilon > spent[-1]
        spent.append(fed.epsilon)
    assert fed.ledger.rounds == 15
    vectors = [6 - Q for Q in drawn]
    if mode == "central":
        assert fed.ledger.releases == Counter(f"5:{k}" for k in vectors)
    else:
        assert sum(fed.ledger.releases.values()) == 5 * sum(vectors)
        assert fed.ledger.bytes_up > 0
    again = Ledger.from_mapping(json.loads(json.dumps(fed.ledger.to_mapping())))
    assert again.releases == fed.ledger.releases


def test_another_cohort_is_another_sample() -> None:
    fed = Federation(clients([0.0] * 10), privacy=Privacy(mode="central"))
    for rounds in (1, 3):
        cohort = fed.cohort(4)
        for _ in range(rounds):
            cohort.round(answer, y=SENT)
    assert fed.ledger.releases == {"4:2": 1, "4:6": 1}


def test_without_privacy_nothing_is_booked() -> None:
    fed = Federation(clients([1.0, 2.0]), privacy=Privacy(noise=3.0))
    fed.round(answer, y=SENT)
    assert fed.privacy is None and fed.epsilon is None and "releases" not in fed.ledger.to_mapping()


# -------------------------------------------------------------------------------------------------- specs and runs


def test_a_spec_with_a_bound_for_each_field_survives_the_way_to_toml_and_back() -> None:
    sets = ["privacy.mode=central", "privacy.clip.q=1.0", "privacy.clip.x=0.5"]
    spec = load_spec("demo", sets)
    assert spec.privacy == Privacy(mode="central", clip={"q": 1.0, "x": 0.5})
    assert parse(spec.to_mapping()) == spec
    assert spec.digest != load_spec("demo").digest


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ({"federation.weighting": "samples"}, r"federation.weighting = 'samples' is wrong with privacy"),
        ({"federation.aggregator": "median"}, r"federation.aggregator is wrong with privacy.mode = 'central'"),
        ({"algorithm.name": "ma-dsbo"}, r"privacy.mode = 'central' is wrong: the algorithm has no server"),
        ({"privacy.noise": 0.0}, r"privacy.noise = 0.0 is wrong"),
        ({"privacy.delta": 1.0}, r"privacy.delta = 1.0 is wrong"),
    ],
)
def test_settings_that_the_noise_is_not_made_for_are_refused(sets: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load_spec("demo", {"privacy.mode": "central", **sets})


def test_local_privacy_leaves_the_server_its_aggregator() -> None:
    fed = Federation(clients([1.0, 1.0, 900.0]), aggregator=Median(), privacy=Privacy(mode="local", noise=QUIET))
    assert np.linalg.norm(fed.round(answer, y=SENT).h) == pytest.approx(1.0, rel=1e-3)


def test_a_missing_accountant_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SettingsError, match=r"pip install 'fedbilevel\[privacy\]'"):
        Federation(clients([1.0]), privacy=Privacy(mode="central"))


def test_a_private_run_records_epsilon_probes_no_client_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    sets = {
        "problem.name": "quadratic",
        "data.clients": 20,
        "algorithm.name": "lfednest",
        "algorithm.participation": 5,
        "algorithm.lower_epochs": 1,
        "privacy.mode": "central",
        "privacy.noise": 8.0,
        "evaluate.checkpoint_every": 1,
    }
    whole = run(load_spec("demo", sets | {"stop.rounds": 9}), tmp_path / "whole")
    run(load_spec("demo", sets | {"stop.rounds": 6}), tmp_path / "parts")
    parts = run(load_spec("demo", sets | {"stop.rounds": 9}), tmp_path / "parts", resume=True)

    def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k != "seconds"} for record in history]

    assert plain(whole.history) == plain(parts.history)
    spent = [record["epsilon"] for record in whole.history]
    assert spent == sorted(spent) and spent[0] == 0.0
    assert all(record["upper_loss"] is None for record in whole.history) and not whole.summary["probes"]
    uploads = 3  # of LFedNest with SVRG: q, y, x
    expected = Privacy(mode="central", noise=8.0).epsilon({f"5:{uploads}": 3}, 20)
    assert isinstance(load_spec("demo", sets).algorithm, LFedNest)
    assert whole.summary["privacy"]["epsilon"] == pytest.approx(expected, rel=1e-5)
    assert whole.summary["privacy"]["uploads"] == {f"5:{uploads}": 3}
