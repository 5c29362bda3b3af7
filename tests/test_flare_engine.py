"""The engine of a real federation without the network: messages, a site's answers, and what the server checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import ClientSize, ListedClients
from fedbilevel.engines.flare import Flare, Malformed, Site, pack, unpack
from fedbilevel.engines.flare.server import Delivery
from fedbilevel.engines.flare.wire import descriptor_from_json, descriptor_to_json
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Task
from fedbilevel.problems import QuadraticTask
from fedbilevel.steps import Epochs, PerClient, Sample, Samples, Scalar, Y, client_step

SITES = ("a", "b", "c")
ALGORITHM = fb.AggITD(
    N=1,
    alpha=0.1,
    beta=0.05,
    lam=0.3,
    participation=1.0,
    lower_steps=(1, 3, 2),
    upper_steps=2,
    batch_zeta_local=3,
    batch_xi=4,
)


class Wires:
    """Sites in this process; a test may spoil what goes up or down."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self.down: dict[str, list[int]] = {name: [] for name in sites}
        self.spoil: Callable[[str, bytes], Any] = lambda name, reply: reply
        self.dead: set[str] = set()

    def __call__(self, requests: Mapping[str, bytes], timeout: float, /) -> Delivery:
        replies, failures = {}, {}
        for name, request in requests.items():
            self.down[name].append(len(request))
            if name in self.dead:
                failures[name] = "unreachable"
            else:
                replies[name] = self.spoil(name, self.sites[name].answer(request))
        return Delivery(replies, failures)


@pytest.fixture(scope="module")
def three(quadratic: QuadraticTask) -> ListedClients:
    return ListedClients(quadratic.clients.data[:3])


@pytest.fixture(scope="module")
def sites(quadratic: QuadraticTask, three: ListedClients) -> dict[str, Site]:
    """They keep their compiled programs; whatever they hold ends with a session."""
    return {n: Site(quadratic.problem, three.load(i), modules=[__name__]) for i, n in enumerate(SITES)}


@pytest.fixture(scope="module")
def loop(quadratic: QuadraticTask, three: ListedClients) -> fb.Loop:
    return fb.Loop(quadratic.problem, three)


@pytest.fixture
def wires(sites: dict[str, Site]) -> Wires:
    return Wires(sites)


@pytest.fixture
def fed(quadratic: QuadraticTask, wires: Wires) -> fb.Federation:
    return fb.Federation(Flare(quadratic.problem, SITES, wires), seed=3)


def trace(fed: fb.Federation, algorithm: Any = ALGORITHM, iterations: int = 3) -> list[Any]:
    state, states = algorithm.init(fed.engine.problem, fed.engine.clients.count), []
    for _ in range(iterations):
        state = algorithm.step(fed, state)
        states += [np.asarray(a).tolist() for a in state]
    return states


def ask(fed: fb.Federation) -> Any:
    fed.hold(x=jnp.ones(10), y=jnp.ones(8))
    return np.asarray(fed.round(lower_gradient, zeta=Sample("lower")).q)


def payload(fed: fb.Federation) -> dict[str, Any]:
    keys = ("rounds", "bytes_up", "bytes_down", "rejected")
    return {n: [getattr(a, k) for k in keys] for n, a in fed.ledger.steps.items()}


# ------------------------------------------------------------------------------------------------ the same numbers


def test_sites_are_bit_for_bit_the_loop_and_the_ledgers_agree(fed: fb.Federation, loop: fb.Loop) -> None:
    reference = fb.Federation(loop, seed=3)
    assert trace(fed) == trace(reference)
    assert payload(fed) == payload(reference) and fed.ledger.rounds == 15
    for account in fed.ledger.steps.values():
        assert account.wire_up > account.bytes_up and account.wire_down > account.bytes_down
        assert account.wire_up + account.wire_down < account.bytes_up + account.bytes_down + 15 * 6 * 1200
    assert all("wire_up" not in a for a in reference.ledger.to_mapping()["steps"].values())


def test_gossip_with_rows_of_its_own_for_each_client_runs_on_sites(fed: fb.Federation, loop: fb.Loop) -> None:
    gossip = fb.Gossip()
    assert trace(fed, gossip, 1) == trace(fb.Federation(loop, seed=3), gossip, 1)


