"""What rules remember from one round to the next: that it is used, saved and restored, and never shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fakes import FakeEngine, Reply, answer
from fedbilevel.aggregate import CentredClipping, Median, Memory, Rows, gather_by
from fedbilevel.engines import Call, Fault, Reason, Replies
from fedbilevel.errors import Diverged
from fedbilevel.record import Checkpoint
from fedbilevel.record._checkpoint import Seal, decode, encode
from fedbilevel.run._course import Course

LAST = CentredClipping(start="last")
SENT = np.asarray([100.0, -50.0], np.float32)


def said(rounds: list[np.ndarray]) -> FakeEngine:
    """Clients that contribute the rows of `rounds`, an array for each round: two columns to y, one to h."""

    def answers(call: Call) -> Iterator[Replies]:
        rows = rounds[call.address.place].astype(np.float32)
        given = np.asarray(call.arrays["y"])
        yield Replies(
            clients=call.clients, reply=Reply(jnp.asarray(given + rows[:, :2]), jnp.asarray(rows[:, 2:]))
        )

    return FakeEngine(len(rounds[0]), 1, 2, answers)


def clipped(rows: np.ndarray, v: np.ndarray | None, iterations: int = 3) -> np.ndarray:
    """Centred clipping as it is published, slowly: from v, with the median distance to the median as radius."""
    rows = rows.astype(float)
    median = np.median(rows, axis=0)
    radius = np.median([np.linalg.norm(r - median) for r in rows])
    v = median if v is None else v
    for _ in range(iterations):
        apart = [r - v for r in rows]
        v = v + np.mean([a * min(1.0, radius / max(np.linalg.norm(a), 1e-30)) for a in apart], axis=0)
    return v


def three_rounds() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.normal(size=(7, 3)) + 0.3 * k for k in range(3)]


def test_centred_clipping_goes_on_from_its_last_result_as_published() -> None:
    """For a next value, what goes on is the difference: y itself is another vector in every round."""
    rounds = three_rounds()
    fed = fb.Federation(said(rounds), gather=gather_by(LAST))
    y = h = None
    for k, rows in enumerate(rounds):
        sent = SENT * (k + 1)
        got = fed.round(answer, y=sent)
        y, h = clipped(rows[:, :2], y), clipped(rows[:, 2:], h)
        np.testing.assert_allclose(np.asarray(got.y), sent + y, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(got.h), h, rtol=1e-4, atol=1e-5)
        if k:
            assert np.linalg.norm(clipped(rows[:, :2], None) - y) > 1e-3, "the start matters"


def test_the_first_round_and_a_rule_without_a_past_start_from_the_median() -> None:
    rows = three_rounds()[0].astype(np.float32)
    np.testing.assert_array_equal(LAST(rows, np.ones(7)), CentredClipping(start="median")(rows, np.ones(7)))


def remembered(last: dict[str, np.ndarray], fields: dict[str, Any], rule: Any = LAST) -> Any:
    gathered = Rows(rule, {})
    gathered.recall(last)
    h = None if "h" not in fields else jnp.asarray(fields["h"], jnp.float32)
    reply = Reply(jnp.asarray(fields["y"], jnp.float32), h)
    gathered.add(Replies(clients=tuple(range(7)), reply=reply), np.ones(7))
    return gathered.value


def test_a_field_that_was_missing_or_has_another_shape_starts_from_the_median() -> None:
    first, second, third = three_rounds()
    last: dict[str, np.ndarray] = {}
    remembered(last, {"y": first[:, :2], "h": first[:, 2:]})
    assert set(last) == {"y", "h"}
    remembered(last, {"y": second[:, :2]})
    assert set(last) == {"y"}, "the last round had no h"
    alone = remembered({}, {"y": third, "h": third[:, 2:]})
    after = remembered(last, {"y": third, "h": third[:, 2:]})
    np.testing.assert_array_equal(after.h, alone.h)
    np.testing.assert_array_equal(after.y, alone.y)


def test_the_value_of_a_round_is_computed_once() -> None:
    first, second, _ = three_rounds()
    last: dict[str, np.ndarray] = {}
    remembered(last, {"y": first[:, :2]})
    gathered = Rows(LAST, {})
    gathered.recall(last)
    gathered.add(Replies(clients=tuple(range(7)), reply=Reply(jnp.asarray(second[:, :2]), None)), np.ones(7))
    np.testing.assert_array_equal(gathered.value.y, gathered.value.y)


def test_a_rule_that_does_not_remember_leaves_nothing() -> None:
    memory: Memory = {}
    for rule in (Median(), CentredClipping(start="median")):
        fed = fb.Federation(said(three_rounds()), gather=gather_by(rule), memory=memory)
        fed.round(answer, y=SENT)
    assert not any(memory.values())


def test_federations_of_one_rule_share_no_memory_and_cohorts_share_that_of_their_federation() -> None:
    rounds, gather = three_rounds(), gather_by(LAST)
    alone, other = (fb.Federation(said(rounds), gather=gather) for _ in range(2))
    other.round(answer, y=SENT)
    second = other.cohort(1.0).round(answer, y=SENT)
    expected = clipped(rounds[1][:, 2:], clipped(rounds[0][:, 2:], None))
    np.testing.assert_allclose(np.asarray(second.h), expected, rtol=1e-4, atol=1e-5)
    first = alone.round(answer, y=SENT)
    np.testing.assert_allclose(np.asarray(first.h), clipped(rounds[0][:, 2:], None), rtol=1e-4, atol=1e-5)


def test_a_round_with_too_few_replies_is_not_remembered() -> None:
    rounds, memory = three_rounds(), Memory()
    engine = said(rounds)
    fb.Federation(engine, gather=gather_by(LAST), memory=memory).round(answer, y=SENT)
    before = dict(memory["answer"])
    lost = FakeEngine(
        7, 1, 2, lambda call: [Replies(refused=dict.fromkeys(call.clients, Reason(Fault.ABSENT, "lost")))]
    )
    with pytest.raises(fb.TooFewReplies):
        fb.Federation(lost, gather=gather_by(LAST), memory=memory).round(answer, y=SENT)
    assert memory["answer"] == before


# -------------------------------------------------------------------------------------------------------- in a run

METHOD = fb.AggITD(N=2, alpha=0.2, beta=0.2, lam=0.5, participation=5)


PUBLISHED = {"name": "centred-clipping", "start": "last"}
AGGREGATORS: dict[str, dict[str, Any]] = {
    "centred clipping": PUBLISHED,
    "buckets": {"name": "bucketing", "size": 2},
    "centred clipping of buckets": {"name": "bucketing", "rule": PUBLISHED},
}


def trained(
    task: Any, iterations: int, out: Path | None = None, aggregator: Any = PUBLISHED, **more: Any
) -> fb.Result:
    return fb.train(
        task.problem,
        task.clients,
        METHOD,
        stop={"iterations": iterations},
        engine={"name": "simulation"},
        federation={"aggregator": aggregator},
        evaluate={"checkpoint_every": 2, "every": 2},
        measure=task.measure,
        out=out,
        **more,
    )


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_resumed_run_draws_and_remembers_bit_for_bit(name: str, quadratic: Any, tmp_path: Path) -> None:
    aggregator = AGGREGATORS[name]
    whole = trained(quadratic, 4, aggregator=aggregator)
    trained(quadratic, 2, tmp_path / "run", aggregator)
    resumed = trained(quadratic, 4, tmp_path / "run", aggregator, resume=True)
    for one, other in ((whole.x, resumed.x), (whole.y, resumed.y)):
        np.testing.assert_array_equal(one, other)


def test_a_resumed_run_that_forgets_is_another_run(
    quadratic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory matters, so the test above would notice if it were lost."""
    whole = trained(quadratic, 4)
    monkeypatch.setattr(Checkpoint, "memory", {})
    trained(quadratic, 2, tmp_path / "run")
    forgetful = trained(quadratic, 4, tmp_path / "run", resume=True)
    assert np.any(np.asarray(forgetful.x) != np.asarray(whole.x))


