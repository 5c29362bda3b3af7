"""Layers around an engine: their one order, what they pass on, and what the server sees through all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import Accountant, Agents, AggITD, Engine, Federation, Loop, Policies, Privacy, stacked, train
from fedbilevel._probes import losses
from fedbilevel.engines import Call, Replies
from fedbilevel.errors import StepError
from fedbilevel.layers import Attack, AttackSettings, Chaos, ChaosSettings, NoisyReplies
from fedbilevel.layers._attack import attackers
from fedbilevel.layers._chaos import KINDS
from fedbilevel.ledger import Event
from fedbilevel.oracle import Oracle
from fedbilevel.privacy import Secret
from fedbilevel.problem import Task
from fedbilevel.problems import QuadraticTask
from fedbilevel.rng import Kind
from fedbilevel.steps import Draw, Own, Sample, Y, client_step, present

CLIP, SIGMA, SCALE = 0.5, 0.01, 50.0
PRIVACY = Privacy(mode="local", clip=CLIP, noise=SIGMA)
SECRET = Secret(bytes(range(32)))
ATTACK = AttackSettings(kind="scaled", scale=SCALE, share=0.2)
CHAOS = ChaosSettings(**dict.fromkeys(KINDS, 0.04), seed=2)


class Watching:
    """A user's own layer: it passes everything on, and keeps what came by."""

    def __init__(self, engine: Engine) -> None:
        self.problem, self.clients, self.capabilities = engine.problem, engine.clients, engine.capabilities
        self._engine = engine
        self.seen: list[tuple[Call, Replies]] = []

    def replies(self, call: Call) -> Iterator[Replies]:
        for chunk in self._engine.replies(call):
            self.seen.append((call, chunk))
            yield chunk

    def close(self) -> None:
        self._engine.close()


@pytest.fixture
def loop(quadratic: QuadraticTask) -> Loop:
    return Loop(quadratic.problem, quadratic.clients)


# ------------------------------------------------------------------------------------------------------- the order


def from_the_outside(engine: Any) -> list[type]:
    """The classes of the layers, the engine itself last."""
    inner = vars(engine).get("_engine")
    return [type(engine), *(from_the_outside(inner) if inner is not None else [])]


ASKED: dict[str, tuple[type, Any]] = {
    "chaos": (Chaos, CHAOS),
    "attack": (Attack, ATTACK),
    "privacy": (NoisyReplies, PRIVACY),
}


@pytest.mark.parametrize("asked", [c for n in range(4) for c in itertools.combinations(ASKED, n)])
def test_the_order_is_chaos_around_attack_around_noise_whatever_is_asked_for(
    asked: tuple[str, ...], loop: Loop
) -> None:
    for order in itertools.permutations(asked):
        made = stacked(loop, **{name: ASKED[name][1] for name in order})
        assert from_the_outside(made) == [*(ASKED[name][0] for name in asked), Loop]


def test_settings_that_ask_for_nothing_make_no_layer(loop: Loop) -> None:
    assert stacked(loop, privacy=Privacy(), attack=AttackSettings()) is loop
    assert stacked(loop, privacy=Privacy(mode="central")) is loop, "central noise is the server's"
    assert stacked(loop, attack=AttackSettings(kind="label-flip")) is loop, "flipped labels are the clients'"


# ----------------------------------------------------------------------------------------------- what is passed on


@pytest.mark.parametrize("asked", [c for n in range(4) for c in itertools.combinations(ASKED, n)])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_capabilities_pass_through_every_layer_and_a_users_own(
    asked: tuple[str, ...], outside: bool, inside: bool, loop: Loop
) -> None:
    base: Engine = Watching(loop) if inside else loop
    made = stacked(base, **{name: ASKED[name][1] for name in asked})
    made = Watching(made) if outside else made
    assert made.capabilities.states is loop.capabilities.states is not None
    assert made.capabilities.local_work
    assert made.capabilities.adds_noise is ("privacy" in asked)
    assert (made.capabilities.link_faults is not None) is ("chaos" in asked)


def test_clients_whose_engine_adds_noise_get_none_a_second_time(loop: Loop) -> None:
    noisy = Watching(NoisyReplies(loop, PRIVACY, SECRET))
    assert stacked(noisy, privacy=PRIVACY) is noisy
    assert from_the_outside(stacked(noisy, privacy=PRIVACY, attack=ATTACK)) == [
        Attack,
        Watching,
        NoisyReplies,
        Loop,
    ]


