"""Files of a run that were damaged: they are named with a remedy, and nothing of the run is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedbilevel.studies.runner
from commands import DIGITS, QUADRATIC, Command, contents, one_line, sets
from fedbilevel import CheckpointError, load_spec, run
from fedbilevel.federate.commands import registered
from fedbilevel.record import LOCK, RunFolder
from fedbilevel.studies import Runs

HISTORY = {
    "no iteration": '{"rounds": 1}',
    "a list": "[1, 2]",
    "a string": '"a line"',
    "null": "null",
    "a word for the iteration": '{"iteration": "one"}',
    "truth for the iteration": '{"iteration": true}',
    "a negative iteration": '{"iteration": -1}',
    "lists in lists": "[" * 100_000,
    "a number of 5,000 digits": f'{{"iteration": {"9" * 5000}}}',
    "only an iteration": '{"iteration": 1}',
    "a word for the rounds": '{"iteration": 1, "rounds": "many"}',
    "a list for the accuracy": '{"test_accuracy": [1], "iteration": 1, "rounds": 5}',
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    run(load_spec("demo", QUADRATIC), path)
    return path


@pytest.fixture
def earlier(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "earlier"))


@pytest.mark.parametrize("line", HISTORY.values(), ids=HISTORY)
@pytest.mark.parametrize("at", ["the first line", "the last line"])
def test_a_line_of_the_history_that_is_no_evaluation_is_named(
    command: Command, earlier: Path, line: str, at: str
) -> None:
    file = earlier / "history.jsonl"
    lines = file.read_text().splitlines()
    place = 0 if at == "the first line" else len(lines) - 1
    lines[place] = line
    file.write_text("".join(f"{each}\n" for each in lines))
    before = contents(earlier)
    outcome = command("run", *sets(*QUADRATIC, "stop.rounds=20"), "--out", earlier, "--resume")
    one_line(outcome, 1, f"{file} is not as it was written (line {place + 1}", "put it back, or --overwrite")
    assert len(outcome.err) < 1000
    after = contents(earlier)
    assert {k: v for k, v in after.items() if k != LOCK} == {k: v for k, v in before.items() if k != LOCK}


def test_a_history_that_is_not_text_is_named(command: Command, earlier: Path) -> None:
    file = earlier / "history.jsonl"
    file.write_bytes(b"\xff\xfe\n")
    one_line(
        command("run", *sets(*QUADRATIC), "--out", earlier, "--resume"), 1, f"{file} is not as it was written"
    )
    file.unlink()
    file.mkdir()
    outcome = command("run", *sets(*QUADRATIC), "--out", earlier, "--resume")
    assert outcome.code in (1, 2) and outcome.err.count("\n") == 1 and outcome.err.startswith("error: ")


SUMMARIES = {
    "not JSON": "{",
    "a list": "[]",
    "a number": "3",
    "no accuracy": '{"rounds": 1}',
    "a word for the accuracy": '{"accuracy": "good", "rounds_to": {"0.90": 1}}',
    "a word for an accuracy": '{"accuracy": {"mean": "good"}, "rounds_to": {"0.90": 1}}',
    "no level": '{"accuracy": {"mean": 1.0}, "rounds_to": {}}',
    "lists in lists": "[" * 100_000,
    "bytes": "\\xff",
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a grid search of one run, which is there already, so that no process has to be started."""
    out = tmp_path_factory.mktemp("tuned")
    spec = load_spec("demo", [*DIGITS, "algorithm.N=1", "seed=0"])
    run(spec, Runs(out / "runs").of(spec).path)
    return out


