"""A real federation on this machine: processes of their own, mutual TLS, and what happens when they are killed.

All tests share one federation of three sites. Slow: it takes eight processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
import rogue_site
from engine_equality import IN_PROCESS, books, compare, differences, folder_of, wire
from engine_equality import SETTINGS as TWENTY
from fedbilevel.engines.flare import verify_audit
from fedbilevel.federate import LoopbackFederation
from federation_kills import NAMES, Killer, federation, killed_run, same, submit

pytestmark = pytest.mark.slow

ITERATIONS = 8  # of the twenty of the benchmarks
SETTINGS = TWENTY | {"stop.iterations": ITERATIONS}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackFederation]:
    with federation(tmp_path_factory.mktemp("flare")) as made:
        yield made


@pytest.fixture(scope="module")
def uninterrupted(local: LoopbackFederation, tmp_path_factory: pytest.TempPathFactory) -> fb.Result:
    return submit(local, tmp_path_factory.mktemp("run") / "whole", SETTINGS)


def jobs(result: fb.Result) -> list[dict[str, Any]]:
    return list(json.loads((folder_of(result) / "federation.json").read_text())["jobs"])


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


# ------------------------------------------------------------------------------------------------ the same numbers


def test_the_federation_is_bit_for_bit_the_loop_and_agrees_with_the_simulation(
    uninterrupted: fb.Result, tmp_path: Path
) -> None:
    results: dict[str, fb.Result] = {}
    table = compare(IN_PROCESS | {"flare": lambda settings, out: uninterrupted}, SETTINGS, tmp_path, results)
    assert uninterrupted.summary["iterations"] == ITERATIONS
    assert table["flare"]["to the loop"] == {"x": 0.0, "y": 0.0}
    assert timeless(uninterrupted.history) == timeless(results["loop"].history)
    assert all(0 < apart < 1e-4 for apart in table["flare"]["to the simulation"].values())
    assert table["flare"]["books"] == table["loop"]["books"] == table["simulation"]["books"]
    assert differences(uninterrupted, results["loop"]) != differences(uninterrupted, results["simulation"])


def test_the_ledger_says_2n_plus_3_and_has_the_bytes_of_whole_messages_beside(uninterrupted: fb.Result) -> None:
    assert uninterrupted.summary["rounds"] == (2 * 1 + 3) * ITERATIONS
    payload = [sum(account[i] for account in books(uninterrupted).values()) for i in (1, 2)]
    messages = 3 * 5 * ITERATIONS
    assert all(0 < sent - paid < 1000 * messages for sent, paid in zip(wire(uninterrupted), payload, strict=True))


def test_sites_live_through_the_job_in_processes_of_their_own(
    local: LoopbackFederation, uninterrupted: fb.Result
) -> None:
    (job,) = jobs(uninterrupted)
    assert job["finished"] and sorted(job["pids"]) == NAMES and job["refused"] == {}
    assert len({job["server_pid"], os.getpid(), *job["pids"].values()}) == 5
    for name in NAMES:
        lines = (local.site_file(name).parent / "audit.jsonl").read_text().splitlines()
        written = [entry for entry in map(json.loads, lines) if entry["pid"] == job["pids"][name]]
        asked = [entry for entry in written if entry["what"] == "step"]
        assert [entry["what"] for entry in written if entry not in asked and entry["what"] != "begin"] == ["hello"]
        assert verify_audit(local.site_file(name).parent / "audit.jsonl").broken is None
        assert sum(entry["round"].startswith("round ") for entry in asked) == 5 * ITERATIONS


def test_nothing_listens_on_any_address_but_loopback(local: LoopbackFederation, uninterrupted: fb.Result) -> None:
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


@pytest.fixture(scope="module")
def killed(local: LoopbackFederation, tmp_path_factory: pytest.TempPathFactory) -> tuple[fb.Result, Killer]:
    """A run whose server is killed. A site is killed in test_example.py, and both in the benchmark."""
    return killed_run(local, tmp_path_factory.mktemp("killed") / "run", SETTINGS, [], after=10)


def test_a_run_whose_server_was_killed_is_resumed(killed: tuple[fb.Result, Killer]) -> None:
    *_, dead, last = jobs(killed[0])
    assert "server out of reach" in dead["reason"] and last["finished"]
    assert last["from_iteration"] > dead["from_iteration"] == 0


def test_a_kill_changes_no_bit_of_the_result(killed: tuple[fb.Result, Killer], uninterrupted: fb.Result) -> None:
    result, _ = killed
    assert len(jobs(result)) == 2 and same(result, uninterrupted)
    assert timeless(result.history) == timeless(uninterrupted.history)


# ------------------------------------------------------------------------------------------------ who is refused


def test_a_site_of_a_foreign_authority_is_refused(local: LoopbackFederation, tmp_path: Path) -> None:
    """Its certificate is as good as any, but of an authority that the server does not know."""
    foreign = LoopbackFederation(tmp_path / "foreign", {"site-1": tmp_path / "none.toml"})
    foreign.provision()
    own, other = local.kit("site-1") / "startup", foreign.kit("site-1") / "startup"
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


def test_sites_that_answer_wrongly_or_cannot_load_are_refused_counted_and_named_and_the_run_goes_on(
    local: LoopbackFederation, uninterrupted: fb.Result, tmp_path: Path
) -> None:
    files = {name: local.site_file(name) for name in NAMES[1:]}
    before = {name: file.read_text() for name, file in files.items()}
    shutil.copy(rogue_site.__file__, files["site-2"].parent)
    files["site-2"].write_text(before["site-2"].replace("held_site:make", "rogue_site:make"))
    files["site-3"].write_text(before["site-3"].replace("rows.npz", "gone.npz"))
    settings = SETTINGS | {"federation.min_replies": 1, "federation.strikes": "never", "stop.iterations": 2}
    try:
        result = submit(local, tmp_path / "run", settings)
    finally:
        for name, file in files.items():
            file.write_text(before[name])
    (job,) = jobs(result)
    assert job["finished"] and list(job["refused"]) == ["site-3"] and "gone.npz" in job["refused"]["site-3"]
    assert result.summary["iterations"] == 2 and all(np.isfinite(a).all() for a in jax.tree.leaves(result.y))
    rejected = list(result.summary["rejected"].values())
    assert sum(n for clients in rejected for n in clients["2"].values()) == 13
    wrong = [reason for clients in rejected for reason in clients["1"]]
    assert sum(n for clients in rejected for n in clients["1"].values()) == 13, (
        "every round of the rogue, and every probe"
    )
    for why in (
        "is not finite",
        "has shape (",
        "bytes, at most",
        "site-2: no reply",  # FLARE did not receive it
        "not a reply of",
        "it does not begin with the magic word",
        "dict instead of bytes",
    ):
        assert any(why in reason for reason in wrong), why


def test_the_command_runs_it_all(tmp_path: Path) -> None:
    sets = [f"--set={key}={value}" for key, value in SETTINGS.items() if value is not None]
    command = [sys.executable, "-m", "fedbilevel", "federate", "--simulate-sites", "1", *sets]
    command += ["--set=federation.min_replies=1", "--set=stop.iterations=2", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            out, complaints = running.communicate(timeout=600)
        finally:
            running.terminate()  # it ends the federation that it started
    assert running.returncode == 0, complaints
    assert "rounds per outer iteration: 5" in out and "test accuracy" in out
    assert {"history.jsonl", "summary.json", "curve.png", "federation.json"} <= {
        f.name for f in (tmp_path / "run").iterdir()
    }
