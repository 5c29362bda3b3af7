"""Draws with an address, walks along them, and the registry of client steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Annotated, Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from fedbilevel.algorithms.local import lower_steps
from fedbilevel.engines import Loop, expect, make_call
from fedbilevel.errors import SettingsError, UnknownName
from fedbilevel.federation import Federation
from fedbilevel.oracle import Oracle
from fedbilevel.problems import QuadraticTask
from fedbilevel.rng import Address, Kind
from fedbilevel.steps import (
    XY,
    YY,
    Draw,
    Epochs,
    Form,
    Next,
    Own,
    PerClient,
    ReplyField,
    Role,
    Sample,
    Samples,
    Scalar,
    Step,
    Stream,
    Use,
    X,
    Y,
    client_step,
    draw,
    find_step,
    sgd,
    svrg,
    walk,
)
from fedbilevel.steps._affine import is_affine
from fedbilevel.stepsizes import Moves

ADDRESS = Address(7, Kind.ROUND, 3)
NAME = "zeta"


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
    address = ADDRESS._replace(root=seed)
    for descriptor in (Sample("lower", size), Samples("lower", size, 3), Epochs("lower", size, 2)):
        made = draw(descriptor, address, NAME, client, rows, rows)
        again = draw(descriptor, address, NAME, client, rows, rows + more)
        assert rows_of(made) == rows_of(again)
        for chosen in rows_of(made):
            assert len(set(chosen)) == len(chosen) and set(chosen) <= set(range(rows))
            assert 1 <= len(chosen) <= min(size, rows)
            assert isinstance(descriptor, Epochs) or len(chosen) == min(size, rows)


@pytest.mark.parametrize("descriptor", [Sample("lower", 9), Samples("lower", 9, 2), Epochs("lower", 9, 1)])
def test_a_draw_has_an_address(descriptor: Any) -> None:
    def at(address: Address = ADDRESS, name: str = NAME, client: int = 5) -> list[list[int]]:
        return rows_of(draw(descriptor, address, name, client, 40, 40))

    assert at() == at()
    others = [
        at(Address(8, Kind.ROUND, 3)),
        at(Address(7, Kind.PROBE, 3)),
        at(Address(7, Kind.LOCAL, 3)),
        at(Address(7, Kind.ROUND, 4)),
        at(name="xi"),
        at(client=6),
    ]
    assert all(other != at() for other in others)
    assert len({str(other) for other in others}) == len(others)


def test_the_draws_of_a_stream_differ_and_each_row_is_equally_likely() -> None:
    chosen = rows_of(draw(Samples("lower", 3, 2000), ADDRESS, NAME, 0, 6, 6))
    assert len({tuple(rows) for rows in chosen}) > 100
    counts = np.bincount(np.concatenate(chosen), minlength=6)
    # each row is in a draw with probability 1/2: a deviation of sqrt(2000)/2 = 22
    assert np.all(np.abs(counts - 1000) < 5 * 22.4)


@settings(max_examples=60)
@given(rows=sizes, more=st.integers(0, 20), size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_epochs_cover_every_row_exactly_once_a_pass(rows: int, more: int, size: int, epochs: int) -> None:
    made = draw(Epochs("lower", size, epochs), ADDRESS, NAME, 2, rows, rows + more)
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
        made = draw(Samples("upper", 2, count), ADDRESS, NAME, client, 8, 8)
        assert made.active.tolist() == [True] * int(own) + [False] * (4 - int(own))
        assert len(rows_of(made)) == own and int(made.steps) == own
        alone = draw(Samples("upper", 2, int(own)), ADDRESS, NAME, client, 8, 8)
        assert rows_of(alone) == rows_of(made), "a client's rows do not depend on the others' counts"
        full = draw(Samples("upper", None, count), ADDRESS, NAME, client, 8, 8)
        assert full.draws == Draw(None, None) and full.active.tolist() == made.active.tolist()


def test_no_size_is_all_rows() -> None:
    assert draw(Sample("lower"), ADDRESS, NAME, 0, 5, 9) == Draw(None, None)
    made = draw(Epochs("lower", None, 3), ADDRESS, NAME, 0, 5, 9)
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


Slope = Callable[[Any], Any]  # the derivative of a row's loss with respect to a_r·v


def tanh(s: Any) -> Any:
    """Of log cosh s: the gradient is not affine in v."""
    return jnp.tanh(s) if isinstance(s, Array) else np.tanh(s)


def square(s: Any) -> Any:
    """Of (s + 1)²: the gradient is affine in v, so svrg takes a Hessian product instead of two gradients."""
    return 2 * (s + 1)


def gradient(v: Array, b: Draw, slope: Slope = tanh) -> Array:
    """The gradient of the mean of a loss of a_r·v over the rows drawn."""
    if b.index is None:
        return slope(ROWS @ v) @ ROWS / len(ROWS)
    a = jnp.asarray(ROWS)[b.index]
    return (b.weight * slope(a @ v)) @ a / jnp.sum(b.weight)


def plain(v: np.ndarray, rows: Any, slope: Slope = tanh) -> np.ndarray:
    a = ROWS.astype(np.float64)[rows]
    return slope(a @ v) @ a / len(a)


def loop(batches: list[Any], step: float, corrected: bool, slope: Slope = tanh) -> np.ndarray:
    anchor, v = ANCHOR.astype(np.float64), ANCHOR.astype(np.float64)
    for rows in batches:
        direction = plain(v, rows, slope)
        if corrected:
            direction = direction - plain(anchor, rows, slope) + CORRECTION.astype(np.float64)
        v = v - step * direction
    return v


def step(s: Any) -> Any:
    """Of a zigzag: -1 or 1. Its derivative is zero, and yet it differs between v and the anchor."""
    return jnp.sign(jnp.sin(20 * s)) if isinstance(s, Array) else np.sign(np.sin(20 * s))


@pytest.mark.parametrize("slope", [tanh, square, step])
@pytest.mark.parametrize("tau", [1, 2, 5])
@pytest.mark.parametrize("size", [3, None], ids=["minibatch", "full batch"])
def test_svrg_and_sgd_are_the_plain_loops(tau: int, size: int | None, slope: Slope) -> None:
    counts = PerClient((tau, 5))
    stream = draw(Samples("lower", size, counts), ADDRESS, NAME, 0, 11, 11)
    batches = [slice(None)] * tau if size is None else rows_of(stream)
    assert len(batches) == tau
    own = partial(gradient, slope=slope)
    got = svrg(own, jnp.asarray(ANCHOR), jnp.asarray(CORRECTION), 0.1, stream)
    np.testing.assert_allclose(got, loop(batches, 0.1, True, slope), rtol=2e-5)
    got = sgd(own, jnp.asarray(ANCHOR), 0.1, stream)
    np.testing.assert_allclose(got, loop(batches, 0.1, False, slope), rtol=2e-5)


@pytest.mark.parametrize(
    ("affine", "function"),
    [
        (True, lambda v: 3 * v - jnp.flip(v) + 1),
        (True, jax.grad(lambda v: jnp.sum((ROWS @ v - 1) ** 2) + jnp.sum(v**2))),
        (True, jax.grad(lambda v: jnp.linalg.norm(v) ** 0 + jnp.mean(jnp.square(v)))),
        (True, lambda v: jax.jit(lambda w: (w, jnp.ones(4)))(v)[1]),  # one result of a call depends on v
        (False, jax.grad(lambda v: jnp.sum(jnp.logaddexp(0, ROWS @ v)))),
        (False, jax.grad(lambda v: jnp.sum(v**3))),
        (False, jax.grad(lambda v: jnp.where(v[0] > 0, 1.0, 2.0) * jnp.sum(v**2))),  # affine on each side only
        (False, lambda v: jnp.abs(v)),
        (False, jax.grad(lambda v: jnp.sum(jnp.maximum(0, 1 - ROWS @ v)))),  # steps, whose derivative is zero
        (False, jax.grad(lambda v: jnp.sum(jnp.abs(ROWS @ v - 1)))),
        (False, lambda v: v + jax.lax.stop_gradient(v**2)),
        (False, lambda v: jax.jit(lambda w: v * w)(v)),
        (False, lambda v: jax.lax.scan(lambda c, _: (c * v, None), v, length=2)[0]),
    ],
)
def test_a_function_is_known_to_be_affine_by_its_operations(affine: bool, function: Any) -> None:
    assert is_affine(function, jnp.asarray(ANCHOR)) is affine


def test_svrg_on_a_stream_of_one_is_a_step_along_q_and_needs_no_gradient() -> None:
    def never(v: Array, b: Draw) -> Array:
        raise AssertionError("the first step costs nothing")

    stream = draw(Samples("lower", 3, 1), ADDRESS, NAME, 0, 11, 11)
    got = svrg(never, jnp.asarray(ANCHOR), jnp.asarray(CORRECTION), 0.5, stream)
    np.testing.assert_allclose(got, ANCHOR - 0.5 * CORRECTION, rtol=1e-6)


def test_svrg_over_epochs_with_a_short_last_batch_is_the_plain_loop() -> None:
    stream = draw(Epochs("lower", 4, 2), ADDRESS, NAME, 1, 11, 30)
    batches = rows_of(stream)
    assert [len(b) for b in batches] == [4, 4, 3, 4, 4, 3] and len(stream.active) == 16
    step = jax.jit(lambda s: svrg(gradient, jnp.asarray(ANCHOR), jnp.asarray(CORRECTION), 0.2, s))
    np.testing.assert_allclose(step(stream), loop(batches, 0.2, corrected=True), rtol=2e-5)


# ------------------------------------------------------------------- pytrees, several streams, other libraries

MANY = [("minibatch", 3), ("full batch", None)]
COUNTS = PerClient((3, 5))


def stream_of(size: int | None, name: str = NAME) -> Stream:
    """Three steps of five: the last two are another client's."""
    made: Stream = draw(Samples("lower", size, COUNTS), ADDRESS, name, 0, 11, 11)
    return made


