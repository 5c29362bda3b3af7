"""What a federation tolerates: which faults are offences, and who is excluded for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from fakes import FakeEngine, Reply, answer
from fedbilevel import Federation, Policies, SettingsError, TooFewReplies, load_spec
from fedbilevel.engines import Call, Fault, Reason, Replies
from fedbilevel.ledger import Exclusion
from fedbilevel.policies import Conduct
from fedbilevel.privacy import Privacy

SENT = np.zeros(3, np.float32)
Answer = Callable[[Call], Iterable[Replies]]


def good(client: int) -> Replies:
    return Replies(clients=(client,), reply=Reply(jnp.ones((1, 3)), jnp.ones((1, 2))))


def with_h(h: jnp.ndarray) -> Answer:
    return lambda call: [Replies(clients=(1,), reply=Reply(jnp.ones((1, 3)), h))]


HOW: dict[Fault, Answer] = {  # client 1 answers so
    Fault.ABSENT: lambda call: [Replies(refused={1: Reason(Fault.ABSENT, "no answer")})],
    Fault.LATE: lambda call: [dataclasses.replace(good(1), delay=9.0)],
    Fault.FAILED: lambda call: [Replies(refused={1: Reason(Fault.FAILED, "out of memory")})],
    Fault.STALE: lambda call: [dataclasses.replace(good(1), address=call.address._replace(place=-1))],
    Fault.TWICE: lambda call: [good(1), good(1)],
    Fault.MISFIT: with_h(jnp.ones((1, 1))),
    Fault.NOT_FINITE: with_h(jnp.full((1, 2), jnp.nan)),
    Fault.TOO_LARGE: with_h(jnp.full((1, 2), 1e20)),
}
TEXT = {
    Fault.ABSENT: "no answer",
    Fault.LATE: "late: after 5 s",
    Fault.FAILED: "out of memory",
    Fault.STALE: "a reply to round -1",
    Fault.TWICE: "answered twice",
    Fault.MISFIT: "h has shape (1,) instead of (2,)",
    Fault.NOT_FINITE: "h is not finite",
    Fault.TOO_LARGE: "h has an entry beyond 1e+15",
}


def federation(turns: list[Answer], policies: Policies, count: int = 3) -> Federation:
    """Client 1 answers in one way after the other, the last of them from then on; the others answer well."""
    left = list(turns)

    def replies(call: Call) -> Iterator[Replies]:
        now = left.pop(0) if len(left) > 1 else left[0]
        for client in call.clients:
            yield from now(call) if client == 1 else [good(client)]

    return Federation(FakeEngine(count, 2, 3, replies), policies=policies)


def strikes_after(rounds: int, turns: list[Answer], policies: Policies) -> tuple[Federation, dict[int, int]]:
    fed = federation(turns, policies)
    for _ in range(rounds):
        fed.cohort(1.0).round(answer, y=SENT)
    return fed, fed.ledger.conduct.strikes


@pytest.mark.parametrize("fault", HOW)
def test_every_fault_is_named_and_only_offences_give_strikes(fault: Fault) -> None:
    fed, strikes = strikes_after(2, [HOW[fault]], Policies(deadline=5.0))
    assert {(event.client, event.what) for event in fed.ledger.rejected} == {(1, TEXT[fault])}
    assert sum(fed.ledger.rejected.values()) == 2
    blameless = fault in (Fault.ABSENT, Fault.LATE, Fault.TWICE)  # who answers twice has answered well once
    assert strikes == ({} if blameless else {1: 2})
    assert fed.ledger.exclusions == []


@pytest.mark.parametrize("fault", [Fault.ABSENT, Fault.LATE])
def test_not_answering_or_answering_late_never_excludes_a_client(fault: Fault) -> None:
    assert not fault.offence
    fed, _ = strikes_after(20, [HOW[fault]], Policies(deadline=5.0, strikes=1))
    assert fed.ledger.exclusions == [] and len(fed.cohort(1.0).clients) == 3


@pytest.mark.parametrize("fault", [Fault.MISFIT, Fault.NOT_FINITE, Fault.TOO_LARGE, Fault.FAILED, Fault.STALE])
def test_bad_answers_in_a_row_exclude_a_client_for_the_rounds_that_are_set(fault: Fault) -> None:
    assert fault.offence
    fed, strikes = strikes_after(3, [HOW[fault]], Policies(strikes=3, exclusion_rounds=4))
    assert fed.ledger.exclusions == [Exclusion(client=1, round=3, until=7)] and strikes == {}
    asked = []
    for _ in range(5):
        cohort = fed.cohort(1.0)
        asked.append(1 in cohort.clients)
        cohort.round(answer, y=SENT)
    assert asked == [False] * 4 + [True]


def test_a_good_answer_takes_back_the_strikes_and_an_absence_leaves_them() -> None:
    bad, absent, well = HOW[Fault.MISFIT], HOW[Fault.ABSENT], lambda call: [good(1)]
    _, strikes = strikes_after(4, [bad, bad, well, bad], Policies(strikes=3))
    assert strikes == {1: 1}
    fed, _ = strikes_after(4, [bad, bad, absent, bad], Policies(strikes=3))
    assert fed.ledger.exclusions == [Exclusion(1, 4, 54)]


def test_an_answer_that_is_good_when_asked_again_is_no_offence() -> None:
    fed, strikes = strikes_after(1, [HOW[Fault.MISFIT], lambda call: [good(1)]], Policies(strikes=1, retries=1))
    assert strikes == {} and fed.ledger.exclusions == [] and fed.ledger.steps["answer"].retries == 1


def test_strikes_never_exclude_where_the_settings_say_never() -> None:
    fed, _ = strikes_after(10, [HOW[Fault.MISFIT]], Policies(strikes=None))
    assert fed.ledger.exclusions == []
    spec = load_spec("demo", {"federation.strikes": "never", "federation.exclusion_rounds": 7})
    assert spec.federation.policies(Privacy()) == Policies(strikes=None, exclusion_rounds=7)
    assert load_spec("demo").federation.policies(Privacy()) == Policies()
    with pytest.raises(SettingsError, match=r"federation\.strikes = 0 is wrong"):
        load_spec("demo", {"federation.strikes": 0})


def test_a_cohort_whose_clients_are_all_excluded_is_refused_with_the_remedy() -> None:
    fed = federation([HOW[Fault.ABSENT]], Policies(), count=2)
    fed.ledger.conduct = Conduct(until={0: 9, 1: 9})
    with pytest.raises(TooFewReplies, match=r"all 2 clients of the cohort are excluded .* federation\.strikes"):
        fed.cohort(1.0)


def test_under_privacy_chance_alone_decides_whose_replies_count() -> None:
    assert Policies(strikes=2, retries=3).under_privacy() == Policies(strikes=None, retries=3)
    with pytest.raises(SettingsError, match=r"oversample = 0.5 is wrong with privacy: .* use 0"):
        Policies(oversample=0.5).under_privacy()
    with pytest.raises(SettingsError, match=r"federation\.oversample = 0.5 is wrong with privacy"):
        load_spec("demo", {"federation.oversample": 0.5, "privacy.mode": "local"})