def test_sites_of_unequal_size_agree_with_the_loop(digits: Task) -> None:
    """The loop pads to the largest client and a site does not: the last digits may differ."""
    clients = ListedClients([digits.clients.load(i) for i in range(3)])
    assert len({clients.size(i) for i in range(3)}) == 3
    wires = Wires({n: Site(digits.problem, clients.load(i)) for i, n in enumerate(SITES)})
    engine = Flare(digits.problem, SITES, wires)
    assert [engine.clients.size(i) for i in range(3)] == [clients.size(i) for i in range(3)]
    got = fb.Federation(engine, seed=3, weighting="samples")
    expected = fb.Federation(fb.Loop(digits.problem, clients), seed=3, weighting="samples")
    for one, other in zip(trace(got), trace(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_what_is_held_is_sent_once_and_again_to_a_site_that_lost_it(fed: fb.Federation, wires: Wires) -> None:
    first = ask(fed)
    again = np.asarray(fed.round(lower_gradient, zeta=Sample("lower")).q)
    sizes = wires.down["b"][1:]
    assert sizes[0] - sizes[1] > 4 * 18 and again.tolist() == first.tolist()
    wires.sites["b"]._shelf.clear()
    assert np.asarray(fed.round(lower_gradient, zeta=Sample("lower")).q).tolist() == first.tolist()
    assert len(wires.down["b"]) == len(wires.down["a"]) + 1 and not fed.ledger.rejected
    assert wires.down["b"][-1] > wires.down["b"][-2] + 4 * 17


# --------------------------------------------------------------------------------------------- replies gone wrong


def recoded(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[bytes], Any]:
    def spoil(reply: bytes) -> bytes:
        message = unpack(reply)
        header = {k: v for k, v in message.header.items() if k != "vectors"}
        vectors = {k: np.array(v) for k, v in message.vectors.items()}
        change(header, vectors)
        return pack(header, vectors)

    return spoil


def nan(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    vectors["q"][0] = np.nan


def wide(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    vectors["q"] = np.ones(9, np.float32)


def huge(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    vectors["q"] = np.ones(2**20, np.float32)


def double(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    vectors["q"] = vectors["q"].astype(np.float64)


def extra(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    vectors["w"] = vectors["q"]


def other_step(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    header["step"] = "fedbilevel.algorithms.local:upper_steps"


def late(header: dict[str, Any], vectors: dict[str, Any]) -> None:
    header["round"] -= 1


WRONG: dict[str, Callable[[bytes], Any]] = {
    "q is not finite": recoded(nan),
    "q has shape (9,) instead of (8,)": recoded(wide),
    "b: 4194": recoded(huge),
    "q has type float64 instead of float32": recoded(double),
    "b: fields ['w'], which lower_gradient does not have": recoded(extra),
    "b: a reply of fedbilevel.algorithms.local:upper_steps instead": recoded(other_step),
    "b: a reply to round 0 instead of 1": recoded(late),
    "b: not a message: it does not begin with the magic word": lambda reply: b"garbage " * 20,
    "b: 3 bytes are too short for a message": lambda reply: reply[:3],
    "b: vector q of shape (8,) is cut off": lambda reply: reply[:-1],
    "b: 1 bytes more than the header describes": lambda reply: reply + b"x",
    "b: str instead of bytes": lambda reply: "text",
    "b: NoneType instead of bytes": lambda reply: None,
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_reply_is_refused_counted_and_named_and_the_others_go_on(
    why: str, fed: fb.Federation, wires: Wires, loop: fb.Loop
) -> None:
    wires.spoil = lambda name, reply: WRONG[why](reply) if name == "b" else reply
    got = ask(fed)
    (reason,) = fed.ledger.rejected
    assert reason.startswith(f"client 1: lower_gradient: {why}")
    others = fb.Federation(loop)
    others.clients = (0, 2)
    assert got.tolist() == ask(others).tolist()
    wires.spoil = lambda name, reply: reply
    fed.round(lower_gradient, zeta=Sample("lower"))
    assert fed.ledger.steps["lower_gradient"].rejected == 1, "the site is asked again, and is sent what it lacks"


def test_a_site_that_cannot_be_reached_is_named_and_the_others_go_on(fed: fb.Federation, wires: Wires) -> None:
    wires.dead.add("c")
    ask(fed)
    assert fed.ledger.rejected == {"client 2: lower_gradient: c: unreachable": 1}
    assert fed.engine.lost == {"c": "unreachable"}
    wires.dead.clear()
    ask(fed)
    assert fed.engine.lost == {} and fed.ledger.steps["lower_gradient"].rejected == 1


def test_a_site_that_is_down_at_the_start_stays_a_client_that_does_not_answer(
    quadratic: QuadraticTask, wires: Wires
) -> None:
    wires.dead.add("a")
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires))
    assert fed.engine.clients.count == 3 and fed.engine.clients.size(0) == ClientSize(0, 0)
    ask(fed)
    assert fed.ledger.rejected == {"client 0: lower_gradient: a: unreachable": 1}
    assert len(wires.down["a"]) == 1, "it is not asked again"
    with pytest.raises(fb.SettingsError, match="at the site"):
        fed.engine.clients.load(1)
    wires.dead |= set(SITES)
    with pytest.raises(fb.StepError, match=r"^no site takes part: a: unreachable; b: "):
        Flare(quadratic.problem, SITES, wires)


# --------------------------------------------------------------------------------------------------- a site's side


class Number(NamedTuple):
    value: Scalar


class Vector(NamedTuple):
    value: Y


CALLS: list[int] = []


@client_step
def counted(c: Oracle) -> Vector:
    """A step that says when it is traced."""
    CALLS.append(1)
    return Vector(c.y * 2)


@client_step
def broken(c: Oracle) -> Number:
    """A step with a mistake in it."""
    raise ZeroDivisionError("of all things")


def test_an_exception_at_a_site_comes_back_with_site_step_and_reason(fed: fb.Federation) -> None:
    with pytest.raises(
        fb.TooFewReplies, match=r"broken, round 0: 0 valid replies of 3, 1 needed; client 0: a: broken: "
    ):
        fed.round(broken)
    (reason, *_) = fed.ledger.rejected
    assert reason.endswith("ZeroDivisionError: of all things")


def request(number: int, session: str = "s", **more: Any) -> bytes:
    header = {
        "kind": "step",
        "round": number,
        "session": session,
        "step": counted.address,
        "address": [0, "round", 0],
    }
    header |= {"client": 0, "held": {"y": 7}, "constants": {}, "samples": {}} | more
    return pack(header, {"held.y": np.arange(8, dtype=np.float32)} if number == 1 else {})


@pytest.fixture
def site(sites: dict[str, Site]) -> Site:
    made = sites["a"]
    hello = {"kind": "hello", "round": 0, "session": "s", "sizes": [10, 8]}
    welcome = unpack(made.answer(pack(hello, {})))
    assert welcome.header["kind"] == "welcome" and welcome.header["rows"] == [8, 8]
    return made


def reason(reply: bytes) -> str:
    return str(unpack(reply).header.get("reason"))


def test_a_doubled_request_gets_the_same_answer_and_an_old_one_none(site: Site) -> None:
    first = site.answer(request(1))
    assert unpack(first).vectors["value"].tolist() == list(np.arange(8.0) * 2)
    assert site.answer(request(1)) is first
    assert unpack(site.answer(request(2))).header["round"] == 2
    assert reason(site.answer(request(1))) == "round 1 is over, 2 was the last"


def test_a_new_session_holds_nothing(site: Site) -> None:
    site.answer(request(1))
    assert reason(site.answer(request(2, "t"))) == "the session is another one; say hello first"
    site.answer(pack({"kind": "hello", "round": 0, "session": "t", "sizes": [10, 8]}, {}))
    lost = unpack(site.answer(request(2, "t")))
    assert lost.header["kind"] == "lost" and lost.header["names"] == ["y"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"step": "os:system"}, "step os:system is not of a module that this site allows: fedbilevel, "),
        ({"step": "fedbilevel.nowhere:step"}, "there is no module fedbilevel.nowhere"),
        (
            {"step": "fedbilevel.algorithms.local:nothing"},
            "client step 'fedbilevel.algorithms.local:nothing' is unknown",
        ),
        ({"step": "fedbilevel.__main__:main"}, "client step 'fedbilevel.__main__:main' is unknown"),
        ({"step": 3}, "the header has no step that is a str"),
        ({"client": True}, "the header has no client that is a int"),
        ({"samples": {"zeta": {"kind": "all"}}}, "a sample is described as {'kind': 'all'}"),
        ({"samples": {"zeta": {"kind": "sample", "part": "_x"}}}, "a sample is of the part '_x'"),
    ],
)
def test_a_request_that_a_site_does_not_take_is_refused_with_the_reason(
    site: Site, more: dict[str, Any], why: str
) -> None:
    assert why in reason(site.answer(request(1, **more)))


def test_a_site_refuses_a_server_with_another_problem(site: Site, quadratic: QuadraticTask) -> None:
    answer = site.answer(pack({"kind": "hello", "round": 0, "session": "t", "sizes": [10, 9]}, {}))
    assert reason(answer).startswith(
        "the site's problem has [10, 8] parameters of x and y, the server's has [10, 9]"
    )


def test_a_site_refuses_an_oversized_request(quadratic: QuadraticTask) -> None:
    site = Site(quadratic.problem, quadratic.clients.load(0), limit=1000)
    assert reason(site.answer(b"x" * 1001)) == "1001 bytes, at most 1000 are allowed"


# -------------------------------------------------------------------------------------------------------- messages


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_bytes_at_random_are_malformed_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(data)


@settings(max_examples=300)
@given(st.data())
def test_a_message_with_a_byte_changed_is_read_or_malformed_and_nothing_worse(data: st.DataObject) -> None:
    message = pack({"kind": "reply", "round": 3}, {"q": np.arange(5, dtype=np.float32), "s": np.float32(2)})
    place = data.draw(st.integers(0, len(message) - 1))
    changed = message[:place] + bytes([data.draw(st.integers(0, 255))]) + message[place + 1 :]
    try:
        read = unpack(changed)
    except Malformed:
        return
    assert sum(v.nbytes for v in read.vectors.values()) < len(message)


def test_a_message_comes_back_as_it_was() -> None:
    vectors = {"q": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.float32(0.1), "none": np.zeros(0, "f4")}
    read = unpack(pack({"kind": "reply", "round": 3}, vectors))
    assert read.header["kind"] == "reply" and list(read.vectors) == list(vectors)
    for name, value in vectors.items():
        assert read.vectors[name].dtype == np.float32 and read.vectors[name].tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(
    "descriptor",
    [Sample("upper"), Sample("lower", 3), Samples("lower", None, PerClient((1, 2))), Epochs("lower", 5, 2)],
)
def test_a_sample_descriptor_comes_back_as_it_was(descriptor: Any) -> None:
    assert descriptor_from_json(descriptor_to_json(descriptor)) == descriptor
