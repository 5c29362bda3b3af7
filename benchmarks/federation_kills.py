"""What kill -9 costs a federation: of a site in each kind of round, and of the server.

    python benchmarks/federation_kills.py

Three sites on this machine, 20 outer iterations of FBO-AggITD: a run without a kill, one in which a site is killed
in each kind of round in turn, and one whose server is killed and which is resumed. The seconds lost go from the
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

import fedbilevel as fb
import held_site
from engine_equality import SETTINGS, books, spec_of, vectors
from fedbilevel.errors import FedBilevelError
from fedbilevel.federate import LocalFederation, simulated_sites
from fedbilevel.federate.local import SERVER
from held_site import KINDS

NAMES = ["site-1", "site-2", "site-3"]
VICTIM = "site-2"


@contextmanager
def federation(folder: Path) -> Iterator[LocalFederation]:
    """Three sites and a server; the victim is one that can be held."""
    files = simulated_sites(spec_of(SETTINGS), folder / "sites", NAMES)
    shutil.copy(held_site.__file__, files[VICTIM].parent)
    own = tomllib.loads(files[VICTIM].read_text())
    del own["problem"]["name"]
    own["problem"] |= {"python": "held_site:make", "place": str(files[VICTIM].parent)}
    files[VICTIM].write_text(tomli_w.dumps(own))
    with LocalFederation(folder, files) as local:
        yield local


def submit(local: LocalFederation, out: Path, settings: dict[str, Any], **more: Any) -> fb.Result:
    """Run to the end, starting again whatever has ended."""
    from fedbilevel.federate.submit import Kit, Submission

    options = dict(resume=False, overwrite=False) | {k: more.pop(k) for k in ("resume",) if k in more}
    submission = Submission(Kit(local.admin_kit), NAMES, **{"patience": 120.0, "between": local.revive, **more})
    return submission.run(spec_of(settings), out, **options)


def audited(local: LocalFederation) -> list[dict[str, Any]]:
    """What the victim was asked, as it wrote down itself before it began to work on it."""
    file = local.site_file(VICTIM).parent / "audit.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Killer(threading.Thread):
    """Kills the victim once in each of these kinds of round; `lost` has the seconds until it was there again."""

    def __init__(self, local: LocalFederation, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(daemon=True)
        self._local, self._kinds, self._place = local, kinds, local.site_file(VICTIM).parent
        self._over = threading.Event()
        self.lost: dict[str, float] = {}
        self.rounds: dict[str, int] = {}

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        (self._place / "hold").unlink(missing_ok=True)

    def run(self) -> None:
        held = self._place / "held"
        for kind in self._kinds:
            (self._place / "hold").write_text(kind)
            while not held.exists():
                if self._over.wait(0.01):
                    return
            caught = json.loads(held.read_text())
            held.unlink()
            os.kill(caught["pid"], signal.SIGKILL)
            killed = time.time()
            back: list[float] = []
            while not back:
                if self._over.wait(0.1):
                    return
                again = (asked for asked in audited(self._local) if asked["round"] == caught["round"])
                back = [asked["time"] for asked in again if asked["time"] > killed]
            self.rounds[kind], self.lost[kind] = caught["round"][1], back[0] - killed


def killed_server(local: LocalFederation, out: Path, settings: dict[str, Any]) -> tuple[fb.Result, float]:
    """A run whose server is killed, resumed when it is back; and the seconds until it was where it had been."""
    killed: list[float] = []

    def kill() -> None:
        while len(_history(out)) < 4:
            time.sleep(0.02)
        local.kill(SERVER)
        killed.extend((time.time(), audited(local)[-1]["round"][1]))

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        submit(local, out, settings, restarts=0, patience=10.0, between=lambda: None)
    except FedBilevelError as error:
        assert "--resume" in str(error), error
    else:
        raise AssertionError("the run ended although its server was killed")
    thread.join()
    local.revive()
    result = submit(local, out, settings, resume=True)
    there = [a["time"] for a in audited(local) if a["time"] > killed[0] and a["round"] == ["round", killed[1]]]
    return result, there[0] - killed[0]


def _history(out: Path) -> list[str]:
    file = out / "history.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def same(one: fb.Result, other: fb.Result) -> bool:
    """Whether two runs ended with the same bits and the same books."""
    ours, theirs = vectors(one), vectors(other)
    return all(ours[n].tobytes() == theirs[n].tobytes() for n in theirs) and books(one) == books(other)


def main() -> None:
    words = {True: "the same bits", False: "DIFFERS"}
    with tempfile.TemporaryDirectory() as place, federation(Path(place) / "federation") as local:
        out = Path(place)
        whole = submit(local, out / "whole", SETTINGS)
        with Killer(local) as killer:
            killed = submit(local, out / "killed", SETTINGS, restarts=8)
        print("| killed | in round | seconds lost | result |\n|---|---|---|---|")
        for kind in KINDS:
            lost, outcome = killer.lost[kind], words[same(killed, whole)]
            print(f"| site, {kind} | {killer.rounds[kind]} | {lost:.1f} | {outcome} |")
        server, lost = killed_server(local, out / "server", SETTINGS)
        print(f"| server, then --resume | | {lost:.1f} | {words[same(server, whole)]} |")


if __name__ == "__main__":
    main()
