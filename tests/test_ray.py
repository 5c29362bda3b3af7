"""Ray: the simulation's numbers on a cluster, also when an actor or a node dies in the middle of a round.

Ray listens on every address of a host, so its tests run in a network namespace that has only loopback. One
process there has a cluster of two nodes and tells what it saw; the tests look at that.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from engine_equality import IN_PROCESS, ON_RAY, SETTINGS, compare
from fedbilevel.data import ClientData, ClientSize, DataSettings
from fedbilevel.problem import Task
from fedbilevel.problems import HyperRepresentation
from loopback import can_unshare, loopback_only

pytestmark = pytest.mark.slow

ITERATIONS = 3
ACTORS = ["ray, 1 actor", "ray, 2 actors"]
ALGORITHM = fb.AggITD(
    N=1,
    alpha=0.1,
    beta=0.05,
    lam=0.3,
    participation=19,  # odd, so that two actors need padding
    lower_steps=2,
    upper_steps=2,
    batch_zeta_local=6,
    batch_xi=4,
)


def trace(engine: Any) -> list[list[float]]:
    fed, state = fb.Federation(engine, seed=3), ALGORITHM.init(engine.problem)
    states = []
    for _ in range(ITERATIONS):
        state = ALGORITHM.step(fed, state)
        states.append(np.concatenate(state).astype(np.float64).tolist())
    assert fed.ledger.rounds == 5 * ITERATIONS and not fed.ledger.rejected
    return states


class Gated:
    """Clients whose loading says where it happens and takes its time, so that a test can kill in the middle."""

    def __init__(self, clients: Any, folder: Path) -> None:
        self._clients, self._folder = clients, folder
        self.count, self.capacity = clients.count, clients.capacity

    def size(self, client: int) -> ClientSize:
        return self._clients.size(client)

    def load(self, client: int) -> ClientData:
        if (self._folder / "armed").exists():
            (self._folder / f"{client}.tmp").write_text(str(os.getpid()))
            (self._folder / f"{client}.tmp").rename(self._folder / f"{client}.pid")
            time.sleep(0.2)
        return self._clients.load(client)


def with_a_kill(engine: Any, folder: Path, kill: Any, among: set[int]) -> tuple[list[list[float]], bool, float]:
    """A trace in whose first round `kill(pid)` is called with the first of these processes that loads data.

    With it, whether there was one, and how many seconds the trace took.
    """
    killed: list[int] = []
    for file in folder.glob("*.pid"):
        file.unlink()

    def wait() -> None:
        for _ in range(2000):
            pids = {int(f.read_text()) for f in folder.glob("*.pid")} & among
            if pids:
                (folder / "armed").unlink()
                killed.append(min(pids))
                kill(killed[0])
                return
            time.sleep(0.01)

    (folder / "armed").touch()
    thread = threading.Thread(target=wait)
    thread.start()
    started = time.monotonic()
    states = trace(engine)
    seconds = time.monotonic() - started
    thread.join()
    return states, bool(killed), seconds


def main(folder: Path) -> None:
    """In the namespace: everything that needs a cluster."""
    import ray
    from ray.cluster_utils import Cluster

    from fedbilevel.engines.ray import Ray

    cluster = Cluster(
        initialize_head=True,
        head_node_args=dict(num_cpus=3, include_dashboard=False, object_store_memory=2**28),
    )
    second = cluster.add_node(num_cpus=1, object_store_memory=2**28)
    os.environ["RAY_ADDRESS"] = cluster.address

    data = DataSettings(name="digits", clients=20, partition="dirichlet")
    task = HyperRepresentation(hidden=12).task(data, 0)
    gated = Gated(task.clients, folder)
    seen: dict[str, Any] = {"simulation": trace(fb.Simulation(task.problem, task.clients, devices=1))}

    engine = Ray(task.problem, gated, actors=2, devices=1)
    before = engine.whereabouts()
    seen["nodes"] = len({node for node, _ in before})
    seen["two actors"] = trace(engine)
    seen["actor killed"] = with_a_kill(
        engine, folder, lambda pid: os.kill(pid, signal.SIGKILL), {pid for _, pid in before}
    )
    seen["actors that lived"] = len(set(before) & set(engine.whereabouts()))
    there = {pid for node, pid in engine.whereabouts() if node == second.node_id}
    seen["node killed"] = with_a_kill(
        engine, folder, lambda pid: cluster.remove_node(second, allow_graceful=False), there
    )
    seen["nodes left"] = len({node for node, _ in engine.whereabouts()})
    engine.close()

    results: dict[str, fb.Result] = {}
    engines = IN_PROCESS | {name: ON_RAY[name] for name in ACTORS}
    seen["table"] = compare(engines, SETTINGS, folder / "equality", results)
    for name, result in results.items():
        seen["table"][name]["history"] = [{k: v for k, v in r.items() if k != "seconds"} for r in result.history]
    (folder / "seen.json").write_text(json.dumps(seen))
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not can_unshare():
        pytest.skip("needs Linux namespaces: unshare -r -n and ip")
    folder = tmp_path_factory.mktemp("ray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the benchmarks among them
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = loopback_only(sys.executable, __file__, str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads((folder / "seen.json").read_text()))


def apart(one: Any, other: Any) -> float:
    return max(
        float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)) for a, b in zip(one, other, strict=True)
    )


def test_two_actors_on_two_nodes_agree_with_the_simulation(seen: dict[str, Any]) -> None:
    assert seen["nodes"] == 2
    assert apart(seen["two actors"], seen["simulation"]) < 1e-5
    assert apart(seen["simulation"][:1], seen["simulation"][-1:]) > 1e-2, "the states move"


def test_an_actor_killed_in_a_round_changes_no_bit(seen: dict[str, Any]) -> None:
    states, killed, _ = seen["actor killed"]
    assert killed and seen["actors that lived"] == 1
    assert states == seen["two actors"]


def test_a_node_killed_in_a_round_changes_no_bit(seen: dict[str, Any]) -> None:
    states, killed, _ = seen["node killed"]
    assert killed and seen["nodes left"] == 1
    assert states == seen["two actors"]


def test_a_run_on_ray_is_the_simulation_bit_for_bit_with_one_actor_and_closely_with_more(
    seen: dict[str, Any],
) -> None:
    table = seen["table"]
    assert len(table) == 4 and all(row["iterations"] == 20 for row in table.values())
    assert table["ray, 1 actor"]["to the simulation"] == {"x": 0.0, "y": 0.0}
    assert table["ray, 1 actor"]["history"] == table["simulation"]["history"]
    assert all(apart < 1e-4 for row in table.values() for apart in row["to the simulation"].values())
    assert min(table["ray, 2 actors"]["to the simulation"].values()) > 0, "the comparison can tell a difference"


def test_ledgers_agree_in_rounds_and_payload_and_ray_has_the_bytes_of_its_messages_beside(
    seen: dict[str, Any],
) -> None:
    table = seen["table"]
    assert all(row["books"] == table["simulation"]["books"] for row in table.values())
    for name in ACTORS:
        up = sum(account[1] for account in table[name]["books"].values())
        assert up < table[name]["wire"][0] < up + 3 * 100 * 1000
        assert table[name]["wire"][1] > 0


# ------------------------------------------------------------------------------------- without a cluster


def test_an_actors_inside_compiles_nothing_again_for_a_shorter_part(digits: Task, compilations: Any) -> None:
    from fedbilevel.algorithms.local import lower_gradient
    from fedbilevel.engines.ray import Part, answer

    simulation = fb.Simulation(digits.problem, digits.clients, devices=1)
    x, y = (np.asarray(flat.vector) for flat in (digits.problem.flat_x, digits.problem.flat_y))
    samples = {"zeta": fb.Sample("lower", 4)}

    def ask(clients: tuple[int, ...], asked: int, version: int) -> Any:
        versions = (("x", version), ("y", version))
        part = Part(lower_gradient.address, (0, "round", 0), clients, asked, versions, {}, samples)
        return answer(simulation, part, ({}, {}), (x, y))["q"]

    first = ask((0, 1, 2), 3, 0)
    with compilations() as compiled:
        second = ask((1, 2, 2), 2, 1)
    assert compiled == []
    assert first.shape == (3, digits.problem.size_y) and second.tolist() == first[1:].tolist()


def test_a_step_of_the_main_script_is_refused_with_a_remedy() -> None:
    from fedbilevel.engines.ray import check_found

    with pytest.raises(fb.SettingsError, match=r"^step mine is defined in the main script.* move it to a module"):
        check_found("__main__:mine")
    check_found("fedbilevel.algorithms.local:lower_gradient")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
