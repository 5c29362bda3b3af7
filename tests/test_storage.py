"""What can go wrong with a run folder: each time one line that says so, and what was there before is whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fedbilevel import Result, load_spec, run
from fedbilevel.errors import CheckpointError, RunFolderError
from fedbilevel.record import CHECKPOINTS, RunFolder

SMALL = {
    "problem.name": "quadratic",
    "data.clients": 4,
    "algorithm.participation": 1.0,
    "stop.rounds": None,
    "stop.iterations": 6,
    "evaluate.checkpoint_every": 2,
}

pytestmark = pytest.mark.slow


def command(out: Path, *more: str, sets: dict[str, object] | None = None) -> list[str]:
    changes = [f"--set={key}={json.dumps(value)}" for key, value in (SMALL | (sets or {})).items() if value]
    changes.append("--set=stop.rounds=none")
    return [sys.executable, "-m", "fedbilevel", "run", "paper", "--quiet", *changes, "--out", str(out), *more]


def where(result: Result) -> Path:
    """The folder of a run that has one."""
    assert result.folder is not None
    return result.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It ended with this exit code and one line on the standard error, in these words."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    for word in words:
        assert word in said, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(load_spec("paper", SMALL), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def copy(whole: Result, tmp_path: Path) -> Path:
    shutil.copytree(where(whole), tmp_path / "run")
    return tmp_path / "run"


def longer(folder: Path) -> Result:
    return run(load_spec("paper", SMALL | {"stop.iterations": 8}), folder, resume=True)


def test_the_last_three_checkpoints_are_kept(whole: Result) -> None:
    places = []
    for name in CHECKPOINTS:
        header = (where(whole) / name).read_bytes()
        size = int.from_bytes(header[:8], "little")
        places.append(json.loads(header[8 : 8 + size])["__metadata__"]["iteration"])
    assert places == ["6", "4", "2"]


@pytest.mark.parametrize("where", ["header", "arrays", "cut"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_goes_on_to_the_same_end(
    whole: Result, copy: Path, where: str
) -> None:
    path = copy / CHECKPOINTS[0]
    data = bytearray(path.read_bytes())
    if where == "cut":
        del data[-3:]
    else:
        at = data.index(b'"iteration":"6"') + 13 if where == "header" else len(data) - 2
        data[at] ^= 1
    path.write_bytes(data)
    before = contents(copy)
    with pytest.raises(CheckpointError, match=r"delete it to go on from checkpoint\.1\.safetensors"):
        longer(copy)
    assert contents(copy) == before
    path.unlink()
    assert longer(copy).history[:7] == [
        {**a, "seconds": b["seconds"]} for a, b in zip(whole.history, longer(copy).history, strict=False)
    ]


def test_a_checkpoint_of_another_state_is_refused(copy: Path) -> None:
    path = copy / CHECKPOINTS[0]
    arrays = load_file(path)
    save_file({"../../x": np.zeros(3, np.float32), **arrays}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        longer(copy)
    assert sorted(p.name for p in copy.parent.iterdir()) == ["run"], "no name in a file is a path"


def check_altered(whole: Result, copy: Path, data: bytes) -> None:
    """A checkpoint with these bytes is refused by name, or read as it was written."""
    plan, path = load_spec("paper", SMALL).plan, copy / CHECKPOINTS[0]
    path.write_bytes(data)
    try:
        found = RunFolder(copy).checkpoint(plan)
    except CheckpointError as error:
        assert str(path) in str(error) or "history.jsonl" in str(error)
        return
    wanted = RunFolder(where(whole)).checkpoint(plan)
    assert found is not None and wanted is not None
    assert found[1:] == wanted[1:], "a byte of the padding"
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def test_a_changed_byte_anywhere_in_the_head_of_a_checkpoint_is_noticed(whole: Result, copy: Path) -> None:
    sound = (where(whole) / CHECKPOINTS[0]).read_bytes()
    head = 8 + int.from_bytes(sound[:8], "little")
    assert 300 < head < len(sound)
    for place in range(head):
        check_altered(whole, copy, sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])


@hypothesis_settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), change=st.integers(1, 255), kind=st.sampled_from(["change", "cut", "add"]))
def test_whatever_becomes_of_a_checkpoint_it_is_refused_or_the_same(
    whole: Result, copy: Path, place: int, change: int, kind: str
) -> None:
    data = bytearray((where(whole) / CHECKPOINTS[0]).read_bytes())
    if kind == "change":
        data[place % len(data)] ^= change
    elif kind == "cut":
        del data[place % len(data) :]
    else:
        data[place % len(data) : 0] = bytes([change])
    check_altered(whole, copy, bytes(data))


def test_an_altered_history_is_refused(copy: Path) -> None:
    path = copy / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    record = json.loads(lines[2])
    lines[2] = json.dumps(record | {"upper_loss": record["upper_loss"] / 2}) + "\n"
    path.write_text("".join(lines))
    before = contents(copy)
    with pytest.raises(CheckpointError, match=r"history\.jsonl is not as it was written: up to iteration 6"):
        longer(copy)
    path.write_text("".join(lines).replace("}", "]", 1))
    with pytest.raises(CheckpointError, match=r"history\.jsonl is not as it was written"):
        longer(copy)
    assert {k: v for k, v in contents(copy).items() if k != path.name} == {
        k: v for k, v in before.items() if k != path.name
    }


def test_a_folder_in_use_is_refused_by_name_of_its_process_and_free_when_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = (
        "import os, signal, sys\n"
        "from fedbilevel import load_spec, run\n"
        "def stop(progress): os.kill(os.getpid(), signal.SIGSTOP)\n"
        f"run(load_spec('paper', {SMALL!r}), sys.argv[1], observers=[stop])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(out)])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # in the middle of its run
        before = contents(out)
        with pytest.raises(RunFolderError, match=rf"is in use by another run \(process {process.pid}\)"):
            run(load_spec("paper", SMALL), out, resume=True)
        with pytest.raises(RunFolderError, match="is in use"):
            run(load_spec("paper", SMALL), out, overwrite=True)
        assert contents(out) == before
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert run(load_spec("paper", SMALL), out, resume=True).summary["iterations"] == 6


def mounted(script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that mounts, in a mount namespace of its own."""
    return subprocess.run(["unshare", "-m", "sh", "-ec", script], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def can_mount() -> None:
    if shutil.which("unshare") is None or mounted("mount -t tmpfs none /mnt").returncode:
        pytest.skip("mounting in a namespace of its own needs root")


@pytest.mark.usefixtures("can_mount")
def test_a_full_disk_ends_the_run_with_one_line_and_the_run_goes_on_when_there_is_room(
    whole: Result, tmp_path: Path
) -> None:
    """Six pages: the lock, spec, history, environment and two checkpoints fit, a third does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    first, again = (" ".join(f"'{word}'" for word in command(disk / "run", *more)) for more in ((), ("--resume",)))
    done = mounted(
        f"mount -t tmpfs -o size=24k none {disk}; set +e; {first}; code=$?; set -e; ls -a {disk}/run;"
        f"mount -o remount,size=1m {disk}; {again}; cp {disk}/run/history.jsonl {tmp_path}; exit $code"
    )
    one_line(done, 1, "checkpoint.safetensors could not be written: No space left on device", "--resume")
    assert "checkpoint.safetensors" in done.stdout.split() and ".checkpoint.safetensors.tmp" not in done.stdout
    ours, theirs = (
        [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]
        for path in (tmp_path / "history.jsonl", where(whole) / "history.jsonl")
    )
    assert ours == theirs


@pytest.mark.usefixtures("can_mount")
def test_a_folder_that_cannot_be_written_is_a_setting_to_change(copy: Path) -> None:
    before = contents(copy)
    wish = " ".join(f"'{word}'" for word in command(copy, "--resume"))
    done = mounted(f"mount --bind {copy.parent} {copy.parent}; mount -o remount,ro,bind {copy.parent}; {wish}")
    one_line(done, 2, "cannot be written: Read-only file system")
    assert contents(copy) == before