def test_faults_of_links_reach_gossip_through_a_users_own_layer(loop: Loop) -> None:
    fed = Federation(Watching(stacked(loop, chaos=ChaosSettings(drop=0.5))))
    ring = np.eye(20) / 2 + (np.eye(20, k=1) + np.eye(20, k=-1)) / 4
    Agents(fed).exchange("mix", ring, y=jnp.ones((20, 3)))
    assert sum(fed.ledger.injected.values()) == sum(fed.ledger.rejected.values()) > 5
    assert {event.what for event in fed.ledger.injected} == {"drop"}


class Kept(NamedTuple):
    q: Y
    last: Own[Y]


@client_step
def keeping(c: Oracle, zeta: Draw) -> Kept:
    """Replies with the gradient that the client kept, and keeps the new one."""
    return Kept(c.own("last", jnp.zeros_like(c.y)), c.g_y(c.y, zeta))


@pytest.mark.parametrize("asked", [c for n in range(4) for c in itertools.combinations(ASKED, n)])
def test_what_clients_keep_never_leaves_them_and_is_found_through_every_layer(
    asked: tuple[str, ...], loop: Loop
) -> None:
    server = Watching(stacked(loop, **{name: ASKED[name][1] for name in asked}))
    fed = Federation(server, policies=Policies(deadline=5.0))
    fed.hold(x=loop.problem.flat_x.vector, y=loop.problem.flat_y.vector)
    first, second = (fed.round(keeping, zeta=Sample("lower")).q for _ in range(2))
    assert np.linalg.norm(second) > 5 * np.linalg.norm(first), "the first is zero, or its noise"
    whole = [chunk.reply for _, chunk in server.seen if isinstance(chunk.reply, Kept)]
    assert whole and all(reply.last is None for reply in whole)
    assert not fed.ledger.keepers, "the states are in this process, so none can be lost elsewhere"


# ------------------------------------------------------------------------ privacy, an attacker and faults together

SAID = {  # how the federation names each fault
    "no answer": "drop",
    "late": "late",
    "answered twice": "twice",
    "is not finite": "nan or infinity",
    "has shape": "shape",
    "has type": "dtype",
    "fields [": "step",
    "a reply to": "stale",
    "beyond": "enormous",
}


def by_kind(events: Iterable[tuple[Event, int]]) -> Counter[Event]:
    """Counts of events by client, step and kind of fault; a NaN and an infinity are noticed in the same way."""
    found: Counter[Event] = Counter()
    for event, count in events:
        kind = next((kind for said, kind in SAID.items() if said in event.what), event.what)
        kind = "nan or infinity" if kind in ("nan", "infinity") else kind
        found[event._replace(what=kind)] += count
    return found


def test_attackers_obey_no_bound_the_honest_do_and_every_fault_is_noticed(
    quadratic: QuadraticTask, loop: Loop
) -> None:
    """What arrives at the server under local privacy, with a fifth of liars and all kinds of faults."""
    server = Watching(stacked(loop, privacy=PRIVACY, secret=SECRET, attack=ATTACK, chaos=CHAOS))
    policies = Policies(deadline=5.0).under_privacy()
    fed = Federation(server, policies=policies, accountant=Accountant(PRIVACY))
    algorithm = AggITD(N=1, alpha=0.1, beta=0.01, participation=1.0)
    state = algorithm.init(quadratic.problem)
    for _ in range(4):
        state = algorithm.step(fed, state)

    liars = attackers(20, ATTACK.share, 0)
    assert len(liars) == 4
    honest = stacked(loop, privacy=PRIVACY, secret=SECRET)
    computed: dict[Any, dict[int, Any]] = {}
    longest = {True: 0.0, False: 0.0}
    beyond = compared = 0
    for call, chunk in server.seen:
        if chunk.injected or not chunk.clients:
            continue
        (client,) = chunk.clients
        if call.address not in computed:
            computed[call.address] = {alone.clients[0]: alone.reply for alone in honest.replies(call)}
        for name in present(chunk.reply):
            before = np.asarray(call.before.get(name, 0.0))
            sent = np.asarray(getattr(chunk.reply, name)[0]) - before
            own = np.asarray(getattr(computed[call.address][client], name)[0]) - before
            size = float(np.linalg.norm(sent))
            longest[client in liars] = max(longest[client in liars], size)
            compared += 1
            if client in liars:
                np.testing.assert_allclose(sent, SCALE * own, rtol=1e-3, atol=1e-3)
                beyond += size > CLIP + noise_at_most(sent.size)
            else:
                np.testing.assert_allclose(sent, own, rtol=1e-6, atol=1e-6)
                assert size <= CLIP + noise_at_most(sent.size)
    assert compared > 100 and beyond > 20
    assert longest[True] > 0.9 * SCALE * CLIP, "what attackers send is not clipped"
    assert longest[False] > 0.9 * CLIP, "the bound is reached, so it was needed"

    injected, rejected = by_kind(fed.ledger.injected.items()), by_kind(fed.ledger.rejected.items())
    assert injected == rejected
    assert {event.what for event in fed.ledger.injected} == set(KINDS)
    assert {event.client for event in injected} & liars, "faults happen to attackers too"


