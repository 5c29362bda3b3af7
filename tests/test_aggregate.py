"""Aggregation rules against references, and what has to hold for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax import Array
from scipy import optimize, stats

from fakes import Reply, answer
from fedbilevel import AggITD, Federation, SettingsError, Simulation, UnknownName, gather_by, load_spec
from fedbilevel.aggregate import (
    AGGREGATORS,
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Mean,
    Median,
    MultiKrum,
    NormBound,
    Place,
    Rows,
    Rule,
    TrimmedMean,
    WeightedMean,
    traced_rule,
)
from fedbilevel.algorithms.aggitd import Gradients
from fedbilevel.engines import Call, Fault, Reason, Replies, make_call
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Task
from fedbilevel.rng import Address, Kind
from fedbilevel.spec import parse
from fedbilevel.steps import Draw, Sample, Step, Y, client_step

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(9, 5)).astype(np.float32) * 10.0 ** np.arange(-2, 3, dtype=np.float32)
SIZES = np.asarray([3, 1, 4, 1, 5, 9, 2, 6, 5], float)
ONES = np.ones(9)
QUICK = settings(max_examples=30)
COUNTING = {
    "trimmed-mean",
    "multi-krum",
    "bucketing",
}  # rules that count replies in order to cut some, whatever these weigh
ROBUST = sorted(name for name in AGGREGATORS if name != "mean")


def repeated(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weights that are whole numbers, as so many equal rows."""
    return np.repeat(rows, weights.astype(int), axis=0)


def clip(v: np.ndarray, radius: float) -> np.ndarray:
    return v * min(1.0, radius / np.linalg.norm(v)) if np.any(v) else v


# ---------------------------------------------------------------------------------------------- against references


def test_the_median_is_numpys() -> None:
    np.testing.assert_allclose(Median()(ROWS, ONES), np.median(ROWS, axis=0), rtol=1e-6)
    np.testing.assert_allclose(Median()(ROWS[:8], ONES[:8]), np.median(ROWS[:8], axis=0), rtol=1e-5)


def test_the_trimmed_mean_is_scipys_where_whole_rows_are_cut() -> None:
    rows = ROWS[:8]
    for share in (0.0, 0.125, 0.25, 0.375):
        expected = stats.trim_mean(rows.astype(float), share, axis=0)
        np.testing.assert_allclose(TrimmedMean(share=share)(rows, ONES[:8]), expected, rtol=1e-5)


def test_the_trimmed_mean_of_three_replies_keeps_nothing_of_a_liar() -> None:
    """A quarter of three replies is less than one, and the liar has to be cut as a whole."""
    rows = np.asarray([[1.0, 2.0], [1.5, 2.5], [1e14, -1e14]], np.float32)
    np.testing.assert_array_equal(TrimmedMean()(rows, np.ones(3)), [1.5, 2.0])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.3, 0.4, 0.49])
@pytest.mark.parametrize("count", range(3, 14))
def test_the_trimmed_mean_cuts_whole_replies_at_each_end(share: float, count: int) -> None:
    """ceil(share n) at each end, and where that would leave nothing, all but the one or two in the middle."""
    rows = RNG.normal(size=(count, 3)).astype(np.float32)
    rows[-1] = 1e14
    expected = []
    for column in rows.astype(float).T:
        left = sorted(column)
        for _ in range(math.ceil(share * count)):
            if len(left) > 2:
                left = left[1:-1]
        expected.append(sum(left) / len(left))
    np.testing.assert_allclose(TrimmedMean(share=share)(rows, np.ones(count)), expected, rtol=1e-5, atol=1e-6)


def test_the_trimmed_mean_counts_replies_and_averages_what_is_left_by_weight() -> None:
    """A liar cannot stay by claiming a large weight."""
    rows = np.asarray([[1.0], [2.0], [4.0], [1e14]], np.float32)
    got = TrimmedMean()(rows, np.asarray([1.0, 3.0, 1.0, 1e6]))
    np.testing.assert_allclose(got, [(3 * 2 + 1 * 4) / 4], rtol=1e-6)


def test_a_share_of_the_replies_is_not_rounded_up_by_the_error_of_a_product() -> None:
    assert 0.07 * 100 > 7
    rows = np.arange(100, dtype=np.float32)[:, None] ** 2
    expected = np.mean(np.arange(7, 93) ** 2)
    np.testing.assert_allclose(TrimmedMean(share=0.07)(rows, np.ones(100)), [expected], rtol=1e-6)