def of_pair(v: dict[str, Array], b: Draw) -> dict[str, Array]:
    return {"a": gradient(v["a"], b), "b": 2 * gradient(v["b"], b)}


def doubled(v: Array, b: Draw) -> Array:
    return 2 * gradient(v, b)


@pytest.mark.parametrize("size", [size for _, size in MANY], ids=[name for name, _ in MANY])
def test_a_walk_of_a_pair_of_vectors_is_the_two_walks(size: int | None) -> None:
    stream = stream_of(size)
    a, b, q = jnp.asarray(ANCHOR), jnp.asarray(ANCHOR[::-1].copy()), jnp.asarray(CORRECTION)
    pair, corrections = {"a": a, "b": b}, {"a": q, "b": 3 * q}
    for got, expected in (
        (
            svrg(of_pair, pair, corrections, 0.3, stream),
            (svrg(gradient, a, q, 0.3, stream), svrg(doubled, b, 3 * q, 0.3, stream)),
        ),
        (sgd(of_pair, pair, 0.3, stream), (sgd(gradient, a, 0.3, stream), sgd(doubled, b, 0.3, stream))),
        (
            walk(lambda v, d: jax.tree.map(lambda w, g: w + g, v, of_pair(v, d)), pair, stream),
            (walk(lambda v, d: v + gradient(v, d), a, stream), walk(lambda v, d: v + doubled(v, d), b, stream)),
        ),
    ):
        assert got.keys() == pair.keys()
        for name, value in zip("ab", expected, strict=True):
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
            assert np.linalg.norm(got[name] - pair[name]) > 0.1, "it moves"


