"""The objects that FLARE runs: the site's, which answers requests, and the server's, which runs the algorithm.

The server pushes collab calls to processes that live as long as the job. Requests and replies are bytes. FLARE
cannot stream the run folder, so the process that submitted the job pulls it by an app command while the job runs.
"""

from __future__ import annotations

import base64
import hmac
import os
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from ..engines.flare import Flare, pack
from ..engines.flare.server import Delivery
from ..errors import FedBilevelError
from ..privacy import state_folder
from ..record import BOOKS, FILES
from ..run import Progress, run
from ..runtime import cache_programs, keep_memory
from ..spec import parse
from .door import Door, seal
from .job import NAME, PLACE, read_key, read_order
from .limits import bound_replies
from .sitefile import load_site

SITE_FILE = "FEDBILEVEL_SITE"  # the environment variable that tells a site's process where its TOML is
FAREWELL = 60.0  # seconds that a finished job waits for its last files to be pulled

# FLARE teaches a job to unpack PyTorch's tensors wherever PyTorch is installed. We send bytes only. Without that
# module a job starts a second earlier, takes less memory, and unpacks nothing that it was not asked to.
sys.modules["nvflare.app_opt.pt"] = None  # type: ignore[assignment]


class SiteApp:
    """A site in FLARE. If its TOML is wrong, the site does not take part and tells the server the reason."""

    def __init__(self) -> None:
        self._door: Door | None = None
        self._trouble = ""

    @collab.init
    def start(self) -> None:
        """Load the site's own data and problem."""
        keep_memory()
        cache_programs()  # so that a site that was killed restarts faster
        answer, note = self._complain, None
        try:
            site = load_site(Path(os.environ[SITE_FILE])).site()
            answer, note = site.answer, site.note
        except KeyError:
            self._trouble = "the site was not started by `fedbilevel site`"
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
        self._door = Door(answer, read_key(_ordered()), note)

    @collab.publish
    def handle(self, request: bytes, sealed: str = "") -> bytes:
        """Answer a request, if it is the server's."""
        assert self._door is not None, "FLARE starts an app before it calls it"
        return self._door.ask(collab.caller, request, sealed)

    def _complain(self, request: Any, caller: str) -> bytes:
        """Tell the server why the site cannot take part."""
        return pack({"kind": "error", "round": 0, "reason": self._trouble}, {})


def _ordered() -> Path:
    """The folder of this process's part of the job that has its order."""
    job = collab.fl_ctx.get_job_id()
    return Path(collab.workspace.get_app_dir(job)) / PLACE


class ServerApp:
    """The server in FLARE. It runs the spec that came with the job, and its run folder can be pulled."""

    def __init__(self) -> None:
        self._folder = Path()
        self._engine: Flare | None = None
        self._progress: dict[str, Any] = {}
        self._outcome: dict[str, Any] | None = None
        self._pulled = threading.Event()
        self._end = False  # whether the submitter of the run wants it to end
        self._safe = 0  # the clock of the checkpoint that the submitter of the run has
        self._key = ""  # what a command must have to be the submitter's

    @collab.main
    def run(self) -> None:
        """Run the job to its end, or raise."""
        keep_memory()
        cache_programs()
        context = collab.fl_ctx
        job, workspace = context.get_job_id(), collab.workspace
        self._folder = Path(workspace.get_run_dir(job)) / NAME
        order = read_order(_ordered())
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, content in order.files.items():
            (self._folder / name).write_bytes(base64.b64decode(content))
        self._key = order.key
        context.get_engine().register_app_command(NAME, self._pull)
        spec = parse(tomllib.loads(order.spec))

        limit = min(order.timeout, spec.federation.deadline or order.timeout)
        noise = spec.privacy.noise if spec.privacy.mode == "local" else None

        def watch(progress: Progress) -> bool:
            self._progress = progress.to_mapping()
            return self._end

        try:
            task = spec.task()
            self._engine = Flare(
                task.problem,
                order.sites,
                partial(deliver, order.keys),
                timeout=limit,
                noise=noise,
                run=order.run,
                spec=spec.digest,
                safe=lambda: self._safe,
                max_rows=spec.federation.max_rows,
                bound=partial(bound_replies, context.get_engine().get_cell()),
            )
            # The server keeps books of its own: the folder that came with the job may lack the last releases.
            books = [state_folder() / "books" / f"{order.run}.jsonl"] if spec.privacy.mode else []
            run(
                spec,
                self._folder,
                resume=True,
                observers=[watch],
                task=task,
                engine=self._engine,
                books=books,
            )
            self._outcome = {"finished": True}
        except FedBilevelError as error:
            lost = self._engine.lost if self._engine is not None else {}
            self._outcome = {"finished": False, "reason": str(error), "lost": lost}
        except BaseException as error:
            self._outcome = {"finished": False, "reason": f"{type(error).__name__}: {error}", "lost": {}}
            raise
        finally:
            self._pulled.wait(FAREWELL)

    def _pull(self, topic: str, data: Any, context: Any) -> dict[str, Any]:
        """Return what is new in the folder. The checkpoint is read first, so the history is never behind it.

        FLARE lets every site of the job send an app command. Only the submitter of the run has the key.
        """
        asked = data if isinstance(data, dict) else {}
        if not hmac.compare_digest(str(asked.get("key")).encode(), self._key.encode()):
            raise PermissionError("only the submitter of a run may ask for its files or end it")
        if asked.get("farewell"):
            self._pulled.set()
        self._end = self._end or asked.get("end") is True
        self._safe = max(self._safe, int(asked.get("safe", 0)))
        outcome, have = self._outcome, asked.get("have", {})
        files: dict[str, tuple[int, str]] = {}
        for file in (self._folder / name for name in (*FILES, BOOKS) if name != "history.jsonl"):
            if not file.exists():
                continue
            changed = file.stat().st_mtime_ns
            if have.get(file.name) != changed:
                files[file.name] = changed, base64.b64encode(file.read_bytes()).decode()
        history = self._folder / "history.jsonl"
        text = history.read_bytes()[int(asked.get("history", 0)) :] if history.exists() else b""
        engine = self._engine
        return {
            "files": files,
            "history": text[: text.rfind(b"\n") + 1].decode(),
            "progress": self._progress,
            "outcome": outcome,
            "pids": dict(engine.pids) if engine is not None else {},
            "refused": dict(engine.refused) if engine is not None else {},
            "pid": os.getpid(),
            "time": time.time(),
        }


def deliver(keys: Mapping[str, str], requests: Mapping[str, bytes], timeout: float, /) -> Delivery:
    """Send every site its request at once, sealed with the site's key, and wait for all of them."""
    up = {proxy.name for proxy in collab.clients} & keys.keys()
    replies: dict[str, Any] = {}
    failures = {site: "not in this job" for site in requests if site not in up}
    waiting = [
        collab.get_clients([site])(blocking=False, timeout=timeout).handle(request, seal(keys[site], request))
        for site, request in requests.items()
        if site in up
    ]
    started = time.monotonic()
    for queue in waiting:
        replies.update(queue)
        early = time.monotonic() - started < timeout  # FLARE also reports a timeout when it gives up on a site
        for site, error in queue.failures.items():
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
            failures[site] = (
                "the site is gone, or the job was aborted" if early and "timed out" in reason else reason
            )
    return Delivery(replies, failures)
