"""The run folder and the summary, without running anything."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbilevel import CheckpointError, RunFolderError, load_spec
from fedbilevel.errors import StorageError
from fedbilevel.record import LEVELS, LOCK, Checkpoint, Plan, RunFolder, environment, number, summarise
from fedbilevel.spec import Spec

LEDGER = {"steps": {"a": {"rounds": 2, "bytes_up": 3}}, "probes": {}, "rejected": {}}


def line(iteration: int, accuracy: float | None = None) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "rounds": 5 * iteration,
        "bytes_up": 100 * iteration,
        "bytes_down": 10 * iteration,
        "seconds": 0.5 * iteration,
        "test_accuracy": accuracy,
        "upper_loss": 1.0,
    }


@pytest.fixture
def spec() -> Spec:
    return load_spec("paper", {"problem.name": "quadratic"})


@pytest.fixture
def folder(tmp_path: Path, spec: Spec) -> Iterator[RunFolder]:
    """A folder with four lines of history and a checkpoint at iteration 2."""
    made = RunFolder(tmp_path / "run")
    made.open(spec.plan, resume=False, overwrite=False)
    for i in range(3):
        made.append(line(i))
    made.save(spec.plan, Checkpoint({"x": np.arange(3, dtype=np.float32)}, 2, LEDGER))
    made.append(line(3))
    with closing(made):
        yield made


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != LOCK
    }


# The summary ------------------------------------------------------------------------------------------


def test_a_summary_gives_rounds_bytes_and_seconds_to_each_accuracy_and_null_where_not_reached() -> None:
    accuracies = [0.1, 0.82, 0.79, 0.91, 0.88]
    made = summarise([line(i, a) for i, a in enumerate(accuracies)], LEDGER, compilations=7)
    assert (made["rounds"], made["iterations"], made["compilations"]) == (20, 4, 7)
    assert made["rounds_to"] == {"0.80": 5, "0.85": 15, "0.90": 15, "0.95": None}
    assert made["bytes_to"] == {"0.80": 110, "0.85": 330, "0.90": 330, "0.95": None}
    assert made["seconds_to"] == {"0.80": 0.5, "0.85": 1.5, "0.90": 1.5, "0.95": None}
    assert made["accuracy"] == {
        "last": 0.88,
        "best": 0.91,
        "mean": number(np.mean(accuracies)),
        "std": number(np.std(accuracies)),
        "window": 500,
    }
    assert made["ledger"] == LEDGER["steps"]


def test_an_accuracy_that_is_just_met_counts_as_reached_and_so_does_one_at_the_start() -> None:
    assert summarise([line(0, 0.1), line(1, 0.9)], LEDGER)["rounds_to"]["0.90"] == 5
    assert summarise([line(0, 0.99)], LEDGER)["rounds_to"] == dict.fromkeys(LEVELS, 0)


@pytest.mark.parametrize("every", [1, 4])
def test_mean_and_deviation_are_over_rounds_however_often_a_run_is_evaluated(every: int) -> None:
    early = [line(i, 0.0) for i in range(60)]
    late = [line(60 + i, 0.25 + 0.5 * (i // 4 % 2)) for i in range(40)]  # the rounds 300 to 495
    history = (early + late)[::every]
    last = history[-1]["rounds"]
    accuracy = summarise(history, LEDGER, window=last - 299)["accuracy"]
    assert accuracy == {"last": 0.75, "best": 0.75, "mean": 0.5, "std": 0.25, "window": last - 299}
    assert summarise(history, LEDGER, window=last - 294)["accuracy"]["mean"] == (0.5 if every == 4 else 0.487805)


def test_a_window_has_at_least_the_last_evaluation_that_was_measured() -> None:
    history = [line(0, 0.1), line(1, 0.2), line(2, 0.4), line(200)]
    accuracy = summarise(history, LEDGER, window=1)["accuracy"]
    assert accuracy == {"last": 0.4, "best": 0.4, "mean": 0.4, "std": 0.0, "window": 1}


def test_a_summary_has_the_training_accuracy_only_where_it_was_measured_and_can_be_about_it() -> None:
    history = [line(i, 0.5) | {"train_accuracy": a} for i, a in enumerate((0.7, 0.8, 0.9))]
    made = summarise(history, LEDGER, window=10)
    assert made["train_accuracy"] == {"last": 0.9, "best": 0.9, "mean": 0.85, "std": 0.05, "window": 10}
    assert made["accuracy"]["mean"] == 0.5 and made["rounds_to"]["0.80"] is None
    about = summarise(history, LEDGER, window=10, metric="train_accuracy")
    assert about["accuracy"] == made["train_accuracy"] and about["rounds_to"]["0.80"] == 5
    assert "train_accuracy" not in summarise([line(0, 0.5)], LEDGER)


def test_a_history_without_accuracy_has_none_in_its_summary() -> None:
    made = summarise([line(0), line(1)], LEDGER)
    assert made["rounds_to"] == dict.fromkeys(LEVELS)
    assert made["accuracy"] == {"last": None, "best": None, "mean": None, "std": None, "window": 500}


# The folder -------------------------------------------------------------------------------------------


def test_opening_makes_the_folder_with_the_spec_and_the_environment(tmp_path: Path, spec: Spec) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    with closing(folder):
        assert folder.open(spec.plan, resume=False, overwrite=False) is None
    assert sorted(contents(folder.path)) == ["environment.json", "history.jsonl", "spec.toml"]
    assert load_spec(folder.file("spec.toml")) == spec
    found = json.loads(folder.file("environment.json").read_text())
    assert set(found) == {"started", "command", "revision", "python", "platform", "cpus", "packages", "iteration"}
    assert {"fedbilevel", "jax", "numpy"} <= set(found["packages"])


def test_a_checkpoint_comes_back_as_it_was_saved_and_the_history_is_cut_to_it(
    folder: RunFolder, spec: Spec
) -> None:
    found = folder.open(spec.plan, resume=True, overwrite=False)
    assert found is not None
    assert (found.iteration, found.ledger) == (2, LEDGER)
    np.testing.assert_array_equal(found.arrays["x"], [0, 1, 2])
    assert folder.history() == [line(i) for i in range(3)]


def test_a_half_written_last_line_is_dropped(folder: RunFolder, spec: Spec) -> None:
    with folder.file("history.jsonl").open("a") as stream:
        stream.write(json.dumps(line(4))[:20])
    assert folder.history() == [line(i) for i in range(4)]
    folder.open(spec.plan, resume=True, overwrite=False)
    assert folder.file("history.jsonl").read_text() == "".join(json.dumps(line(i)) + "\n" for i in range(3))


def test_without_a_checkpoint_a_resumed_run_starts_again(folder: RunFolder, spec: Spec) -> None:
    folder.file("checkpoint.safetensors").unlink()
    assert folder.open(spec.plan, resume=True, overwrite=False) is None
    assert folder.history() == []


def test_only_stop_may_change_on_resuming(folder: RunFolder) -> None:
    longer = load_spec("paper", {"problem.name": "quadratic", "stop.rounds": None, "stop.iterations": 9})
    assert folder.open(longer.plan, resume=True, overwrite=False) is not None
    before = contents(folder.path)
    other = load_spec("paper", {"problem.name": "quadratic", "algorithm.N": 2})
    with pytest.raises(RunFolderError, match=r"algorithm\.N was 1 and is 2.*only stop may change"):
        folder.open(other.plan, resume=True, overwrite=False)
    assert contents(folder.path) == before


def test_a_checkpoint_of_another_spec_is_refused(folder: RunFolder, spec: Spec, tmp_path: Path) -> None:
    other = load_spec("paper", {"problem.name": "quadratic", "seed": 1})
    foreign = RunFolder(tmp_path / "foreign")
    foreign.open(other.plan, resume=False, overwrite=False)
    foreign.save(other.plan, Checkpoint({"x": np.zeros(3, np.float32)}, 2, LEDGER))
    foreign.close()
    shutil.copy(foreign.file("checkpoint.safetensors"), folder.path)
    before = contents(folder.path)
    with pytest.raises(
        CheckpointError, match="is a checkpoint of another spec; delete it to start this run again"
    ):
        folder.open(spec.plan, resume=True, overwrite=False)
    assert contents(folder.path) == before


@pytest.mark.parametrize("keep", [0, 5, 60, -4])
def test_a_truncated_checkpoint_is_refused_and_nothing_is_touched(
    folder: RunFolder, spec: Spec, keep: int
) -> None:
    path = folder.file("checkpoint.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    before = contents(folder.path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        folder.open(spec.plan, resume=True, overwrite=False)
    assert contents(folder.path) == before


def test_overwriting_clears_what_runs_write_and_nothing_else(folder: RunFolder, spec: Spec) -> None:
    folder.file("notes.txt").write_text("mine")
    folder.file("tensorboard").mkdir()
    folder.file("curve.png").write_bytes(b"old")
    folder.file(".summary.json.tmp").write_bytes(b"half")
    assert folder.open(spec.plan, resume=False, overwrite=True) is None
    assert sorted(contents(folder.path)) == ["environment.json", "history.jsonl", "notes.txt", "spec.toml"]
    assert folder.history() == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_left_by_a_process_that_died_while_starting_can_be_used(
    tmp_path: Path, spec: Spec, resume: bool
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / ".spec.toml.tmp").write_text("seed")
    with closing(RunFolder(path)) as folder:
        assert folder.open(spec.plan, resume=resume, overwrite=False) is None
    assert load_spec(path / "spec.toml") == spec


def test_the_spec_is_the_first_file_and_the_last_to_go(
    folder: RunFolder, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def dies(self: Path, missing_ok: bool = False) -> None:
        if self.name == "history.jsonl":
            raise KeyboardInterrupt
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        folder.open(spec.plan, resume=False, overwrite=True)
    monkeypatch.undo()
    assert folder.file("spec.toml").exists()
    assert folder.open(spec.plan, resume=False, overwrite=True) is None


def test_a_write_that_dies_leaves_the_old_file(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("summary.json", "old")

    def dies(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        folder.write("summary.json", "new")
    assert folder.file("summary.json").read_text() == "old"


def test_a_file_is_synced_before_its_rename_and_the_folder_after_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def syncs(descriptor: int) -> None:
        done.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def renames(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(Path, "replace", renames)
    folder.write("summary.json", "new")
    assert done == ["sync file", "rename", "sync folder"]


def test_a_file_system_that_cannot_sync_a_folder_is_put_up_with_and_a_failing_disk_is_not(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(code: int) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(code, os.strerror(code))

        return fsync

    monkeypatch.setattr(os, "fsync", refuses(errno.EINVAL))
    folder.write("summary.json", "new")
    assert folder.file("summary.json").read_text() == "new"
    monkeypatch.setattr(os, "fsync", refuses(errno.EIO))
    with pytest.raises(StorageError, match=r"summary\.json could not be written: Input/output error"):
        folder.write("summary.json", "newer")


def test_a_plan_is_all_that_a_folder_needs(tmp_path: Path) -> None:
    plan = Plan({"name": "mine", "algorithm": {"rate": 0.5}, "stop": {"rounds": 3}}, "0123", every=2)
    with closing(RunFolder(tmp_path / "run")) as folder:
        folder.open(plan, resume=False, overwrite=False)
        folder.append(line(0))
        folder.append(line(1))  # off the schedule of the plan, and so not vouched for
        folder.save(plan, Checkpoint({}, 1, LEDGER))
        folder.write_history([line(0)])
        longer = Plan({"name": "mine", "algorithm": {"rate": 0.5}}, "0123", every=2)
        assert folder.open(longer, resume=True, overwrite=False) == Checkpoint({}, 1, LEDGER)
        assert tomllib.loads(folder.file("spec.toml").read_text()) == longer.values
        other = Plan({"name": "mine", "algorithm": {"rate": 0.5, "N": 2}}, "4567", every=2)
        with pytest.raises(RunFolderError, match=r"algorithm\.N was None and is 2"):
            folder.open(other, resume=True, overwrite=False)


def test_the_plan_of_a_spec_says_what_the_spec_says(spec: Spec) -> None:
    assert spec.plan == Plan(spec.to_mapping(), spec.digest, spec.evaluate.every, spec.to_mapping(changed=True))
    assert spec.plan.to_toml() == spec.to_toml()


def test_the_environment_is_told_without_git_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["revision"] is None


def test_a_number_keeps_six_digits_which_a_float32_surely_has() -> None:
    assert number(np.float32(0.1)) == 0.1
    assert number(1.2345678) == 1.23457