def test_the_geometric_median_is_the_minimum_that_scipy_finds() -> None:
    def distance(v: np.ndarray) -> float:
        return float(SIZES @ np.linalg.norm(ROWS - v, axis=1))

    found = GeometricMedian(tolerance=1e-7, iterations=1000)(ROWS, SIZES)
    start, fine = np.median(ROWS, axis=0).astype(float), dict(maxiter=20_000, xatol=1e-9, fatol=1e-9)
    best = optimize.minimize(distance, start, method="Nelder-Mead", options=fine).fun
    assert distance(found) <= best * (1 + 1e-5)
    assert distance(start) > best * 1.001


def test_the_tolerance_ends_the_iteration_of_the_geometric_median() -> None:
    fine, coarse, one = (
        GeometricMedian(**how)(ROWS, ONES)
        for how in (dict(tolerance=1e-8, iterations=1000), dict(tolerance=1e9), dict(iterations=1))
    )
    np.testing.assert_array_equal(coarse, one)
    assert np.linalg.norm(fine - one) > 1e-3


def test_a_reply_that_most_of_the_weight_agrees_on_is_the_geometric_median() -> None:
    rows = np.asarray([[1, 2], [1, 2], [1, 2], [50, -9], [7, 7]], np.float32)
    np.testing.assert_array_equal(GeometricMedian()(rows, np.ones(5)), [1, 2])


@pytest.mark.parametrize("radius", [None, 0.5])
def test_centred_clipping_follows_its_formula(radius: float | None) -> None:
    v = np.median(ROWS.astype(float), axis=0)
    tau = np.median(np.linalg.norm(ROWS - v, axis=1)) if radius is None else radius
    for _ in range(3):
        v = v + np.mean([clip(r - v, tau) for r in ROWS.astype(float)], axis=0)
    np.testing.assert_allclose(CentredClipping(radius=radius)(ROWS, ONES), v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("radius", [None, 0.5])
def test_the_norm_bound_follows_its_formula(radius: float | None) -> None:
    tau = np.median(np.linalg.norm(ROWS, axis=1)) if radius is None else radius
    expected = np.average([clip(r, tau) for r in ROWS.astype(float)], axis=0, weights=SIZES)
    got = NormBound(radius=tau)(ROWS, SIZES)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    if radius is None:
        uniform = np.mean([clip(r, tau) for r in ROWS.astype(float)], axis=0)
        np.testing.assert_allclose(NormBound()(ROWS, ONES), uniform, rtol=1e-4, atol=1e-5)


def krum(rows: np.ndarray, liars: int, keep: int) -> np.ndarray:
    """Multi-Krum as it is published, slowly, for replies without ties."""
    n, scores = len(rows), []
    for i in range(n):
        others = sorted(float(np.sum((rows[i] - rows[j]) ** 2)) for j in range(n) if j != i)
        scores.append(sum(others[: n - liars - 2]))
    best = sorted(range(n), key=lambda i: scores[i])[:keep]
    return np.mean([rows[i] for i in best], axis=0)


@pytest.mark.parametrize(
    ("liars", "keep"), [(1, None), (2, None), (3, None), (1, 1), (2, 4), (0.2, None), (0.3, 2)]
)
def test_multi_krum_follows_its_definition(liars: float, keep: int | None) -> None:
    for seed in range(5):
        rows = np.random.default_rng(seed).normal(size=(9, 5)).astype(np.float32)
        f = liars if isinstance(liars, int) else math.ceil(liars * 9)
        expected = krum(rows.astype(float), f, 9 - f if keep is None else keep)
        got = MultiKrum(liars=liars, keep=keep)(rows, np.ones(9))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_multi_krum_keeps_at_most_as_many_replies_as_are_honest() -> None:
    """Ten of nine cannot be kept, and neither can a liar among them."""
    rows = np.concatenate([ROWS[:8, :2], np.full((1, 2), 1e14, np.float32)])
    got = MultiKrum(liars=1, keep=10)(rows, ONES)
    np.testing.assert_allclose(got, rows[:8].mean(axis=0), rtol=1e-5)


def test_multi_krum_keeps_replies_with_equal_scores_together() -> None:
    """The scores of 3 and -3 are equal; if exactly four of five were kept, the order would decide."""
    rows = np.asarray([[0.0], [1.0], [-1.0], [3.0], [-3.0]], np.float32)
    np.testing.assert_array_equal(MultiKrum(liars=1)(rows, np.ones(5)), [0.0])


def test_multi_krum_sees_differences_that_are_small_beside_what_replies_have_in_common() -> None:
    """The distances are about 1e-3, and the replies about 1e3: a square in single precision would lose them."""
    rows = (1e3 + 1e-3 * RNG.normal(size=(7, 4))).astype(np.float32)
    expected = krum(rows.astype(float), 2, 5)
    np.testing.assert_allclose(MultiKrum(liars=2)(rows, np.ones(7)), expected, rtol=1e-6)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.2, 0.25, 0.3, 0.4, 0.45, 0.49])