def test_two_runs_of_the_same_settings_are_the_same_run(quadratic: Any) -> None:
    first, second = (trained(quadratic, 2) for _ in range(2))
    np.testing.assert_array_equal(first.x, second.x)


def test_a_run_that_goes_back_remembers_what_it_knew_there(
    quadratic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back, seen = Course.go_back, list[tuple[Memory, Memory, Any]]()

    def watched(course: Course, error: Diverged, found: Any) -> bool:
        before = {step: dict(fields) for step, fields in course._memory.items()}
        went = go_back(course, error, found)
        assert course.folder is not None
        saved = course.folder.checkpoint(course.setup.plan)
        assert saved is not None
        seen.append((before, {s: dict(f) for s, f in course._memory.items()}, saved.memory))
        return went

    def raise_twice(progress: fb.Progress) -> None:
        if progress.iteration == 3 and len(seen) < 2:
            raise Diverged("on purpose", ("x",), {"alpha": 0.2})

    monkeypatch.setattr(Course, "go_back", watched)
    trained(quadratic, 4, tmp_path / "run", observers=[raise_twice], on_divergence="restart")
    assert len(seen) == 2
    for before, after, saved in seen:
        assert after.keys() == saved.keys()
        for step, fields in saved.items():
            for name, array in fields.items():
                np.testing.assert_array_equal(after[step][name], array)
        assert any(np.any(before[s][n] != a) for s, fields in saved.items() for n, a in fields.items())


def test_a_checkpoint_holds_a_memory_beside_a_state_that_has_the_same_names(tmp_path: Path) -> None:
    array = np.asarray([1.0, np.pi, 1e-40], np.float32)
    memory = {"a.b": {"c": array}, "a": {"b.c": -array}}
    state = {"memory.a.b.c": np.ones(2), "x": np.zeros(1)}
    file = tmp_path / "checkpoint"
    file.write_bytes(encode(Checkpoint(state, 3, fb.Ledger().to_mapping(), memory=memory), Seal("p", "h")))
    found, _ = decode(file)
    assert found.arrays.keys() == state.keys()
    np.testing.assert_array_equal(found.arrays["memory.a.b.c"], np.ones(2))
    np.testing.assert_array_equal(found.memory["a.b"]["c"], array)
    np.testing.assert_array_equal(found.memory["a"]["b.c"], -array)


def test_settings_have_no_place_for_a_memory() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAST.start = "median"  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- poisoned memory


@pytest.mark.parametrize("radius", [None, 1.0])
def test_a_cohort_of_liars_does_not_spoil_the_rounds_after_it(radius: float | None) -> None:
    """In the first round liars have the majority. In the second a single one is left, and it is tolerated."""
    honest = three_rounds()[1]
    first, second = honest.copy(), honest.copy()
    first[:4] = 1e14
    second[0] = 1e14
    fed = fb.Federation(said([first, second]), gather=gather_by(CentredClipping(start="last", radius=radius)))
    fed.round(answer, y=SENT)
    got = fed.round(answer, y=0 * SENT)
    spread = np.ptp(honest[1:], axis=0)
    low, high = honest[1:].min(axis=0) - spread, honest[1:].max(axis=0) + spread
    value = np.concatenate([got.y, np.asarray(got.h)])
    assert np.all(low <= value) and np.all(value <= high), value
