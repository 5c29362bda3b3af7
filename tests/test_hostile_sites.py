"""Sites that send the server whatever they like: no reply ends a run or decides a round, and each is named.

Every test here is an attack. The liar is site b, the second client, unless a test says otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.aggregate import Gather, gather_by
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import ListedClients
from fedbilevel.engines.flare import Flare, Site, pack, unpack
from fedbilevel.engines.flare.wire import MAGIC, PREFIX
from fedbilevel.ledger import REASONS, Event, Ledger
from fedbilevel.oracle import Oracle
from fedbilevel.problems import QuadraticTask
from fedbilevel.spec import load_spec
from fedbilevel.steps import YY, Sample, Samples, Stream, client_step
from wires import Wires

SITES = ("a", "b", "c")
Spoil = Callable[[dict[str, Any], bytes], bytes]


@pytest.fixture(scope="module")
def sites(quadratic: QuadraticTask) -> dict[str, Site]:
    return {n: Site(quadratic.problem, quadratic.clients.load(i)) for i, n in enumerate(SITES)}


@pytest.fixture(scope="module")
def honest(quadratic: QuadraticTask) -> list[float]:
    """The mean of the sites a and c."""
    fed = fb.Federation(fb.Loop(quadratic.problem, ListedClients(quadratic.clients.data[:3])))
    fed.clients = (0, 2)
    return ask(fed)


@pytest.fixture
def wires(sites: dict[str, Site]) -> Wires:
    return Wires(sites)


def ask(fed: fb.Federation) -> list[float]:
    fed.hold(x=jnp.ones(10), y=jnp.ones(8))
    return np.asarray(fed.round(lower_gradient, zeta=Sample("lower")).q).tolist()


def raw(header: Any, body: bytes = b"") -> bytes:
    """A message with this header, which may be text that `pack` would not write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text)) + text + body


def edited(**changes: Any) -> Spoil:
    """The reply with fields of its header replaced."""
    return lambda header, body: raw(header | changes, body)


def patched(old: bytes, new: bytes) -> Spoil:
    """The reply with a piece of its header's text replaced."""

    def spoil(header: dict[str, Any], body: bytes) -> bytes:
        text = json.dumps(header).encode()
        assert old in text
        return raw(text.replace(old, new, 1), body)

    return spoil


def spoiled(reply: bytes, spoil: Spoil, kinds: tuple[str, ...]) -> bytes:
    """The reply as a liar sends it, if it is of one of these kinds."""
    header = dict(unpack(reply).header)
    if header["kind"] not in kinds:
        return reply
    return spoil(header, b"".join(v.tobytes() for v in unpack(reply).vectors.values()))


def lying(name: str, spoil: Spoil, *kinds: str) -> Callable[[str, bytes], Any]:
    return lambda site, reply: spoiled(reply, spoil, kinds) if site == name else reply


def vector(name: Any = "q", dtype: Any = "float32", shape: Any = (8,)) -> Spoil:
    return edited(vectors=[{"name": name, "dtype": dtype, "shape": shape}])


# ------------------------------------------------------------------------- one malformed reply cannot end a run