def test_multi_krum_needs_two_liars_and_three_replies_for_every_number_from_its_smallest(share: float) -> None:
    enough = [n >= 2 * math.ceil(share * n - 1e-9) + 3 for n in range(600)]
    smallest = max(n for n in range(600) if not enough[n]) + 1
    assert MultiKrum(liars=share).fewest == smallest
    assert MultiKrum(liars=2).fewest == 7


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("within", [Median(), GeometricMedian(), MultiKrum(liars=1)])
def test_bucketing_is_the_rule_on_the_means_of_buckets_that_the_address_draws(size: int, within: Rule) -> None:
    address = Address(3, Kind.ROUND, 17)
    order = address.generator("buckets").permutation(9)
    means = [np.mean([ROWS[i].astype(float) for i in order[k : k + size]], axis=0) for k in range(0, 9, size)]
    expected = within(np.asarray(means, np.float32), np.ones(len(means)))
    got = Bucketing(size=size, rule=within).at(Place(address))(ROWS, ONES)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_other_rounds_have_other_buckets_and_the_same_round_the_same() -> None:
    here, there = (Bucketing().at(Place(Address(0, Kind.ROUND, place))) for place in (4, 5))
    np.testing.assert_array_equal(here(ROWS, ONES), here(ROWS, ONES))
    assert np.any(here(ROWS, ONES) != there(ROWS, ONES))


@pytest.mark.parametrize("name", sorted(set(AGGREGATORS) - COUNTING))
def test_a_weight_counts_as_so_many_equal_replies(name: str) -> None:
    rule, many = AGGREGATORS[name](), repeated(ROWS, SIZES)
    np.testing.assert_allclose(rule(ROWS, SIZES), rule(many, np.ones(len(many))), rtol=2e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------- what holds for all rules

numbers = st.floats(-1e3, 1e3, width=32)
replies_of = arrays(np.float32, st.tuples(st.integers(2, 9), st.integers(1, 4)), elements=numbers)


@QUICK
@given(replies_of, st.sampled_from(sorted(set(AGGREGATORS) - {"bucketing"})), st.randoms(use_true_random=False))
def test_the_order_of_the_replies_does_not_matter(rows: np.ndarray, name: str, random: Any) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    weights = np.arange(1.0, len(rows) + 1)
    one, other = AGGREGATORS[name]()(rows, weights), AGGREGATORS[name]()(rows[order], weights[order])
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * (1 + np.abs(rows).max()))


@QUICK
@given(arrays(np.float32, 4, elements=numbers), st.integers(1, 9), st.sampled_from(sorted(AGGREGATORS)))
def test_replies_that_agree_are_the_result(reply: np.ndarray, count: int, name: str) -> None:
    got = AGGREGATORS[name]()(np.tile(reply, (count, 1)), np.arange(1.0, count + 1))
    np.testing.assert_allclose(got, reply, rtol=1e-5, atol=1e-4)


