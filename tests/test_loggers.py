"""Loggers: what they write is read back, and whatever one of them does, the run goes on."""

from __future__ import annotations

import json
import logging
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from commands import DIGITS, QUADRATIC, Command, one_line, sets
from fedbilevel.loggers import LOGGERS, MLflow, WandB, make_logger, scalars
from fedbilevel.problems import QuadraticTask
from fedbilevel.record import RunFolder

METHOD = fb.AggITD(N=1, lower_steps=1, upper_steps=1, estimator="summed", participation=1.0)


def train(task: QuadraticTask, iterations: int = 2, **more: Any) -> fb.Result:
    return fb.train(
        task.problem, task.clients, METHOD, stop={"iterations": iterations}, measure=task.measure, **more
    )


class Notes:
    """A logger that is its own log, and notes what it is told."""

    def __init__(self) -> None:
        self.runs: list[fb.LoggedRun] = []
        self.records: list[Mapping[str, Any]] = []
        self.summaries: list[Mapping[str, Any] | None] = []

    def start(self, run: fb.LoggedRun) -> Notes:
        self.runs.append(run)
        return self

    def log(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.summaries.append(summary)


class Broken(Notes):
    """A logger that raises in one of its methods."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error, self.calls = where, error, 0

    def _raise(self, where: str) -> None:
        if self.where == where:
            self.calls += 1
            raise self.error

    def start(self, run: fb.LoggedRun) -> Broken:
        self._raise("start")
        return self

    def log(self, record: Mapping[str, Any]) -> None:
        self._raise("log")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.summaries.append(summary)
        self._raise("finish")


# The interface ----------------------------------------------------------------------------------------


def test_a_logger_is_told_the_run_every_line_of_its_history_and_its_summary(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    notes = Notes()
    result = train(quadratic, out=tmp_path / "run", loggers=[notes])
    (run,) = notes.runs
    assert (run.folder, run.name, run.history) == (tmp_path / "run", "run", ())
    assert run.settings["algorithm"]["N"] == 1
    assert notes.records == result.history, "with the evaluation of the start"
    assert len(notes.records) == 3
    assert notes.summaries == [result.summary]


def test_a_resumed_run_tells_its_logger_what_the_history_has_already(
    quadratic: QuadraticTask, tmp_path: Path
) -> None:
    first = train(quadratic, out=tmp_path / "run")
    notes = Notes()
    second = train(quadratic, 4, out=tmp_path / "run", resume=True, loggers=[notes])
    assert list(notes.runs[0].history) == first.history
    assert notes.records == second.history[len(first.history) :]


def test_an_observer_that_ends_a_run_does_not_keep_its_last_line_from_loggers(quadratic: QuadraticTask) -> None:
    notes = Notes()
    result = train(quadratic, 9, evaluate={"every": 3}, observers=[lambda p: p.iteration == 4], loggers=[notes])
    assert [r["iteration"] for r in notes.records] == [0, 3, 4]
    assert notes.records == result.history


@pytest.mark.parametrize("where", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no\nroom"), SystemExit(3)], ids=["error", "exit"])
def test_what_a_logger_raises_is_told_once_in_one_line_and_the_run_goes_on(
    quadratic: QuadraticTask, caplog: pytest.LogCaptureFixture, where: str, error: BaseException
) -> None:
    broken, notes = Broken(where, error), Notes()
    result = train(quadratic, loggers=[broken, notes])
    assert notes.records == result.history, "another logger does not notice"
    assert broken.calls == 1, "a logger that failed is told nothing more"
    (told,) = [r.getMessage() for r in caplog.records if r.name == "fedbilevel"]
    name = type(error).__name__
    assert told.startswith(f"Broken logs nothing more: {where} raises {name}: ")
    assert told.endswith("; the run goes on")
    assert "\n" not in told
    assert broken.summaries == {"start": [], "log": [None], "finish": [result.summary]}[where]


def test_an_interrupt_is_not_taken_for_an_error_of_the_logger(quadratic: QuadraticTask) -> None:
    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        train(quadratic, loggers=[Broken("log", KeyboardInterrupt()), notes])
    assert notes.summaries == [None], "the run was interrupted"


def test_a_run_that_fails_tells_its_logger_why(quadratic: QuadraticTask) -> None:
    notes, method = Notes(), fb.AggITD(N=1, alpha=1e9, beta=1e9, participation=1.0)
    with pytest.raises(fb.Diverged):
        fb.train(quadratic.problem, quadratic.clients, method, stop={"rounds": 400}, loggers=[notes])
    (summary,) = notes.summaries
    assert summary is not None
    assert "not finite" in summary["failure"] or "explode" in summary["failure"]


def test_a_logger_cannot_change_the_history(quadratic: QuadraticTask, tmp_path: Path) -> None:
    class Vandal(Notes):
        def log(self, record: Mapping[str, Any]) -> None:
            assert isinstance(record, dict)
            record.clear()

    result = train(quadratic, out=tmp_path / "run", loggers=[Vandal()])
    assert [r["iteration"] for r in result.history] == [0, 1, 2]


def test_a_private_run_logs_no_more_than_its_history_has(quadratic: QuadraticTask) -> None:
    pytest.importorskip("dp_accounting")
    notes = Notes()
    privacy = {"mode": "central", "clip": 1.0, "noise": 1.0}
    result = train(quadratic, privacy=privacy, loggers=[notes])
    assert notes.records == result.history
    assert notes.records[-1]["upper_loss"] is None, "the losses of clients would be uploads without noise"


def test_the_scalars_of_a_record_are_its_numbers_also_the_nested_ones() -> None:
    record = {"rounds": 5, "test_loss": None, "note": "a", "flag": True, "rejected": {"reason": {"no answer": 2}}}
    assert list(scalars(record)) == [("rounds", 5.0), ("rejected/reason/no answer", 2.0)]


# Names ------------------------------------------------------------------------------------------------

OWN = """
from pathlib import Path
import fedbilevel as fb

@fb.settings
class Lines:
    file: str = "lines.txt"

    def start(self, run):
        return Open(run.folder / self.file)

class Open:
    def __init__(self, path):
        self.path = path

    def log(self, record):
        with self.path.open("a") as stream:
            stream.write(f"{record['rounds']}\\n")

    def finish(self, summary):
        with self.path.open("a") as stream:
            stream.write("end\\n")

class Bare:
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_loggers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_loggers", None)


@pytest.mark.usefixtures("own")
def test_a_logger_of_ones_own_is_named_by_its_address_or_by_a_table(command: Command, tmp_path: Path) -> None:
    table = '{name = "python", class = "my_loggers:Lines", file = "other.txt"}'
    out = tmp_path / "run"
    options = ("--log", "my_loggers:Lines", "--log", table, "--quiet")
    assert command("run", *sets(*QUADRATIC), "--out", out, *options) == (0, "", "")
    rounds = [f"{r['rounds']}" for r in RunFolder(out).history()]
    for name in ("lines.txt", "other.txt"):
        assert (out / name).read_text().split() == [*rounds, "end"]


@pytest.mark.usefixtures("own")
def test_a_logger_that_is_none_is_refused_before_the_folder_is_made(command: Command, tmp_path: Path) -> None:
    for given, message in {
        "my_loggers:Bare": "it is not a settings class",
        "my_loggers:Absent": "logger.class = 'my_loggers:Absent' is wrong",
        '{name = "mlflow", unit = 3}': "logger.unit is not a setting",
        "5": "logger = 5 is wrong: use one of: mlflow, tensorboard, wandb",
    }.items():
        outcome = command("run", *sets(*QUADRATIC), "--out", tmp_path / "run", "--log", given)
        one_line(outcome, 2, message)
    with pytest.raises(fb.SettingsError, match="logger = object is wrong: it lacks start"):
        make_logger(object())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [*LOGGERS])
