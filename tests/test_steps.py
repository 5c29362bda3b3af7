"""Draws with an address, walks along them, and the registry of client steps."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from fedbilevel.algorithms.local import lower_steps
from fedbilevel.errors import SettingsError, UnknownName
from fedbilevel.steps import (
    Draw,
    Epochs,
    PerClient,
    Sample,
    Samples,
    Scalar,
    Stream,
    X,
    Y,
    client_step,
    draw,
    find_step,
    sgd,
    svrg,
    walk,
)

ADDRESS = (7, "round", 3, "zeta")


def real(index: Any, weight: Any) -> list[int]:
    """The rows that were really drawn."""
    assert set(np.unique(weight)) <= {0.0, 1.0}
    return [int(i) for i, w in zip(index, weight, strict=True) if w]


def rows_of(made: Any) -> list[list[int]]:
    """The rows of a draw, or of every active step of a stream."""
    if isinstance(made, Draw):
        return [real(made.index, made.weight)]
    every = [real(i, w) for i, w in zip(made.draws.index, made.draws.weight, strict=True)]
    assert all(not rows for rows, active in zip(every, made.active, strict=True) if not active)
    return [rows for rows, active in zip(every, made.active, strict=True) if active]


sizes = st.integers(1, 30)


@settings(max_examples=60)
@given(
    rows=sizes, more=st.integers(0, 9), size=st.integers(1, 12), client=st.integers(0, 10**6), seed=st.integers(0)
)
def test_a_sample_is_without_replacement_and_blind_to_padding(
    rows: int, more: int, size: int, client: int, seed: int
) -> None:
    address = (seed, *ADDRESS[1:])
    for descriptor in (Sample("lower", size), Samples("lower", size, 3), Epochs("lower", size, 2)):
        made = draw(descriptor, address, client, rows, rows)
        again = draw(descriptor, address, client, rows, rows + more)
        assert rows_of(made) == rows_of(again)
        for chosen in rows_of(made):
            assert len(set(chosen)) == len(chosen) and set(chosen) <= set(range(rows))
            assert 1 <= len(chosen) <= min(size, rows)
            assert isinstance(descriptor, Epochs) or len(chosen) == min(size, rows)


@pytest.mark.parametrize("descriptor", [Sample("lower", 9), Samples("lower", 9, 2), Epochs("lower", 9, 1)])
def test_a_draw_has_an_address(descriptor: Any) -> None:
    def at(address: tuple[Any, ...] = ADDRESS, client: int = 5) -> list[list[int]]:
        return rows_of(draw(descriptor, address, client, 40, 40))

    assert at() == at()
    others = [
        at((8, "round", 3, "zeta")),
        at((7, "probe", 3, "zeta")),
        at((7, "round", 4, "zeta")),
        at((7, "round", 3, "xi")),
        at(client=6),
    ]
    assert all(other != at() for other in others)
    assert len({str(other) for other in others}) == len(others)


def test_the_draws_of_a_stream_differ_and_each_row_is_equally_likely() -> None:
    chosen = rows_of(draw(Samples("lower", 3, 2000), ADDRESS, 0, 6, 6))
    assert len({tuple(rows) for rows in chosen}) > 100
    counts = np.bincount(np.concatenate(chosen), minlength=6)
    # each row is in a draw with probability 1/2: a deviation of sqrt(2000)/2 = 22
    assert np.all(np.abs(counts - 1000) < 5 * 22.4)


@settings(max_examples=60)
@given(rows=sizes, more=st.integers(0, 20), size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_epochs_cover_every_row_exactly_once_a_pass(rows: int, more: int, size: int, epochs: int) -> None:
    made = draw(Epochs("lower", size, epochs), ADDRESS, 2, rows, rows + more)
    batches = rows_of(made)
    a_pass = -(-rows // size)
    assert len(batches) == epochs * a_pass
    assert len(made.active) == epochs * -(-(rows + more) // size)
    for start in range(0, len(batches), a_pass):
        of_pass = batches[start : start + a_pass]
        assert sorted(chain.from_iterable(of_pass)) == list(range(rows))
        assert all(len(batch) == size for batch in of_pass[:-1])
        assert len(of_pass[-1]) == rows - (a_pass - 1) * size
    if rows >= 10 and epochs > 1:
        assert batches[:a_pass] != batches[a_pass : 2 * a_pass], "passes are shuffled anew"


def test_samples_take_each_clients_own_count() -> None:
    count = PerClient((1, 4, 2))
    for client, own in enumerate(count.values):
        made = draw(Samples("upper", 2, count), ADDRESS, client, 8, 8)
        assert made.active.tolist() == [True] * int(own) + [False] * (4 - int(own))
        assert len(rows_of(made)) == own and int(made.steps) == own
        alone = draw(Samples("upper", 2, int(own)), ADDRESS, client, 8, 8)
        assert rows_of(alone) == rows_of(made), "a client's rows do not depend on the others' counts"
        full = draw(Samples("upper", None, count), ADDRESS, client, 8, 8)
        assert full.draws == Draw(None, None) and full.active.tolist() == made.active.tolist()


def test_no_size_is_all_rows() -> None:
    assert draw(Sample("lower"), ADDRESS, 0, 5, 9) == Draw(None, None)
    made = draw(Epochs("lower", None, 3), ADDRESS, 0, 5, 9)
    assert made.draws == Draw(None, None) and made.active.tolist() == [True] * 3


def test_a_walk_leaves_a_finished_client_where_it_is() -> None:
    index = np.asarray([[2], [3], [5]], np.int32)
    stream = Stream(Draw(index, np.ones((3, 1), np.float32)), np.asarray([True, True, False]))
    end = walk(lambda v, b: 10 * v + b.index[0], jnp.asarray(1.0), stream)
    assert float(end) == 123.0


# ------------------------------------------------------------------- local steps against a loop in plain Python

G = np.random.default_rng(0)
ROWS = G.normal(size=(11, 4)).astype(np.float32)
ANCHOR, CORRECTION = G.normal(size=4).astype(np.float32), G.normal(size=4).astype(np.float32)


def gradient(v: Array, b: Draw) -> Array:
    """The gradient of mean_r log cosh(a_r·v) over the rows drawn; not linear in v."""
    if b.index is None:
        return jnp.tanh(ROWS @ v) @ ROWS / len(ROWS)
    a = jnp.asarray(ROWS)[b.index]
    return (b.weight * jnp.tanh(a @ v)) @ a / jnp.sum(b.weight)


def plain(v: np.ndarray, rows: Any) -> np.ndarray:
    a = ROWS.astype(np.float64)[rows]
    return np.tanh(a @ v) @ a / len(a)


def loop(batches: list[Any], step: float, corrected: bool) -> np.ndarray:
    anchor, v = ANCHOR.astype(np.float64), ANCHOR.astype(np.float64)
    for rows in batches:
        direction = plain(v, rows)
        if corrected:
            direction = direction - plain(anchor, rows) + CORRECTION.astype(np.float64)
        v = v - step * direction
    return v


@pytest.mark.parametrize("tau", [1, 2, 5])
@pytest.mark.parametrize("size", [3, None], ids=["minibatch", "full batch"])
def test_svrg_and_sgd_are_the_plain_loops(tau: int, size: int | None) -> None:
    counts = PerClient((tau, 5))
    stream = draw(Samples("lower", size, counts), ADDRESS, 0, 11, 11)
    batches = [slice(None)] * tau if size is None else rows_of(stream)
    assert len(batches) == tau
    got = svrg(gradient, jnp.asarray(ANCHOR), jnp.asarray(CORRECTION), 0.3, stream)
    np.testing.assert_allclose(got, loop(batches, 0.3, corrected=True), rtol=2e-5)
    got = sgd(gradient, jnp.asarray(ANCHOR), 0.3, stream)
    np.testing.assert_allclose(got, loop(batches, 0.3, corrected=False), rtol=2e-5)


def test_svrg_on_a_stream_of_one_is_a_step_along_q_and_needs_no_gradient() -> None:
    def never(v: Array, b: Draw) -> Array:
        raise AssertionError("the first step costs nothing")

    stream = draw(Samples("lower", 3, 1), ADDRESS, 0, 11, 11)
    got = svrg(never, jnp.asarray(ANCHOR), jnp.asarray(CORRECTION), 0.5, stream)
    np.testing.assert_allclose(got, ANCHOR - 0.5 * CORRECTION, rtol=1e-6)


def test_svrg_over_epochs_with_a_short_last_batch_is_the_plain_loop() -> None:
    stream = draw(Epochs("lower", 4, 2), ADDRESS, 1, 11, 30)
    batches = rows_of(stream)
    assert [len(b) for b in batches] == [4, 4, 3, 4, 4, 3] and len(stream.active) == 16
    step = jax.jit(lambda s: svrg(gradient, jnp.asarray(ANCHOR), jnp.asarray(CORRECTION), 0.2, s))
    np.testing.assert_allclose(step(stream), loop(batches, 0.2, corrected=True), rtol=2e-5)


# ------------------------------------------------------------------------------------------------- the registry


class Kinds(NamedTuple):
    a: X
    b: Y | None
    c: Scalar


class NoKinds(NamedTuple):
    a: Array


@client_step
def with_kinds(c: Any, v: Array) -> Kinds:
    """A step for the registry."""
    return Kinds(v, None, jnp.sum(v))


@client_step
def without_kinds(c: Any, v: Array) -> NoKinds:
    """A step whose reply says nothing about itself."""
    return NoKinds(v)


def test_a_step_is_found_by_its_address_and_called_as_its_function() -> None:
    assert with_kinds.address == f"{__name__}:with_kinds" and with_kinds.name == "with_kinds"
    assert find_step(with_kinds.address) is with_kinds
    assert find_step("fedbilevel.algorithms.local:lower_steps") is lower_steps
    assert float(with_kinds(None, jnp.ones(3)).c) == 3.0


def test_an_unknown_address_is_named_with_what_is_known() -> None:
    with pytest.raises(UnknownName, match=r"'nowhere:nothing' is unknown.*aggitd:gradients"):
        find_step("nowhere:nothing")


def test_a_reply_has_kinds_and_one_without_raises() -> None:
    assert with_kinds.reply == {"a": "x", "b": "y", "c": "scalar"}
    with pytest.raises(SettingsError, match=r"without_kinds: field a .* use X, Y or Scalar"):
        _ = without_kinds.reply