DIGITS = b"9" * 5000
MALFORMED: dict[str, Spoil] = {
    "an empty reply": lambda header, body: b"",
    "a magic word and nothing else": lambda header, body: MAGIC,
    "a header that is a number": lambda header, body: raw(b"7"),
    "a header that is not UTF-8": lambda header, body: raw(b'{"kind": "\xff"}'),
    "a header in UTF-16": lambda header, body: raw(json.dumps(header).encode("utf-16"), body),
    "a reply without vectors": lambda header, body: raw({k: v for k, v in header.items() if k != "vectors"}),
    "a reply with an empty list of vectors": lambda header, body: raw(header | {"vectors": []}),
    "a list nested 100000 times": patched(b'"kind"', b'"deep": ' + b"[" * 10**5 + b"]" * 10**5 + b', "kind"'),
    "objects nested 100000 times": patched(b'"kind"', b'"deep": ' + b'{"a":' * 10**5 + b'1, "kind"'),
    "a list nested 50 times": patched(b'"kind"', b'"deep": ' + b"[" * 50 + b"]" * 50 + b', "kind"'),
    "a number of 5000 digits": patched(b'"round": 1', b'"round": ' + DIGITS),
    "a round of 4000 digits": patched(b'"round": 1', b'"round": ' + DIGITS[:4000]),
    "a round that is true": edited(round=True),
    "a round that is 1.0": patched(b'"round": 1', b'"round": 1.0'),
    "NaN": patched(b'"round": 1', b'"extra": NaN, "round": 1'),
    "Infinity": patched(b'"round": 1', b'"extra": -Infinity, "round": 1'),
    "a number beyond the floats": patched(b'"round": 1', b'"extra": 1e999, "round": 1'),
    "a key that comes twice": patched(b'"round": 1', b'"round": 7, "round": 1'),
    "a kind that is a list": edited(kind=["reply"]),
    "a step that is a list": edited(step=[["reply"]]),
    "a lone surrogate in the step": edited(step="\ud800"),
    "a type that is a list": vector(dtype=[]),
    "a type that is an object": vector(dtype={}),
    "a type of objects": vector(dtype="O"),
    "a shape that is a word": vector(shape="8"),
    "a shape of booleans": vector(shape=[True, 8]),
    "a shape of fractions": vector(shape=[8.0]),
    "a negative shape": vector(shape=[-8, -1]),
    "a shape whose product overflows": vector(shape=[2**30, 2**30, 2**30, 2**30]),
    "an empty shape whose product overflows": lambda header, body: vector(shape=[0, *[2**30] * 3])(header, b""),
    "a shape of five axes": vector(shape=[8, 1, 1, 1, 1]),
    "a name that is a number": vector(name=7),
    "a name of 100000 letters": vector(name="q" * 10**5),
    "a name with escape sequences": vector(name="\x1b[2Jq"),
    "a name that is a lone surrogate": vector(name="\udcff"),
    "a vector that is a list": edited(vectors=[[]]),
    "vectors that are an object": edited(vectors={"q": 8}),
    "9999 empty vectors": edited(
        vectors=[{"name": f"v{i}", "dtype": "float32", "shape": [0]} for i in range(9999)]
    ),
    "a reply of an unknown kind": edited(kind="\x1b]0;owned\x07"),
    "an error whose reason is a list": edited(kind="error", reason=[[]]),
    "lost names that are no list": edited(kind="lost", names="y"),
    "lost names that are numbers": edited(kind="lost", names=[1, {}, None]),
    "lost names that nobody holds": edited(kind="lost", names=["z", "password"]),
    "no lost names": edited(kind="lost", names=[]),
    "a lost reply for ever": edited(kind="lost", names=["y"]),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_reply_is_a_named_refusal_of_its_site(
    what: str, quadratic: QuadraticTask, wires: Wires, honest: list[float]
) -> None:
    wires.spoil = lying("b", MALFORMED[what], "reply")
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires))
    assert ask(fed) == honest
    (event,) = fed.ledger.rejected
    assert (event.client, fed.ledger.rejected[event]) == (1, 1)
    assert event.what.isprintable() and len(event.what) <= 120, event.what
    assert len(wires.down["b"]) <= 3, "the greeting, the request, and once more for what was lost"


def test_a_site_that_says_for_ever_that_it_lost_a_vector_is_excluded(
    quadratic: QuadraticTask, wires: Wires
) -> None:
    wires.spoil = lying("b", edited(kind="lost", names=["y"]), "reply")
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires))
    for _ in range(4):
        ask(fed.cohort(1.0))
    assert [exclusion.client for exclusion in fed.ledger.exclusions] == [1]
    assert len(wires.down["b"]) == 1 + 3 * 2, "in each of three rounds it was asked twice, and then no more"


# --------------------------------------------------------------------------------------- malformed greetings

