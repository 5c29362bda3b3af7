"""Clients of unequal size in groups: less padding, and the same numbers in the same order."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import AggITD, ClientSize, Federation, Sample, Simulation
from fedbilevel._probes import losses
from fedbilevel.engines import _groups
from fedbilevel.engines._groups import groups_of, in_order, joined
from fedbilevel.problem import Task

WIDTH = 2**18


def sizes(*rows: int) -> list[ClientSize]:
    return [ClientSize(each, each) for each in rows]


def test_every_client_is_in_one_group_that_has_room_for_its_rows() -> None:
    rng = np.random.default_rng(0)
    rows = [*np.minimum(rng.pareto(1.0, 35) * 10 + 1, 400).astype(int).tolist(), 400]
    chunk, capacity = list(range(100, 136)), ClientSize(400, 300)
    own = [ClientSize(each, max(1, each // 2)) for each in rows]
    groups = groups_of(chunk, own, capacity, lanes=2, width=WIDTH)
    assert sorted(place for group in groups for place in group.places) == list(range(36))
    assert len({len(group.clients) for group in groups}) == 1, "one number of clients, so few programs"
    assert {group.rows.lower for group in groups} <= {40, 100, 180, 280, 400}
    for group in groups:
        assert group.clients[: len(group.places)] == tuple(chunk[place] for place in group.places)
        assert all(own[place] <= group.rows and own[place].upper <= group.rows.upper for place in group.places)
    padded = sum(len(group.clients) * sum(group.rows) for group in groups)
    assert sum(map(sum, own)) < padded < 0.5 * 36 * sum(capacity)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        ((300,) * 10, WIDTH),
        ((300, 290, 280, 270, 260, 250), WIDTH),  # too little to save
        ((300, 30, 30, 30, 30, 30), 100),  # too little work for further calls
    ],
)
def test_clients_are_served_at_once_if_groups_do_not_pay(rows: tuple[int, ...], width: int) -> None:
    assert groups_of(range(len(rows)), sizes(*rows), ClientSize(300, 300), lanes=2, width=width) == []


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_results_of_groups_are_put_in_the_order_of_the_chunk(lanes: int) -> None:
    rows = [10, 400, 20, 30, 5, 399, 100, 200, 7] * 15
    chunk = np.random.default_rng(1).permutation(len(rows)).tolist()
    groups = groups_of(chunk, sizes(*rows), ClientSize(400, 400), lanes, WIDTH)
    assert len(groups) > 10
    parts = [jnp.asarray(group.clients)[:, None] for group in groups]
    made = joined(parts, jnp.asarray(in_order(groups, lanes)), lanes)
    assert made[:, 0].tolist() == chunk


def test_a_run_in_groups_is_the_run_with_all_clients_padded_to_the_largest(
    digits: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds with their mean, in rounds whose replies are kept apart, and with as many draws."""
    method = AggITD(N=1, alpha=0.1, beta=0.05, lam=0.3, participation=7, upper_steps=2, batch_xi=4, lower_epochs=2)
    monkeypatch.setattr(_groups, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(_groups, "SAVED", 0.0)

    def run(each_call: float) -> tuple[Any, Any, Federation, int]:
        monkeypatch.setattr(_groups, "A_CALL", each_call)
        engine = Simulation(digits.problem, digits.clients, devices=1)
        fed, state = Federation(engine, seed=3), method.init(digits.problem)
        for _ in range(2):
            state = method.step(fed, state)
        rows: dict[str, Any] = dict(xi=Sample("upper"), zeta=Sample("lower"))
        apart = fed.probe(losses, range(5, 17), apart=True, x=state.x, y=state.y, **rows)
        return np.concatenate(state), np.stack(apart), fed, len(engine._grouped[1])

    state, apart, fed, groups = run(0.0)
    plain, rows, books, none = run(np.inf)
    assert (groups, none) == (12, 0)
    np.testing.assert_allclose(state, plain, atol=1e-5 * float(np.linalg.norm(plain)))
    np.testing.assert_allclose(apart, rows, rtol=1e-5)
    assert not np.allclose(np.sort(rows, axis=1), rows), "the order of clients would be noticed"
    assert [a.bytes_up for a in fed.ledger.steps.values()] == [a.bytes_up for a in books.ledger.steps.values()]
