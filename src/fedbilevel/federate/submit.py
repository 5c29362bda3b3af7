"""Submitting a run to a federation, watching it, and continuing it when a job fails.

FLARE fails a job when a site's process dies. The run folder is pulled from the server while the job runs, with a
checkpoint after every outer iteration. After a job has failed, another job continues from that checkpoint with the
sites that are up.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from ..errors import FedBilevelError, SettingsError, TooFewReplies
from ..ledger import Ledger
from ..loggers import LoggedRun, Logger, Logs
from ..reading import Unreadable, read_json
from ..record import BOOKS, FEDERATION, FILES, Plan, RunFolder, restore_state
from ..report import write_run_page
from ..run import Observer, Progress, Result
from ..spec import Spec
from .job import CARRIED, CHECKPOINT, NAME, Order, write_job

PAUSE = 0.5  # seconds between two looks at a job
RECENT = 45.0  # A site counts as up if its last sign of life is at most this many seconds ago.


class Kit:
    """A session with the server, opened with an admin's kit. A session that breaks is opened again."""

    def __init__(self, folder: Path) -> None:
        try:
            self._user = read_json(folder / "startup" / "fed_admin.json")["admin"]["username"]
            if not isinstance(self._user, str):
                raise TypeError
        except (Unreadable, LookupError, TypeError):
            raise SettingsError(
                f"--kit {folder} is not the kit of an admin; give the folder that `nvflare provision` made for one"
            ) from None
        self._folder = folder
        self._session: Session | None = None

    def session(self, patience: float = 10.0) -> Session:
        if self._session is None:
            self._session = new_secure_session(self._user, str(self._folder), timeout=patience)
        return self._session

    def drop(self) -> None:
        """Forget a session that is broken."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()

    def sites(self) -> list[str]:
        """The sites that are up: those that gave a sign of life recently."""
        now = time.time()
        clients = self.session().get_connected_client_list()
        return sorted(c.name for c in clients if c.last_connect_time is None or now - c.last_connect_time < RECENT)


@dataclasses.dataclass
class Submission:
    """One run on a federation.

    restarts  how many failed jobs may be followed by another
    patience  seconds to wait for the server, for sites that are not up, and for a running job that is silent
    start     seconds that a job may take to start
    timeout   seconds that a site has for a step
    between   called while waiting; this is where processes that have ended can be started again
    """

    kit: Kit
    sites: list[str]
    restarts: int = 5
    patience: float = 60.0
    start: float = 300.0
    timeout: float = 600.0
    between: Callable[[], Any] = lambda: None
    say: Callable[[str], None] = lambda text: None

    def run(
        self,
        spec: Spec,
        out: Path,
        *,
        resume: bool,
        overwrite: bool,
        observers: Sequence[Observer] = (),
        loggers: Sequence[Logger] = (),
        accept_change: bool = False,
    ) -> Result:
        """Run a spec into a folder on this machine, or continue the run that is there. Loggers log here too."""
        folder = RunFolder(out)
        written = folder.federation() if resume else None
        record = written or {"run": secrets.token_hex(8), "sites": self.sites, "jobs": []}
        if record["sites"] != self.sites:
            raise SettingsError(f"--out {out} holds a run of the sites {record['sites']}, not {self.sites}")
        folder.open(spec.plan, resume=resume, overwrite=overwrite, accept_change=accept_change)
        with contextlib.closing(folder), Logs(loggers) as logs:
            title, known = spec.title(len(self.sites)), tuple(folder.history())
            logs.start(LoggedRun(title, spec.plan.values, folder.path, known))
            diary = _Diary(logs, known[-1]["iteration"] if known else -1)
            result = self._jobs(spec, folder, record, observers, diary)
            logs.finish(result.summary)
            return result

    def _jobs(
        self,
        spec: Spec,
        folder: RunFolder,
        record: dict[str, Any],
        observers: Sequence[Observer],
        diary: _Diary,
    ) -> Result:
        """Submit jobs until one is finished, or until another job would not help."""
        problem = spec.task().problem
        failed = 0
        self.say(f"the digest of the spec, by which sites may allow it: {spec.digest}")
        while True:
            job: dict[str, Any] = {"started": time.time()}
            record["jobs"].append(job)
            write = partial(folder.write_json, FEDERATION, record)
            write()  # whoever watches the run sees the names of its sites
            try:
                self._attempt(spec, record["run"], job, _Follower(folder, spec.plan, observers, diary), write)
            finally:
                self.kit.drop()  # a session that is left open keeps this process alive
                job["seconds"] = round(time.time() - job["started"], 2)
                write()
            if job.get("finished"):
                write_run_page(folder)
                break
            failed += 1
            final = not job.get("worth_another", True)
            if final or failed > self.restarts:
                why = "" if final else f"; {failed} jobs failed, --restarts allows {self.restarts}"
                raise FedBilevelError(
                    f"the job failed: {job['reason']}{why}; --resume continues from the last checkpoint"
                )
            self.say(f"job failed ({job['reason']}); continuing from iteration {_reached(folder, spec)}")
            folder.open(spec.plan, resume=True, overwrite=False)  # cuts the history back to the checkpoint
        saved = folder.checkpoint(spec.plan)
        start = spec.algorithm.init(problem, len(self.sites))
        state = start if saved is None else restore_state(start, saved.arrays)
        x, y = problem.flat_x.restore(state.x), problem.flat_y.restore(state.y)
        return Result(folder.path, folder.summary(), folder.history(), x, y)

    def _attempt(
        self, spec: Spec, run: str, job: dict[str, Any], follow: _Follower, write: Callable[[], None]
    ) -> None:
        """Submit one job, follow it to its end, and record its outcome; `write()` keeps what is recorded."""
        folder = follow.folder
        up = self._gather(spec.federation.needed(len(self.sites)))
        job |= {"sites": up, "from_iteration": _reached(folder, spec)}
        key = secrets.token_hex(32)  # without it, every site could command the job
        try:
            identity = job["job"] = self._submit(spec, folder, run, up, key)
        except Exception as error:
            self.kit.drop()
            job["reason"] = f"it could not be submitted: {error}"
            return
        write()
        begun = heard = time.monotonic()
        while not job.get("ended"):
            time.sleep(PAUSE)
            self.between()
            try:
                news = self.kit.session().do_app_command(identity, NAME, follow.asked() | {"key": key})
            except Exception as error:  # it does not run yet, or it has ended, or the server is gone
                status = self._status(identity)
                if status is not None and status.startswith("FINISHED"):
                    job |= {"ended": True, "reason": f"FLARE ended it: {status}"}
                elif time.monotonic() > heard + (self.start if heard == begun else self.patience):
                    where = status or "server out of reach"
                    job |= {"ended": True, "reason": f"no sign of it ({where}): {error}"}
                    if status is None:
                        return  # the server cannot be told that the job is over
                continue
            follow.take(news, job)
            heard = time.monotonic()
        with contextlib.suppress(Exception):  # this tells the job that it may end
            self.kit.session().do_app_command(identity, NAME, {"farewell": True, "key": key})
        if not job.get("finished"):
            self._abort(identity)

    def _gather(self, fewest: int) -> list[str]:
        """Wait for all sites; after `patience` seconds, `fewest` sites that are up are enough."""
        limit, up = time.monotonic() + self.patience, list[str]()
        trouble = ""
        while time.monotonic() < limit:
            try:
                up = [site for site in self.kit.sites() if site in self.sites]
            except Exception as error:
                self.kit.drop()
                trouble = f" ({error})"
            if len(up) == len(self.sites):
                return up
            self.between()
            time.sleep(PAUSE)
        if len(up) < fewest:
            raise TooFewReplies(
                f"{len(up)} of {len(self.sites)} sites are up, {fewest} needed{trouble}; start the others, "
                "or lower federation.min_replies, and --resume"
            )
        return up

    def _submit(self, spec: Spec, folder: RunFolder, run: str, up: list[str], key: str) -> str:
        files = {n: folder.file(n) for n in CARRIED if folder.file(n).exists()}
        order = Order(
            spec=spec.to_toml(),
            run=run,
            sites=self.sites,
            timeout=self.timeout,
            files={n: base64.b64encode(f.read_bytes()).decode() for n, f in files.items()},
            keys={site: secrets.token_hex(32) for site in up},
            key=key,
        )
        with tempfile.TemporaryDirectory() as place:
            job = write_job(Path(place), order)
            return str(self.kit.session(self.patience).submit_job(str(job)))

    def _status(self, identity: str) -> str | None:
        """The status of a job in FLARE, or None when the server cannot be reached."""
        try:
            return str(self.kit.session().get_job_meta(identity).get("status"))
        except Exception:
            self.kit.drop()
            return None

    def _abort(self, identity: str) -> None:
        """Abort a job that failed, because it may still hold its sites."""
        try:
            self.kit.session().abort_job(identity)
        except Exception:
            self.kit.drop()


@dataclasses.dataclass
class _Diary:
    """Gives the lines of the history to loggers. A job that goes on from a checkpoint repeats some of them."""

    logs: Logs
    reached: int  # the iteration of the last line that was given

    def take(self, history: Sequence[Mapping[str, Any]]) -> None:
        for record in history:
            if record["iteration"] > self.reached:
                self.reached = record["iteration"]
                self.logs.log(record)


class _Follower:
    """Keeps the run folder on this machine equal to the one at the server."""

    def __init__(self, folder: RunFolder, plan: Plan, observers: Sequence[Observer], diary: _Diary) -> None:
        self.folder, self._plan, self._observers, self._diary = folder, plan, observers, diary
        self._have: dict[str, int] = {}
        self._history = ""
        self._seen = -1
        self._end = False  # whether an observer has ended the run
        self._safe = self._clock()

    def asked(self) -> dict[str, Any]:
        told = {"end": self._end, "safe": self._safe}
        return {"have": self._have, "history": len(self._history.encode()), **told}

    def _clock(self) -> int:
        """The clock of the checkpoint on this machine, from which the run continues if the job fails."""
        saved = self.folder.checkpoint(self._plan)
        return 0 if saved is None else Ledger.from_mapping(saved.ledger).clock

    def take(self, news: dict[str, Any], job: dict[str, Any]) -> None:
        if news["history"]:
            self._history += news["history"]
            self.folder.write("history.jsonl", self._history)
            self._diary.take(self.folder.history())
        for name, (changed, content) in news["files"].items():
            if name not in (*FILES, BOOKS):  # the server may write files of the run folder, and nothing else
                continue
            self.folder.write(name, base64.b64decode(content))
            self._have[name] = changed
        if CHECKPOINT in news["files"]:
            self._safe = self._clock()
        job |= {"pids": news["pids"], "server_pid": news["pid"], "refused": news["refused"]}
        if news["progress"] and news["progress"]["iteration"] != self._seen:
            self._seen = news["progress"]["iteration"]
            told = [observer(Progress.from_mapping(news["progress"])) for observer in self._observers]
            self._end = self._end or any(answer is True for answer in told)
        if news["outcome"] is not None:
            job["ended"] = True
            job["finished"] = news["outcome"]["finished"]
            if not job["finished"]:
                job |= {"reason": news["outcome"]["reason"], "worth_another": bool(news["outcome"]["lost"])}


def _reached(folder: RunFolder, spec: Spec) -> int:
    saved = folder.checkpoint(spec.plan)
    return 0 if saved is None else saved.iteration