GREETINGS: dict[str, Spoil] = {
    "rows beyond the floats": patched(b'"rows": [8, 8]', b'"rows": [Infinity, 1]'),
    "a number of rows without end": patched(b'"rows": [8, 8]', b'"rows": [1e999, 1]'),
    "rows of 1e15": edited(rows=[10**15, 8]),
    "rows of 1e30": edited(rows=[8, 10**30]),
    "negative rows": edited(rows=[-(10**6), 8]),
    "no rows": edited(rows=[0, 8]),
    "rows that are true": edited(rows=[True, True]),
    "rows that are fractions": edited(rows=[8.5, 8.0]),
    "rows that are words": edited(rows=["8", "8"]),
    "one number of rows": edited(rows=[8]),
    "three numbers of rows": edited(rows=[8, 8, 8]),
    "rows that are an object": edited(rows={"lower": 8}),
    "a negative process": edited(pid=-1),
    "process zero": edited(pid=0),
    "a process of 4000 digits": patched(b'"pid": ', b'"pid": ' + DIGITS[:4000]),
    "a process that is true": edited(pid=True),
    "a process that is a word": edited(pid="1"),
    "a greeting for another round": edited(round=4),
    "a greeting that is an empty message": lambda header, body: b"",
    "a greeting with a vector": lambda header, body: pack(header, {"q": np.zeros(3, np.float32)}),
    "a reply instead of a greeting": edited(kind="reply"),
    "a reason with escape sequences": edited(kind="error", reason="\x1b[2J\x1b]0;owned\x07 fine\r\nnot refused"),
    "a reason without end": edited(kind="error", reason="why? " * 20000),
    "a reason that is a lone surrogate": edited(kind="error", reason="\ud800"),
}


@pytest.mark.parametrize("what", GREETINGS)
def test_a_malformed_greeting_is_a_named_refusal_of_its_site(
    what: str, quadratic: QuadraticTask, wires: Wires, honest: list[float]
) -> None:
    wires.spoil = lying("b", GREETINGS[what], "welcome")
    engine = Flare(quadratic.problem, SITES, wires)
    assert list(engine.refused) == ["b"] and list(engine.pids) == ["a", "c"]
    assert engine.refused["b"].isprintable() and len(engine.refused["b"]) <= 240
    assert ask(fb.Federation(engine)) == honest


# ------------------------------------------------------------------------- reasons that a site can choose freely

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n\u202egnorw\x00\x9b31m"


def shape_of(number: int) -> Spoil:
    return lambda header, body: pack(header, {"q": np.zeros(9 + number, np.float32)})


CHANGING: dict[str, Callable[[int], Spoil]] = {  # what the liar sends in each of many rounds
    "reasons": lambda n: edited(kind="error", reason=f"{ESCAPES} reason {n}"),
    "codes": lambda n: edited(kind="error", code=f"code {n}", reason="the same"),
    "shapes": shape_of,
    "fields": lambda n: lambda header, body: pack(header, {f"q{n}": np.zeros(8, np.float32)}),
    "steps": lambda n: edited(step=f"step{n}"),
    "rounds": lambda n: edited(round=10**6 + n),
    "kinds": lambda n: edited(kind=f"kind{n}"),
    "lengths": lambda n: lambda header, body: b"x" * n,
    "lost vectors": lambda n: edited(kind="lost", names=[f"v{n}"]),
}


def many_rounds(fed: fb.Federation, change: Callable[[int], None], rounds: int = 60) -> list[int]:
    """The sizes of the books after each round in which the liar finds something new to say."""
    sizes = []
    for number in range(rounds):
        change(number)
        ask(fed)
        sizes.append(len(json.dumps(fed.ledger.to_mapping())))
    return sizes


def printable(value: Any) -> bool:
    """Whether a JSON value is printable everywhere, and has no text beyond 120 characters."""
    if isinstance(value, dict):
        return all(printable(v) for pair in value.items() for v in pair)
    if isinstance(value, list):
        return all(printable(v) for v in value)
    return not isinstance(value, str) or (value.isprintable() and len(value) <= 120)