def test_a_logger_whose_package_is_missing_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbilevel.loggers._base.find_spec", lambda module: None)
    with pytest.raises(
        fb.SettingsError, match=rf"logger {name} needs an extra: pip install 'fedbilevel\[{name}\]'"
    ):
        make_logger(name)


# TensorBoard ------------------------------------------------------------------------------------------


def events(folder: Path) -> Iterator[Any]:
    """The events in the files of a folder, oldest file first: a length, its checksum, an event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            yield Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length


def test_tensorboard_has_every_line_and_hides_what_a_resumed_run_repeats(
    quadratic: QuadraticTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = time.time()
    monkeypatch.setattr("time.time", lambda: moment)  # both parts of the run begin within one second

    def written() -> list[tuple[int, float]]:
        found = [(e.step, v) for e in events(tmp_path / "run" / "tensorboard") for v in e.summary.value]
        return [(step, value.simple_value) for step, value in found if value.tag == "upper_loss"]

    first = train(quadratic, out=tmp_path / "run", loggers=["tensorboard"])
    assert [step for step, _ in written()] == [r["rounds"] for r in first.history]
    assert [value for _, value in written()] == pytest.approx([r["upper_loss"] for r in first.history])
    second = train(quadratic, 4, out=tmp_path / "run", loggers=["tensorboard"], resume=True)
    assert [step for step, _ in written()] == [r["rounds"] for r in second.history]
    (start,) = [e.step for e in events(tmp_path / "run" / "tensorboard") if e.session_log.status]
    assert start == first.history[-1]["rounds"] + 1


# MLflow -----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store in a folder, which the logger finds by the environment."""
    pytest.importorskip("mlflow", reason="needs the extra fedbilevel[mlflow]")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")  # set by the logger too; here it is taken back after the test
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())


