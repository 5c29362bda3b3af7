"""Clients that lie: who they are, what they send, and that it is the contribution that is twisted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fakes import FakeEngine, Reply, answer
from fedbilevel import Federation, SettingsError, load_spec
from fedbilevel.data import DataSettings, clients_from
from fedbilevel.engines import Call, Replies, make_call
from fedbilevel.layers import Attack, AttackSettings, FlippedLabels
from fedbilevel.layers._attack import attackers, hidden_scale
from fedbilevel.rng import Address, Kind

COUNT, SHARE = 10, 0.3
SENT = np.asarray([100.0, 100.0], np.float32)  # y before the round


def honest(call: Call) -> Iterator[Replies]:
    """Client i contributes i + 1 to every component of y and h, in chunks of four."""
    for start in range(0, len(call.clients), 4):
        own = call.clients[start : start + 4]
        u = np.asarray(own, np.float32)[:, None] + 1
        yield Replies(clients=own, reply=Reply(jnp.asarray(SENT + np.repeat(u, 2, axis=1)), jnp.asarray(u)))


def asked(clients: Sequence[int] = range(COUNT), kind: Kind = Kind.ROUND) -> Call:
    return make_call(answer, Address(0, kind, 0), clients, {"y": SENT})


CALL = asked()
U = np.arange(1.0, COUNT + 1)
LIARS = sorted(attackers(COUNT, SHARE, 0))
OTHERS = [c for c in range(COUNT) if c not in LIARS]


def sent(kind: Any, scale: float | None = None, call: Call = CALL) -> np.ndarray:
    """What arrives, as contributions: a row for each client, y before h."""
    engine = Attack(FakeEngine(COUNT, 1, 2, honest), kind=kind, share=SHARE, scale=scale)
    chunks = list(engine.replies(call))
    assert [c for chunk in chunks for c in chunk.clients] == list(call.clients)
    y, h = (np.concatenate([np.asarray(getattr(chunk.reply, name)) for chunk in chunks]) for name in ("y", "h"))
    np.testing.assert_allclose((y - SENT)[:, :1], h, rtol=1e-4, atol=1e-4)  # both channels alike
    return h[:, 0]


def test_the_attackers_are_a_share_of_the_clients_drawn_from_the_seed() -> None:
    assert len(attackers(100, 0.2, 0)) == 20 and attackers(100, 0.2, 0) == attackers(100, 0.2, 0)
    assert attackers(100, 0.2, 0) != attackers(100, 0.2, 1)
    assert attackers(100, 0.0, 0) == frozenset()


EXPECTED = {
    "sign-flip": ([None, -U[LIARS]], [4.0, -4 * U[LIARS]]),
    "scaled": ([None, 10 * U[LIARS]], [3.0, 3 * U[LIARS]]),
    "ipm": ([None, -0.5 * U[OTHERS].mean()], [2.0, -2 * U[OTHERS].mean()]),
    "alie": (
        [None, U[OTHERS].mean() - hidden_scale(COUNT, len(LIARS)) * U[OTHERS].std()],
        [1.5, U[OTHERS].mean() - 1.5 * U[OTHERS].std()],
    ),
}


@pytest.mark.parametrize(("kind", "case"), [(kind, i) for kind in EXPECTED for i in (0, 1)])
def test_attackers_send_what_the_attack_says_and_the_others_what_they_computed(kind: str, case: int) -> None:
    scale, lie = EXPECTED[kind][case]
    got = sent(kind, scale)
    np.testing.assert_allclose(got[LIARS], lie, rtol=1e-4)
    np.testing.assert_array_equal(got[OTHERS], U[OTHERS])


@pytest.mark.parametrize("kind", EXPECTED)
def test_probes_are_answered_honestly(kind: Any) -> None:
    np.testing.assert_array_equal(sent(kind, call=asked(kind=Kind.PROBE)), U)


@pytest.mark.parametrize(("kind", "factor"), [("sign-flip", -1.0), ("scaled", 10.0)])
def test_with_the_message_as_target_the_vector_itself_is_twisted(kind: Any, factor: float) -> None:
    engine = Attack(FakeEngine(COUNT, 1, 2, honest), kind=kind, share=SHARE, target="message")
    for chunk in engine.replies(CALL):
        for i, client in enumerate(chunk.clients):
            twist = factor if client in LIARS else 1.0
            np.testing.assert_allclose(chunk.reply.y[i], twist * (SENT + U[client]))
            np.testing.assert_allclose(chunk.reply.h[i], [twist * U[client]])


def test_a_cohort_of_liars_takes_one_another_for_honest() -> None:
    call = asked(LIARS)
    np.testing.assert_allclose(sent("ipm", 1.0, call), np.full(len(LIARS), -U[LIARS].mean()), rtol=1e-5)


def test_alie_hides_behind_as_many_honest_clients_as_it_needs() -> None:
    """50 clients, 24 liars: two honest ones more are a majority, so 24 of 26 may be nearer (Baruch et al.)."""
    assert hidden_scale(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert hidden_scale(20, 10) > hidden_scale(20, 4) > 0
    assert hidden_scale(20, 20) == hidden_scale(20, 15) <= 3.0


def test_attackers_with_flipped_labels_have_the_others_everywhere_and_the_same_inputs() -> None:
    rows = [(np.full((3, 2), float(c)), np.asarray([0, 1, 4])) for c in range(4)]
    plain = clients_from([(r, r) for r in rows])
    flipped = FlippedLabels(plain, frozenset({2}), 5)
    assert (flipped.count, flipped.capacity, flipped.size(2)) == (4, plain.capacity, plain.size(2))
    for client, labels in ((1, [0, 1, 4]), (2, [4, 3, 0])):
        data = flipped.load(client)
        for part in data.parts.values():
            np.testing.assert_array_equal(part.targets, labels)
            np.testing.assert_array_equal(part.inputs, rows[client][0])


def test_a_spec_builds_the_attack_and_nothing_without_a_kind() -> None:
    small = {"data.name": "digits", "data.clients": 10, "federation.engine": "loop", "attack.share": 0.3}
    spec = load_spec("demo", small | {"attack.kind": "sign-flip", "attack.scale": 2.0})
    task = spec.task()
    plain = spec.federation.build(task.problem, spec.clients(task))
    engine = spec.attack.wrap(plain, spec.seed)
    assert isinstance(engine, Attack) and engine.attackers == attackers(10, 0.3, spec.seed)
    assert load_spec("demo", small).attack.wrap(plain, spec.seed) is plain
    flips = load_spec("demo", small | {"attack.kind": "label-flip"})
    flipped = flips.clients(task)
    assert isinstance(flipped, FlippedLabels) and flips.attack.wrap(plain, spec.seed) is plain
    _, clients = DataSettings(name="digits", clients=10).load(0)
    liar = min(flipped.attackers)
    np.testing.assert_array_equal(flipped.load(liar).lower.targets, 9 - clients.load(liar).lower.targets)


def test_an_attack_that_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"attack.kind = 'label-flip' is wrong: the problem has no labels"):
        spec = load_spec("demo", {"problem.name": "quadratic", "attack.kind": "label-flip"})
        spec.clients(spec.task())
    with pytest.raises(SettingsError, match=r"attack.kind = 'ipm' is wrong: .* no server"):
        load_spec("demo", {"algorithm.name": "gossip", "attack.kind": "ipm"})
    with pytest.raises(SettingsError, match=r"attack.share = 1.5 is wrong"):
        load_spec("demo", {"attack.share": 1.5})
    assert AttackSettings() == AttackSettings(kind=None, share=0.2, scale=None, target="update")


def test_the_federation_takes_lies_for_replies() -> None:
    """Nothing is rejected: the replies have the right form. The mean moves as the formula says."""
    fed = Federation(Attack(FakeEngine(COUNT, 1, 2, honest), kind="sign-flip", share=SHARE))
    mean = fed.round(answer, y=SENT)
    assert not fed.ledger.rejected
    np.testing.assert_allclose(np.asarray(mean.h), [(U[OTHERS].sum() - U[LIARS].sum()) / COUNT], rtol=1e-5)
