"""What kill -9 costs a federation: of a site in each kind of round, and of the server.

    python benchmarks/federation_kills.py

Three sites on this machine, 20 outer iterations of FBO-AggITD: a run without a kill, and one in which a site is
killed in each kind of round in turn and then the server, after which it is resumed. The seconds lost go from a
kill until the site begins the same round again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

import fedbilevel as fb
import held_site
from engine_equality import SETTINGS, books, spec_of, vectors
from fedbilevel.errors import FedBilevelError
from fedbilevel.federate import LoopbackFederation, simulated_sites
from fedbilevel.federate.loopback import SERVER
from held_site import KINDS

NAMES = ["site-1", "site-2", "site-3"]
VICTIM = "site-2"
DOWN = 10.0  # seconds after which a server is taken for dead


@contextmanager
def federation(folder: Path) -> Iterator[LoopbackFederation]:
    """Three sites and a server; the victim is one that can be held."""
    files = simulated_sites(spec_of(SETTINGS), folder / "sites", NAMES)
    shutil.copy(held_site.__file__, files[VICTIM].parent)
    own = tomllib.loads(files[VICTIM].read_text())
    del own["problem"]["name"]
    own["problem"] |= {"python": "held_site:make", "place": str(files[VICTIM].parent)}
    files[VICTIM].write_text(tomli_w.dumps(own))
    with LoopbackFederation(folder, files) as local:
        yield local


def submission(local: LoopbackFederation, **more: Any) -> Any:
    """Who submits runs; also on a busy machine."""
    from fedbilevel.federate.submit import Kit, Submission

    return Submission(Kit(local.admin_kit), NAMES, **{"patience": 120.0, **more})


def submit(local: LoopbackFederation, out: Path, settings: dict[str, Any], resume: bool = False) -> fb.Result:
    """Run to the end, starting again whatever has ended."""
    submitted = submission(local, between=local.revive)
    return submitted.run(spec_of(settings), out, resume=resume, overwrite=False)


def audited(local: LoopbackFederation) -> list[dict[str, Any]]:
    """What the victim was asked, as it wrote down itself before it began to work on it."""
    file = local.site_file(VICTIM).parent / "audit.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["what"] == "step"]


def reached(local: LoopbackFederation, since: float = 0.0) -> int:
    """The number of the round that the victim was asked for last, or of the next one if it was a probe."""
    asked = [a["round"] for a in audited(local) if a["time"] > since]
    return int(asked[-1].split()[1]) if asked else 0


class Killer(threading.Thread):
    """Kills the victim once in each kind of round, then the server; what was killed is in `killed`.

    after   the round before which it waits
    """

    def __init__(self, local: LoopbackFederation, submitted: Any, kinds: Sequence[str], after: int) -> None:
        super().__init__(daemon=True)
        self._kinds, self._after, self._begun = kinds, after, time.time()
        self._local, self._place, self._submitted = local, local.site_file(VICTIM).parent, submitted
        self._over = threading.Event()
        self.killed: dict[str, tuple[int, float]] = {}  # in which round, and when

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        (self._place / "hold").unlink(missing_ok=True)

    def run(self) -> None:
        held = self._place / "held"
        if not self._until(lambda: reached(self._local, self._begun) >= self._after):
            return
        for kind in self._kinds:
            (self._place / "hold").write_text(kind)
            if not self._until(held.exists):
                return
            caught = json.loads(held.read_text())
            held.unlink()
            os.kill(caught["pid"], signal.SIGKILL)
            self.killed[kind] = caught["round"], time.time()
            if not self._until(lambda kind=kind: self.lost(kind) is not None):  # type: ignore[misc]
                return
        last = reached(self._local)
        if self._until(lambda: reached(self._local) > last + 5):  # an iteration later
            self._submitted.patience = DOWN
            self._local.kill(SERVER)
            self.killed["server"] = reached(self._local), time.time()

    def _until(self, happened: Callable[[], bool]) -> bool:
        while not happened():
            if self._over.wait(0.02):
                return False
        return True

    def lost(self, what: str) -> float | None:
        """The seconds from a kill until the victim began the same round again; None as long as it did not."""
        number, killed = self.killed[what]
        asked = (a["time"] for a in audited(self._local) if a["round"] == f"round {number}")
        again = (moment for moment in asked if moment > killed)
        return next((time - killed for time in again), None)


def killed_run(
    local: LoopbackFederation, out: Path, settings: dict[str, Any], kinds: Sequence[str] = KINDS, after: int = 0
) -> tuple[fb.Result, Killer]:
    """A run with kills: one command as long as sites are killed, and a second one after the server was."""
    submitted = submission(local, restarts=len(kinds))
    with Killer(local, submitted, kinds, after) as killer:
        try:
            submitted.run(spec_of(settings), out, resume=False, overwrite=False)
        except FedBilevelError as error:
            assert "--resume" in str(error), error
        else:
            raise AssertionError("the run ended although its server was killed")
    local.revive()
    return submit(local, out, settings, resume=True), killer


def same(one: fb.Result, other: fb.Result) -> bool:
    """Whether two runs ended with the same bits and the same books."""
    ours, theirs = vectors(one), vectors(other)
    return all(ours[n].tobytes() == theirs[n].tobytes() for n in theirs) and books(one) == books(other)


def main() -> None:
    with tempfile.TemporaryDirectory() as place, federation(Path(place) / "federation") as local:
        whole = submit(local, Path(place) / "whole", SETTINGS)
        result, killer = killed_run(local, Path(place) / "killed", SETTINGS)
        print("| killed | in round | seconds lost |\n|---|---|---|")
        for what, (number, _) in killer.killed.items():
            print(f"| {what} | {number} | {killer.lost(what):.1f} |")
        if not same(result, whole):
            raise SystemExit("DIFFERS from the run without a kill.")
        print("The same bits as without a kill.")


if __name__ == "__main__":
    main()