def test_a_walk_along_two_streams_takes_a_draw_of_each_while_both_go_on() -> None:
    one, two = stream_of(3), stream_of(2, "xi")
    two = two._replace(active=np.asarray([True, False, True, True, False]))
    got = walk(lambda v, b, d: v - 0.1 * gradient(v, b) * gradient(v, d), jnp.asarray(ANCHOR), one, two)
    v = ANCHOR.astype(np.float64)
    for i in (0, 2):  # the steps that are active in both
        first, second = (real(s.draws.index[i], s.draws.weight[i]) for s in (one, two))
        v = v - 0.1 * plain(v, first) * plain(v, second)
    np.testing.assert_allclose(got, v, rtol=2e-5)
    mixed = walk(
        lambda v, b, d: v - 0.1 * gradient(v, b) * gradient(v, d), jnp.asarray(ANCHOR), one, stream_of(None)
    )
    v = ANCHOR.astype(np.float64)
    for i in range(3):  # the second stream has all rows at every step
        v = v - 0.1 * plain(v, real(one.draws.index[i], one.draws.weight[i])) * plain(v, slice(None))
    np.testing.assert_allclose(mixed, v, rtol=2e-5)


def of_numpy(v: np.ndarray, b: Draw) -> np.ndarray:
    """The same gradient, by a library that JAX cannot trace."""
    assert type(v) is np.ndarray
    return plain(v, slice(None) if b.index is None else real(b.index, b.weight))


