"""Rounds, replies and the ledger, on an engine whose clients answer whatever the test wants."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from fakes import ALL, FakeEngine, Watching
from fedbilevel.agents import Agents
from fedbilevel.aggregate import Gather, Median, NormBound, gather_by
from fedbilevel.batch import Batch
from fedbilevel.data import clients_from
from fedbilevel.engines import Call, Engine, Fault, Loop, Reason, Replies
from fedbilevel.engines._work import prepare
from fedbilevel.errors import Diverged, SettingsError, TooFewReplies
from fedbilevel.federation import Federation, cohort_size
from fedbilevel.layers import Attack
from fedbilevel.ledger import Event, Ledger
from fedbilevel.oracle import Oracle
from fedbilevel.policies import Policies
from fedbilevel.problem import Problem
from fedbilevel.rng import Address, Kind
from fedbilevel.steps import Draw, Next, PerClient, Sample, Scalar, X, Y, client_step

P, Q = 3, 2  # so a vector of x has 12 bytes and one of y 8


class Both(NamedTuple):
    u: X
    v: Y | None
    loss: Scalar


class Other(NamedTuple):
    w: X


class Number(NamedTuple):
    value: Scalar


class Direction(NamedTuple):
    x: X
    y: Y


class Moved(NamedTuple):
    y: Next[Y]


@client_step
def both(
    c: Oracle,
    p: Array | None = None,
    q: Array | None = None,
    x: Array | None = None,
    z: Array | None = None,
    tau: Array | None = None,
    beta: float = 1.0,
    last: bool = False,
    name: str = "",
    xi: Draw = ALL,
    bare: bool = False,
) -> Both:
    """The fields that the fake clients send; `bare` leaves v out."""
    y = jnp.zeros(Q)
    return Both(c.f_x(y, xi), None if bare else c.g_y(y, ALL), c.f(y, xi))


@client_step
def direction(c: Oracle) -> Direction:
    """Gradients that have the names of the vectors that the client holds."""
    return Direction(c.f_x(c.y, ALL), c.f_y(c.y, ALL))


@client_step
def moved(c: Oracle, zeta: Draw) -> Moved:
    """A vector that is said to be the next y, whether the client has a y or not."""
    return Moved(c.g_y(jnp.zeros(Q), zeta))


@client_step
def lower_mean(c: Oracle, offset: Array, zeta: Draw) -> Number:
    """The mean of the drawn inputs and an offset."""
    return Number(c.g(jnp.zeros(Q), zeta, at=jnp.zeros(P)) + offset)


def averaging() -> Problem:
    """A problem whose lower loss is the mean of the drawn inputs."""

    def lower(x: Array, y: Array, batch: Batch) -> Array:
        return batch.mean(batch.inputs)

    return Problem(jnp.zeros(P), jnp.zeros(Q), lower, lower)


def reply(client: int, value: float | None = None) -> Both:
    value = float(client) if value is None else value
    return Both(
        *(jnp.asarray(a, jnp.float32) for a in (np.full((1, P), value), np.full((1, Q), 10 * value), [value]))
    )


def one(client: int, value: Any) -> Replies:
    """The reply of one client."""
    return Replies(clients=(client,), reply=value)


def engine_of(count: int = 5, answer: Callable[[Call], Iterable[Replies]] | None = None) -> FakeEngine:
    """Client i answers with i, or all answer by a function."""
    return FakeEngine(count, P, Q, answer or (lambda call: (one(c, reply(c)) for c in call.clients)))


def with_one_wrong(wrong: Replies, who: int = 2) -> FakeEngine:
    """All of five clients but one answer as they should; that one answers as told."""
    return engine_of(answer=lambda call: (wrong if c == who else one(c, reply(c)) for c in call.clients))


def rejected(client: int, why: str, count: int) -> dict[Event, int]:
    return {Event(client, "both", why): count}


def stacked(parts: Iterable[Both]) -> Both:
    return Both(*(jnp.concatenate(f) for f in zip(*parts, strict=True)))


# ------------------------------------------------------------------------------------------ the mean of replies


def test_a_round_is_the_mean_of_the_replies() -> None:
    mean = Federation(engine_of()).round(both)
    np.testing.assert_allclose(mean.u, np.full(P, 2.0))
    assert mean.v is not None
    np.testing.assert_allclose(mean.v, np.full(Q, 20.0))
    assert float(mean.loss) == 2.0


@settings(max_examples=25)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), st.integers(1, 3))
def test_the_mean_does_not_depend_on_how_the_replies_are_stacked(values: list[float], size: int) -> None:
    def answer(call: Call) -> Iterator[Replies]:
        for start in range(0, len(values), size):
            part = [reply(c, values[c]) for c in range(start, min(start + size, len(values)))]
            yield Replies(clients=tuple(range(start, start + len(part))), reply=stacked(part))

    mean = Federation(engine_of(len(values), answer)).round(both)
    np.testing.assert_allclose(mean.u, np.full(P, np.mean(values)), rtol=1e-4, atol=1e-4)


def test_a_field_that_the_step_leaves_out_stays_none() -> None:
    engine = engine_of(answer=lambda call: (one(c, reply(c)._replace(v=None)) for c in call.clients))
    fed = Federation(engine)
    assert fed.round(both, bare=True).v is None
    assert fed.ledger.bytes_up == 5 * 4 * P
    with pytest.raises(
        TooFewReplies, match=r"client 0: values for \['loss', 'u'\] instead of \['loss', 'u', 'v'\]"
    ):
        fed.round(both)


nan = reply(2)._replace(u=jnp.asarray([[1.0, np.nan, 1.0]]))
infinite = reply(2)._replace(loss=jnp.asarray([np.inf]))
wide = reply(2)._replace(v=jnp.ones((1, Q + 1)))
whole = reply(2)._replace(u=jnp.ones((1, P), jnp.int32))
missing = reply(2)._replace(v=None)
WRONG = {
    "u is not finite": one(2, nan),
    "loss is not finite": one(2, infinite),
    "v has shape (3,) instead of (2,)": one(2, wide),
    "u has type int32 instead of float32": one(2, whole),
    "u has type float64 instead of float32": one(2, reply(2)._replace(u=np.ones((1, P), np.float64))),  # type: ignore[arg-type]
    "fields ['w'] instead of ['loss', 'u', 'v']": one(2, Other(jnp.ones((1, P)))),
    "fields [] instead of ['loss', 'u', 'v']": one(2, None),
    "values for ['loss', 'u'] instead of ['loss', 'u', 'v']": one(2, missing),
    "late": Replies(refused={2: Reason(Fault.LATE, "late")}),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_reply_is_left_out_counted_and_named(why: str) -> None:
    fed = Federation(with_one_wrong(WRONG[why]))
    mean = fed.round(both)
    np.testing.assert_allclose(mean.u, np.full(P, (0 + 1 + 3 + 4) / 4))
    assert mean.v is not None
    np.testing.assert_allclose(mean.v, np.full(Q, 20.0))
    fed.round(both)
    assert fed.ledger.rejected == rejected(2, why, 2)
    assert fed.ledger.steps["both"].rejected == 2


def test_a_client_that_is_not_finite_is_left_out_of_a_stack() -> None:
    def answer(call: Call) -> Iterator[Replies]:
        parts = [nan if c == 2 else reply(c) for c in call.clients]
        yield Replies(clients=call.clients, reply=stacked(parts))

    fed = Federation(engine_of(answer=answer))
    np.testing.assert_allclose(fed.round(both).u, np.full(P, 2.0))
    assert fed.ledger.rejected == rejected(2, "u is not finite", 1)


@pytest.mark.parametrize("gather", [gather_by(None), gather_by(Median())], ids=["mean", "median"])
@pytest.mark.parametrize("liars", [1, 4])
def test_a_first_reply_that_leaves_a_field_out_decides_nothing_about_the_others(
    gather: Gather, liars: int
) -> None:
    """The step says which fields there are, so that not even a majority can talk the server out of one."""
    engine = engine_of(7, lambda call: (one(c, missing if c < liars else reply(c, 7.0)) for c in call.clients))
    fed = Federation(engine, gather=gather)
    got = fed.round(both)
    np.testing.assert_allclose(got.u, np.full(P, 7.0))
    assert got.v is not None
    np.testing.assert_allclose(got.v, np.full(Q, 70.0))
    why = "values for ['loss', 'u'] instead of ['loss', 'u', 'v']"
    assert fed.ledger.rejected == {Event(c, "both", why): 1 for c in range(liars)}


# ---------------------------------------------------------------------------- directions and the next values

HELD_X, HELD_Y = jnp.asarray([5.0, -4.0, 3.0]), jnp.asarray([2.0, -1.0])
DIRECTIONS = np.random.default_rng(0).normal(size=(5, P + Q)).astype(np.float32) * np.arange(1, 6)[:, None]


def with_directions() -> FakeEngine:
    def answer(call: Call) -> Iterator[Replies]:
        for c in call.clients:
            both = jnp.asarray(DIRECTIONS[c : c + 1], jnp.float32)
            yield one(c, Direction(both[:, :P], both[:, P:]))

    return engine_of(answer=answer)


def test_a_direction_called_x_or_y_is_taken_as_it_is_by_a_robust_rule() -> None:
    """The norm bound is not the same after a shift, so it would show if the held vector were taken off."""
    fed = Federation(with_directions(), gather=gather_by(NormBound(radius=1.0)))
    fed.hold(x=HELD_X, y=HELD_Y)
    got = fed.round(direction)
    for value, rows, held in ((got.x, DIRECTIONS[:, :P], HELD_X), (got.y, DIRECTIONS[:, P:], HELD_Y)):
        clipped = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
        np.testing.assert_allclose(value, clipped.mean(0), rtol=1e-5)
        apart = rows - np.asarray(held)
        shifted = np.asarray(held) + np.mean(
            apart / np.maximum(np.linalg.norm(apart, axis=1)[:, None], 1.0), axis=0
        )
        assert np.linalg.norm(shifted - clipped.mean(0)) > 0.1, "the other reading is another vector"


def test_an_attacker_turns_a_direction_called_x_or_y_round_and_not_about_the_held_vector() -> None:
    engine = Attack(with_directions(), kind="sign-flip", share=0.4)
    fed = Federation(engine)
    fed.hold(x=HELD_X, y=HELD_Y)
    got = fed.round(direction)
    assert len(engine.attackers) == 2
    signs = np.asarray([-1.0 if c in engine.attackers else 1.0 for c in range(5)])
    expected = (signs[:, None] * DIRECTIONS).mean(0)
    np.testing.assert_allclose(np.concatenate([got.x, got.y]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gather", [gather_by(None), gather_by(Median())], ids=["mean", "median"])
def test_the_next_value_of_a_vector_that_nobody_was_given_is_refused(gather: Gather) -> None:
    engine = engine_of(answer=lambda call: (one(c, Moved(jnp.ones((1, Q)))) for c in call.clients))
    fed = Federation(engine, gather=gather)
    with pytest.raises(SettingsError, match=r"step moved: y of its reply is the next value of .*hold or send y"):
        fed.round(moved, zeta=Sample("lower"))
    assert engine.calls == [] and fed.ledger.rounds == 0
    fed.hold(y=HELD_Y)
    np.testing.assert_allclose(fed.round(moved, zeta=Sample("lower")).y, np.ones(Q))
    assert list(engine.calls[0].before) == ["y"]


def test_too_few_replies_name_step_round_and_client() -> None:
    engine = with_one_wrong(one(2, nan))
    assert np.isfinite(Federation(engine, min_replies=4).round(both).loss)
    fed = Federation(engine, min_replies=5)
    with pytest.raises(TooFewReplies) as first:
        fed.round(both, beta=0.5, q=jnp.ones(Q))
    with pytest.raises(TooFewReplies) as second:
        fed.round(both, beta=0.5, q=jnp.ones(Q))
    message = "4 valid replies of 5, 5 needed; client 2: u is not finite"
    assert str(first.value).startswith(
        f"both, round 0: {message}, at the start, where no step size matters; look for"
    )
    assert str(second.value) == f"both, round 1: {message}"
    assert fed.ledger.rounds == 2, "a round that failed was a round"


def test_a_long_list_of_failures_is_cut_and_has_no_wrong_remedy() -> None:
    lost = Reason(Fault.ABSENT, "lost")
    engine = engine_of(answer=lambda call: [Replies(refused=dict.fromkeys(call.clients, lost))])
    with pytest.raises(TooFewReplies, match=r"0 valid replies of 5, 1 needed; client 0: lost; .*; and 2 more$"):
        Federation(engine).round(both, beta=0.5)


def test_replies_are_weighted_by_samples_if_asked() -> None:
    weights = np.asarray([2, 4, 6, 8, 10])  # 2c + 1 lower rows and one upper row
    mean = Federation(engine_of(), weighting="samples").round(both)
    np.testing.assert_allclose(mean.u, np.full(P, np.average(np.arange(5), weights=weights)), rtol=1e-6)
    fed = Federation(with_one_wrong(one(2, nan)), weighting="samples")
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


def test_the_rows_of_each_client_are_billed_to_it() -> None:
    fed = Federation(engine_of())
    rows = PerClient(np.ones((5, P), np.float32))
    fed.round(both, p=rows, q=jnp.ones(Q), tau=PerClient((1, 2, 3, 4, 5)))
    assert fed.ledger.bytes_down == 5 * (12 + 8), "a number of its own is no payload, a row is"
    part = fed.cohort(2)
    part.round(both, p=rows)
    assert fed.ledger.bytes_down == 5 * (12 + 8) + 2 * 12, "only those who are asked are sent theirs"


def test_what_is_sent_reaches_the_engine_by_its_kind() -> None:
    engine = engine_of()
    sample, own = Sample("lower", 3), PerClient((1, 2, 3, 4, 5))
    Federation(engine, seed=9).round(both, z=None, q=jnp.ones(Q), beta=0.5, last=True, tau=own, xi=sample)
    (call,) = engine.calls
    assert call.address == Address(9, Kind.ROUND, 0) and call.clients == (0, 1, 2, 3, 4)
    assert set(call.arrays) == {"q", "beta"} and call.arrays["beta"].dtype == np.float32
    assert call.constants == {"z": None, "last": True}
    assert call.rows == {"tau": own} and call.samples == {"xi": sample}


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
    engine = with_one_wrong(one(2, nan))
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
    agents = Agents(fed)
    line = np.asarray([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])  # 0 - 1 - 2: four links
    rows = jnp.arange(6.0).reshape(3, 2)
    mixed = agents.exchange("mix", line, rows=rows)["rows"]
    np.testing.assert_allclose(mixed, line @ np.asarray(rows))
    account = fed.ledger.steps["mix"]
    assert (account.rounds, account.bytes_up, account.bytes_down) == (1, 4 * 8, 4 * 8)


def test_each_keeps_the_replies_apart_is_no_round_and_names_who_fails() -> None:
    fed = Federation(engine_of())
    apart = Agents(fed).each(both)
    np.testing.assert_allclose(apart.u[:, 0], np.arange(5.0))
    assert (fed.ledger.rounds, fed.ledger.bytes_up, fed.ledger.local) == (0, 0, 1)
    with pytest.raises(TooFewReplies, match="client 2: u is not finite"):
        Agents(Federation(with_one_wrong(one(2, nan)))).each(both)


def rows_of(call: Call, client: int, engine: Engine) -> list[int]:
    made = prepare(call, engine.problem, client, engine.clients.size(client), engine.clients.capacity)["zeta"]
    return [int(i) for i in made.index]


def test_work_without_communication_draws_new_rows_every_time_and_none_of_a_rounds() -> None:
    g = np.random.default_rng(0)
    clients = clients_from([(g.normal(size=40).astype("f4"), np.ones(1, "f4")) for _ in range(3)])
    engine = Watching(Loop(averaging(), clients))
    fed, zeta = Federation(engine, seed=2), Sample("lower", 6)
    agents = Agents(fed)
    apart = [agents.each(lower_mean, offset=0.0, zeta=zeta).value for _ in range(2)]
    fed.round(lower_mean, offset=0.0, zeta=zeta)
    apart.append(agents.each(lower_mean, offset=0.0, zeta=zeta).value)
    assert [call.address for call in engine.calls] == [
        Address(2, Kind.LOCAL, 0),
        Address(2, Kind.LOCAL, 1),
        Address(2, Kind.ROUND, 0),
        Address(2, Kind.LOCAL, 2),
    ]
    assert (fed.ledger.local, fed.ledger.rounds, fed.ledger.clock) == (3, 1, 4)
    for client in range(3):
        drawn = [rows_of(call, client, engine) for call in engine.calls]
        assert len({tuple(rows) for rows in drawn}) == 4
        inputs = clients.load(client).lower.inputs
        for values, rows in zip(apart, (drawn[0], drawn[1], drawn[3]), strict=True):
            assert float(values[client]) == pytest.approx(float(inputs[rows].mean()), abs=1e-6)


def test_a_resumed_federation_draws_for_work_without_communication_as_if_nothing_had_happened() -> None:
    engine = engine_of()
    fed = Federation(engine, seed=3)
    Agents(fed).each(both)
    resumed = Federation(
        engine, seed=3, ledger=Ledger.from_mapping(json.loads(json.dumps(fed.ledger.to_mapping())))
    )
    for each in (fed, resumed):
        Agents(each).each(both)
    assert engine.calls[1].address == engine.calls[2].address == Address(3, Kind.LOCAL, 1)


def test_agents_need_an_engine_whose_clients_can_work_for_themselves() -> None:
    engine = engine_of()
    engine.capabilities = dataclasses.replace(engine.capabilities, local_work=False)
    with pytest.raises(SettingsError, match="the algorithm has no server"):
        Agents(Federation(engine))


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
    rounds = [call for call in engines[1].calls if call.kind is Kind.ROUND]
    assert len(rounds) == 3 and len(engines[1].calls) == 6
    for one, other in zip(engines[0].calls, rounds, strict=True):
        assert (one.address, one.clients) == (other.address, other.clients)
        assert one.held["x"].missing == other.held["x"].missing
    assert all(call.held == {} for call in engines[1].calls if call.kind is Kind.PROBE)


def test_a_probe_draws_elsewhere_and_rounds_draw_the_same_with_and_without_it() -> None:
    g = np.random.default_rng(0)
    clients = clients_from([(g.normal(size=n).astype("f4"), np.ones(1, "f4")) for n in (9, 4, 7)])
    engine = Loop(averaging(), clients)
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
    assert float(got.value) == pytest.approx(everything + 5, rel=1e-6)


def test_the_ledger_goes_to_json_and_back() -> None:
    fed = Federation(with_one_wrong(one(2, nan)))
    fed.hold(x=jnp.ones(P))
    for _ in range(2):
        fed.round(both)
    fed.probe(both)
    text = json.dumps(fed.ledger.to_mapping())
    again = Ledger.from_mapping(json.loads(text))
    assert again == fed.ledger and again.rejected == rejected(2, "u is not finite", 3)
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
            drawn.append(tuple(part.clients))
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


def test_a_cohort_of_excluded_clients_only_has_too_few_replies() -> None:
    """Both clients are excluded in turn; then there is nobody to ask, and the excluded are not asked after all."""
    engine = engine_of(
        2, lambda call: (one(c, nan if c == call.address.place else reply(c)) for c in call.clients)
    )
    fed = Federation(engine, policies=Policies(strikes=1, exclusion_rounds=5))
    for _ in range(2):
        fed.round(both)
    assert [(e.client, e.round, e.until) for e in fed.ledger.exclusions] == [(0, 1, 6), (1, 2, 7)]
    with pytest.raises(TooFewReplies, match="round 2: all 2 clients of the cohort are excluded") as raised:
        fed.cohort(1.0)
    assert not isinstance(raised.value, Diverged)
    assert len(engine.calls) == 2
    for _ in range(4):  # the federation itself is every registered client, whoever is excluded
        fed.round(both)
    assert fed.cohort(1.0).clients == (0,), "the first exclusion is over"