@pytest.mark.parametrize("what", CHANGING)
def test_a_site_with_a_new_lie_in_every_round_does_not_fill_the_books(
    what: str, quadratic: QuadraticTask, wires: Wires
) -> None:
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires), policies=fb.Policies(strikes=None))

    def change(number: int) -> None:
        wires.spoil = lying("b", CHANGING[what](number), "reply")

    sizes = many_rounds(fed, change)
    assert sizes[-1] < sizes[29] + 200, "after thirty rounds only numbers grow"
    assert printable(fed.ledger.to_mapping())
    assert sum(fed.ledger.rejected.values()) == 60 == fed.ledger.steps["lower_gradient"].rejected
    assert {event.client for event in fed.ledger.rejected} == {1}
    assert len(fed.ledger.said.get(1, [])) == {"reasons": 3, "codes": 1}.get(what, 0)
    again = Ledger.from_mapping(json.loads(json.dumps(fed.ledger.to_mapping())))
    assert again == fed.ledger
    again.reject(1, "lower_gradient", fb.Reason(fb.Fault.MISFIT, "one more"))
    few = len(fed.ledger.rejected) < REASONS
    assert Event(1, "lower_gradient", "one more" if few else "misfit") in again.rejected


def test_reasons_of_the_transport_do_not_fill_the_books(quadratic: QuadraticTask, wires: Wires) -> None:
    """FLARE gives a text for each failure, in which a site may have a say."""
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires))
    wires.dead.add("b")

    def change(number: int) -> None:
        wires.why = f"{ESCAPES} failure {number} " + "x" * 10**4

    sizes = many_rounds(fed, change)
    assert sizes[-1] < sizes[29] + 200 and printable(fed.ledger.to_mapping())
    engine = fed.engine
    assert isinstance(engine, Flare) and printable(engine.lost)


def test_reasons_of_an_engine_of_another_package_do_not_fill_the_books(quadratic: QuadraticTask) -> None:
    class Talkative(fb.Loop):
        """It takes the text of a client for a reason."""

        said = 0

        def replies(self, call: fb.Call) -> Any:
            self.said += 1
            yield from super().replies(dataclasses.replace(call, clients=call.clients[1:]))
            why = fb.Reason(fb.Fault.FAILED, f"{ESCAPES} {self.said} " + "x" * 10**4)
            yield fb.Replies(refused={call.clients[0]: why})

    engine = Talkative(quadratic.problem, ListedClients(quadratic.clients.data[:3]))
    fed = fb.Federation(engine, policies=fb.Policies(strikes=None))
    sizes = many_rounds(fed, lambda number: None)
    assert sizes[-1] < sizes[29] + 200 and printable(fed.ledger.to_mapping())
    assert sum(fed.ledger.rejected.values()) == 60


def test_an_error_has_no_escape_sequences_of_a_site_and_still_says_what_the_site_said(
    quadratic: QuadraticTask, wires: Wires
) -> None:
    wires.spoil = lying("b", edited(kind="error", reason=f"{ESCAPES} out of memory"), "reply")
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires), min_replies=3)
    with pytest.raises(fb.TooFewReplies) as caught:
        ask(fed)
    assert str(caught.value).isprintable() and "out of memory" in str(caught.value)
    ((client, said),) = fed.ledger.said.items()
    assert client == 1 and printable(said) and said[0].endswith("out of memory")
    (event,) = fed.ledger.rejected
    assert "out of memory" not in event.what, "the key of the books is not the site's to choose"


# --------------------------------------------------------------------------------- one liar cannot decide a round


