"""A run over two processes: the numbers of one process, each client's data at one of them, one run folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import processes
from fedbilevel.cli import runs
from fedbilevel.problem import Task
from fedbilevel.record import FILES, LOCK, SOMETIMES
from own_steps import HeavyBall

SETTINGS = {
    "problem.name": "quadratic",
    "problem.noise": 0.5,
    "data.clients": 7,  # odd: the last device gets a client twice
    "algorithm.participation": 1.0,
    "algorithm.batch_zeta_local": 3,
    "algorithm.lower_steps": [1, 2, 3, 4, 5, 6, 7],
    "algorithm.lower_epochs": None,
    "algorithm.upper_steps": 2,
    "evaluate.clients": 7,
}


# ---------------------------------------------------------------------------------- what runs in other processes


def work(out: str, steps: str) -> None:
    """Run the settings up to each number of iterations in turn; print what this process saw, as JSON."""
    if "JAX_PROCESS_ID" in os.environ:
        processes.join()
    loaded: set[int] = set()
    task = fb.load_spec(None, SETTINGS | {"stop.iterations": 1}).task()

    def load(client: int) -> fb.ClientData:
        loaded.add(client)
        return task.clients.load(client)

    clients = fb.LazyClients(task.clients.count, task.clients.capacity, load, task.clients.size)
    fb.Spec.task = lambda self: Task(task.problem, clients, task.measure)  # type: ignore[method-assign]
    for stop in map(int, steps.split(",")):
        spec = fb.load_spec(None, SETTINGS | {"stop.iterations": stop})
        result = fb.run(spec, out, resume=True)
        kept = fb.train(
            task.problem,
            task.clients,
            HeavyBall(participation=5),
            stop={"iterations": stop},
            out=f"{out}-kept",
            resume=True,
        )
        remembered = fb.train(
            task.problem,
            task.clients,
            HeavyBall(participation=5),
            stop={"iterations": stop},
            federation={"aggregator": {"name": "centred-clipping", "start": "last"}},
            out=f"{out}-remembered",
            resume=True,
        )
    ledger = {k: v for k, v in result.summary.items() if k in ("ledger", "probes", "rejected", "rounds")}
    refusals = []
    for change, again in (("federation.engine.devices", 1), ("stop.iterations", 9)):
        try:
            fb.run(fb.load_spec(None, SETTINGS | {"stop.iterations": 1, change: again}), out)
        except fb.FedBilevelError as error:
            refusals.append(f"{type(error).__name__}: {error}")
    seen = {"devices": [jax.local_device_count(), jax.device_count()], "loaded": sorted(loaded)}
    state = {name: np.asarray(getattr(result, name)).tolist() for name in ("x", "y")}
    state |= {
        "kept": np.asarray(kept.y).tolist(),
        "remembered": np.asarray(remembered.y).tolist(),
        "moves": np.linalg.norm(kept.y - task.problem.flat_y.vector).item(),
    }
    print(json.dumps(seen | state | {"history": result.history, "ledger": ledger, "refusals": refusals}))


def start(out: Path, steps: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"import test_distributed as t; t.work({str(out)!r}, {steps!r})"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(*started: subprocess.Popen[str]) -> list[dict[str, Any]]:
    try:
        ended = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("distributed")
    return [place / name for name in ("alone", "first", "second")]


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> dict[str, Any]:
    """One process with two devices, four iterations."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    return outcomes(start(folders[0], "4", XLA_FLAGS=flags))[0]


@pytest.fixture(scope="module")
def together(folders: list[Path]) -> list[dict[str, Any]]:
    """Two processes with one device each: two iterations, and two more after resuming."""
    port = free_port()
    common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    one = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    pair = [start(folders[1 + i], "2,4", JAX_PROCESS_ID=str(i), XLA_FLAGS=one, **common) for i in range(2)]
    return outcomes(*pair)


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


def apart(one: Any, other: Any) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ------------------------------------------------------------------------------------------------ two processes


