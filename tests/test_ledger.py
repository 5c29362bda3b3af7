"""The books of a federation survive the way through JSON, by which a run is resumed."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.ledger import Account, Event, Exclusion, Ledger, counted
from fedbilevel.policies import Conduct


def through_json(ledger: Ledger) -> Ledger:
    return Ledger.from_mapping(json.loads(json.dumps(ledger.to_mapping())))


FULL = Ledger(
    steps={
        "gradients": Account(rounds=3, bytes_up=40, bytes_down=50, seconds=0.25, rejected=2, retries=1, surplus=4),
        "upper_steps": Account(rounds=4, wire_up=900, wire_down=1000),
    },
    probes={"losses": Account(rounds=1)},
    rejected=Counter({Event(3, "gradients", "q is not finite"): 2, Event(12, "upper_steps", "no answer"): 1}),
    injected=Counter({Event(3, "gradients", "nan"): 2, Event(12, "upper_steps", "drop"): 1}),
    exclusions=[Exclusion(3, 9, 59), Exclusion(3, 70, 120)],
    conduct=Conduct(strikes={12: 2}, until={3: 120}),
    local=5,
    keepers={0: 11, 12: 7},
    forgotten=Counter({12: 2}),
)


def test_everything_in_the_books_comes_back_from_json() -> None:
    again = through_json(FULL)
    assert again == FULL
    assert (again.rounds, again.clock, again.bytes_up, again.seconds) == (7, 12, 40, 0.25)
    assert {type(event) for book in (again.rejected, again.injected) for event in book} == {Event}
    assert {type(each) for each in again.exclusions} == {Exclusion}


def test_a_ledger_goes_on_counting_where_the_one_before_it_ended() -> None:
    again = through_json(FULL)
    again.rejected[Event(3, "gradients", "q is not finite")] += 1
    again.forgotten[12] += 1
    assert again.rejected[Event(3, "gradients", "q is not finite")] == 3
    assert (again.forgotten[12], again.forgotten[1]) == (3, 0)


def test_an_empty_ledger_says_little_and_comes_back_too() -> None:
    assert Ledger().to_mapping() == {"steps": {}, "probes": {}, "rejected": {}}
    assert through_json(Ledger()) == Ledger()


def test_events_are_nested_by_step_and_client_so_that_no_text_is_taken_apart() -> None:
    assert FULL.to_mapping()["rejected"] == {
        "gradients": {"3": {"q is not finite": 2}},
        "upper_steps": {"12": {"no answer": 1}},
    }


KINDS = st.builds(Event, st.integers(0, 10**6), st.text(max_size=8), st.text(max_size=8))
EVENTS = st.dictionaries(KINDS, st.integers(1, 9), max_size=8)


@settings(max_examples=30)
@given(EVENTS, EVENTS)
def test_whatever_reasons_and_names_contain_they_come_back(
    rejected: dict[Event, int], injected: dict[Event, int]
) -> None:
    ledger = Ledger(rejected=Counter(rejected), injected=Counter(injected))
    assert through_json(ledger) == ledger


@settings(max_examples=30)
@given(EVENTS)
def test_counts_by_reason_and_by_client_have_the_same_sum(found: dict[Event, int]) -> None:
    by_reason, by_client = counted(found, "reason"), counted(found, "client")
    assert sum(by_reason.values()) == sum(by_client.values()) == sum(found.values())
    assert set(by_reason) == {event.what for event in found}
    assert set(by_client) == {str(event.client) for event in found}
