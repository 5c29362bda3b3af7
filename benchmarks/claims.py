"""Run the commands of docs/claims.md, and say which claims hold: `make claims`.

    python benchmarks/claims.py              every command of which a test decides
    python benchmarks/claims.py --quick      the tests of the suite alone
    python benchmarks/claims.py --all        also those whose figures are to be read
    python benchmarks/claims.py --list       what would be run

A command that several claims name is run once. What a command writes is in runs/claims, one file for each.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "claims.md"
NOTHING_RAN = 5  # of pytest: every test of the file is skipped, as it needs an extra that is not installed


@dataclass(frozen=True)
class Claim:
    """A line of the table: what is claimed, the tests that decide, and scripts, which decide or are to be read."""

    text: str
    tests: tuple[str, ...]
    scripts: tuple[str, ...]
    read: bool

    def chosen(self, quick: bool = False, every: bool = False) -> tuple[str, ...]:
        """The commands that are run."""
        return self.tests + (() if quick or (self.read and not every) else self.scripts)


def claims(page: Path = PAGE) -> list[Claim]:
    """The lines of the table."""
    found = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[2] in ("test", "read", "test, read"):
            commands = re.findall(r"`((?:\.venv/bin/|make )[^`]+)`", cells[1])
            tests = tuple(command for command in commands if "/pytest " in command)
            scripts = tuple(command for command in commands if command not in tests)
            found.append(Claim(cells[0], tests, scripts, "read" in cells[2]))
    return found


def verdict(command: str, log: Path) -> str:
    """Run a command, and say what became of it. Programs are compiled as users compile them."""
    started, own = time.monotonic(), {**os.environ, "XLA_FLAGS": ""}
    with log.open("w") as to:
        code = subprocess.run(shlex.split(command), cwd=ROOT, stdout=to, stderr=to, env=own).returncode
    known = {0: "holds", NOTHING_RAN: "not run, as an extra is missing"}
    told = known.get(code, f"FAILS with code {code}, see {log.relative_to(ROOT)}")
    return f"{told}; {time.monotonic() - started:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--all", "--list"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    logs = ROOT / "runs" / "claims"
    logs.mkdir(parents=True, exist_ok=True)
    known: dict[str, str] = {}
    for claim in claims():
        print(f"\n{claim.text}", flush=True)
        for command in claim.chosen(given.quick, given.all):
            if command not in known:
                known[command] = "" if given.list else verdict(command, logs / f"{len(known):02}.txt")
            print(f"    {command}: {known[command]}", flush=True)
    failed = [command for command, told in known.items() if told.startswith("FAILS")]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(known)} commands failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
