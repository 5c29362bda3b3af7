"""Engines: whatever runs the clients, the numbers, the samples and the programs are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from fedbilevel import (
    AggITD,
    ClientData,
    ClientSize,
    Federation,
    LazyClients,
    Loop,
    Part,
    Sample,
    SettingsError,
    Simulation,
    StepError,
)
from fedbilevel._probes import losses
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import Clients
from fedbilevel.engines import Call, Engine, Replies
from fedbilevel.ledger import Account, Ledger
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Problem, Task
from fedbilevel.problems import QuadraticTask
from fedbilevel.steps import Draw, Epochs, PerClient, Samples, Scalar, Step, Stream, Y, client_step

TAU = tuple(1 + i % 4 for i in range(20))
ALGORITHM = AggITD(
    N=1,
    alpha=0.1,
    beta=0.05,
    lam=0.3,
    participation=19,  # odd, so that two devices and four need padding
    lower_steps=TAU,  # each client its own
    upper_steps=2,
    batch_zeta_local=6,
    batch_xi=4,
)
ITERATIONS = 4


def trace(
    engine: Engine, algorithm: AggITD = ALGORITHM, iterations: int = ITERATIONS
) -> tuple[list[Any], Federation]:
    """The states of a run, each as one float64 vector (x, y), and its federation."""
    fed, state = Federation(engine, seed=3), algorithm.init(engine.problem)
    states = []
    for _ in range(iterations):
        state = algorithm.step(fed, state)
        states.append(np.concatenate(state).astype(np.float64))
    return states, fed


def apart(one: list[Any], other: list[Any]) -> float:
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def simulation(digits: Task) -> Simulation:
    return Simulation(digits.problem, digits.clients, devices=1)


@pytest.fixture(scope="module")
def loop(digits: Task) -> Loop:
    return Loop(digits.problem, digits.clients)


@pytest.fixture(scope="module")
def reference(simulation: Simulation) -> list[Any]:
    states, fed = trace(simulation)
    uploads = fed.ledger.bytes_up / 19 / 4 - ITERATIONS * 2 * 780
    assert 4 * ITERATIONS * 130 > uploads > 3 * ITERATIONS * 130, "both Q = 0 and Q = 1 were drawn"
    return states


# ------------------------------------------------------------------------------------------- the same numbers


class Recording:
    """An engine that keeps each client's replies on their way, and how many came together."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.problem, self.clients = engine, engine.problem, engine.clients
        self.capabilities = engine.capabilities
        self.kept: dict[int, Any] = {}
        self.sizes: list[int] = []

    def replies(self, call: Call) -> Iterator[Replies]:
        for replies in self.engine.replies(call):
            self.sizes.append(len(replies.clients))
            for i, client in enumerate(replies.clients):
                self.kept[client] = [a[i] for a in map(np.asarray, replies.reply) if a.ndim]
            yield replies

    def close(self) -> None:
        self.engine.close()


@pytest.mark.slow
def test_the_loop_agrees_with_the_simulation(loop: Loop, reference: list[Any], digits: Task) -> None:
    assert len({digits.clients.size(i) for i in range(20)}) > 5, "clients are of unequal size"
    states, _ = trace(loop)
    assert apart(states, reference) < 1e-4
    assert apart(reference[:1], reference[-1:]) > 1e-2, "the states move"


@pytest.mark.slow
def test_serving_clients_in_turn_is_the_same_as_batching_them(digits: Task, reference: list[Any]) -> None:
    states, _ = trace(Simulation(digits.problem, digits.clients, over="map", devices=1))
    assert apart(states, reference) < 1e-5


@pytest.mark.slow
def test_a_cohort_in_chunks_is_the_same_and_does_not_compile_again(
    digits: Task, reference: list[Any], compilations: Any
) -> None:
    engine = Recording(Simulation(digits.problem, digits.clients, memory_limit=1, devices=1))
    states, _ = trace(engine)
    assert engine.sizes[:5] == [4, 4, 4, 4, 3], "in chunks, the last of them short"
    assert apart(states, reference) < 1e-5
    with compilations() as seen:
        again, _ = trace(engine)
    assert seen == []
    assert apart(again, states) == 0.0


