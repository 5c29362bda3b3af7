"""How many replies a rule needs in order to tolerate a liar, and that no round makes do with fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fakes import FakeEngine, Reply, answer
from fedbilevel.aggregate import AGGREGATORS, Median, gather_by
from fedbilevel.engines import Call, Fault, Reason, Replies

ROBUST = sorted(name for name in AGGREGATORS if name != "mean")
SENT = np.zeros(2, np.float32)
LIE = 1e14


def answering(count: int, replies: int, lies: int = 0, lie: float = LIE) -> FakeEngine:
    """Clients of whom the first `replies` answer with numbers from one to two; the last `lies` of these lie."""

    def answers(call: Call) -> Iterator[Replies]:
        there = [c for c in call.clients if c < replies]
        own = np.linspace(1.0, 2.0, replies - lies, dtype=np.float32).tolist() + [lie] * lies
        u = jnp.asarray([own[c] for c in there], jnp.float32)[:, None]
        lost = {c: Reason(Fault.ABSENT, "no answer") for c in call.clients if c >= replies}
        yield Replies(clients=tuple(there), reply=Reply(jnp.tile(u, 2), u), refused=lost)

    return FakeEngine(count, 1, 2, answers)


def one_round(engine: FakeEngine, rule: Any, **more: Any) -> Any:
    return fb.Federation(engine, gather=gather_by(rule), **more).round(answer, y=SENT)


# ------------------------------------------------------------------------------------------------------ in a round


@pytest.mark.parametrize("name", ROBUST)
def test_two_replies_of_which_one_may_lie_are_refused_by_every_rule(name: str) -> None:
    with pytest.raises(fb.TooFewReplies, match=r"2 valid replies of 9, \d needed; client 2: no answer"):
        one_round(answering(9, 2, lies=1), AGGREGATORS[name]())


@pytest.mark.parametrize("name", ROBUST)
def test_without_a_number_a_round_needs_as_many_replies_as_its_rule(name: str) -> None:
    rule = AGGREGATORS[name]()
    assert np.isfinite(one_round(answering(12, rule.fewest), rule).h).all()
    with pytest.raises(fb.TooFewReplies, match=f"{rule.fewest - 1} valid replies of 12, {rule.fewest} needed"):
        one_round(answering(12, rule.fewest - 1), rule)


@pytest.mark.parametrize("lie", [LIE, -LIE])
@pytest.mark.parametrize("name", ROBUST)
def test_at_the_smallest_number_of_replies_honest_ones_bound_what_a_liar_can_do(name: str, lie: float) -> None:
    """Honest replies are from one to two. The result is as near to them as they are to one another.

    A norm bound only makes a liar as long as an honest reply.
    """
    rule = AGGREGATORS[name]()
    got = one_round(answering(rule.fewest, rule.fewest, 1, lie), rule)
    low, high = (-2.0, 2.0) if name == "norm-bound" else (1.0 - 1.0, 2.0 + 1.0)
    for value in (*np.asarray(got.h), *np.asarray(got.y)):
        assert low <= value <= high


def test_a_larger_number_holds_and_the_mean_needs_a_single_reply() -> None:
    with pytest.raises(fb.TooFewReplies, match="4 valid replies of 9, 5 needed"):
        one_round(answering(9, 4), Median(), min_replies=5)
    np.testing.assert_allclose(one_round(answering(9, 1), None).h, [1.0])


def test_a_share_of_the_clients_asked_does_not_undercut_the_rule() -> None:
    with pytest.raises(fb.TooFewReplies, match="2 valid replies of 9, 3 needed"):
        one_round(answering(9, 2), Median(), min_replies=0.1)


def test_a_probe_needs_no_quorum_because_it_is_a_mean() -> None:
    fed = fb.Federation(answering(9, 2), gather=gather_by(Median()))
    np.testing.assert_allclose(np.asarray(fed.probe(answer, y=SENT).h), [1.5])


# -------------------------------------------------------------------------------------------------- before a round


def test_a_federation_refuses_a_number_below_that_of_its_rule() -> None:
    with pytest.raises(fb.SettingsError, match=r"min_replies = 2 is wrong: .* needs 3 replies"):
        fb.Federation(answering(9, 9), gather=gather_by(Median()), min_replies=2)


def test_a_cohort_that_is_smaller_than_the_quorum_is_refused_before_a_client_is_asked() -> None:
    engine = answering(9, 9)
    with pytest.raises(fb.SettingsError, match=r"participation = 2 is wrong: .* 2 clients.* needs 3 replies"):
        fb.Federation(engine, gather=gather_by(Median())).cohort(2)
    assert engine.calls == []
    assert len(fb.Federation(engine).cohort(2).clients) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"federation.min_replies": 2}, r"federation.min_replies = 2 is wrong: .*median needs 3 replies"),
    "share": ({"federation.min_replies": 0.1}, r"federation.min_replies = 0.1 is wrong: .*median needs 3 replies"),
    "cohort": ({"algorithm.participation": 2}, r"algorithm.participation = 2 is wrong: .*median needs 3 replies"),
    "part": ({"algorithm.participation": 0.02}, r"algorithm.participation = 0.02 is wrong: .*median needs 3"),
    "clients": (
        {"data.clients": 2, "algorithm.participation": 1.0},
        r"federation.aggregator = 'median' is wrong: .*2 clients.* needs 3 replies",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_spec_in_which_a_rule_could_not_tolerate_a_liar_is_refused_at_the_start(why: str) -> None:
    sets, message = REFUSED[why]
    load = {"data.clients": 100, "algorithm.participation": 10} | sets
    fb.load_spec("demo", load)
    with pytest.raises(fb.SettingsError, match=message):
        fb.load_spec("demo", load | {"federation.aggregator": "median"})


def test_a_spec_without_a_number_leaves_it_to_the_rule() -> None:
    assert fb.load_spec("demo").federation.needed(10) == 1
    assert fb.load_spec("demo", {"federation.aggregator": "median"}).federation.needed(10) == 3
    assert (
        fb.load_spec("demo", {"federation.aggregator": "median", "federation.min_replies": 0.5}).federation.needed(
            10
        )
        == 5
    )
    assert "min_replies" not in fb.load_spec("demo").to_mapping()["federation"]


# ---------------------------------------------------------------------------------------------- rules of one's own


@fb.settings
class First:
    """A rule that says nothing of how many replies it needs."""

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return rows[0]


@fb.settings
class Careful:
    """A rule that needs some replies."""

    fewest: int = 4

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return rows[0]


def test_a_rule_of_ones_own_needs_one_reply_unless_it_says_otherwise() -> None:
    np.testing.assert_allclose(one_round(answering(9, 1), First()).h, [1.0])
    with pytest.raises(fb.TooFewReplies, match="3 valid replies of 9, 4 needed"):
        one_round(answering(9, 3), Careful())


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_number_of_replies_that_cannot_be_is_refused_with_the_name_of_the_rule(wrong: int) -> None:
    with pytest.raises(fb.SettingsError, match=rf"Careful.fewest = {wrong} is wrong"):
        one_round(answering(9, 3), Careful(fewest=wrong))


def test_a_function_is_a_rule_too() -> None:
    rule: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda rows, weights: rows.max(axis=0)  # noqa: E731
    np.testing.assert_allclose(one_round(answering(9, 2), rule).h, [2.0])