def only_run(store: Any, experiment: str = "fedbilevel") -> Any:
    (run,) = store.search_runs([store.get_experiment_by_name(experiment).experiment_id])
    return run


@pytest.mark.slow
def test_mlflow_has_the_settings_the_history_and_the_results(command: Command, tmp_path: Path, store: Any) -> None:
    out = tmp_path / "run"
    assert command("run", *sets(*DIGITS), "--out", out, "--log", "mlflow", "--quiet") == (0, "", "")
    run, history = only_run(store), RunFolder(out).history()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["algorithm.lower_steps"] == "1"
    assert run.data.params["data.name"] == "digits"
    for name in ("test_accuracy", "bytes_up", "iteration"):
        found = [(m.step, m.value) for m in store.get_metric_history(run.info.run_id, name)]
        assert found == [(r["rounds"], r[name]) for r in history]
    assert run.data.metrics["summary/accuracy/best"] == RunFolder(out).summary()["accuracy"]["best"]


@pytest.mark.slow
def test_mlflow_goes_on_with_the_run_of_a_resumed_run_and_starts_anew_after_overwrite(
    quadratic: QuadraticTask, tmp_path: Path, store: Any
) -> None:
    logger = MLflow(experiment="own")
    first = train(quadratic, out=tmp_path / "run", loggers=[logger])
    second = train(quadratic, 4, out=tmp_path / "run", loggers=[logger], resume=True)
    run = only_run(store, "own")
    found = store.get_metric_history(run.info.run_id, "upper_loss")
    assert [m.step for m in found] == [r["rounds"] for r in second.history]
    assert len(second.history) > len(first.history)
    assert run.info.status == "FINISHED"
    train(quadratic, out=tmp_path / "run", loggers=[logger], overwrite=True)
    assert len(store.search_runs([run.info.experiment_id])) == 2


