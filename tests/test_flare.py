"""A real federation on this machine: processes of their own, mutual TLS, and what happens when they are killed.

All tests share one federation of three sites. Slow: it takes eight processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.federate import LocalFederation, simulated_sites
from fedbilevel.federate.commands import federated
from fedbilevel.federate.local import SERVER
from fedbilevel.record import RunFolder

pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]

NAMES = ["site-1", "site-2", "site-3"]
ITERATIONS = 20
SETTINGS: dict[str, Any] = {
    "data.name": "digits",
    "data.partition": "iid",
    "problem.hidden": 12,
    "algorithm.participation": 1.0,
    "algorithm.lower_epochs": 1,
    "algorithm.batch_zeta_local": 50,
    "algorithm.upper_steps": 2,
    "federation.min_replies": 3,
    "evaluate.clients": 3,
    "stop.rounds": None,
    "stop.iterations": ITERATIONS,
}


def spec(**more: Any) -> fb.Spec:
    return federated(fb.load_spec("demo", SETTINGS | {k.replace("__", "."): v for k, v in more.items()}), 3)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    place = tmp_path_factory.mktemp("flare")
    with LocalFederation(place, simulated_sites(spec(), place / "sites", NAMES)) as federation:
        yield federation


def submit(local: LocalFederation, chosen: fb.Spec, out: Path, resume: bool = False, **more: Any) -> fb.Result:
    from fedbilevel.federate.submit import Kit, Submission

    submission = Submission(Kit(local.admin_kit), NAMES, patience=120.0, between=local.revive, **more)
    return submission.run(chosen, out, resume=resume, overwrite=False)


@pytest.fixture(scope="module")
def uninterrupted(local: LocalFederation, tmp_path_factory: pytest.TempPathFactory) -> fb.Result:
    return submit(local, spec(), tmp_path_factory.mktemp("run") / "whole")


def arrays(folder: Path, chosen: fb.Spec) -> dict[str, list[float]]:
    saved = RunFolder(folder).checkpoint(chosen)
    assert saved is not None
    return {name: a.tolist() for name, a in saved.arrays.items()}


def jobs(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "federation.json").read_text())["jobs"])


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


# ------------------------------------------------------------------------------------------------ the same numbers


def test_the_federation_is_bit_for_bit_the_loop_and_the_ledgers_agree(
    uninterrupted: fb.Result, tmp_path: Path
) -> None:
    chosen = spec(federation__engine="loop")
    loop = fb.run(chosen, tmp_path / "loop")
    assert timeless(uninterrupted.history) == timeless(loop.history) and len(loop.history) == ITERATIONS + 1
    assert arrays(uninterrupted.folder, spec()) == arrays(loop.folder, chosen)
    assert uninterrupted.summary["rounds"] == loop.summary["rounds"] == 5 * ITERATIONS
    for name, account in loop.summary["ledger"].items():
        ours = uninterrupted.summary["ledger"][name]
        assert [ours[k] for k in ("rounds", "bytes_up", "bytes_down")] == [
            account[k] for k in ("rounds", "bytes_up", "bytes_down")
        ]
        assert ours["wire_up"] > ours["bytes_up"] and ours["wire_down"] > ours["bytes_down"]


def test_the_federation_agrees_with_the_simulation(uninterrupted: fb.Result, tmp_path: Path) -> None:
    chosen = spec(federation__devices=1)
    simulation = arrays(fb.run(chosen, tmp_path / "simulation").folder, chosen)
    for name, value in arrays(uninterrupted.folder, spec()).items():
        apart = np.linalg.norm(np.subtract(value, simulation[name])) / np.linalg.norm(simulation[name])
        assert apart < 1e-4, name


def test_sites_live_through_the_job_in_processes_of_their_own(uninterrupted: fb.Result) -> None:
    (job,) = jobs(uninterrupted.folder)
    assert job["finished"] and sorted(job["pids"]) == NAMES and job["refused"] == {}
    assert len({job["server_pid"], os.getpid(), *job["pids"].values()}) == 5


def test_nothing_listens_on_any_address_but_loopback(local: LocalFederation, uninterrupted: fb.Result) -> None:
    own = descendants([process.pid for process in local.processes.values()])
    listening = listeners(own)
    assert listening, "the server listens"
    assert {address for address in listening if not address.startswith("127.")} == set()


def descendants(roots: list[int]) -> set[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, size = set(roots), 0
    while len(found) != size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def listeners(pids: set[int]) -> set[str]:
    """The addresses on which these processes listen, from the table of sockets."""
    own = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                own |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                packed = bytes.fromhex(fields[1].partition(":")[0])
                found.add(".".join(map(str, reversed(packed))) if len(packed) == 4 else f"[{packed.hex()}]")
    return found


# ------------------------------------------------------------------------------------------------ something dies


def when_reached(folder: Path, iteration: int, act: Callable[[dict[str, Any]], None]) -> threading.Thread:
    """Call `act` with the running job as soon as the run has a checkpoint of this iteration."""

    def wait() -> None:
        limit = time.monotonic() + 300
        while time.monotonic() < limit:
            history = RunFolder(folder).history() if (folder / "history.jsonl").exists() else []
            if history and history[-1]["iteration"] >= iteration:
                act(history[-1])
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def audited(local: LocalFederation, site: str) -> list[dict[str, Any]]:
    """What the site was asked, as it wrote down itself before it began to work on it."""
    file = local.site_file(site).parent / "audit.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "gradient": lambda asked: asked["step"] == "gradients" and "array.z" not in asked["down"],
    "lower": lambda asked: asked["step"] == "lower_steps",
    "hessian": lambda asked: asked["step"] == "gradients" and "array.z" in asked["down"],
    "hypergradient": lambda asked: asked["step"] == "hypergradient",
    "upper": lambda asked: asked["step"] == "upper_steps",
}


def test_a_site_killed_in_every_kind_of_round_changes_no_bit_of_the_result(
    local: LocalFederation, uninterrupted: fb.Result, tmp_path: Path
) -> None:
    out, killed = tmp_path / "killed", dict[str, float]()

    def kill() -> None:
        seen = len(audited(local, "site-2"))
        limit = time.monotonic() + 900
        for kind, fits in KINDS.items():
            while kind not in killed and time.monotonic() < limit:
                for asked in audited(local, "site-2")[seen:]:
                    seen += 1
                    if asked["number"] > 5 and fits(asked):  # not in the first iteration of a job
                        os.kill(asked["pid"], signal.SIGKILL)
                        killed[kind] = time.monotonic()
                        break
                time.sleep(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    result = submit(local, spec(), out, restarts=8)
    thread.join()
    *failed, last = jobs(out)
    assert list(killed) == list(KINDS) and len(failed) >= len(KINDS)
    assert last["finished"] and not any(job.get("finished") for job in failed)
    assert [job["from_iteration"] for job in failed[1:]] == sorted(job["from_iteration"] for job in failed[1:])
    assert timeless(result.history) == timeless(uninterrupted.history)
    assert arrays(out, spec()) == arrays(uninterrupted.folder, spec())


def test_after_the_server_was_killed_the_run_is_resumed(
    local: LocalFederation, uninterrupted: fb.Result, tmp_path: Path
) -> None:
    out = tmp_path / "server"
    server = local.processes[SERVER]
    thread = when_reached(out, 3, lambda _: os.killpg(server.pid, signal.SIGKILL))
    with pytest.raises(fb.FedBilevelError, match="--resume"):
        from fedbilevel.federate.submit import Kit, Submission

        impatient = Submission(Kit(local.admin_kit), NAMES, restarts=0, patience=10.0)
        impatient.run(spec(), out, resume=False, overwrite=False)
    thread.join()
    local.revive()
    result = submit(local, spec(), out, resume=True)
    assert timeless(result.history) == timeless(uninterrupted.history)
    assert arrays(out, spec()) == arrays(uninterrupted.folder, spec())


# ------------------------------------------------------------------------------------------------ who is refused


def test_a_site_of_a_foreign_authority_is_refused(local: LocalFederation, tmp_path: Path) -> None:
    """Its certificate is as good as any, but of an authority that the server does not know."""
    foreign = LocalFederation(tmp_path / "foreign", {"site-1": tmp_path / "none.toml"})
    foreign._folder.mkdir()
    foreign._provision()
    own, other = local._kits / "site-1" / "startup", foreign._kits / "site-1" / "startup"
    target = json.loads((own / "fed_client.json").read_text())["servers"][0]["service"]["target"]
    host, _, port = target.partition(":")

    def shake(kit: Path) -> bytes:
        context = ssl.create_default_context(cafile=str(own / "rootCA.pem"))
        context.load_cert_chain(str(kit / "client.crt"), str(kit / "client.key"))
        plain = socket.create_connection((host, int(port)), timeout=20)
        with context.wrap_socket(plain, server_hostname=host) as secure:
            secure.settimeout(3)
            try:
                return secure.recv(1)  # a refusal comes after the handshake in TLS 1.3
            except TimeoutError:
                return b"accepted"

    assert shake(own) != b""
    with pytest.raises(ssl.SSLError):
        shake(other)


def test_a_site_that_answers_nan_is_named_and_one_that_cannot_load_is_refused_and_the_run_goes_on(
    local: LocalFederation, uninterrupted: fb.Result, tmp_path: Path
) -> None:
    files = [local.site_file(name) for name in NAMES[1:]]
    before = [file.read_text() for file in files]
    rows = files[0].parent / "nan.npz"
    with np.load(files[0].parent / "rows.npz") as own:
        np.savez(rows, **{name: own[name] * np.nan if name == "lower.inputs" else own[name] for name in own.files})
    files[0].write_text(before[0].replace("rows.npz", "nan.npz"))
    files[1].write_text(before[1].replace("rows.npz", "gone.npz"))
    try:
        result = submit(local, spec(federation__min_replies=1, stop__iterations=2), tmp_path / "run")
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    (job,) = jobs(result.folder)
    assert job["finished"] and list(job["refused"]) == ["site-3"] and "gone.npz" in job["refused"]["site-3"]
    rejected = result.summary["rejected"]
    assert rejected["client 1: gradients: q is not finite"] == 2
    assert any(reason.startswith("client 2: gradients: site-3: SettingsError: data.npz") for reason in rejected)
    assert result.summary["iterations"] == 2


def test_the_command_runs_it_all(tmp_path: Path) -> None:
    sets = [f"--set={key}={value}" for key, value in SETTINGS.items() if key != "stop.iterations"]
    command = [sys.executable, "-m", "fedbilevel", "federate", "--simulate-sites", "2", *sets]
    command += ["--set=federation.min_replies=2", "--set=stop.iterations=2", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            out, complaints = running.communicate(timeout=600)
        finally:
            running.terminate()  # it ends the federation that it started
    assert running.returncode == 0, complaints
    assert "rounds an outer iteration: 5" in out and "test accuracy" in out
    assert {"history.jsonl", "summary.json", "curve.png", "federation.json"} <= {
        f.name for f in (tmp_path / "run").iterdir()
    }