@pytest.mark.parametrize("gather", [gather_by(None), gather_by(fb.Median())], ids=["mean", "median"])
def test_a_first_site_that_leaves_a_field_out_is_the_only_one_that_is_rejected_and_excluded(
    gather: Gather, quadratic: QuadraticTask
) -> None:
    """There are three honest sites, which is what the median needs."""
    data = dict(zip("abcd", quadratic.clients.data, strict=False))
    wires = Wires({name: Site(quadratic.problem, own) for name, own in data.items()})
    wires.spoil = lying("a", lambda header, body: raw(header | {"vectors": []}), "reply")
    fed = fb.Federation(Flare(quadratic.problem, list(data), wires), gather=gather)
    clients = ListedClients(quadratic.clients.data[1:4])
    wanted = ask(fb.Federation(fb.Loop(quadratic.problem, clients), gather=gather))
    for _ in range(5):
        assert ask(fed.cohort(1.0)) == wanted
    assert {event.client for event in fed.ledger.rejected} == {0}
    assert [exclusion.client for exclusion in fed.ledger.exclusions] == [0]


@pytest.mark.parametrize("rows", [101, 10**6])
def test_a_site_that_claims_more_rows_than_the_federation_allows_does_not_take_part(
    rows: int, quadratic: QuadraticTask, wires: Wires, honest: list[float]
) -> None:
    wires.spoil = lying("b", edited(rows=[8, rows]), "welcome")
    engine = Flare(quadratic.problem, SITES, wires, max_rows=100)
    assert (
        engine.refused["b"] == "it claims more rows than federation.max_rows = 100; set it higher if that is right"
    )
    assert ask(fb.Federation(engine, weighting="samples")) == honest


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "geometric-median", "centred-clipping", "norm-bound"])
def test_a_spec_does_not_let_clients_choose_their_weight_in_a_rule_against_liars(rule: str) -> None:
    changes = {"federation.weighting": "samples", "federation.aggregator": {"name": rule}}
    with pytest.raises(fb.SettingsError, match=r"^federation\.weighting = 'samples' is wrong with .*'uniform'"):
        load_spec("demo", changes)


def test_the_weight_that_a_liar_claims_would_defeat_the_median() -> None:
    """Why the spec refuses it: the median with weights is what the heaviest reply says."""
    rows = np.asarray([[1.0], [1.0], [-50.0]], np.float32)
    assert fb.Median()(rows, np.ones(3, np.float32)).tolist() == [1.0]
    assert fb.Median()(rows, np.asarray([8, 8, 1000], np.float32)).tolist() == [-50.0]


def test_a_spec_says_how_many_rows_a_site_may_claim() -> None:
    assert load_spec("demo").federation.max_rows == 10**7
    assert load_spec("demo", {"federation.max_rows": 500}).federation.max_rows == 500
    for wrong in (0, -1, 1.5, True, "many"):
        with pytest.raises(fb.SettingsError, match=r"^federation\.max_rows"):
            load_spec("demo", {"federation.max_rows": wrong})


class Curvature(NamedTuple):
    v: YY


@client_step
def curvature(c: Oracle, zeta: Stream) -> Curvature:
    """A stack of matrices, one for each of two draws."""
    size = c.y.shape[0]
    return Curvature(jnp.ones((zeta.active.shape[0], size, size)))


@pytest.mark.parametrize("matrices", [0, 1, 3])
@pytest.mark.parametrize("liar", ["a", "c"])
def test_a_stack_of_another_number_of_matrices_is_refused(
    liar: str, matrices: int, quadratic: QuadraticTask
) -> None:
    """Were it added to the others, it would be spread over them, or end the run."""
    wires = Wires(
        {n: Site(quadratic.problem, quadratic.clients.load(i), modules=[__name__]) for i, n in enumerate(SITES)}
    )
    wires.spoil = lying(liar, lambda h, body: pack(h, {"v": np.full((matrices, 8, 8), 9.0, np.float32)}), "reply")
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires))
    fed.hold(x=jnp.ones(10), y=jnp.ones(8))
    mean = np.asarray(fed.round(curvature, zeta=Samples("lower", 2, 2)).v)
    assert mean.shape == (2, 8, 8) and (mean == 1).all()
    (event,) = fed.ledger.rejected
    assert event.what == f"v has shape ({matrices}, 8, 8) instead of (2, 8, 8)"