def noise_at_most(components: int) -> float:
    """A length that σ C ξ practically never has."""
    return SIGMA * CLIP * (np.sqrt(components) + 6)


def test_an_injected_nan_is_rejected_under_local_privacy(loop: Loop) -> None:
    """It is made after the noise; a client's own NaN is made into noise around zero before it."""
    fed = Federation(stacked(loop, privacy=PRIVACY, chaos=ChaosSettings(nan=0.4)))
    fed.hold(x=loop.problem.flat_x.vector, y=loop.problem.flat_y.vector)
    fed.round(keeping, zeta=Sample("lower"))
    hit = {event.client for event in fed.ledger.injected}
    assert 3 <= len(hit) <= 13
    assert fed.ledger.rejected == Counter(Event(client, "keeping", "q is not finite") for client in hit)


def test_a_run_with_all_layers_counts_as_many_noticed_faults_as_injected_ones(digits: Task) -> None:
    algorithm = AggITD(N=1, alpha=0.1, beta=0.05, lam=0.3, participation=10, lower_epochs=1, upper_steps=2)
    result = train(
        digits.problem,
        digits.clients,
        algorithm,
        stop={"iterations": 3},
        engine="loop",
        federation={"aggregator": "median", "deadline": 5.0},
        privacy=PRIVACY,
        secret=SECRET,
        attack={"kind": "sign-flip", "share": 0.2},
        chaos=CHAOS,
    )
    injected, rejected = (by_kind(events(result.summary[book])) for book in ("injected", "rejected"))
    assert injected == rejected and sum(injected.values()) > 30
    assert "nan" in {event.what for event, _ in events(result.summary["injected"])}
    assert "exclusions" not in result.summary, "under privacy no client is excluded"
    assert result.summary["privacy"]["epsilon"] > 0


def events(nested: dict[str, dict[str, dict[str, int]]]) -> Iterator[tuple[Event, int]]:
    """The counts of a summary as events."""
    for step, clients in nested.items():
        for client, counts in clients.items():
            for what, count in counts.items():
                yield Event(int(client), step, what), count


def test_measurements_and_work_without_messages_have_no_layer(loop: Loop) -> None:
    """Attackers, faults and noise are in rounds only. With local privacy there are no measurements."""
    made = stacked(loop, attack=ATTACK, chaos=ChaosSettings(nan=1.0))
    private = stacked(loop, privacy=PRIVACY, attack=ATTACK, chaos=ChaosSettings(nan=1.0))
    at = dict(x=loop.problem.flat_x.vector, y=loop.problem.flat_y.vector)
    asked = dict(**at, xi=Sample("upper"), zeta=Sample("lower"))
    for kind in (Kind.PROBE, Kind.LOCAL):
        call = Federation(loop).call(kind, losses, range(20), asked)
        wanted = [np.asarray(chunk.reply) for chunk in loop.replies(call)]
        for engine in (made,) if kind is Kind.PROBE else (made, private):
            np.testing.assert_array_equal([np.asarray(chunk.reply) for chunk in engine.replies(call)], wanted)
        if kind is Kind.PROBE:
            with pytest.raises(StepError, match="losses: a measurement without noise is not private"):
                list(private.replies(call))