@pytest.mark.parametrize("size", [size for _, size in MANY], ids=[name for name, _ in MANY])
def test_a_walk_of_another_library_is_the_scanned_one(size: int | None) -> None:
    stream, other = stream_of(size), stream_of(size, "xi")
    start, q = ANCHOR.astype(np.float64), CORRECTION.astype(np.float64)
    a, c = jnp.asarray(ANCHOR), jnp.asarray(CORRECTION)
    pairs = [
        (svrg(of_numpy, start, q, 0.3, stream), svrg(gradient, a, c, 0.3, stream)),
        (sgd(of_numpy, start, 0.3, stream), sgd(gradient, a, 0.3, stream)),
        (
            walk(lambda v, b, d: v - of_numpy(v, b) * of_numpy(v, d), start, stream, other),
            walk(lambda v, b, d: v - gradient(v, b) * gradient(v, d), a, stream, other),
        ),
        (
            svrg(lambda v, b: {"v": of_numpy(v["v"], b)}, {"v": start}, {"v": q}, 0.3, stream)["v"],
            svrg(lambda v, b: {"v": gradient(v["v"], b)}, {"v": a}, {"v": c}, 0.3, stream)["v"],
        ),
    ]
    for eager, scanned in pairs:
        assert type(eager) is np.ndarray and isinstance(scanned, Array)
        np.testing.assert_allclose(eager, scanned, rtol=2e-5, atol=1e-6)
        assert np.linalg.norm(eager - start) > 0.1, "it moves"


def test_a_number_beside_the_vector_is_walked_along_in_a_compiled_step() -> None:
    """A start of a plain number is no sign of another library when the draws are traced."""

    def count(v: tuple[Array, Array], b: Draw) -> tuple[Array, Array]:
        return v[0] - 0.3 * gradient(v[0], b), v[1] + 1

    stream = stream_of(3)
    compiled = jax.jit(lambda start, s: walk(count, (start, 0), s))
    value, steps = compiled(jnp.asarray(ANCHOR), stream)
    assert int(steps) == 3
    np.testing.assert_allclose(value, sgd(gradient, jnp.asarray(ANCHOR), 0.3, stream), rtol=1e-5)
    from_host = jax.jit(lambda s: (sgd(gradient, ANCHOR, 0.3, s), svrg(gradient, ANCHOR, CORRECTION, 0.3, s)))
    for got, corrected in zip(from_host(stream), (False, True), strict=True):
        np.testing.assert_allclose(got, loop(rows_of(stream), 0.3, corrected), rtol=2e-5)


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


# ------------------------------------------------------------------------------------------- what a reply says


class EveryKind(NamedTuple):
    a: X
    b: Y | None
    c: Scalar
    d: XY
    e: YY
    f: Next[Y]
    g: Next[X] | None
    h: Own[X]
    i: Own[dict[str, Array]] | None
    j: Optional[Scalar]  # noqa: UP045


class OwnOnly(NamedTuple):
    a: Own[Array]


class NextOfNothing(NamedTuple):
    a: Next[Array]


