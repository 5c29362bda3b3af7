"""Differential privacy: what is clipped, where noise comes from, and what an epsilon is charged for."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import dp_accounting as dp
import jax.numpy as jnp
import numpy as np
import pytest

from fakes import FakeEngine, Reply, answer
from fedbilevel import (
    Accountant,
    AggITD,
    Federation,
    LFedNest,
    Policies,
    Privacy,
    SettingsError,
    Simulation,
    load_spec,
    run,
    stacked,
)
from fedbilevel.aggregate import Median, gather_by
from fedbilevel.engines import Call, Engine, Fault, Reason, Replies, make_call
from fedbilevel.ledger import Event
from fedbilevel.privacy import (
    ClientUploads,
    CohortUploads,
    NoisySum,
    Release,
    Secret,
    epsilon_of,
    local_epsilon,
    spent_epsilon,
)
from fedbilevel.privacy._accounting import ORDERS, _epsilon
from fedbilevel.problem import Task
from fedbilevel.rng import Address, Kind
from fedbilevel.spec import parse
from own_steps import momentum

QUIET = 1e-12  # a noise that is none, to see the clipping alone
SECRET = Secret(bytes(range(32)))

SENT = np.full(4000, 7.0, np.float32)


def clients(norms: list[float]) -> FakeEngine:
    """Client i contributes a vector of norm `norms[i]` to y and h; nan is a reply that is not finite."""

    def replies(call: Call) -> Iterator[Replies]:
        for client in call.clients:
            u = np.full((1, SENT.size), norms[client] / math.sqrt(SENT.size), np.float32)
            yield Replies(clients=(client,), reply=Reply(jnp.asarray(SENT + u), jnp.asarray(u)))

    return FakeEngine(len(norms), SENT.size, SENT.size, replies)


def private(engine: Engine, privacy: Privacy, **more: Any) -> Federation:
    """A federation under privacy, of the parts that a run makes it of."""
    secret = more.pop("secret", SECRET)
    gather = (lambda call: NoisySum(privacy, secret, call)) if privacy.mode == "central" else None
    parts: dict[str, Any] = {"gather": gather, "policies": Policies().under_privacy(), **more}
    noisy = stacked(engine, privacy=privacy, secret=secret)
    return Federation(noisy, **{"accountant": Accountant(privacy), **parts})


def contributions(engine: FakeEngine, **privacy: Any) -> tuple[np.ndarray, np.ndarray]:
    fed = private(engine, Privacy(**privacy))
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
    assert np.linalg.norm(y) == pytest.approx(2, rel=1e-3)
    assert np.linalg.norm(h) == pytest.approx(0.25, rel=1e-3)
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
def test_noise_is_the_same_for_the_same_release_only(mode: Any) -> None:
    """The same for the same secret and round; another for every round, field and secret."""

    def rounds(last: int) -> list[np.ndarray]:
        secret = Secret(bytes([*range(31), last]))
        fed = private(clients([0.0, 0.0]), Privacy(mode=mode), secret=secret)
        replies = [fed.round(answer, y=SENT) for _ in range(2)]
        return [np.asarray(field) - offset for r in replies for field, offset in ((r.y, SENT), (r.h, 0.0))]

    one, again, other = rounds(0), rounds(0), rounds(1)
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    different = [*one, *other]
    close = [np.corrcoef(a, b)[0, 1] for i, a in enumerate(different) for b in different[:i]]
    assert np.abs(close).max() < 0.1


FORMS: dict[str, tuple[Fault, Callable[[Any], Any]]] = {
    "h has type float64 instead of float32": (Fault.MISFIT, lambda r: r._replace(h=np.asarray(r.h, np.float64))),
    "h has shape (3,) instead of (4000,)": (Fault.MISFIT, lambda r: r._replace(h=r.h[:, :3])),
    "y has shape (3,) instead of (4000,)": (Fault.MISFIT, lambda r: r._replace(y=r.y[:, :3])),
    "values for ['y'] instead of ['h', 'y']": (Fault.MISFIT, lambda r: r._replace(h=None)),
    "fields [] instead of ['h', 'y']": (Fault.MISFIT, lambda r: None),
    "out of memory": (Fault.FAILED, lambda r: None),
}


@pytest.mark.parametrize("mode", ["central", "local"])
@pytest.mark.parametrize("why", FORMS)
def test_a_reply_of_a_wrong_form_is_rejected_and_named_as_without_noise(why: str, mode: Any) -> None:
    fault, wrong = FORMS[why]
    honest = clients([1.0, 1.0, 1.0])

    def replies(call: Call) -> Iterator[Replies]:
        for chunk in honest.replies(call):
            if chunk.clients != (1,):
                yield chunk
            elif fault is Fault.FAILED:
                yield Replies(refused={1: Reason(fault, why)})
            else:
                yield Replies(clients=(1,), reply=wrong(chunk.reply))

    engine = FakeEngine(3, SENT.size, SENT.size, replies)
    fed = private(engine, Privacy(mode=mode, noise=QUIET))
    answered = 3 if mode == "central" else 2  # central: the sum over those asked; local: the mean of what came
    assert np.linalg.norm(np.asarray(fed.round(answer, y=SENT).h)) == pytest.approx(2 / answered, rel=1e-3)
    assert fed.ledger.rejected == {Event(1, "answer", why): 1}


def test_gossip_refuses_privacy_and_aggregators() -> None:
    refused = {"privacy.mode": "central", "federation.aggregator": "median"}
    for field, value in refused.items():
        with pytest.raises(SettingsError, match=f"{field} = '{value}' is wrong: the algorithm has no server"):
            load_spec("demo", {"algorithm.name": "gossip", field: value})


def test_each_client_has_noise_of_its_own_in_local_privacy() -> None:
    engine = stacked(clients([0.0, 0.0]), privacy=Privacy(mode="local"), secret=SECRET)
    call = make_call(answer, Address(0, Kind.ROUND, 0), (0, 1), {"y": SENT})
    first, second = (np.asarray(chunk.reply.h[0]) for chunk in engine.replies(call))
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


def central(noise: float, releases: dict[Release, int], clients: int, delta: float = 1e-5) -> float:
    return spent_epsilon(Privacy(mode="central", noise=noise, delta=delta), releases, clients)


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """δ(ε) of a Gaussian mechanism (Balle and Wang 2018, theorem 8), written out."""
    low, high = NormalDist().cdf(0.5 / multiplier - epsilon * multiplier), -0.5 / multiplier - epsilon * multiplier
    return low - math.exp(epsilon) * NormalDist().cdf(high)


def test_without_sampling_epsilon_is_exactly_that_of_one_gaussian_mechanism() -> None:
    """Ten clients of ten, four times, with 3 vectors: 12 uploads of multiplier σ/2 are one of σ/(2 √12)."""
    cases: list[dict[Release, int]] = [{CohortUploads(10, 3): 4}, {CohortUploads(10, 12): 1}]
    for releases in cases:
        found = central(40.0, releases, 10)
        assert gaussian_delta(found, 20 / math.sqrt(12)) == pytest.approx(1e-5, rel=1e-6)
        assert found < rdp_epsilon(lambda a: 12 * a / (2 * 20.0**2)), "Rényi accounting is a bound, and not exact"


def test_next_to_no_noise_has_an_epsilon_that_is_bounded_and_goes_on_growing() -> None:
    """At the change from the exact formula to the bound, ε is larger by about a thousandth."""
    found = [local_epsilon(1, 2 * multiplier, 1e-5) for multiplier in (1e-9, 1e-6, 0.99999e-3, 1.00001e-3, 1e-2)]
    assert found == sorted(found, reverse=True) and math.isfinite(found[0])
    assert found[2] == pytest.approx(found[3], rel=2e-3) and found[2] > found[3]


def test_epsilon_is_never_above_that_of_a_client_in_every_cohort() -> None:
    """With little noise, the bound for sampling without replacement is worse than no bound for sampling at all."""
    releases: dict[Release, int] = {CohortUploads(90, 5): 10}
    found = central(2.0, releases, 100)
    assert found == pytest.approx(local_epsilon(50, 2.0, 1e-5), rel=1e-9)
    assert found < _epsilon(((100, 90, 5, 10),), 1.0, 1e-5)


def test_the_uploads_of_one_cohort_are_one_mechanism_under_one_sample() -> None:
    """k vectors of a cohort are charged as one vector with noise smaller by √k, not as k cohorts."""
    together = central(6.0, {CohortUploads(10, 9): 20}, 100)
    one = central(2.0, {CohortUploads(10, 1): 20}, 100)
    apart = central(6.0, {CohortUploads(10, 1): 180}, 100)
    assert together == pytest.approx(one, rel=1e-9)
    assert together > 1.2 * apart


def test_a_smaller_cohort_amplifies_and_more_noise_costs_less() -> None:
    def epsilon(cohort: int, noise: float, count: int = 10) -> float:
        return central(noise, {CohortUploads(cohort, 5): count}, 1000)

    assert epsilon(10, 10) < epsilon(100, 10) < epsilon(1000, 10)
    assert epsilon(100, 20) < epsilon(100, 10) < epsilon(100, 10, 20)
    assert central(1.0, {}, 100) == 0.0
    assert epsilon(100, 10) < central(10.0, {CohortUploads(100, 5): 10}, 1000, delta=1e-7)


def test_local_privacy_is_charged_for_the_client_that_sent_most_and_is_not_amplified() -> None:
    releases: dict[Release, int] = {ClientUploads(3): 5, ClientUploads(8): 12}
    found = spent_epsilon(Privacy(mode="local", noise=20.0), releases, 1000)
    assert gaussian_delta(found, 10 / math.sqrt(12)) == pytest.approx(1e-5, rel=1e-6)


# -------------------------------------------------------------------------------------------------- what is booked


@pytest.mark.parametrize("mode", ["central", "local"])
def test_what_an_outer_iteration_uploads_is_booked_by_cohort_or_by_client(mode: Any, digits: Task) -> None:
    """AggITD with N = 1: q, y, h, x, and z once or twice by the Q of the iteration: 5 or 6 vectors in 5 rounds."""
    algorithm = AggITD(
        N=1, alpha=0.1, beta=0.05, lam=0.3, participation=5, lower_epochs=1, upper_steps=2, batch_u=8, batch_xi=4
    )
    engine = Simulation(digits.problem, digits.clients, devices=1)
    privacy = Privacy(mode=mode, noise=5.0, clip=1.0)
    accountant = Accountant(privacy)
    fed = private(engine, privacy, accountant=accountant)
    state, drawn, spent = algorithm.init(digits.problem), [], [0.0]
    for _ in range(3):
        drawn.append(int(fed.rng("Q").integers(2)))
        state = algorithm.step(fed, state)
        spent.append(accountant.epsilon(digits.clients.count))
        assert spent[-1] > spent[-2]
    assert fed.ledger.rounds == 15
    vectors = [6 - Q for Q in drawn]
    if mode == "central":
        assert accountant.releases == Counter(CohortUploads(5, k) for k in vectors)
    else:
        assert all(isinstance(release, ClientUploads) for release in accountant.releases)
        assert sum(accountant.releases.values()) == 5 * sum(vectors)
        assert fed.ledger.bytes_up > 0


def test_another_cohort_is_another_sample() -> None:
    accountant = Accountant(Privacy(mode="central"))
    fed = private(clients([0.0] * 10), accountant.privacy, accountant=accountant)
    for rounds in (1, 3):
        cohort = fed.cohort(4)
        for _ in range(rounds):
            cohort.round(answer, y=SENT)
    assert accountant.releases == {CohortUploads(4, 2): 1, CohortUploads(4, 6): 1}


def test_clients_that_keep_something_get_no_credit_for_the_draw_of_cohorts() -> None:
    """Until a step keeps something, the cohort amplifies; then epsilon is that of a client in every cohort."""
    privacy, place = Privacy(mode="central", noise=20.0), Address(0, Kind.ROUND, 0)
    accountant = Accountant(privacy)
    for step, amplified in ((answer, True), (momentum, False)):
        call = Call(step=step, address=place, clients=(3, 5))
        assert call.keeps is not amplified
        accountant.book(call, 0, 2, Reply(jnp.zeros(1), jnp.zeros(1)))
        uploads = sum(
            key.vectors * n for key, n in accountant.books.cohorts.items() if isinstance(key, CohortUploads)
        )
        alone = local_epsilon(uploads, 20.0, privacy.delta)
        assert (accountant.epsilon(100) < alone) is amplified


def test_without_a_mode_nothing_is_clipped_or_booked(tmp_path: Path) -> None:
    engine = clients([1.0, 2.0])
    assert stacked(engine, privacy=Privacy(noise=3.0)) is engine
    small = {"problem.name": "quadratic", "data.clients": 4, "algorithm.participation": 2, "privacy.noise": 3.0}
    result = run(load_spec("demo", small | {"stop.rounds": 5}), tmp_path / "run")
    assert "privacy" not in result.summary and all("epsilon" not in record for record in result.history)


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
    fed = private(
        clients([1.0, 1.0, 900.0]), Privacy(mode="local", noise=QUIET, clip=3.0), gather=gather_by(Median())
    )
    assert np.linalg.norm(np.asarray(fed.round(answer, y=SENT).h)) == pytest.approx(1.0, rel=1e-3)


def test_a_missing_accountant_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SettingsError, match=r"pip install 'fedbilevel\[privacy\]'"):
        Accountant(Privacy(mode="central"))


@pytest.mark.slow
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
    whole = run(load_spec("demo", sets | {"stop.rounds": 9}), tmp_path / "whole", secret=SECRET)
    run(load_spec("demo", sets | {"stop.rounds": 6}), tmp_path / "parts", secret=SECRET)
    parts = run(load_spec("demo", sets | {"stop.rounds": 9}), tmp_path / "parts", resume=True, secret=SECRET)

    def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k != "seconds"} for record in history]

    assert plain(whole.history) == plain(parts.history)
    spent = [record["epsilon"] for record in whole.history]
    assert spent == sorted(spent) and spent[0] == 0.0
    assert all(record["upper_loss"] is None for record in whole.history) and not whole.summary["probes"]
    expected = central(8.0, {CohortUploads(5, 3): 3}, 20)  # LFedNest with SVRG uploads q, y and x
    assert isinstance(load_spec("demo", sets).algorithm, LFedNest)
    assert whole.summary["privacy"]["epsilon"] == pytest.approx(expected, rel=1e-5)
    assert whole.summary["privacy"]["uploads"] == [{"cohort": 5, "vectors": 3, "cohorts": 3}]