@pytest.mark.parametrize("content", SUMMARIES.values(), ids=SUMMARIES)
def test_a_damaged_summary_is_named(
    command: Command, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(fedbilevel.studies.runner._Worker, "begin", None)  # no run is to be started
    out = Path(shutil.copytree(tuned, tmp_path / "tuned"))
    words = ("tune", *sets(*DIGITS), "--grid", "algorithm.N=1", "--out", out)
    assert command(*words).code == 0
    (file,) = out.glob("runs/*/summary.json")
    file.write_text(content)
    one_line(command(*words), 1, f"{file} is not as it was written (", "delete it")
    assert (out / "best.toml").exists(), "the results of before are still there"


def test_a_damaged_environment_is_named(tmp_path: Path) -> None:
    for content in ("{", "[]", "{}", '{"revision": []}'):
        (tmp_path / "environment.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"environment\.json is not as it was written \("):
            RunFolder(tmp_path).environment()
    (tmp_path / "environment.json").unlink()
    with pytest.raises(CheckpointError, match=r"environment\.json is not as it was written \(it cannot be read"):
        RunFolder(tmp_path).environment()


FEDERATIONS: dict[str, str] = {
    "not JSON": "{",
    "a list": "[]",
    "no sites": '{"run": "ab", "jobs": []}',
    "no run": '{"sites": ["a"], "jobs": []}',
    "no jobs": '{"run": "ab", "sites": ["a"]}',
    "a word for the sites": '{"run": "ab", "sites": "abc", "jobs": []}',
    "numbers for the sites": '{"run": "ab", "sites": [1, 2], "jobs": []}',
    "no site": '{"run": "ab", "sites": [], "jobs": []}',
    "a number for the run": '{"run": 3, "sites": ["a"], "jobs": []}',
    "a table for the jobs": '{"run": "ab", "sites": ["a"], "jobs": {}}',
    "words for the jobs": '{"run": "ab", "sites": ["a"], "jobs": ["x"]}',
    "lists in lists": "[" * 100_000,
}


@pytest.mark.parametrize("content", FEDERATIONS.values(), ids=FEDERATIONS)
def test_a_damaged_record_of_a_federation_is_named(tmp_path: Path, content: str) -> None:
    from fedbilevel.federate.submit import Submission

    def nobody() -> list[str]:
        raise AssertionError("the federation was asked before the record was read")

    (tmp_path / "federation.json").write_text(content)
    shown = r"federation\.json is not as it was written \(.*put it back, or --overwrite to start again"
    with pytest.raises(CheckpointError, match=shown):
        registered(tmp_path, None, True, nobody)
    kit: Any = None
    spec = load_spec("demo", QUADRATIC)
    with pytest.raises(CheckpointError, match=shown):
        Submission(kit, ["a"]).run(spec, tmp_path, resume=True, overwrite=False)
    assert (tmp_path / "federation.json").read_text() == content


def test_a_damaged_spec_of_a_run_is_named(command: Command, earlier: Path) -> None:
    for content in ("[", "a = [" * 10_000, f"a.{'.'.join('b' * 2000)} = 1", "\0"):
        (earlier / "spec.toml").write_text(content)
        outcome = command("run", *sets(*QUADRATIC), "--out", earlier, "--resume")
        one_line(outcome, 2, f"{earlier / 'spec.toml'} is not TOML", "put it back, or --overwrite to start again")


def test_the_header_of_a_checkpoint_may_be_anything(command: Command, earlier: Path) -> None:
    """Its digest is recomputed, so that only the meaning of the header is wrong."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    from fedbilevel.files import arrays_digest

    file = earlier / "checkpoint.safetensors"
    with safe_open(file, framework="numpy") as opened:
        header = dict(opened.metadata())
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    header.pop("sha256")
    for change in (
        {"iteration": "9" * 5000},
        {"ledger": "[" * 100_000},
        {"ledger": "3"},
        {"ledger": "{}"},
        {"ledger": '{"steps": 3}'},
        {"restarts": "[1]"},
        {"restarts": "{}" * 3},
        {"clients": "[1]"},
    ):
        other = header | change
        other["sha256"] = arrays_digest(arrays, json.dumps(other, sort_keys=True))
        save_file(arrays, file, other)
        outcome = command("run", *sets(*QUADRATIC, "stop.rounds=20"), "--out", earlier, "--resume")
        assert outcome.code == 1 and outcome.err.startswith(f"error: {file}"), (change.keys(), outcome.err[:300])
        assert outcome.err.count("\n") == 1