@pytest.mark.slow
def test_two_processes_give_what_one_gives(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    assert alone["devices"] == [2, 2] and [p["devices"] for p in together] == [[1, 2], [1, 2]]
    for name in ("x", "y"):
        assert apart(together[0][name], alone[name]) < 1e-5
        assert together[0][name] == together[1][name], "the processes do not drift apart"
        assert np.linalg.norm(alone[name]) > 1e-3, "the state moves"
    assert len(alone["history"]) == 5
    for ours, theirs in zip(together[0]["history"], alone["history"], strict=True):
        assert ours.keys() == theirs.keys()
        numbers = [k for k, v in theirs.items() if v is not None and k != "seconds"]
        np.testing.assert_allclose([ours[k] for k in numbers], [theirs[k] for k in numbers], rtol=1e-4)


@pytest.mark.slow
def test_what_clients_keep_is_the_same_in_two_processes_also_after_a_resume(
    folders: list[Path], alone: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    assert apart(together[0]["kept"], alone["kept"]) < 1e-5 and alone["moves"] > 1e-2
    assert together[0]["kept"] == together[1]["kept"]
    first, second = (folder.with_name(f"{folder.name}-kept") for folder in folders[1:])
    assert list((first / "clients").glob("*.safetensors")) and not second.exists()


@pytest.mark.slow
def test_what_a_rule_remembers_is_the_same_in_two_processes_also_after_a_resume(
    alone: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    assert together[0]["remembered"] == together[1]["remembered"]
    assert apart(together[0]["remembered"], alone["remembered"]) < 1e-5
    assert apart(alone["remembered"], alone["kept"]) > 1e-3, "another rule is another run"


@pytest.mark.slow
def test_every_process_books_the_same_rounds_and_bytes(
    alone: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    books = [without_seconds(outcome["ledger"]) for outcome in (alone, *together)]
    assert books[0] == books[1] == books[2] and books[0]["rounds"] == 20
    histories = [without_seconds(process["history"]) for process in together]
    assert histories[0] == histories[1]


@pytest.mark.slow
def test_each_process_loads_the_data_of_its_own_clients(
    alone: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    assert alone["loaded"] == list(range(7))
    assert together[0]["loaded"] == [0, 1, 2, 3]
    assert together[1]["loaded"] == [0, 4, 5, 6], "and the first client's, to see how large one is"


@pytest.mark.slow
def test_the_first_process_alone_has_a_run_folder(folders: list[Path], together: list[dict[str, Any]]) -> None:
    _, first, second = folders
    assert not second.exists()
    written = [json.loads(line) for line in (first / "history.jsonl").read_text().splitlines()]
    assert written == together[0]["history"] and [r["iteration"] for r in written] == list(range(5))
    assert {f.name for f in first.iterdir()} - set(SOMETIMES) == {LOCK, *FILES}


@pytest.mark.slow
def test_what_is_refused_is_refused_by_all(folders: list[Path], together: list[dict[str, Any]]) -> None:
    devices, taken = zip(*(process["refusals"] for process in together), strict=True)
    assert set(devices) == {
        "SettingsError: federation.engine.devices = 1 is wrong: 2 processes have 2 and use all of them; remove it"
    }
    assert taken[0].startswith(f"RunFolderError: --out {folders[1]} holds another run; choose another folder")
    assert taken[1] == taken[0].replace("RunFolderError: ", "RunFolderError: the first process says: ")


# -------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments that JAX is given, instead of its starting anything."""
    calls: list[Any] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
    for name in ("ADDRESS", "BIND_ADDRESS"):
        monkeypatch.delenv(f"JAX_COORDINATOR_{name}", raising=False)
    for name in ("NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    return calls


@pytest.mark.parametrize(
    ("address", "bind", "bound"),
    [
        ("localhost:1234", None, "localhost:1234"),
        ("127.0.0.1:1234", "[::]:1234", "[::]:1234"),
        ("node7:1234", None, None),
    ],
)
def test_the_environment_says_which_process_it_is(
    address: str, bind: str | None, bound: str | None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "16")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    if bind is not None:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bind)
    processes.join()
    assert asked == [((address, 16, 3), {"coordinator_bind_address": bound})]


def test_a_cluster_is_left_to_jax(asked: list[Any]) -> None:
    processes.join()
    assert asked == [((None, None, None), {"coordinator_bind_address": None})]


def test_a_place_that_is_not_known_is_an_error_with_a_remedy(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(fb.SettingsError, match=r"should be defined\. Set JAX_COORDINATOR_ADDRESS=host:port, "):
        processes.join()
    monkeypatch.setenv("JAX_PROCESS_ID", "two")
    with pytest.raises(fb.SettingsError, match="JAX_PROCESS_ID = 'two' is wrong: use a whole number"):
        processes.join()


def test_the_command_joins_before_it_runs_and_one_process_talks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []
    monkeypatch.setattr(processes, "join", lambda: order.append("join"))
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(runs, "run", lambda *a, **k: order.append(k["observers"]))
    runs.run_command(folder=tmp_path, log=["tensorboard"], distributed=True)
    assert order == ["join", []]
