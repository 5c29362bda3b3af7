"""Central privacy in a federation whose site and server are killed: epsilon never falls, the secret stays secret.

    python benchmarks/private_kills.py

Three sites on this machine, 12 outer iterations of FBO-AggITD with central privacy. A site is killed in the middle
of a round, and the server later; then the run is resumed. Afterwards every file of the federation is searched: the
kits, the jobs, the logs, the audit files and the run folder. The secret must be in none of them.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {"privacy.mode": "central", "privacy.noise": 2.0, "stop.iterations": 12}


def found_in(folder: Path, key: bytes) -> list[Path]:
    """The files below a folder that have the key, as bytes, in hexadecimal or in base64."""
    written = [key, key.hex().encode(), key.hex().upper().encode(), base64.b64encode(key)]
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(text in path.read_bytes() for text in written)]


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        os.environ["FEDBILEVEL_STATE"] = str(Path(place) / "state")
        import engine_equality
        from fedbilevel.privacy import machine_secret, name_in_books
        from federation_kills import federation, killed_run

        settings = engine_equality.SETTINGS | SETTINGS
        out, work = Path(place) / "run", Path(place) / "federation"
        with federation(work) as local:
            result, killer = killed_run(local, out, settings, kinds=("lower",))
        spent = [record["epsilon"] for record in result.history]
        lines = (out / "privacy.jsonl").read_text().splitlines()[1:]
        iterations = settings["stop.iterations"]
        print(f"killed: {', '.join(f'{what} in round {number}' for what, (number, _) in killer.killed.items())}")
        print(f"iterations {result.history[-1]['iteration']}; booked {len(lines)} of {5 * iterations} rounds")
        print(f"epsilon by iteration: {', '.join(f'{epsilon:.2f}' for epsilon in spent)}")
        (server,) = (Path(place) / "state" / "books").iterdir()
        known = {json.loads(line)["release"] for line in server.read_text().splitlines()[1:]}
        booked = {json.loads(line)["release"] for line in lines} <= known
        secret = machine_secret()
        run = secret.of_run(name_in_books([server]) or "")
        keys = (secret.key, run.key, run.root(0))  # the seed of the spec is 0
        leaks = [path for key in keys for folder in (work, out) for path in found_in(folder, key)]
        sound = spent == sorted(spent) and booked and not leaks
        print(f"epsilon never falls: {spent == sorted(spent)}; the server's books have all releases: {booked}")
        print(f"files that have the secret, the key of the run or its root: {len(leaks)}")
        return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