@QUICK
@given(
    arrays(np.float32, (7, 3), elements=st.floats(-1, 1, width=32)),
    st.integers(1, 6),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(["median", "geometric-median", "centred-clipping", "trimmed-mean"]),
)
def test_a_minority_of_liars_cannot_move_the_result_far(
    honest: np.ndarray, liars: int, lie: float, name: str
) -> None:
    """Honest replies lie in the unit cube; whatever fewer than half of the replies say, the result is near it."""
    rows = np.concatenate([honest, np.full((liars, 3), lie, np.float32)])
    rule = TrimmedMean(share=0.47) if name == "trimmed-mean" else AGGREGATORS[name]()
    bound = {"median": 1.0, "trimmed-mean": 1.0}.get(name, 60.0)
    assert np.abs(rule(rows, np.ones(len(rows)))).max() <= bound + 1e-4


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_replies_as_small_or_large_as_numbers_are_make_no_trouble(name: str, size: float) -> None:
    """Warnings are errors here: no division by zero, no overflow on the way to a result that is a number."""
    rows = np.asarray([[0, 0], [1, 0], [0, 1], [0, 0], [1, 1]], np.float32) * np.float32(size)
    got = AGGREGATORS[name]()(rows, np.ones(5))
    assert np.isfinite(got).all() and np.abs(got).max() <= 1.01 * size


def test_the_mean_is_moved_by_one_liar_and_the_norm_bound_only_so_far() -> None:
    rows = np.concatenate([np.ones((8, 2), np.float32), np.full((1, 2), -1e30, np.float32)])
    assert np.abs(TrimmedMean(share=0.0)(rows, np.ones(9))).max() > 1e28
    np.testing.assert_allclose(NormBound()(rows, np.ones(9)), np.full(2, 7 / 9), rtol=1e-5)


# ------------------------------------------------------------------------------------------------- in a federation


def column(values: list[float]) -> Array:
    return jnp.asarray(values, jnp.float32)[:, None]


def stacked(clients: list[int], y: list[float], h: list[float]) -> Replies:
    return Replies(clients=tuple(clients), reply=Reply(column(y), column(h)))


def called(step: Step[Any, Any], **arguments: Any) -> Call:
    return make_call(step, Address(0, Kind.ROUND, 0), (0, 1), arguments)


def test_rules_see_the_difference_to_the_vector_that_a_field_is_the_next_value_of() -> None:
    """y is annotated as the next value, so y_i - y is bounded; h is not, so h_i is."""
    call = called(answer, y=np.asarray([100.0], np.float32))
    assert list(call.before) == ["y"]
    rows = gather_by(NormBound(radius=1.0))(call)
    rows.add(stacked([0, 1], [100.5, 110.0], [5.0, 0.5]), np.ones(2))
    np.testing.assert_allclose(rows.value.y, [100 + (0.5 + 1.0) / 2])
    np.testing.assert_allclose(rows.value.h, [(1.0 + 0.5) / 2])


class Direction(NamedTuple):
    y: Y


@client_step
def direction(c: Oracle, y: Array, zeta: Draw) -> Direction:
    """Replies with a direction that has the name of the vector sent."""
    return Direction(c.g_y(y, zeta))


def test_a_field_of_the_name_of_a_vector_sent_is_no_next_value_unless_it_says_so() -> None:
    call = called(direction, y=np.asarray([100.0], np.float32), zeta=Sample("lower"))
    assert call.before == {}
    rows = gather_by(NormBound(radius=1.0))(call)
    rows.add(Replies(clients=(0, 1), reply=Direction(column([0.5, 10.0]))), np.ones(2))
    np.testing.assert_allclose(rows.value.y, [(0.5 + 1.0) / 2])