@pytest.mark.slow
def test_mlflow_marks_runs_that_failed_or_were_interrupted(
    quadratic: QuadraticTask, tmp_path: Path, store: Any
) -> None:
    def stop(progress: fb.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(quadratic, loggers=["mlflow"], observers=[stop])
    assert only_run(store).info.status == "KILLED"
    method = fb.AggITD(N=1, alpha=1e9, beta=1e9, participation=1.0)
    with pytest.raises(fb.Diverged):
        fb.train(
            quadratic.problem,
            quadratic.clients,
            method,
            stop={"rounds": 400},
            loggers=[{"name": "mlflow", "experiment": "failed"}],
        )
    assert only_run(store, "failed").info.status == "FAILED"


@pytest.mark.slow
def test_a_store_that_cannot_be_used_does_not_end_the_run(
    quadratic: QuadraticTask, tmp_path: Path, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "fedbilevel"):
        result = train(quadratic, loggers=[MLflow(uri=str(tmp_path / "file"))])
    assert result.summary["iterations"] == 2
    (told,) = [r.getMessage() for r in caplog.records if r.name == "fedbilevel"]
    assert told.startswith("MLflow logs nothing more: start raises ")


# Weights & Biases -------------------------------------------------------------------------------------

BLOCK = 32768  # bytes of a block in a .wandb file, which is a log of LevelDB behind seven bytes


def messages(path: Path, seconds: float = 60.0) -> list[Any]:
    """The messages in a .wandb file.

    W&B writes the file in a process of its own, and does not wait for it at the end of a run. The last message
    says how the run ended, so the file is read again until it is there.
    """
    until = time.monotonic() + seconds
    while True:
        found = list(stored(path))
        kinds = [message.WhichOneof("record_type") for message in found]
        if "exit" in kinds:
            return found
        assert time.monotonic() < until, f"{path} has no end: {kinds}"
        time.sleep(0.05)


def stored(path: Path) -> Iterator[Any]:
    """The messages that are in a .wandb file at this moment, without one that is being written."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    assert b":W&B".startswith(content[:4])
    while at < len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        if at + 7 > len(content):
            return
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + length > len(content):
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def logged(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's history."""
    items = [message.history.item for message in messages(path) if message.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which runs are stored that are not sent anywhere."""
    pytest.importorskip("wandb", reason="needs the extra fedbilevel[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return tmp_path / "wandb"


@pytest.mark.slow
def test_wandb_has_the_settings_the_history_and_the_results_and_nothing_else(
    command: Command, tmp_path: Path, offline: Path
) -> None:
    out = tmp_path / "run"
    assert command("run", *sets(*DIGITS), "--out", out, "--log", "wandb", "--quiet") == (0, "", "")
    (path,) = offline.glob("offline-run-*/*.wandb")
    history = RunFolder(out).history()
    rows = logged(path)
    for name in ("rounds", "test_accuracy", "bytes_up", "iteration"):
        assert [row[name] for row in rows] == [r[name] for r in history]
    assert {key for row in rows for key in row if not key.startswith("_")} <= {
        name for r in history for name, _ in scalars(r)
    }
    kinds = {message.WhichOneof("record_type") for message in messages(path)}
    assert not kinds & {"output", "output_raw", "stats", "environment"}, "no output and no machine"
    config: dict[str, Any] = {}
    for message in messages(path):
        config |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
        config |= {item.key: json.loads(item.value_json) for item in message.config.update}
    assert config["algorithm"]["lower_steps"] == 1
    results: dict[str, Any] = {}
    for message in messages(path):
        results |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in message.summary.update}
    assert results["summary/accuracy/best"] == RunFolder(out).summary()["accuracy"]["best"]
    assert not list(offline.rglob("requirements.txt")) and not list(offline.rglob("*metadata*"))


@pytest.mark.slow
def test_wandb_goes_on_under_the_same_id_when_a_run_is_resumed(
    quadratic: QuadraticTask, tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DIR")
    logger = WandB(project="own", mode="offline")
    train(quadratic, out=tmp_path / "run", loggers=[logger])
    second = train(quadratic, 4, out=tmp_path / "run", loggers=[logger], resume=True)
    paths = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))  # folders are named by their times
    assert len(paths) == 2
    assert len({path.name for path in paths}) == 1, "the name of the file has the id"
    assert [row["rounds"] for path in paths for row in logged(path)] == [r["rounds"] for r in second.history]
    assert [row["_step"] for path in paths for row in logged(path)] == [0, 1, 2, 3, 4], "the parts do not overlap"
    projects = {m.run.project for path in paths for m in messages(path) if m.WhichOneof("record_type") == "run"}
    assert projects == {"own"}
