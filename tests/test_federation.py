"""Rounds, replies and the ledger, on an engine whose clients answer whatever the test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from fakes import FakeEngine
from fedbilevel.data import clients_from
from fedbilevel.engines import Call, Loop, Replies
from fedbilevel.errors import SettingsError, TooFewReplies
from fedbilevel.federation import Federation, cohort_size
from fedbilevel.ledger import Ledger
from fedbilevel.oracle import Oracle
from fedbilevel.steps import Draw, PerClient, Sample, Scalar, X, Y, client_step

P, Q = 3, 2  # so a vector of x has 12 bytes and one of y 8


class Both(NamedTuple):
    u: X
    v: Y | None
    loss: Scalar


class Other(NamedTuple):
    w: X


class Number(NamedTuple):
    value: Scalar


@client_step
def both(c: Oracle, **arguments: Any) -> Both:
    """A step that the fake engine never runs."""
    raise AssertionError


@client_step
def lower_mean(c: Oracle, offset: Array, zeta: Draw) -> Number:
    """The mean of the drawn inputs and an offset."""
    inputs = c._data.lower.inputs
    chosen = inputs if zeta.index is None else inputs[zeta.index]
    return Number(jnp.mean(chosen) + offset)


def reply(client: int, value: float | None = None) -> Both:
    value = float(client) if value is None else value
    return Both(np.full((1, P), value, np.float32), np.full((1, Q), 10 * value, "f4"), np.full(1, value, "f4"))


def engine_of(count: int = 5, answer: Callable[[Call], Any] | None = None) -> FakeEngine:
    """Client i answers with i, or all answer by a function."""
    return FakeEngine(count, P, Q, answer or (lambda call: (Replies((c,), reply(c)) for c in call.clients)))


def with_one_wrong(wrong: Any) -> FakeEngine:
    """Clients 0, 1, 3, 4 answer as they should; client 2 answers as told."""
    return engine_of(answer=lambda call: (wrong if c == 2 else Replies((c,), reply(c)) for c in call.clients))


# ------------------------------------------------------------------------------------------ the mean of replies


def test_a_round_is_the_mean_of_the_replies() -> None:
    mean = Federation(engine_of()).round(both)
    np.testing.assert_allclose(mean.u, np.full(P, 2.0))
    np.testing.assert_allclose(mean.v, np.full(Q, 20.0))
    assert float(mean.loss) == 2.0


@settings(max_examples=25)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), st.integers(1, 3))
def test_the_mean_does_not_depend_on_how_the_replies_are_stacked(values: list[float], size: int) -> None:
    def answer(call: Call) -> Iterator[Replies]:
        for start in range(0, len(values), size):
            part = [reply(c, values[c]) for c in range(start, min(start + size, len(values)))]
            yield Replies(
                tuple(range(start, start + len(part))), Both(*(np.concatenate(f) for f in zip(*part, strict=True)))
            )

    mean = Federation(engine_of(len(values), answer)).round(both)
    np.testing.assert_allclose(mean.u, np.full(P, np.mean(values)), rtol=1e-4, atol=1e-4)


def test_a_field_that_no_client_sends_stays_none() -> None:
    engine = engine_of(answer=lambda call: (Replies((c,), reply(c)._replace(v=None)) for c in call.clients))
    fed = Federation(engine)
    assert fed.round(both).v is None
    assert fed.ledger.bytes_up == 5 * 4 * P


nan = reply(2)._replace(u=np.asarray([[1.0, np.nan, 1.0]], np.float32))
infinite = reply(2)._replace(loss=np.asarray([np.inf], np.float32))
wide = reply(2)._replace(v=np.ones((1, Q + 1), np.float32))
double = reply(2)._replace(u=np.ones((1, P), np.float64))
missing = reply(2)._replace(v=None)
WRONG = {
    "u is not finite": Replies((2,), nan),
    "loss is not finite": Replies((2,), infinite),
    "v has shape (3,) instead of (2,)": Replies((2,), wide),
    "u has type float64 instead of float32": Replies((2,), double),
    "fields ['w'] instead of ['loss', 'u', 'v']": Replies((2,), Other(np.ones((1, P), np.float32))),
    "fields [] instead of ['loss', 'u', 'v']": Replies((2,), None),
    "another selection of fields than the replies before it": Replies((2,), missing),
    "late": Replies((), None, {2: "late"}),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_reply_is_left_out_counted_and_named(why: str) -> None:
    fed = Federation(with_one_wrong(WRONG[why]))
    mean = fed.round(both)
    np.testing.assert_allclose(mean.u, np.full(P, (0 + 1 + 3 + 4) / 4))
    np.testing.assert_allclose(mean.v, np.full(Q, 20.0))
    fed.round(both)
    assert fed.ledger.rejected == {f"client 2: both: {why}": 2}
    assert fed.ledger.steps["both"].rejected == 2


def test_a_client_that_is_not_finite_is_left_out_of_a_stack() -> None:
    def answer(call: Call) -> Iterator[Replies]:
        parts = [nan if c == 2 else reply(c) for c in call.clients]
        yield Replies(call.clients, Both(*(np.concatenate(f) for f in zip(*parts, strict=True))))

    fed = Federation(engine_of(answer=answer))
    np.testing.assert_allclose(fed.round(both).u, np.full(P, 2.0))
    assert fed.ledger.rejected == {"client 2: both: u is not finite": 1}


def test_too_few_replies_name_step_round_client_and_remedy() -> None:
    engine = with_one_wrong(Replies((2,), nan))
    assert np.isfinite(Federation(engine, min_replies=4).round(both).loss)
    fed = Federation(engine, min_replies=5)
    with pytest.raises(TooFewReplies) as first:
        fed.round(both, beta=0.5, q=jnp.ones(Q))
    with pytest.raises(TooFewReplies) as second:
        fed.round(both, beta=0.5, q=jnp.ones(Q))
    message = "4 valid replies of 5, 5 needed; client 2: u is not finite; try a smaller beta (0.5)"
    assert str(first.value) == f"both, round 0: {message}"
    assert str(second.value) == f"both, round 1: {message}"
    assert fed.ledger.rounds == 2, "a round that failed was a round"


def test_a_long_list_of_failures_is_cut_and_has_no_wrong_remedy() -> None:
    engine = engine_of(answer=lambda call: [Replies((), None, dict.fromkeys(call.clients, "lost"))])
    with pytest.raises(TooFewReplies, match=r"0 valid replies of 5, 1 needed; client 0: lost; .*; and 2 more$"):
        Federation(engine).round(both, beta=0.5)


def test_replies_are_weighted_by_samples_if_asked() -> None:
    weights = np.asarray([2, 4, 6, 8, 10])  # 2c + 1 lower rows and one upper row
    mean = Federation(engine_of(), weighting="samples").round(both)
    np.testing.assert_allclose(mean.u, np.full(P, np.average(np.arange(5), weights=weights)), rtol=1e-6)
    fed = Federation(with_one_wrong(Replies((2,), nan)), weighting="samples")
    kept = [0, 1, 3, 4]
    np.testing.assert_allclose(fed.round(both).loss, np.average(kept, weights=weights[kept]), rtol=1e-6)


# -------------------------------------------------------------------------------------------------- the ledger


def test_payload_bytes_are_those_of_a_hand_count() -> None:
    fed = Federation(engine_of())
    fed.round(
        both, p=jnp.ones(P), q=np.ones(Q, np.float32), beta=0.5, last=True, name="a", tau=PerClient((1,) * 5)
    )
    account = fed.ledger.steps["both"]
    assert account.bytes_down == 5 * (12 + 8)  # numbers, flags and names are not payload
    assert account.bytes_up == 5 * (12 + 8)  # nor is the loss, a scalar
    assert account.rounds == 1 and account.seconds > 0
    assert (fed.ledger.rounds, fed.ledger.bytes_up, fed.ledger.bytes_down) == (1, 100, 100)


def test_what_is_sent_reaches_the_engine_by_its_kind() -> None:
    engine = engine_of()
    sample, own = Sample("lower", 3), PerClient((1, 2, 3, 4, 5))
    Federation(engine, seed=9).round(both, z=None, q=jnp.ones(Q), beta=0.5, last=True, tau=own, xi=sample)
    (call,) = engine.calls
    assert call.address == (9, "round", 0) and call.clients == (0, 1, 2, 3, 4)
    assert set(call.arrays) == {"q", "beta"} and call.arrays["beta"].dtype == np.float32
    assert call.constants == {"z": None, "last": True}
    assert call.own == {"tau": own} and call.samples == {"xi": sample}


def test_what_is_held_is_billed_once_a_client_and_again_when_changed() -> None:
    fed = Federation(engine_of())
    down = []

    def bill() -> int:
        before = fed.ledger.bytes_down
        fed.round(both)
        down.append(fed.ledger.bytes_down - before)
        return down[-1]

    fed.hold(x=jnp.ones(P))
    assert fed.ledger.bytes_down == 0, "it rides on the next round"
    assert (bill(), bill()) == (5 * 12, 0)
    fed.hold(y=jnp.ones(Q))
    assert (bill(), bill()) == (5 * 8, 0)
    fed.hold(x=jnp.zeros(P), y=jnp.zeros(Q))
    assert (bill(), bill()) == (5 * 20, 0)
    assert fed.ledger.bytes_down == sum(down)


def test_a_client_that_was_absent_gets_what_is_held_when_next_asked() -> None:
    engine = engine_of(10)
    fed = Federation(engine, seed=1)
    fed.hold(x=jnp.ones(P))
    have: set[int] = set()
    for _ in range(12):
        part = fed.cohort(3)
        before = fed.ledger.bytes_down
        part.round(both)
        new = set(part.clients) - have
        assert fed.ledger.bytes_down - before == 12 * len(new)
        assert set(engine.calls[-1].held["x"].missing) == new
        have |= new
    assert len(have) > 6, "the cohorts changed"
    fed.hold(x=jnp.zeros(P))
    before = fed.ledger.bytes_down
    fed.round(both)
    assert fed.ledger.bytes_down - before == 12 * 10


def test_a_client_that_did_not_answer_well_gets_what_is_held_again() -> None:
    engine = with_one_wrong(Replies((2,), nan))
    fed = Federation(engine)
    fed.hold(x=jnp.ones(P))
    for _ in range(2):
        fed.round(both)
    assert engine.calls[0].held["x"].missing == (0, 1, 2, 3, 4)
    assert engine.calls[1].held["x"].missing == (2,)


def test_what_is_released_is_held_no_more() -> None:
    engine = engine_of()
    fed = Federation(engine)
    fed.hold(x=jnp.ones(P), y=jnp.ones(Q))
    fed.release("y")
    fed.round(both)
    assert list(engine.calls[0].held) == ["x"]


def test_an_exchange_mixes_rows_and_bills_every_link() -> None:
    fed = Federation(engine_of(3))
    line = np.asarray([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])  # 0 - 1 - 2: four links
    rows = jnp.arange(6.0).reshape(3, 2)
    mixed = fed.exchange("mix", line, rows=rows)["rows"]
    np.testing.assert_allclose(mixed, line @ np.asarray(rows))
    account = fed.ledger.steps["mix"]
    assert (account.rounds, account.bytes_up, account.bytes_down) == (1, 4 * 8, 4 * 8)


def test_each_keeps_the_replies_apart_is_no_round_and_names_who_fails() -> None:
    fed = Federation(engine_of())
    apart = fed.each(both)
    np.testing.assert_allclose(apart.u[:, 0], np.arange(5.0))
    assert (fed.ledger.rounds, fed.ledger.bytes_up) == (0, 0)
    with pytest.raises(TooFewReplies, match="client 2: u is not finite"):
        Federation(with_one_wrong(Replies((2,), nan))).each(both)


def test_versions_of_what_is_held_never_repeat_among_federations() -> None:
    engine = engine_of()
    for _ in range(2):
        fed = Federation(engine)
        for _ in range(2):
            fed.hold(x=jnp.ones(P))
            fed.round(both)
    assert len({call.held["x"].version for call in engine.calls}) == 4


def test_a_probe_is_billed_apart_and_disturbs_nothing() -> None:
    engines, feds = [engine_of(), engine_of()], []
    for engine, probing in zip(engines, (False, True), strict=True):
        fed = Federation(engine, seed=4)
        fed.hold(x=jnp.ones(P))
        for _ in range(3):
            if probing:
                fed.probe(both, clients=(1, 4), x=jnp.ones(P), xi=Sample("upper", 2))
            fed.cohort(2).round(both, xi=Sample("upper", 2))
        feds.append(fed)
    plain, probed = (fed.ledger for fed in feds)
    assert plain.probes == {} and plain.rounds == probed.rounds == 3
    for name in ("bytes_up", "bytes_down", "rounds"):
        assert getattr(probed.steps["both"], name) == getattr(plain.steps["both"], name)
    apart = probed.probes["both"]
    assert (apart.rounds, apart.bytes_down, apart.bytes_up) == (3, 3 * 2 * 12, 3 * 2 * 20)
    rounds = [call for call in engines[1].calls if call.address[1] == "round"]
    assert len(rounds) == 3 and len(engines[1].calls) == 6
    for one, other in zip(engines[0].calls, rounds, strict=True):
        assert (one.address, one.clients) == (other.address, other.clients)
        assert one.held["x"].missing == other.held["x"].missing
    assert all(call.held == {} for call in engines[1].calls if call.address[1] == "probe")


def test_a_probe_draws_elsewhere_and_rounds_draw_the_same_with_and_without_it() -> None:
    g = np.random.default_rng(0)
    clients = clients_from([(g.normal(size=n).astype("f4"), np.ones(1, "f4")) for n in (9, 4, 7)])
    engine = Loop(engine_of().problem, clients)
    feds = [Federation(engine, seed=2) for _ in range(3)]
    zeta = Sample("lower", 2)
    values = []
    for i, fed in enumerate(feds):
        if i == 1:
            probe = float(fed.probe(lower_mean, offset=0.0, zeta=zeta).value)
        values.append([float(fed.round(lower_mean, offset=0.0, zeta=zeta).value) for _ in range(3)])
    assert values[0] == values[1] == values[2]
    assert len({*values[0], probe}) == 4
    everything = np.mean([clients.load(i).lower.inputs.mean() for i in range(3)])
    got = feds[0].round(lower_mean, offset=5.0, zeta=Sample("lower"))
    # Loop pads to nine rows with copies of the first; this step does not look at the weights
    padded = np.mean(
        [np.r_[d, np.full(9 - len(d), d[0])].mean() for d in (clients.load(i).lower.inputs for i in range(3))]
    )
    assert float(got.value) == pytest.approx(padded + 5, rel=1e-6) and padded != everything


def test_the_ledger_goes_to_json_and_back() -> None:
    fed = Federation(with_one_wrong(Replies((2,), nan)))
    fed.hold(x=jnp.ones(P))
    for _ in range(2):
        fed.round(both)
    fed.probe(both)
    text = json.dumps(fed.ledger.to_mapping())
    again = Ledger.from_mapping(json.loads(text))
    assert again == fed.ledger and again.rejected["client 2: both: u is not finite"] == 3
    assert (again.rounds, again.bytes_up, again.bytes_down) == (2, 2 * 5 * 20, (5 + 1) * 12)
    assert again.seconds == fed.ledger.seconds
    goes_on = Federation(engine_of(), ledger=again)
    goes_on.round(both)
    assert again.rounds == 3 and fed.ledger.rounds == 2


# ------------------------------------------------------------------------------------------------- the cohort


@pytest.mark.parametrize(
    ("participation", "clients", "size"),
    [(1, 10, 1), (10, 10, 10), (1.0, 10, 10), (0.1, 100, 10), (0.25, 10, 2), (0.001, 10, 1), (0.5, 1, 1)],
)
def test_a_cohort_is_a_number_or_a_share(participation: float, clients: int, size: int) -> None:
    assert cohort_size(participation, clients) == size
    assert len(Federation(engine_of(clients)).cohort(participation).clients) == size


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (0, "participation = 0 is wrong: there are 5 clients; use 1 to 5"),
        (6, "participation = 6 is wrong: there are 5 clients"),
        (0.0, "participation = 0.0 is wrong: a share"),
        (1.5, r"participation = 1.5 is wrong.*write a whole number"),
    ],
)
def test_a_participation_that_means_nothing_is_refused(participation: float, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Federation(engine_of()).cohort(participation)


def test_a_cohort_is_drawn_at_seed_and_round() -> None:
    def cohorts(seed: int) -> list[tuple[int, ...]]:
        fed = Federation(engine_of(50), seed=seed)
        drawn = []
        for _ in range(4):
            part = fed.cohort(0.2)
            assert part.clients == fed.cohort(0.2).clients, "nothing is drawn by asking"
            assert len(set(part.clients)) == 10 and sorted(part.clients) == list(part.clients)
            assert set(part.clients) <= set(range(50))
            part.round(both)
            drawn.append(part.clients)
        assert tuple(fed.clients) == tuple(range(50)) and fed.ledger.rounds == 4
        return drawn

    assert cohorts(0) == cohorts(0)
    assert len(set(cohorts(0) + cohorts(1))) == 8


def test_a_resumed_federation_goes_on_with_the_same_choices() -> None:
    fed = Federation(engine_of(50), seed=3)
    for _ in range(3):
        fed.round(both)
    resumed = Federation(engine_of(50), seed=3, ledger=Ledger.from_mapping(fed.ledger.to_mapping()))
    assert resumed.cohort(5).clients == fed.cohort(5).clients
    assert resumed.rng("Q").integers(10**9) == fed.rng("Q").integers(10**9) != fed.rng("R").integers(10**9)