def test_chunks_are_kept_and_a_reply_that_is_not_finite_is_not_used() -> None:
    rows = Rows(Median(), {})
    assert rows.count == 0
    assert rows.add(stacked([4, 7], [1.0, 2.0], [0.0, 0.0]), np.ones(2)) == {}
    wild = rows.add(stacked([8, 9], [np.nan, 30.0], [0.0, 6.0]), np.ones(2))
    assert wild == {8: Reason(Fault.NOT_FINITE, "y is not finite", "y")}
    assert rows.count == 3
    np.testing.assert_array_equal(rows.value.y, [2.0])
    np.testing.assert_array_equal(rows.value.h, [0.0])


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_in_which_replies_arrive_changes_no_bit(name: str) -> None:
    """Buckets are those of the clients, and sums are in the order of the clients."""
    y, h = RNG.normal(size=(2, 9)).astype(np.float32).tolist()
    values = []
    for order in (list(range(9)), [4, 8, 0, 3, 7, 1, 2, 6, 5]):
        rows = Rows(AGGREGATORS[name](), {}, Address(0, Kind.ROUND, 3))
        for part in (order[:2], order[2:]):
            rows.add(stacked(part, [y[c] for c in part], [h[c] for c in part]), np.ones(len(part)))
        values.append(rows.value)
    for one, other in zip(*values, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_field_that_the_step_does_not_return_stays_none() -> None:
    """AggITD's first rounds carry no z."""
    for gathered in (Rows(Median(), {}), Mean()):
        gathered.add(Replies(clients=(0, 1), reply=Gradients(column([1.0, 3.0]), None)), ONES[:2])
        np.testing.assert_array_equal(gathered.value.q, [2.0])
        assert gathered.value.z is None


def test_the_mean_is_added_up_and_every_other_rule_keeps_the_rows() -> None:
    call = called(answer, y=np.zeros(1, np.float32))
    assert isinstance(gather_by(None)(call), Mean) and isinstance(gather_by(WeightedMean())(call), Mean)
    for name in ROBUST:
        assert isinstance(gather_by(AGGREGATORS[name]())(call), Rows)


class Swapped:
    """The engine of a task whose last client answers with a constant, in chunks as the engine makes them."""

    def __init__(self, engine: Simulation, constant: float) -> None:
        self.problem, self.clients, self._engine, self._constant = engine.problem, engine.clients, engine, constant
        self.capabilities = engine.capabilities

    def replies(self, call: Call) -> Iterator[Replies]:
        for chunk in self._engine.replies(call):
            changed = [np.array(field) if field is not None else None for field in chunk.reply]
            for field in changed:
                if field is not None and self.clients.count - 1 in chunk.clients:
                    field[chunk.clients.index(self.clients.count - 1)] = self._constant
            yield dataclasses.replace(chunk, reply=type(chunk.reply)(*changed))

    def close(self) -> None: ...


ALGORITHM = AggITD(N=1, alpha=0.1, beta=0.05, lam=0.3, participation=20, lower_epochs=1, upper_steps=2)


@pytest.fixture(scope="module")
def engine(digits: Task) -> Simulation:
    return Simulation(digits.problem, digits.clients, devices=1)


@pytest.mark.parametrize("name", ROBUST)
def test_every_channel_of_an_algorithm_goes_through_the_rule(name: str, engine: Simulation) -> None:
    """One client of twenty answers 1e20 everywhere: x and y stay near the run without it; with the mean not."""
    start = ALGORITHM.init(engine.problem)
    clean = ALGORITHM.step(Federation(engine), start)
    held = ALGORITHM.step(Federation(Swapped(engine, 1e20), gather=gather_by(AGGREGATORS[name]())), start)
    for good, got, first in zip(clean, held, start, strict=True):
        moved = float(np.linalg.norm(np.asarray(good - first)))
        assert float(np.linalg.norm(np.asarray(got - good))) < 2 * moved
        assert float(np.linalg.norm(np.asarray(got - first))) > 0
    lost = ALGORITHM.step(Federation(Swapped(engine, 1e12)), start)
    assert float(np.linalg.norm(np.asarray(lost.x))) > 1e8


# -------------------------------------------------------------------------------------------------------- the spec


EXPECTED: dict[str, tuple[dict[str, Any], Rule]] = {
    "median": ({}, Median()),
    "trimmed-mean": ({"share": 0.1}, TrimmedMean(share=0.1)),
    "geometric-median": ({"tolerance": 0.5, "iterations": 7}, GeometricMedian(tolerance=0.5, iterations=7)),
    "centred-clipping": (
        {"radius": 2.0, "iterations": 7, "start": "last"},
        CentredClipping(radius=2.0, iterations=7, start="last"),
    ),
    "norm-bound": ({"radius": 2.0}, NormBound(radius=2.0)),
    "multi-krum": ({"liars": 2, "keep": 3}, MultiKrum(liars=2, keep=3)),
    "bucketing": (
        {"size": 3, "rule": {"name": "trimmed-mean", "share": 0.1}},
        Bucketing(size=3, rule=TrimmedMean(share=0.1)),
    ),
}


@pytest.mark.parametrize("name", ROBUST)
def test_a_spec_names_the_rule_and_gives_its_parameters(name: str) -> None:
    parameters, expected = EXPECTED[name]
    table = load_spec("demo", {"federation.aggregator": {"name": name, **parameters}})
    dotted = {f"federation.aggregator.{key}": value for key, value in {"name": name, **parameters}.items()}
    assert table.federation.rule == load_spec("demo", dotted).federation.rule == expected
    assert load_spec("demo", {"federation.aggregator": name}).federation.rule == AGGREGATORS[name]()
    assert table.to_mapping()["federation"]["aggregator"]["name"] == name
    assert parse(table.to_mapping()) == table


def test_a_parameter_that_another_rule_has_is_refused_with_the_name_of_the_rule() -> None:
    with pytest.raises(SettingsError, match=r"federation\.aggregator\.share is not a setting"):
        load_spec("demo", {"federation.aggregator": {"name": "norm-bound", "share": 0.1}})
    with pytest.raises(SettingsError, match=r"federation\.aggregator\.share = 0.5 is wrong"):
        load_spec("demo", {"federation.aggregator": {"name": "trimmed-mean", "share": 0.5}})
    with pytest.raises(UnknownName, match=r"federation.aggregator.name = 'medan'.*median"):
        load_spec("demo", {"federation.aggregator": "medan"})


def test_the_rule_of_the_buckets_is_chosen_as_the_aggregator_is() -> None:
    def rule(**given: Any) -> Any:
        return load_spec("demo", {"federation.aggregator": "bucketing", **given}).federation.rule

    inner = "federation.aggregator.rule"
    assert rule() == Bucketing(size=2, rule=Median())
    assert rule(**{inner: "norm-bound"}) == Bucketing(rule=NormBound())
    assert rule(**{f"{inner}.name": "trimmed-mean", f"{inner}.share": 0.1}) == Bucketing(
        rule=TrimmedMean(share=0.1)
    )
    with pytest.raises(SettingsError, match=r"federation\.aggregator\.rule\.share = 0.9 is wrong"):
        rule(**{inner: {"name": "trimmed-mean", "share": 0.9}})
    for refused in ("mean", "bucketing"):
        with pytest.raises(UnknownName, match=rf"federation\.aggregator\.rule\.name = '{refused}'"):
            rule(**{inner: refused})


def test_the_mean_is_the_default_and_has_no_rule() -> None:
    for sets in ({}, {"federation.aggregator": "mean"}):
        assert load_spec("demo", sets).federation.rule is None


def test_an_algorithm_without_a_server_refuses_a_rule() -> None:
    with pytest.raises(SettingsError, match=r"federation.aggregator = 'median' is wrong: .* no server"):
        load_spec("demo", {"algorithm.name": "ma-dsbo", "federation.aggregator": "median"})
    load_spec("demo", {"algorithm.name": "ma-dsbo", "federation.aggregator": "mean"})


TRACED = [
    Median(),
    TrimmedMean(),
    TrimmedMean(share=0.4),
    TrimmedMean(share=0.0),
    NormBound(),
    NormBound(radius=0.5),
    CentredClipping(),
    CentredClipping(radius=0.3, iterations=5),
]


@QUICK
@given(
    rows=arrays(np.float32, st.sampled_from([(3, 1), (4, 3), (7, 2)]), elements=st.sampled_from([-2, 0, 0.5, 3])),
    rule=st.sampled_from(TRACED),
    data=st.data(),
)
def test_a_rule_within_a_program_is_the_rule_on_the_host(rows: np.ndarray, rule: Any, data: Any) -> None:
    """Also for equal replies and unequal weights."""
    weights = np.asarray(
        data.draw(st.lists(st.integers(1, 4), min_size=len(rows), max_size=len(rows))), np.float32
    )
    traced = traced_rule(rule)
    assert traced is not None
    expected = rule(rows, weights.astype(np.float64))
    made = jax.jit(traced)(rows, weights)
    np.testing.assert_allclose(made, expected, atol=2e-6)


def test_rules_that_need_the_host_or_may_change_are_not_traced() -> None:
    host = GeometricMedian(), MultiKrum(), Bucketing(), CentredClipping(start="last"), WeightedMean()
    assert [traced_rule(rule) for rule in (*host, None)] == [None] * 6
    changing: Any = type("Changing", (), {"__hash__": None, "traced": Median().traced})()
    assert traced_rule(changing) is None