@pytest.mark.slow
def test_two_and_four_devices_agree_with_one(reference: list[Any]) -> None:
    script = (
        "import json, jax, test_engines as t\n"
        "from fedbilevel import Simulation\n"
        "from fedbilevel.data import DataSettings\n"
        "from fedbilevel.problems import HyperRepresentation\n"
        "data = DataSettings(name='digits', clients=20, partition='dirichlet')\n"
        "task = HyperRepresentation(hidden=12).task(data, 0)\n"
        "for count in (2, 4):\n"
        "    states, fed = t.trace(Simulation(task.problem, task.clients, devices=count))\n"
        "    print(json.dumps([jax.device_count(), fed.ledger.rounds, [s.tolist() for s in states]]))\n"
    )
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
    }
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for devices, rounds, states in map(json.loads, lines):
        assert (devices, rounds) == (4, 5 * ITERATIONS)
        assert apart([np.asarray(s) for s in states], reference) < 1e-5


def test_federations_can_share_an_engine(digits: Task, simulation: Simulation, loop: Loop) -> None:
    """What one federation's clients remember of its x is not taken for the other's."""
    start = digits.problem.flat_x.vector

    def first_move(engine: Engine, x: Any) -> Any:
        state = ALGORITHM.init(digits.problem)._replace(x=x)
        return np.asarray(ALGORITHM.step(Federation(engine, seed=3), state).x - x)

    first_move(simulation, start)
    second, expected = first_move(simulation, start + 0.3), first_move(loop, start + 0.3)
    assert np.linalg.norm(second - expected) < 1e-3 * np.linalg.norm(expected)


def test_a_probe_of_the_clients_of_a_round_does_not_use_what_they_remember(
    digits: Task, simulation: Simulation, loop: Loop
) -> None:
    fed = Federation(simulation, seed=3)
    cohort = fed.cohort(19).clients
    state = ALGORITHM.step(fed, ALGORITHM.init(digits.problem))
    rows: dict[str, Any] = dict(clients=cohort, xi=Sample("upper"), zeta=Sample("lower"))
    got = fed.probe(losses, x=state.x + 0.1, y=state.y, **rows)
    expected = Federation(loop).probe(losses, x=state.x + 0.1, y=state.y, **rows)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert fed.ledger.rounds == 5 and fed.ledger.probes["losses"].rounds == 1


# ------------------------------------------------------------------------------------------- the same samples


class Drawn(NamedTuple):
    one: Scalar
    many: Scalar
    passes: Scalar
    own: Scalar
    steps: Scalar


def fingerprint(rows: Draw) -> Any:
    """A number that tells which rows were drawn, in which order: exact in float32."""
    places = jnp.arange(1, rows.index.size + 1, dtype=jnp.float32).reshape(rows.index.shape)
    return jnp.sum(rows.weight * places * (rows.index + 1))


@client_step
def drawn(c: Oracle, one: Draw, many: Stream, passes: Stream, own: Array) -> Drawn:
    """Which rows a client drew, its own value, and its number of steps."""
    steps = many.steps.astype(jnp.float32)
    return Drawn(fingerprint(one), fingerprint(many.draws), fingerprint(passes.draws), own * 1.0, steps)


def test_every_engine_draws_the_same_rows_and_gives_clients_their_own_values(digits: Task, loop: Loop) -> None:
    kept = []
    for engine in (loop, Simulation(digits.problem, digits.clients, devices=1, memory_limit=1)):
        recording = Recording(engine)
        fed = Federation(recording, seed=11)
        for participation in (1.0, 13):
            fed.cohort(participation).round(
                drawn,
                one=Sample("upper", 6),
                many=Samples("lower", 5, PerClient(TAU)),
                passes=Epochs("lower", 20, 1),
                own=PerClient(tuple(i / 8 for i in range(20))),
            )
        kept.append(recording.kept)
    assert kept[0] == kept[1] and len(kept[0]) == 20
    for client, values in kept[0].items():
        assert values[3:] == [client / 8, TAU[client]]
    assert len({float(values[1]) for values in kept[0].values()}) == 20, "clients draw for themselves"


# --------------------------------------------------------------------------------------- one million, and errors


