"""A federation of three processes on MNIST at the size of the paper's network: accuracy, pids, seconds a round.

    python benchmarks/federation_round.py --out runs/federation [--rounds 200]

It runs `fedbilevel federate --simulate-sites 3` and reads the record, and what a site wrote down itself: a round
lasts from one request to the next, whatever the site, the server and FLARE do meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def rounds_of(audit: Path) -> list[tuple[str, float]]:
    """The step and the seconds of each round, from a site's audit: until the next request, also a probe's."""
    asked = [json.loads(line) for line in audit.read_text().splitlines()]
    pairs = itertools.pairwise(entry for entry in asked if entry["what"] == "step")
    return [(a["step"], b["time"] - a["time"]) for a, b in pairs if a["round"].startswith("round ")]


def summary(out: Path, work: Path) -> dict[str, Any]:
    """What the run folder and the site's audit say."""
    made = json.loads((out / "summary.json").read_text())
    (job,) = json.loads((out / "federation.json").read_text())["jobs"]
    audits = {site: work / "sites" / site / "audit.jsonl" for site in job["pids"]}
    seen = {
        site: sorted({json.loads(line)["pid"] for line in file.read_text().splitlines()})
        for site, file in audits.items()
    }
    rounds = rounds_of(audits["site-1"])[5:]  # the first iteration compiles
    steps = sorted({step for step, _ in rounds})
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    accuracy = [(r["rounds"], r["test_accuracy"]) for r in history]
    return {
        "best accuracy": max(a for _, a in accuracy),
        "rounds to 90 %": next((n for n, a in accuracy if a >= 0.9), None),
        "rounds": made["rounds"],
        "rounds an outer iteration": made["rounds"] / made["iterations"],
        "seconds from the submission to the end": job["seconds"],
        "median round, seconds": round(statistics.median(s for _, s in rounds), 4),
        "by step": {n: round(statistics.median(s for step, s in rounds if step == n), 4) for n in steps},
        "pids the server saw at the start": job["pids"],
        "pids that answered, over the whole job": seen,
        "ledger": made["ledger"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], help="as for `fedbilevel federate`")
    options = parser.parse_args()
    out, work = options.out / "run", options.out / "work"
    command = [sys.executable, "-m", "fedbilevel", "federate", "--simulate-sites", "3", "--overwrite"]
    command += ["--out", str(out), "--work", str(work), f"--set=stop.rounds={options.rounds}"]
    subprocess.run([*command, *(f"--set={value}" for value in options.set)], check=True)
    print(json.dumps(summary(out, work), indent=2))


if __name__ == "__main__":
    main()
