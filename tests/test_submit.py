"""Going on after failed jobs, with a server that is played: which sites, how often, and what is in the record."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.federate import submit
from fedbilevel.federate.job import PLACE, read_order
from fedbilevel.federate.submit import Submission
from fedbilevel.record import RunFolder
from fedbilevel.run import Progress

SPEC = fb.load_spec(
    "paper", {"problem.name": "quadratic", "data.clients": 3, "stop.rounds": None, "stop.iterations": 4}
)


class Server:
    """A session with a server whose jobs end as they are told to: a reason, or None for a job that finishes."""

    def __init__(self, made: Path, outcomes: list[dict[str, Any] | None], up: list[str]) -> None:
        self.made, self.outcomes, self.up = made, outcomes, up
        self.jobs: list[dict[str, Any]] = []
        self.runs: list[str] = []
        self.keys: list[str] = []
        self.said: list[str] = []

    def session(self, patience: float = 0.0) -> Server:
        return self

    def drop(self) -> None: ...

    def sites(self) -> list[str]:
        return self.up

    def submit_job(self, folder: str) -> str:
        self.jobs.append(json.loads((Path(folder) / "meta.json").read_text())["deploy_map"])
        order = read_order(Path(folder) / "app_server" / PLACE)
        self.runs.append(order.run)
        self.keys.append(order.key)
        return f"job {len(self.jobs)}"

    def do_app_command(self, job: str, topic: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["key"] == self.keys[-1], "every command has the key of its job"
        if asked.get("farewell"):
            self.said.append(f"farewell {job}")
            return {}
        reason = self.outcomes[len(self.jobs) - 1]
        names = ("checkpoint.safetensors",) if reason else ("checkpoint.safetensors", "summary.json")
        files = {n: (1, base64.b64encode((self.made / n).read_bytes()).decode()) for n in names}
        history = (self.made / "history.jsonl").read_text()
        return {
            "files": files | {"../outside": (1, base64.b64encode(b"no").decode())},
            "history": history[asked["history"] :],
            "progress": {"iteration": 4, "rounds": 20, "seconds": 1.0, "share": 1.0, "record": {}},
            "outcome": {"finished": True} if reason is None else {"finished": False, **reason},
            "pids": {"a": 1},
            "refused": {},
            "pid": 2,
        }

    def abort_job(self, job: str) -> None:
        self.said.append(f"abort {job}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as the server of a real job would leave it."""
    folder = fb.run(SPEC, tmp_path_factory.mktemp("made") / "run").folder
    assert folder is not None
    return folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "PAUSE", 0.01)


LOST: dict[str, Any] = {"reason": "gradients, round 3: 2 valid replies of 3", "lost": {"c": "gone"}}


def submission(server: Any, **more: Any) -> Submission:
    return Submission(server, ["a", "b", "c"], **{"patience": 0.1, **more})


def go(server: Server, out: Path, **more: Any) -> fb.Result:
    return submission(server, **more).run(SPEC, out, resume=False, overwrite=False)


@pytest.mark.slow
def test_a_failed_job_is_followed_by_one_with_the_sites_that_are_up(made: Path, tmp_path: Path) -> None:
    server, seen = Server(made, [LOST, None], ["a", "b", "c"]), list[Progress]()
    options: dict[str, Any] = dict(resume=False, overwrite=False, observers=[seen.append])

    def die() -> None:
        server.up = ["a", "b"]

    result = submission(server, between=die).run(SPEC, tmp_path / "run", **options)
    first, second = json.loads((tmp_path / "run" / "federation.json").read_text())["jobs"]
    sites = [[site for app, (site,) in job.items() if app != "app_server"] for job in server.jobs]
    assert sites == [["a", "b", "c"], ["a", "b"]]
    assert (first["finished"], first["reason"], first["from_iteration"]) == (False, LOST["reason"], 0)
    assert (second["finished"], second["sites"], second["from_iteration"]) == (True, ["a", "b"], 4)
    assert server.said == ["farewell job 1", "abort job 1", "farewell job 2"]
    assert result.summary["iterations"] == 4 and seen[-1].iteration == 4
    assert RunFolder(tmp_path / "run").history() == RunFolder(made).history()
    assert not (tmp_path / "outside").exists()


class Notes:
    """A logger that is its own log, and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, run: fb.LoggedRun) -> Notes:
        self.told.append(len(run.history))
        return self

    def log(self, record: Any) -> None:
        self.told.append(record["iteration"])

    def finish(self, summary: Any) -> None:
        self.told.append(None if summary is None else summary["iterations"])


def test_loggers_are_given_every_line_once_also_when_a_second_job_repeats_them(made: Path, tmp_path: Path) -> None:
    server, notes = Server(made, [LOST, None], ["a", "b", "c"]), Notes()
    submission(server).run(SPEC, tmp_path / "run", resume=False, overwrite=False, loggers=[notes])
    lines = [record["iteration"] for record in RunFolder(made).history()]
    assert notes.told == [0, *lines, 4]


def test_there_is_a_limit_to_the_jobs_and_the_record_has_all_of_them(made: Path, tmp_path: Path) -> None:
    server = Server(made, [LOST] * 3, ["a", "b", "c"])
    with pytest.raises(fb.FedBilevelError, match=r"3 jobs failed, --restarts allows 2; --resume continues"):
        go(server, tmp_path / "run", restarts=2)
    assert len(json.loads((tmp_path / "run" / "federation.json").read_text())["jobs"]) == len(server.jobs) == 3


def test_a_failure_that_another_job_would_meet_again_is_final(made: Path, tmp_path: Path) -> None:
    server = Server(made, [{"reason": "round 3: y is not finite", "lost": {}}], ["a", "b", "c"])
    with pytest.raises(fb.FedBilevelError, match=r"^the job failed: round 3: y is not finite; --resume"):
        go(server, tmp_path / "run")
    assert len(server.jobs) == 1


def test_with_fewer_sites_than_a_round_needs_nothing_is_submitted(made: Path, tmp_path: Path) -> None:
    server = Server(made, [None], [])
    with pytest.raises(fb.TooFewReplies, match=r"^0 of 3 sites are up, 1 needed; start the others"):
        go(server, tmp_path / "run")
    assert server.jobs == []


def test_all_jobs_of_a_run_have_its_name_and_no_other_run_has_it(made: Path, tmp_path: Path) -> None:
    """By the name a site finds what it kept for the run."""
    server = Server(made, [LOST, LOST, None, None], ["a", "b", "c"])
    with pytest.raises(fb.FedBilevelError, match="--restarts allows 1"):
        go(server, tmp_path / "run", restarts=1)
    submission(server).run(SPEC, tmp_path / "run", resume=True, overwrite=False)
    go(server, tmp_path / "other")
    first, *again, other = server.runs
    assert again == [first, first] and other != first and first.isalnum()


def test_every_job_has_a_key_of_its_own(made: Path, tmp_path: Path) -> None:
    server = Server(made, [LOST, None], ["a", "b", "c"])
    go(server, tmp_path / "run")
    assert len(set(server.keys)) == 2 and all(len(bytes.fromhex(key)) == 32 for key in server.keys)


def test_a_run_is_not_resumed_with_other_sites(made: Path, tmp_path: Path) -> None:
    go(Server(made, [None], ["a", "b", "c"]), tmp_path / "run")
    server: Any = Server(made, [], [])
    other = Submission(server, ["a"])
    with pytest.raises(fb.SettingsError, match=r"holds a run of the sites \['a', 'b', 'c'\], not \['a'\]"):
        other.run(SPEC, tmp_path / "run", resume=True, overwrite=False)
