"""What kill -9 costs a run on Ray: of an actor, and of a node of the cluster, both in the middle of a round.

    python benchmarks/ray_kills.py

Twenty clients on two actors, an actor on each of two nodes of this machine, three outer iterations of FBO-AggITD:
without a kill, with a kill of an actor, and with a kill of a node. The seconds lost are those that the iterations
took longer.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import fedbilevel as fb
from fedbilevel.data import ClientData, Clients, ClientSize, DataSettings
from fedbilevel.engines import Engine
from fedbilevel.problem import Task
from loopback import stay_on_loopback

T = TypeVar("T")
ITERATIONS = 3
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


def digits() -> Task:
    """Twenty clients of unequal size."""
    data = DataSettings(name="digits", clients=20, partition="dirichlet")
    return fb.HyperRepresentation(hidden=12).task(data, 0)


def trace(engine: Engine) -> list[list[float]]:
    """The state after each outer iteration."""
    fed, state = fb.Federation(engine, seed=3), ALGORITHM.init(engine.problem)
    states = []
    for _ in range(ITERATIONS):
        state = ALGORITHM.step(fed, state)
        states.append(np.concatenate(state).astype(np.float64).tolist())
    assert fed.ledger.rounds == 5 * ITERATIONS and not fed.ledger.rejected
    return states


class Gated:
    """Clients whose loading says where it happens and takes its time, so that one can kill in the middle of it."""

    def __init__(self, clients: Clients, folder: Path) -> None:
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


class Killed(NamedTuple):
    """What some work led to although a process was killed: its value, whether one was, and the seconds."""

    value: Any
    killed: bool
    seconds: float


def with_a_kill(work: Callable[[], T], folder: Path, kill: Callable[[int], None], among: set[int]) -> Killed:
    """Do some work, in which `kill(pid)` is called with the first of these processes that loads data."""
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
    value = work()
    seconds = time.monotonic() - started
    thread.join()
    return Killed(value, bool(killed), seconds)


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def cluster_of_two() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes on this machine, and the second node."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args=dict(num_cpus=3, include_dashboard=False, object_store_memory=2**28),
    )
    second = cluster.add_node(num_cpus=1, object_store_memory=2**28)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


def kills(folder: Path) -> dict[str, Killed]:
    """The trace without a kill, with a kill of an actor, and with a kill of a node."""
    from fedbilevel.engines.ray import Ray

    task = digits()
    with cluster_of_two() as (cluster, second):
        engine = Ray(task.problem, Gated(task.clients, folder), actors=2, devices=1)
        trace(engine)  # compiles
        started = time.monotonic()
        table = {"nothing": Killed(trace(engine), False, time.monotonic() - started)}
        before = engine.whereabouts()
        assert len({node for node, _ in before}) == 2
        table["an actor"] = with_a_kill(lambda: trace(engine), folder, kill_process, {pid for _, pid in before})
        assert len(set(before) & set(engine.whereabouts())) == 1, "the other actor lives"
        there = {pid for node, pid in engine.whereabouts() if node == second.node_id}
        table["a node"] = with_a_kill(
            lambda: trace(engine), folder, lambda pid: cluster.remove_node(second, allow_graceful=False), there
        )
        assert len({node for node, _ in engine.whereabouts()}) == 1, "the other node is left"
        engine.close()
    return table


def main() -> None:
    stay_on_loopback()
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray_kills  # under a name that actors can import

    with tempfile.TemporaryDirectory() as place:
        table = ray_kills.kills(Path(place))
    whole = table["nothing"]
    print("| killed | seconds lost | the same bits |\n|---|---|---|")
    for what, row in table.items():
        if what != "nothing":
            assert row.killed
            print(
                f"| {what} | {row.seconds - whole.seconds:.1f} | {'yes' if row.value == whole.value else 'NO'} |"
            )


if __name__ == "__main__":
    main()
