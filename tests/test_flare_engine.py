"""The engine of a real federation without the network: messages, a site's answers, and what the server checks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

import fedbilevel as fb
from fedbilevel.agents import Agents
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import ClientSize, ListedClients
from fedbilevel.engines.flare import Flare, Malformed, Site, pack, unpack
from fedbilevel.engines.flare.wire import descriptor_from_json, descriptor_to_json
from fedbilevel.ledger import Event, Ledger
from fedbilevel.oracle import Oracle, Shapes
from fedbilevel.problem import Task
from fedbilevel.problems import QuadraticTask
from fedbilevel.steps import Epochs, PerClient, Sample, Samples, Scalar, Y, client_step
from own_steps import momentum, speed
from wires import Wires

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


def flare_of(fed: fb.Federation) -> Flare:
    assert isinstance(fed.engine, Flare)
    return fed.engine


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


def test_each_site_is_sent_its_own_row_and_no_other(fed: fb.Federation, wires: Wires, loop: fb.Loop) -> None:
    rows = PerClient(np.arange(24, dtype=np.float32).reshape(3, 8) + 0.25)
    got, expected = (np.asarray(f.round(shifted, by=rows).value) for f in (fed, fb.Federation(loop, seed=3)))
    assert got.tolist() == expected.tolist() == np.mean(2 * rows.values, axis=0).tolist()
    assert payload(fed) == {"shifted": [1, 3 * 32, 3 * 32, 0]}
    for i, request in enumerate(wires.seen[-6::2]):
        sent = unpack(request).vectors
        assert list(sent) == ["row.by"] and sent["row.by"].tolist() == rows.values[i].tolist()


def test_a_method_without_a_server_is_refused_on_sites(fed: fb.Federation) -> None:
    with pytest.raises(fb.SettingsError, match=r"^the algorithm has no server, .* an algorithm with a server$"):
        trace(fed, fb.Gossip(), 1)
    with pytest.raises(fb.SettingsError, match=r"use the engine simulation, loop or ray"):
        Agents(fed)


@pytest.mark.slow
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
    "b: not a reply of fedbilevel.algorithms.local:lower_gradient": recoded(other_step),
    "b: a reply to another round": recoded(late),
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
    (event,) = fed.ledger.rejected
    assert (event.client, event.step) == (1, "lower_gradient") and event.what.startswith(why)
    others = fb.Federation(loop)
    others.clients = (0, 2)
    assert got.tolist() == ask(others).tolist()
    wires.spoil = lambda name, reply: reply
    fed.round(lower_gradient, zeta=Sample("lower"))
    assert fed.ledger.steps["lower_gradient"].rejected == 1, "the site is asked again, and is sent what it lacks"


def test_a_site_that_cannot_be_reached_is_named_and_the_others_go_on(fed: fb.Federation, wires: Wires) -> None:
    wires.dead.add("c")
    ask(fed)
    assert fed.ledger.rejected == {Event(2, "lower_gradient", "c: no reply"): 1}
    assert fed.ledger.said == {2: ["unreachable"]}
    assert flare_of(fed).lost == {"c": "unreachable"}
    wires.dead.clear()
    ask(fed)
    assert flare_of(fed).lost == {} and fed.ledger.steps["lower_gradient"].rejected == 1


def test_a_site_that_is_down_at_the_start_stays_a_client_that_does_not_answer(
    quadratic: QuadraticTask, wires: Wires
) -> None:
    wires.dead.add("a")
    fed = fb.Federation(Flare(quadratic.problem, SITES, wires))
    assert fed.engine.clients.count == 3 and fed.engine.clients.size(0) == ClientSize(0, 0)
    ask(fed)
    assert fed.ledger.rejected == {Event(0, "lower_gradient", "a: no reply"): 1}
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
    """A step with a mistake in it, which shows at a client and not where the server looks at its shapes."""
    if isinstance(c, Shapes):
        return Number(jnp.zeros(()))
    raise ZeroDivisionError("of all things")


@client_step
def shifted(c: Oracle, by: Array) -> Vector:
    """A step with a row for each client."""
    return Vector(by * 2)


def test_an_exception_at_a_site_comes_back_with_site_step_and_reason(fed: fb.Federation) -> None:
    with pytest.raises(
        fb.TooFewReplies,
        match=r"broken, round 0: 0 valid replies of 3, 1 needed; client 0: a: the step failed at the site: ",
    ):
        fed.round(broken)
    assert [event.client for event in fed.ledger.rejected] == [0, 1, 2]
    assert {event.what[1:] for event in fed.ledger.rejected} == {": the step failed at the site"}
    assert all(said[0].endswith("ZeroDivisionError: of all things") for said in fed.ledger.said.values())
    assert list(fed.ledger.said) == [0, 1, 2]


def request(number: int, session: str = "s", **more: Any) -> bytes:
    header = {
        "kind": "step",
        "round": number,
        "session": session,
        "step": counted.address,
        "address": ["round", 0],
        "keys": {},
    }
    header |= {"clock": 0, "settled": 0, "kept": None}
    header |= {"client": 0, "held": {"y": 7}, "constants": {}, "samples": {}} | more
    return pack(header, {"held.y": np.arange(8, dtype=np.float32)} if number == 1 else {})


@pytest.fixture
def site(sites: dict[str, Site]) -> Site:
    made = sites["a"]
    hello = {"kind": "hello", "round": 0, "session": "s", "run": "r", "sizes": [10, 8]}
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
    site.answer(pack({"kind": "hello", "round": 0, "session": "t", "run": "r", "sizes": [10, 8]}, {}))
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
        ({"clock": None}, "the header has no clock that is a int"),
        ({"settled": "0"}, "the header has no settled that is a int"),
        ({"address": ["local", 0]}, "an address is described as ['local', 0]"),
        ({"address": ["round"]}, "an address is described as ['round']"),
        (
            {"samples": {"zeta": {"kind": "sample", "part": "lower", "size": 2}}},
            "the key of the draws for 'zeta' is not 16 bytes",
        ),
        ({"samples": {"zeta": {"kind": "all"}}}, "a sample is described as {'kind': 'all'}"),
        ({"samples": {"zeta": {"kind": "sample", "part": "_x"}}}, "a sample is of the part '_x'"),
    ],
)
def test_a_request_that_a_site_does_not_take_is_refused_with_the_reason(
    site: Site, more: dict[str, Any], why: str
) -> None:
    assert why in reason(site.answer(request(1, **more)))


def test_a_site_refuses_a_server_with_another_problem(site: Site, quadratic: QuadraticTask) -> None:
    answer = site.answer(pack({"kind": "hello", "round": 0, "session": "t", "run": "r", "sizes": [10, 9]}, {}))
    assert reason(answer).startswith(
        "the site's problem has [10, 8] parameters of x and y, the server's has [10, 9]"
    )


@pytest.mark.parametrize("run", [None, "", "../r", "a/b", "r" * 65])
def test_a_site_refuses_a_run_whose_name_could_be_a_path(site: Site, run: str | None) -> None:
    hello = {"kind": "hello", "round": 0, "session": "t", "run": run, "sizes": [10, 8]}
    why = "the header has no run that is a str" if run is None else "the name of the run is not valid"
    assert reason(site.answer(pack(hello, {}))) == why


def test_a_site_refuses_an_oversized_request(quadratic: QuadraticTask) -> None:
    site = Site(quadratic.problem, quadratic.clients.load(0), limit=1000)
    assert reason(site.answer(b"x" * 1001)) == "1001 bytes, at most 1000 are allowed"


# ------------------------------------------------------------------------------------------- what a site keeps


def kept_sites(quadratic: QuadraticTask, three: ListedClients, folder: Path | None) -> dict[str, Site]:
    """Sites that run the steps of `own_steps`, each with a folder for what they keep."""
    return {
        name: Site(
            quadratic.problem,
            three.load(i),
            modules=["own_steps"],
            states=None if folder is None else folder / name,
        )
        for i, name in enumerate(SITES)
    }


def move(fed: fb.Federation, y: Any = None, rounds: int = 4) -> list[list[float]]:
    """Rounds of momentum from a y; where each of them led."""
    y, trail = jnp.ones(8) if y is None else y, []
    for _ in range(rounds):
        fed.hold(x=jnp.ones(10), y=y)
        y = fed.round(momentum, zeta=Sample("lower", 3), rate=0.05).y
        trail.append(np.asarray(y).tolist())
    return trail


def on_sites(
    quadratic: QuadraticTask,
    wires: Wires,
    run: str = "run",
    safe: Callable[[], int] | None = None,
    **more: Any,
) -> fb.Federation:
    return fb.Federation(Flare(quadratic.problem, SITES, wires, run=run, safe=safe), seed=3, **more)


def copied(ledger: Ledger) -> Ledger:
    """The books as a checkpoint brings them back."""
    return Ledger.from_mapping(ledger.to_mapping())


@pytest.fixture(scope="module")
def expected(quadratic: QuadraticTask, three: ListedClients) -> list[list[float]]:
    """Eight rounds on the loop."""
    trail = move(fb.Federation(fb.Loop(quadratic.problem, three), seed=3), rounds=8)
    stateless = move(fb.Federation(fb.Loop(quadratic.problem, three), seed=3), rounds=1)
    assert trail[0] == stateless[0] and len({tuple(y) for y in trail}) == 8
    return trail


def test_sites_that_keep_a_state_are_bit_for_bit_the_loop(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]]
) -> None:
    fed = on_sites(quadratic, Wires(kept_sites(quadratic, three, tmp_path)))
    assert move(fed, rounds=8) == expected
    assert fed.ledger.keepers == {0: 7, 1: 7, 2: 7} and not fed.ledger.forgotten
    in_memory = on_sites(quadratic, Wires(kept_sites(quadratic, three, None)))
    assert move(in_memory, rounds=8) == expected
    speeds = [float(f.probe(speed, like=jnp.zeros(8)).value) for f in (fed, fed, in_memory)]
    assert speeds[0] == speeds[1] == speeds[2] > 0, "a probe reads the state and leaves it"


def test_the_state_of_a_site_never_travels(quadratic: QuadraticTask, three: ListedClients, tmp_path: Path) -> None:
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    fed = on_sites(quadratic, wires)
    kept: list[bytes] = []
    y = jnp.ones(8)
    for _ in range(4):
        y = jnp.asarray(move(fed, y, 1)[-1])
        for i, name in enumerate(SITES):
            state = wires.sites[name]._states.read(i, fed.ledger.clock)
            assert state["visits"][0] == fed.ledger.rounds
            kept.append(state["velocity"][0].tobytes())
    assert len(set(kept)) == 12
    names = {name for message in wires.seen for name in unpack(message).vectors}
    assert names == {"held.x", "held.y", "array.rate", "y"}
    for message in wires.seen:
        vectors = [v.tobytes() for v in unpack(message).vectors.values()]
        assert not any(state in vector for state in kept for vector in vectors)


def test_a_site_made_anew_over_the_same_folder_goes_on_bit_for_bit(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]]
) -> None:
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    first = on_sites(quadratic, wires)
    assert move(first) == expected[:4]
    wires.sites = kept_sites(quadratic, three, tmp_path)
    fed = on_sites(quadratic, wires, ledger=copied(first.ledger))
    assert move(fed, jnp.asarray(expected[3])) == expected[4:] and not fed.ledger.forgotten


@pytest.mark.parametrize("folder", [True, False])
def test_a_site_that_lost_its_state_says_so_starts_anew_and_is_counted(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]], folder: bool
) -> None:
    place = tmp_path if folder else None
    wires = Wires(kept_sites(quadratic, three, place))
    first = on_sites(quadratic, wires)
    move(first)
    if folder:
        shutil.rmtree(tmp_path / "b")
        wires.sites = kept_sites(quadratic, three, place)
    else:
        wires.sites["b"] = kept_sites(quadratic, three, None)["b"]
    fed = on_sites(quadratic, wires, ledger=copied(first.ledger))
    wires.seen.clear()
    trail = move(fed, jnp.asarray(expected[3]))
    assert fed.ledger.forgotten == {1: 1}, "once: then it has a state again"
    said = [unpack(reply).header.get("forgot") for reply in wires.seen[1::2]]
    assert said == [None, True, None, *[None] * 9]
    assert copied(fed.ledger).forgotten == {1: 1}
    assert trail[0] != expected[4]

    mixed = fb.Loop(quadratic.problem, three)  # the same on the loop: client 1 has no state at clock 4
    reference = fb.Federation(mixed, seed=3)
    move(reference)
    del mixed._states._clients[1]
    assert move(reference, jnp.asarray(expected[3])) == trail


def test_a_site_that_never_had_a_state_does_not_say_that_it_lost_one(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path
) -> None:
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    wires.dead.add("c")
    fed = on_sites(quadratic, wires)
    wires.dead.clear()
    assert flare_of(fed).refused == {"c": "unreachable"}
    move(fed, rounds=2)
    assert fed.ledger.keepers == {0: 1, 1: 1}
    wires.sites = kept_sites(quadratic, three, tmp_path)
    again = on_sites(quadratic, wires, ledger=copied(fed.ledger))
    move(again, rounds=1)
    assert again.ledger.keepers == {0: 2, 1: 2, 2: 2} and not again.ledger.forgotten


@pytest.mark.parametrize("restarted", [True, False])
def test_a_job_that_goes_back_to_a_checkpoint_gets_the_state_from_before_it(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]], restarted: bool
) -> None:
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    first = on_sites(quadratic, wires)
    move(first, rounds=3)
    first.settle()
    saved = copied(first.ledger)
    assert move(first, jnp.asarray(expected[2]), rounds=5) == expected[3:], "all of it after the checkpoint"
    for _ in range(2):  # and it can fail again
        if restarted:
            wires.sites = kept_sites(quadratic, three, tmp_path)
        fed = on_sites(quadratic, wires, ledger=copied(saved))
        assert move(fed, jnp.asarray(expected[2]), rounds=5) == expected[3:] and not fed.ledger.forgotten
    for name in SITES:
        dates = sorted(int(f.stem.partition("-")[2]) for f in (tmp_path / name / "run").glob("*.safetensors"))
        assert dates == [2, 3, 4, 5, 6, 7], "the one before the checkpoint, and all since"


def test_a_server_that_dies_before_its_checkpoint_was_pulled_loses_no_state(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]]
) -> None:
    """The run then goes on from an older checkpoint than the one that the server had settled."""
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    fed = on_sites(quadratic, wires, safe=lambda: 2)
    move(fed, rounds=2)
    pulled = copied(fed.ledger)
    for round_ in range(2, 7):
        fed.settle()  # a checkpoint that nobody pulls
        move(fed, jnp.asarray(expected[round_ - 1]), rounds=1)
    again = on_sites(quadratic, wires, ledger=pulled)
    assert move(again, jnp.asarray(expected[1]), rounds=5) == expected[2:7] and not again.ledger.forgotten


def test_two_runs_at_one_site_do_not_mix(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]]
) -> None:
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    first = on_sites(quadratic, wires, run="one")
    assert move(first) == expected[:4]
    second = on_sites(quadratic, wires, run="two")
    assert move(second) == expected[:4] and not second.ledger.forgotten, "it starts without a state"
    third = on_sites(quadratic, wires, run="one", ledger=copied(first.ledger))
    assert move(third, jnp.asarray(expected[3])) == expected[4:] and not third.ledger.forgotten
    assert sorted(folder.name for folder in (tmp_path / "a").iterdir()) == ["one", "two"]


def test_a_doubled_request_keeps_the_state_once(
    quadratic: QuadraticTask, three: ListedClients, tmp_path: Path, expected: list[list[float]]
) -> None:
    """A reply that was lost on its way: the site is asked again and starts from the same state."""
    wires = Wires(kept_sites(quadratic, three, tmp_path))
    fed = on_sites(quadratic, wires, policies=fb.Policies(retries=1))
    lost = iter([True, False] * 4)

    def lose(name: str, reply: bytes) -> Any:
        again = name == "b" and unpack(reply).header["kind"] == "reply" and next(lost)
        return b"garbage" if again else reply

    wires.spoil = lose
    trail = move(fed)
    assert fed.ledger.steps["momentum"].retries == 4 and not fed.ledger.forgotten
    np.testing.assert_allclose(trail, expected[:4], rtol=1e-5)  # b comes last into the sum
    state = wires.sites["b"]._states.read(1, fed.ledger.clock)
    assert state["visits"][0] == 4


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
