"""Ray: the simulation's numbers on a cluster, also when an actor dies in the middle of a round.

Ray listens on every address of a host, so its tests run in a network namespace that has only loopback. One
process there has a cluster of two nodes and tells what it saw; the tests look at that. A node is killed in
benchmarks/ray_kills.py.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from engine_equality import IN_PROCESS, ON_RAY, SETTINGS, compare
from fedbilevel.engines import Engine
from fedbilevel.problem import Task
from fedbilevel.rng import Address, Kind
from loopback import loopback_only
from own_steps import momentum
from ray_kills import ALGORITHM, Gated, cluster_of_two, digits, kill_process, trace, with_a_kill

ACTORS = ["ray, 1 actor", "ray, 2 actors"]
ROUNDS = 3
ITERATIONS = 6  # of the twenty of the benchmark


class Momentum:
    """Rounds of a step whose clients keep something, with another cohort in each."""

    def __init__(self, engine: Engine) -> None:
        self._fed, self._y = fb.Federation(engine, seed=5), engine.problem.flat_y.vector
        self._x = engine.problem.flat_x.vector

    def go_on(self) -> list[list[float]]:
        """Some more rounds; where each of them led, with what clients have kept."""
        trail = []
        for _ in range(ROUNDS):
            cohort = self._fed.cohort(13)
            cohort.hold(x=self._x, y=self._y)
            self._y = cohort.round(momentum, zeta=fb.Sample("lower", 4), rate=0.05).y
            trail.append([*np.asarray(self._y).astype(np.float64).tolist(), *self._kept()])
        assert not self._fed.ledger.rejected
        return trail

    def _kept(self) -> list[float]:
        states = self._fed.engine.capabilities.states
        assert states is not None
        kept = [states.read(client, self._fed.ledger.clock) for client in range(20)]
        numbers = [np.append(each["velocity"][0], each["visits"][0]) for each in kept if each]
        assert sum(each[-1] for each in numbers) == 13 * self._fed.ledger.rounds
        return list(np.concatenate(numbers).astype(np.float64).tolist())


def by_cohorts(engine: Engine) -> dict[str, Any]:
    """Where two outer iterations lead with cohorts for a phase and for a round, and what they cost."""
    ends: dict[str, Any] = {}
    for kind in ("phase", "round"):
        fed, state = fb.Federation(engine, seed=3, cohorts=kind), ALGORITHM.init(engine.problem)
        for _ in range(2):
            state = ALGORITHM.step(fed, state)
        books = [fed.ledger.rounds, fed.ledger.bytes_up, fed.ledger.bytes_down]
        ends[kind] = np.concatenate(state).astype(np.float64).tolist(), books
    return ends


def main(folder: Path) -> None:
    """In the namespace: everything that needs a cluster."""
    from fedbilevel.engines.ray import Ray

    task = digits()
    gated = Gated(task.clients, folder)
    simulation = fb.Simulation(task.problem, task.clients, devices=1)
    moving = Momentum(simulation)
    seen: dict[str, Any] = {"simulation": trace(simulation), "momentum": [moving.go_on(), moving.go_on()]}
    seen["cohorts"] = by_cohorts(simulation)
    with cluster_of_two():
        engine = Ray(task.problem, gated, actors=2, devices=1)
        seen["nodes"] = len({node for node, _ in engine.whereabouts()})
        seen["two actors"] = trace(engine)
        seen["momentum of two actors"] = Momentum(engine).go_on()
        engine.close()

        engine = Ray(task.problem, gated, actors=1, devices=1)
        ((node, pid),) = engine.whereabouts()
        seen["one actor"], moving = trace(engine), Momentum(engine)
        seen["momentum of one actor"] = moving.go_on()
        seen["cohorts of one actor"] = by_cohorts(engine)
        seen["momentum with a kill"] = with_a_kill(moving.go_on, folder, kill_process, {pid})
        seen["lives"] = (node, pid) in engine.whereabouts()
        seen["one actor after the kill"] = trace(engine)
        engine.close()

        results: dict[str, fb.Result] = {}
        engines = IN_PROCESS | {name: ON_RAY[name] for name in ACTORS}
        seen["table"] = compare(engines, SETTINGS | {"stop.iterations": ITERATIONS}, folder / "equality", results)
    for name, result in results.items():
        seen["table"][name]["history"] = [{k: v for k, v in r.items() if k != "seconds"} for r in result.history]
    (folder / "seen.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(namespace: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the benchmarks among them
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = loopback_only(sys.executable, __file__, str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads((folder / "seen.json").read_text()))


def apart(one: Any, other: Any) -> float:
    return max(
        float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.slow
def test_two_actors_on_two_nodes_agree_with_the_simulation(seen: dict[str, Any]) -> None:
    assert seen["nodes"] == 2
    assert apart(seen["two actors"], seen["simulation"]) < 1e-5
    assert apart(seen["simulation"][:1], seen["simulation"][-1:]) > 1e-2, "the states move"


@pytest.mark.slow
def test_cohorts_for_a_phase_and_for_a_round_are_those_of_the_simulation(seen: dict[str, Any]) -> None:
    assert seen["cohorts of one actor"] == seen["cohorts"]
    phase, every = seen["cohorts"]["phase"], seen["cohorts"]["round"]
    assert phase[0] != every[0] and phase[1][2] < every[1][2], "a new cohort is sent x and y again"


@pytest.mark.slow
def test_an_actor_killed_in_a_round_changes_no_bit(seen: dict[str, Any]) -> None:
    _, killed, _ = seen["momentum with a kill"]
    assert killed and not seen["lives"], "the round in which it died is compared below"
    assert seen["one actor"] == seen["simulation"]
    assert seen["one actor after the kill"] == seen["simulation"]


@pytest.mark.slow
def test_what_clients_keep_is_the_simulations_bit_for_bit_also_after_the_actor_was_killed(
    seen: dict[str, Any],
) -> None:
    first, second = seen["momentum"]
    assert first != second and len(first) == len(second) == ROUNDS
    assert seen["momentum of one actor"] == first
    states, killed, _ = seen["momentum with a kill"]
    assert killed and states == second
    assert apart(seen["momentum of two actors"], first) < 1e-5


@pytest.mark.slow
def test_a_run_on_ray_is_the_simulation_bit_for_bit_with_one_actor_and_closely_with_more(
    seen: dict[str, Any],
) -> None:
    table = seen["table"]
    assert len(table) == 4 and all(row["iterations"] == ITERATIONS for row in table.values())
    assert table["ray, 1 actor"]["to the simulation"] == {"x": 0.0, "y": 0.0}
    assert table["ray, 1 actor"]["history"] == table["simulation"]["history"]
    assert all(apart < 1e-4 for row in table.values() for apart in row["to the simulation"].values())
    assert min(table["ray, 2 actors"]["to the simulation"].values()) > 0, "the comparison can tell a difference"


@pytest.mark.slow
def test_ledgers_agree_in_rounds_and_payload_and_ray_has_the_bytes_of_its_messages_beside(
    seen: dict[str, Any],
) -> None:
    table = seen["table"]
    assert all(row["books"] == table["simulation"]["books"] for row in table.values())
    for name in ACTORS:
        up = sum(account[1] for account in table[name]["books"].values())
        assert up < table[name]["wire"][0] < up + 3 * 5 * ITERATIONS * 1000
        assert table[name]["wire"][1] > 0


# ------------------------------------------------------------------------------------- without a cluster


def test_an_actors_inside_compiles_nothing_again_for_a_shorter_part(
    digits: Task, compilations: Callable[[], AbstractContextManager[list[str]]]
) -> None:
    from fedbilevel.algorithms.local import lower_gradient
    from fedbilevel.engines.ray import Part, answer

    simulation = fb.Simulation(digits.problem, digits.clients, devices=1)
    x, y = (np.asarray(flat.vector) for flat in (digits.problem.flat_x, digits.problem.flat_y))
    samples = {"zeta": fb.Sample("lower", 4)}

    def ask(clients: tuple[int, ...], asked: int, version: int) -> Any:
        versions = (("x", version), ("y", version))
        address = Address(0, Kind.ROUND, 0)
        part = Part(lower_gradient.address, address, clients, asked, versions, {}, samples, {})
        return answer(simulation, part, ({}, {}), (x, y)).fields["q"]

    first = ask((0, 1, 2), 3, 0)
    with compilations() as compiled:
        second = ask((1, 2, 2), 2, 1)
    assert compiled == []
    assert first.shape == (3, digits.problem.size_y) and second.tolist() == first[1:].tolist()


def test_an_actors_inside_has_no_state_but_the_one_that_came_with_the_part(digits: Task) -> None:
    from fedbilevel.engines.ray import Part, answer

    simulation = fb.Simulation(digits.problem, digits.clients, devices=1)
    x, y = (np.asarray(flat.vector) for flat in (digits.problem.flat_x, digits.problem.flat_y))
    versions, samples = (("x", 0), ("y", 0)), {"zeta": fb.Sample("lower", 4)}

    def keep(kind: Kind, states: Any) -> Any:
        common = momentum.address, Address(0, kind, 0), (3, 5, 5), 2, versions
        return answer(
            simulation, Part(*common, {}, samples, states), ({"rate": jnp.float32(0.1)}, {}), (x, y)
        ).kept

    first = keep(Kind.ROUND, {})
    assert list(first) == [3, 5] and [int(state["visits"][0]) for state in first.values()] == [1, 1]
    again = keep(Kind.ROUND, {5: first[5]})
    assert [int(state["visits"][0]) for state in again.values()] == [1, 2]
    assert again[3]["velocity"][0].tolist() == first[3]["velocity"][0].tolist()
    assert keep(Kind.PROBE, {5: first[5]}) == {}


def test_a_step_of_the_main_script_is_refused_with_a_remedy() -> None:
    from fedbilevel.engines.ray import check_found

    with pytest.raises(fb.SettingsError, match=r"^step mine is defined in the main script.* move it to a module"):
        check_found("__main__:mine")
    check_found("fedbilevel.algorithms.local:lower_gradient")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