@client_step
def every_kind(c: Any) -> EveryKind:
    """Never run."""
    raise AssertionError


@client_step
def own_only(c: Any) -> OwnOnly:
    """Never run."""
    raise AssertionError


@client_step
def next_of_nothing(c: Any) -> NextOfNothing:
    """Never run."""
    raise AssertionError


@client_step
def returns_no_tuple(c: Any) -> tuple[Array]:
    """Never run."""
    raise AssertionError


def test_a_reply_says_of_every_field_what_it_is_and_what_becomes_of_it() -> None:
    assert every_kind.reply == {
        "a": ReplyField(Role.VALUE, Form.X, Moves.PRODUCT),
        "b": ReplyField(Role.VALUE, Form.Y, Moves.LOWER),
        "c": ReplyField(Role.VALUE, Form.SCALAR),
        "d": ReplyField(Role.VALUE, Form.XY, Moves.LOWER),
        "e": ReplyField(Role.VALUE, Form.YY, Moves.LOWER),
        "f": ReplyField(Role.NEXT, Form.Y, Moves.PRODUCT),
        "g": ReplyField(Role.NEXT, Form.X, Moves.UPPER),
        "h": ReplyField(Role.OWN, Form.X),
        "i": ReplyField(Role.OWN, None),
        "j": ReplyField(Role.VALUE, Form.SCALAR),
    }
    assert list(every_kind.sent) == list("abcdefgj") and every_kind.kept == ("h", "i")
    assert own_only.sent == {} and own_only.kept == ("a",), "what is kept may be anything"


@pytest.mark.parametrize("step", [without_kinds, next_of_nothing], ids=["plain", "next"])
def test_a_field_that_is_sent_without_a_kind_is_refused(step: Step[Any, Any]) -> None:
    with pytest.raises(SettingsError, match=rf"step {step.name}: field a .* annotate it with X, Y or Scalar"):
        _ = step.reply


def test_a_reply_that_is_no_named_tuple_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"step returns_no_tuple returns .*; annotate it with the NamedTuple"):
        _ = returns_no_tuple.reply


# ----------------------------------------------------------------------------------- what is done with arguments


@client_step
def every_use(
    c: Any,
    array: Array,
    number: float,
    vector: X,
    noted: Annotated[float, "of a step"],
    maybe: Array | None,
    either: Optional[float],  # noqa: UP045
    count: int,
    flag: bool,
    word: str,
    some: int | None,
    rows: Draw,
    steps: Stream,
    maybe_rows: Annotated[Draw, "of the lower part"] | None,
    more: int = 3,
) -> Kinds:
    """Never run."""
    raise AssertionError


@client_step
def takes_all(c: Any, first: int, **others: Array) -> Kinds:
    """Never run."""
    raise AssertionError


@client_step
def unannotated(c: Any, a: Array, b) -> Kinds:  # type: ignore[no-untyped-def]
    """Never run."""
    raise AssertionError


@client_step
def annotated_as_anything(c: Any, b: Any) -> Kinds:
    """Never run."""
    raise AssertionError


def test_an_annotation_decides_what_is_done_with_an_argument() -> None:
    uses = {
        Use.TRACED: ("array", "number", "vector", "noted", "maybe", "either"),
        Use.CONSTANT: ("count", "flag", "word", "some", "more"),
        Use.DRAWN: ("rows", "steps", "maybe_rows"),
    }
    for use, names in uses.items():
        assert [every_use.use(name) for name in names] == [use] * len(names)
    assert takes_all.use("first") is Use.CONSTANT and takes_all.use("anything") is Use.TRACED


@pytest.mark.parametrize("step", [unannotated, annotated_as_anything], ids=["nothing", "Any"])
def test_an_argument_without_an_annotation_is_refused(step: Step[Any, Any]) -> None:
    with pytest.raises(SettingsError, match=f"step {step.name}: argument b has no annotation; write Array"):
        step.use("b")
    with pytest.raises(SettingsError, match="argument b has no annotation"):
        make_call(step, ADDRESS, (0,), {"a": jnp.ones(2), "b": 1} if step is unannotated else {"b": 1})


