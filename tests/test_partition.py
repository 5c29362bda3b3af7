"""Dealing rows to clients, or drawing them: no part empty, the same for the same seed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedbilevel.data import (
    KINDS,
    Clients,
    ClientSize,
    Dataset,
    DataSettings,
    Drawn,
    Partition,
    PartitionedClients,
    draw_labels,
    drawn_clients,
    label_counts,
    label_table,
    partition,
)
from fedbilevel.data._partition import own_tests
from fedbilevel.errors import SettingsError, UnknownName
from fedbilevel.rng import generator

DEALT = sorted(name for name, kind in KINDS.items() if kind.deal and name != "classes")  # which leaves rows over


def dealt(*arguments: Any, **options: Any) -> Partition:
    """A partition that lists the rows of every client."""
    made = partition(*arguments, **options)
    assert isinstance(made, Partition)
    return made


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    labels = draw(st.lists(st.integers(0, 4), min_size=2, max_size=80))
    return {
        "targets": np.asarray(labels, np.int32),
        "clients": draw(st.integers(1, len(labels) // 2)),
        "seed": draw(st.integers(0, 2**40)),
        "alpha": draw(st.floats(0.001, 1000)),
        "shards_per_client": draw(st.integers(1, 4)),
        "train_share": draw(st.none() | st.floats(0.01, 0.99)),
    }


@given(kind=st.sampled_from(DEALT), problem=problems())
def test_every_row_once_and_no_part_empty(kind: str, problem: dict[str, Any]) -> None:
    made = dealt(kind, **problem)
    assert made.clients == len(made.lower) == len(made.upper) == problem["clients"]
    assert all(len(rows) > 0 for rows in [*made.lower, *made.upper])
    rows = np.sort(np.concatenate([*made.lower, *made.upper]))
    np.testing.assert_array_equal(rows, np.arange(len(problem["targets"])))
    again = dealt(kind, **problem)
    for a, b in zip([*made.lower, *made.upper], [*again.lower, *again.upper], strict=True):
        np.testing.assert_array_equal(a, b)


@given(problem=problems())
def test_iid_is_even(problem: dict[str, Any]) -> None:
    made = dealt("iid", **{**problem, "train_share": 0.5})
    sizes = [len(made.rows(i)) for i in range(made.clients)]
    assert max(sizes) - min(sizes) <= 1
    assert all(abs(len(a) - len(b)) <= 1 for a, b in zip(made.lower, made.upper, strict=True))


def test_the_papers_shards() -> None:
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    made = dealt("shards", targets, 100, seed=1)  # 200 shards of 30: none crosses a class
    counts = label_counts(targets, made, 10)
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert set(counts[counts > 0].tolist()) == {30, 60}
    assert {(len(a), len(b)) for a, b in zip(made.lower, made.upper, strict=True)} == {(48, 12)}


@given(seed=st.integers(0, 1000), clients=st.integers(1, 25), k=st.integers(1, 5))
def test_clients_of_a_few_classes_have_equally_many_rows_of_each(seed: int, clients: int, k: int) -> None:
    targets = np.random.default_rng(seed).integers(0, 5, 600)
    made = dealt("classes", targets, clients, seed=seed, classes_per_client=k)
    counts = label_counts(targets, made, 5)
    assert ((counts > 0).sum(axis=1) == k).all() and len(set(counts[counts > 0].tolist())) == 1
    rows = np.concatenate([*made.lower, *made.upper])
    assert len(set(rows.tolist())) == len(rows)
    assert np.ptp((counts > 0).sum(axis=0)) <= 2  # every class has about as many clients
    tests = np.random.default_rng(seed + 1).integers(0, 5, 400)
    own = [targets[made.rows(client)] for client in range(clients)]
    parts = own_tests(tests, own, seed)
    dealt_once = np.concatenate(parts)
    assert len(set(dealt_once.tolist())) == len(dealt_once)
    for labels, part in zip(own, parts, strict=True):
        assert set(tests[part]) == set(labels)


def test_clients_of_a_few_classes_are_refused_where_they_cannot_be() -> None:
    targets = np.arange(20) % 4
    with pytest.raises(SettingsError, match="classes_per_client=5 is too large: the data have 4 classes"):
        partition("classes", targets, 2, seed=0, classes_per_client=5)
    with pytest.raises(SettingsError, match="clients=10 is too large: a client would have 0 rows a class"):
        partition("classes", targets, 10, seed=0, classes_per_client=3)
    with pytest.raises(SettingsError, match=r"data\.partition = 'drawn' is wrong: its clients have no test rows"):
        DataSettings(name="digits", clients=3, partition="drawn").load(0, own_test=True)
    with pytest.raises(SettingsError, match="client 1 has no test rows"):
        own_tests(np.zeros(3, np.int32), [np.zeros(2, np.int32), np.ones(2, np.int32)], 0)
    alike = own_tests(np.zeros(1, np.int32), [np.zeros(2, np.int32)] * 3, 0)  # one test row for three clients
    assert [part.tolist() for part in alike] == [[0]] * 3


@given(seed=st.integers(0, 1000), clients=st.integers(5, 30))
def test_shards_hold_few_labels(seed: int, clients: int) -> None:
    targets = np.random.default_rng(seed).integers(0, 5, 600)
    # A shard is at most 60 rows, fewer than a class has, so it touches two labels at most; most touch one.
    assert np.bincount(targets).min() > 60
    held = (label_counts(targets, partition("shards", targets, clients, seed=seed), 5) > 0).sum(axis=1)
    assert held.max() <= 4 and (held > 2).sum() <= 4  # four shards at most lie across one of the four borders


def test_dirichlet_is_unequal_and_alpha_says_how_much() -> None:
    targets = np.repeat(np.arange(10), 200)

    def share(alpha: float) -> float:
        counts = label_counts(targets, partition("dirichlet", targets, 20, seed=0, alpha=alpha), 10)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert share(0.05) > share(0.5) > share(50)
    sizes = {len(rows) for rows in dealt("dirichlet", targets, 20, seed=0).lower}
    assert len(sizes) > 5


def test_repair_ends_when_there_are_just_two_rows_a_client() -> None:
    made = dealt("dirichlet", np.zeros(4000, int), 2000, seed=0, alpha=0.001)
    assert all(len(rows) == 1 for rows in [*made.lower, *made.upper])


@pytest.mark.parametrize(("kind", "share"), [("iid", 0.5), ("shards", 0.8), ("dirichlet", 0.8)])
def test_default_shares(kind: str, share: float) -> None:
    made = dealt(kind, np.repeat(np.arange(10), 100), 10, seed=3)
    for lower, upper in zip(made.lower, made.upper, strict=True):
        assert abs(len(lower) - share * (len(lower) + len(upper))) <= 0.5


def test_seeds_and_kinds_differ() -> None:
    targets = np.zeros(100, int)
    first = [dealt(k, targets, 5, seed=s).lower[0].tolist() for k in ("iid", "shards") for s in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(first, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clients": 0}, "clients=0"),
        ({"clients": 6}, "use 1 to 5 clients"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"kind": "dirichlet", "alpha": 1e308}, "too extreme"),
        ({"train_share": 0.0}, "train_share=0.0"),
        ({"train_share": 1.0}, "train_share=1.0"),
        ({"shards_per_client": 0}, "shards_per_client=0"),
        ({"kind": "drawn", "clients": 0}, "clients=0"),
        ({"kind": "drawn"}, "rows_per_client=100 does not fit 10 rows: .*; use 2 to 10"),
        ({"kind": "drawn", "rows_per_client": 1}, "rows_per_client=1 does not fit"),
        ({"kind": "drawn", "rows_per_client": 5, "alpha": 1e308}, "too extreme"),
    ],
)
def test_wrong_settings(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        partition(**{"kind": "iid", "targets": np.arange(10), "clients": 2, "seed": 0, **change})


def test_unknown_kind() -> None:
    with pytest.raises(UnknownName, match="partition .idd. is unknown; use one of: classes, dirichlet, drawn"):
        partition("idd", np.arange(10), 2, seed=0)


def tiny(rows: int = 60) -> Dataset:
    g = np.random.default_rng(0)
    return Dataset(
        name="tiny",
        train_inputs=g.normal(size=(rows, 3)).astype(np.float32),
        train_targets=g.integers(0, 4, rows).astype(np.int32),
        test_inputs=np.zeros((1, 3), np.float32),
        test_targets=np.zeros(1, np.int32),
        classes=4,
        shape=(1, 1, 3),
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )


@pytest.mark.parametrize("kind", DEALT)
def test_partitioned_clients(kind: str) -> None:
    dataset = tiny()
    made = dealt(kind, dataset.train_targets, 7, seed=0)
    clients: Clients = PartitionedClients(dataset, made)
    assert clients.count == 7
    assert clients.capacity == ClientSize(max(map(len, made.lower)), max(map(len, made.upper)))
    for i in range(7):
        loaded = clients.load(i)
        assert clients.size(i) == ClientSize(loaded.lower.rows, loaded.upper.rows)
        for part, rows in ((loaded.lower, made.lower[i]), (loaded.upper, made.upper[i])):
            np.testing.assert_array_equal(part.inputs, dataset.train_inputs[rows])
            np.testing.assert_array_equal(part.targets, dataset.train_targets[rows])
            assert part.inputs.dtype == np.float32 and part.targets.dtype == np.int32
            assert part.inputs.flags.c_contiguous
    assert np.shares_memory(clients.load(0).lower.inputs, clients.load(0).lower.inputs)  # not made anew


def test_a_subset_of_rows_is_fine() -> None:
    dataset = tiny()
    clients = PartitionedClients(dataset, Partition([np.asarray([3, 1])], [np.asarray([5])]))
    np.testing.assert_array_equal(clients.load(0).lower.inputs, dataset.train_inputs[[3, 1]])
    assert clients.capacity == (2, 1)


# ------------------------------------------------------------------------------------------- rows that are drawn

MILLION = 1_000_000


@given(problem=problems(), data=st.data())
def test_drawn_rows_are_a_clients_own_whatever_is_asked_before(
    problem: dict[str, Any], data: st.DataObject
) -> None:
    rows = data.draw(st.integers(2, len(problem["targets"])))
    problem = problem | {"clients": MILLION, "rows_per_client": rows}
    made, again = partition("drawn", **problem), partition("drawn", **problem)
    asked = data.draw(st.lists(st.integers(0, MILLION - 1), min_size=1, max_size=4, unique=True))
    first = {client: made.rows(client).tolist() for client in asked}
    assert {client: again.rows(client).tolist() for client in reversed(asked)} == first
    for own in first.values():
        assert len(set(own)) == len(own) == rows, "none twice"
        assert min(own) >= 0 and max(own) < len(problem["targets"])
    lower, upper = made.size(asked[0])
    assert lower + upper == rows and min(lower, upper) >= 1
    assert made.clients == MILLION


def test_drawn_labels_follow_the_shares_of_the_client() -> None:
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(5) * 3, 2000))
    made = partition("drawn", targets, MILLION, seed=7, alpha=0.5, rows_per_client=1000)
    assert isinstance(made, Drawn)
    for client in (0, 1, 999_999):
        shares = generator(7, "partition", "drawn", client).dirichlet(np.full(5, 0.5))
        rows = made.rows(client)
        for part in (rows[: made.each.lower], rows[made.each.lower :]):
            got = np.bincount(targets[part] // 3, minlength=5) / len(part)
            np.testing.assert_allclose(got, shares, atol=4 * 0.5 / np.sqrt(len(part)))
    counts = label_counts(targets, made, 13, first=400)[:, ::3]
    np.testing.assert_allclose(counts.mean(axis=0), 200, atol=4 * 1000 * np.sqrt(0.2 * 0.8 / 3.5 / 400))


def test_alpha_says_how_unequal_drawn_clients_are() -> None:
    targets = np.repeat(np.arange(10), 200)

    def share(alpha: float) -> float:
        counts = label_counts(targets, partition("drawn", targets, 50, seed=0, alpha=alpha), 10)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert share(0.05) > 0.7 > share(0.5) > 0.3 > share(50)


def test_a_label_with_too_few_rows_is_filled_up_with_others() -> None:
    targets = np.repeat(np.arange(4), 10)
    made = partition("drawn", targets, 5, seed=0, alpha=0.001, rows_per_client=25)
    for client in range(5):
        counts = np.bincount(targets[made.rows(client)], minlength=4)
        assert counts.sum() == 25 and counts.max() == 10
    everything = partition("drawn", targets, 5, seed=0, rows_per_client=40)
    assert sorted(everything.rows(3)) == list(range(40))


def test_drawn_seeds_and_clients_differ() -> None:
    first = [partition("drawn", np.zeros(500, int), 9, seed=s).rows(c).tolist() for s in (0, 1) for c in (0, 8)]
    assert all(a != b for a, b in itertools.combinations(first, 2))


def test_drawn_clients() -> None:
    dataset = tiny()
    made = partition("drawn", dataset.train_targets, MILLION, seed=0, rows_per_client=10, train_share=0.7)
    assert isinstance(made, Drawn)
    clients: Clients = drawn_clients(dataset, made)
    assert clients.count == MILLION and clients.capacity == clients.size(5) == ClientSize(7, 3)
    for i in (0, 999_999):
        loaded = clients.load(i)
        rows = made.rows(i)
        for part, own in ((loaded.lower, rows[:7]), (loaded.upper, rows[7:])):
            np.testing.assert_array_equal(part.inputs, dataset.train_inputs[own])
            np.testing.assert_array_equal(part.targets, dataset.train_targets[own])
            assert part.inputs.dtype == np.float32 and part.targets.dtype == np.int32


def test_the_settings_of_drawn_clients() -> None:
    _, clients = DataSettings(name="digits", clients=MILLION, partition="drawn").load(0)
    assert clients.count == MILLION and clients.capacity == (80, 20)
    _, clients = DataSettings(name="digits", clients=3, partition="drawn", rows_per_client=10).load(0)
    assert clients.capacity == (8, 2) and clients.load(2).lower.inputs.shape == (8, 64)
    with pytest.raises(SettingsError, match="or the partition drawn, whose clients may share rows"):
        DataSettings(name="digits", clients=MILLION, partition="iid").load(0)


# ------------------------------------------------------------------------------------------- tables and pictures


def test_of_a_million_clients_the_first_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbilevel.data._describe.COUNTED", 30)
    targets = np.repeat(np.arange(10), 60)
    made = partition("drawn", targets, MILLION, seed=0)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(label_table(targets, made, 10, show=3))
    assert "600 rows, 10 classes, 1,000,000 clients (the first 30 counted)" in " ".join(capture.get().split())
    path = draw_labels(tmp_path / "labels.png", targets, made, 10, dataset="tiny", kind="drawn")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_label_table() -> None:
    targets = np.repeat(np.arange(10), 60)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(label_table(targets, partition("shards", targets, 10, seed=0), 10, show=3))
    text = capture.get()
    for part in ("600 rows, 10 classes, 10 clients", "lower part", "48", "share of largest class", ":30"):
        assert part in text


@pytest.mark.parametrize(("clients", "classes"), [(10, 10), (100, 10), (250, 40)])
def test_draw_labels(tmp_path: Path, clients: int, classes: int) -> None:
    targets = np.arange(2000) % classes
    made = partition("dirichlet", targets, clients, seed=0)
    path = draw_labels(tmp_path / "labels.png", targets, made, classes, dataset="tiny", kind="dirichlet")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_both_parts_can_have_all_rows_of_a_client() -> None:
    apart, same = (DataSettings(name="digits", clients=10, partition="iid", parts=p) for p in ("apart", "same"))
    _, before = apart.split(0)
    _, after = same.split(0)
    for client in range(10):
        assert after.size(client) == (before.rows(client).size,) * 2
        assert set(after.rows(client)) == set(before.rows(client)) and after.rows(client).size == len(
            set(after.rows(client))
        )
    _, clients = same.load(0)
    data = clients.load(3)
    np.testing.assert_array_equal(data.lower.inputs, data.upper.inputs)
    with pytest.raises(SettingsError, match="clients of the partition drawn have rows apart"):
        DataSettings(name="digits", partition="drawn", parts="same").split(0)


def test_pixels_can_be_normalised_by_one_half() -> None:
    usual, half = (DataSettings(name="digits", normalisation=n).dataset for n in ("usual", "half"))
    for before, after in ((usual.train_inputs, half.train_inputs), (usual.test_inputs, half.test_inputs)):
        pixels = np.asarray(before) * usual.std[0] + usual.mean[0]
        np.testing.assert_allclose(np.asarray(after), (pixels - 0.5) / 0.5, atol=1e-5)
    assert (half.mean, half.std) == ((0.5,), (0.5,))