def test_a_million_registered_clients_cost_nothing(quadratic: QuadraticTask) -> None:
    made: list[int] = []

    def make(client: int) -> ClientData:
        made.append(client)
        return quadratic.clients.load(client % 20)

    clients = LazyClients(1_000_000, quadratic.clients.capacity, make)
    fed = Federation(Simulation(quadratic.problem, clients, devices=1), seed=0).cohort(5)
    g = np.random.default_rng(0)
    x, y = (jnp.asarray(g.normal(size=n), jnp.float32) for n in (10, 8))
    fed.hold(x=x, y=y)
    got = fed.round(lower_gradient, zeta=Sample("lower")).q
    assert len(fed.clients) == 5 and max(fed.clients) > 1000
    assert set(made) == {0, *fed.clients}, "nobody else's data were made"
    A, B, b = (m.astype(np.float64) for m in (quadratic.A, quadratic.B, quadratic.b.mean(1)))
    expected = np.mean([A[i % 20] @ y + B[i % 20] @ x + b[i % 20] for i in fed.clients], axis=0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert fed.ledger.bytes_up == 5 * 4 * 8 and fed.ledger.bytes_down == 5 * 4 * (10 + 8)


class Value(NamedTuple):
    value: Y


@client_step
def start(c: Oracle) -> Value:
    """What is held as y."""
    return Value(c.y)


@client_step
def broken(c: Oracle) -> Value:
    """A step with a mistake in it."""
    return Value(c.y + jnp.ones(17))


@client_step
def slope(c: Oracle, zeta: Draw) -> Value:
    """A step without a mistake, which asks for a derivative."""
    return Value(c.g_y(c.y, zeta))


def small_problem() -> Problem:
    return Problem(jnp.zeros(3), jnp.zeros(2), lambda x, y, b: jnp.sum(y), lambda x, y, b: jnp.sum(x))


def problem_with_a_mistake() -> Problem:
    return Problem(
        jnp.zeros(3), jnp.zeros(2), lambda x, y, b: jnp.sum(y + jnp.ones(17)), lambda x, y, b: jnp.sum(x)
    )


def failing_clients() -> LazyClients:
    def make(client: int) -> ClientData:
        if client == 3:
            raise OSError("the disk is gone")
        return ClientData(Part(np.ones((2, 1), np.float32)), Part(np.ones((1, 1), np.float32)))

    return LazyClients(5, ClientSize(2, 1), make)


def ask(engine: Engine, step: Step[Any, Any], **arguments: Any) -> None:
    fed = Federation(engine, ledger=Ledger(steps={"before": Account(rounds=7)}))
    fed.hold(x=jnp.zeros(3), y=jnp.zeros(2))
    fed.round(step, **arguments)


def on_one_device(problem: Problem, clients: Clients) -> Engine:
    return Simulation(problem, clients, devices=1)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Loop, r"^client 3, start, round 7: OSError: the disk is gone$"),
        (on_one_device, r"^start, round 7: OSError: the disk is gone$"),
    ],
    ids=["loop", "simulation"],
)
def test_an_error_while_loading_names_the_client_or_the_step(engine: Callable[..., Engine], message: str) -> None:
    with pytest.raises(StepError, match=message):
        ask(engine(small_problem(), failing_clients()), start)


@pytest.mark.parametrize(
    ("engine", "message"),
    [(Loop, r"^client 0, slope, round 7: "), (on_one_device, r"^slope, round 7: ")],
    ids=["loop", "simulation"],
)
def test_an_error_in_a_loss_names_the_client_or_the_step(engine: Callable[..., Engine], message: str) -> None:
    with pytest.raises(StepError, match=message) as raised:
        ask(engine(problem_with_a_mistake(), failing_clients()), slope, zeta=Sample("lower"))
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("engine", [Loop, on_one_device], ids=["loop", "simulation"])
def test_an_error_in_a_step_names_the_step_before_a_client_is_asked(engine: Callable[..., Engine]) -> None:
    recording = Recording(engine(small_problem(), failing_clients()))
    with pytest.raises(StepError, match=r"^step broken: TypeError: add got incompatible shapes") as raised:
        ask(recording, broken)
    assert raised.value.__cause__ is not None
    assert recording.sizes == []


@pytest.mark.parametrize("devices", [0, 1000])
def test_more_devices_than_there_are_is_refused(devices: int) -> None:
    with pytest.raises(SettingsError, match=rf"devices = {devices} is wrong: JAX sees \d+; use 1 to"):
        Simulation(small_problem(), failing_clients(), devices=devices)


# ------------------------------------------------------------------------------------------------ compilations


@pytest.mark.slow
def test_nothing_compiles_after_every_q_was_visited(
    simulation: Simulation, reference: list[Any], compilations: Any
) -> None:
    fed, state = Federation(simulation, seed=8), ALGORITHM.init(simulation.problem)
    visited = []
    with compilations() as seen:
        for _ in range(8):
            before = fed.ledger.bytes_up
            state = ALGORITHM.step(fed, state)
            visited.append(fed.ledger.bytes_up - before)
    assert len(set(visited)) == 2, "both Q were visited, with cohorts that change"
    assert seen == [], "the run of the reference compiled all there is"