GIVEN: dict[str, Any] = dict(
    array=jnp.ones(2),
    number=0.5,
    vector=np.ones(2, np.float32),
    noted=2,
    maybe=None,
    either=None,
    count=4,
    flag=True,
    word="a",
    some=None,
    rows=Sample("lower", 2),
    steps=Epochs("upper", 2, 1),
    maybe_rows=Sample("lower"),
)


def test_a_call_sorts_its_arguments_by_their_annotations() -> None:
    call = make_call(every_use, ADDRESS, (0, 1), GIVEN)
    assert set(call.arrays) == {"array", "number", "vector", "noted"}
    assert (call.arrays["number"].dtype, call.arrays["noted"].dtype) == (np.float32, np.int32)
    assert call.constants == {"maybe": None, "either": None, "count": 4, "flag": True, "word": "a", "some": None}
    assert set(call.samples) == {"rows", "steps", "maybe_rows"} and call.rows == {}
    apart = PerClient((1, 2))
    call = make_call(every_use, ADDRESS, (0, 1), GIVEN | {"array": apart, "number": 3})
    assert call.rows == {"array": apart} and call.arrays["number"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 3}, "every_use: rows takes a Sample, Samples or Epochs, not 3"),
        ({"array": Sample("lower")}, "every_use: array takes no sample"),
        ({"nothing": 1}, "every_use has no argument nothing; it takes array, number"),
    ],
)
def test_an_argument_that_does_not_fit_its_annotation_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_call(every_use, ADDRESS, (0,), GIVEN | changes)


def test_arguments_that_are_missing_are_named() -> None:
    with pytest.raises(SettingsError, match="step every_use needs count, rows too"):
        make_call(every_use, ADDRESS, (0,), {k: v for k, v in GIVEN.items() if k not in ("count", "rows")})


class Result(NamedTuple):
    value: Scalar


TRACES: list[tuple[str, Any]] = []


@client_step
def remembers_tracing(c: Oracle, factor: Array, count: int) -> Result:
    """count times the factor; it notes when it is traced, and with what."""
    TRACES.append((type(factor).__name__, count))
    return Result(count * factor * 1.0 + 0.0 * jnp.sum(c.y))


def test_a_whole_number_for_an_array_is_traced_and_one_for_an_int_chooses_the_program(
    quadratic: QuadraticTask, compilations: Any
) -> None:
    fed = Federation(Loop(quadratic.problem, quadratic.clients)).cohort(2)
    fed.hold(y=jnp.zeros(quadratic.problem.size_y))
    for factor, count in ((3, 1), (3, 2)):
        assert float(fed.round(remembers_tracing, factor=factor, count=count).value) == factor * count
    TRACES.clear()
    with compilations() as seen:
        for factor in (4, 5, -6):
            assert float(fed.round(remembers_tracing, factor=factor, count=2).value) == 2 * factor
    assert TRACES == [] and seen == [], "another factor is the same program"
    assert float(fed.round(remembers_tracing, factor=4, count=3).value) == 12
    assert TRACES and {count for _, count in TRACES} == {3}, "another count is another program"


@client_step
def walks(c: Oracle, zeta: Stream) -> Result:
    """How many steps a client takes."""
    return Result(walk(lambda v, b: v + 1.0, jnp.zeros(()), zeta))


@pytest.mark.parametrize("counts", [[1, 2, 3], np.asarray([1, 2, 3])], ids=["list", "array"])
def test_the_counts_of_clients_may_be_any_sequence(counts: Any, quadratic: QuadraticTask) -> None:
    call = make_call(walks, ADDRESS, (0, 1), {"zeta": Samples("lower", 2, PerClient(counts))})
    assert expect(call, quadratic.problem).fields == {"value": ()}
    fed = Federation(Loop(quadratic.problem, quadratic.clients))
    fed.clients = (0, 1, 2)
    assert float(fed.round(walks, zeta=Samples("lower", 2, PerClient(counts))).value) == 2.0
