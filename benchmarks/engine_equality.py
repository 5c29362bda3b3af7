"""The same run on every engine: how far apart the numbers are, and what the ledgers say.

Three clients, 20 outer iterations of FBO-AggITD.

    python benchmarks/engine_equality.py

`--set` changes the spec, as in `--set data.name=mnist --set data.partition=shards`. Where clients are of unequal
size, sites and the loop differ in the last digits: a site does not pad its rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel.federate.commands import simulate_run
from fedbilevel.record import RunFolder
from loopback import stay_on_loopback

ITERATIONS = 20
SETTINGS: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 3,
    "data.partition": "drawn",  # as many rows for each client
    "data.rows_per_client": 480,
    "problem.hidden": 12,
    "algorithm.participation": 1.0,
    "algorithm.lower_epochs": 1,
    "algorithm.batch_zeta_local": 50,
    "algorithm.upper_steps": 2,
    "federation.min_replies": 3,
    "evaluate.clients": 3,
    "stop.rounds": None,
    "stop.iterations": ITERATIONS,
}
Runner = Callable[[dict[str, Any], Path], fb.Result]
BOOKED = ("rounds", "bytes_up", "bytes_down")


def spec_of(settings: Mapping[str, Any]) -> fb.Spec:
    """A spec as it is federated: with a checkpoint after each outer iteration."""
    return fb.load_spec("demo", {**settings, "evaluate.checkpoint_every": 1})


def here(name: str, **engine: Any) -> Runner:
    """A run of this process, on an engine given by its name and its settings."""
    more = {"federation.engine": {"name": name, **engine}}
    return lambda settings, out: fb.run(spec_of({**settings, **more}), out)


def on_sites(settings: dict[str, Any], out: Path) -> fb.Result:
    """A run on a federation of processes, started for it."""
    options: dict[str, Any] = dict(restarts=0, resume=False, overwrite=False)
    return simulate_run(spec_of(settings), out, work=None, say=lambda text: None, **options)


IN_PROCESS: dict[str, Runner] = {"simulation": here("simulation", devices=1), "loop": here("loop")}
ON_RAY: dict[str, Runner] = {f"ray, {n} actor{'s' * (n > 1)}": here("ray", actors=n, devices=1) for n in (1, 2, 3)}
ON_FLARE: dict[str, Runner] = {"flare": on_sites}


def folder_of(result: fb.Result) -> Path:
    """The run folder, which every run here has."""
    assert result.folder is not None
    return result.folder


def vectors(result: fb.Result) -> dict[str, np.ndarray]:
    """The state at the end, as it was saved."""
    folder = RunFolder(folder_of(result))
    saved = folder.checkpoint(fb.load_spec(folder.file("spec.toml")).plan)
    assert saved is not None
    return {name: np.asarray(a) for name, a in saved.arrays.items()}


def differences(one: fb.Result, other: fb.Result) -> dict[str, float]:
    """||a - b|| / ||b|| of each vector of the two states; exactly zero means the same bits."""
    ours, theirs = vectors(one), vectors(other)
    norm = np.linalg.norm
    return {n: float(norm(np.float64(ours[n]) - theirs[n]) / norm(np.float64(theirs[n]))) for n in theirs}


def books(result: fb.Result) -> dict[str, list[int]]:
    """Rounds and payload bytes of each step."""
    return {name: [account[key] for key in BOOKED] for name, account in result.summary["ledger"].items()}


def wire(result: fb.Result) -> list[int]:
    """Bytes of whole messages, up and down; zero where there are none."""
    return [sum(a.get(key, 0) for a in result.summary["ledger"].values()) for key in ("wire_up", "wire_down")]


def compare(
    runners: Mapping[str, Runner],
    settings: dict[str, Any],
    folder: Path,
    results: dict[str, fb.Result] | None = None,
) -> dict[str, dict[str, Any]]:
    """Run the settings on each engine; a row of the table for each. `results` is filled, for who wants more."""
    results = {} if results is None else results
    table = {}
    for name, run in runners.items():
        results[name] = result = run(settings, folder / name.replace(", ", "-").replace(" ", "-"))
        table[name] = {
            "to the simulation": differences(result, results["simulation"]),
            "to the loop": differences(result, results["loop"]) if "loop" in results else None,
            "iterations": result.summary["iterations"],
            "books": books(result),
            "wire": wire(result),
        }
    return table


def shown(table: Mapping[str, Any]) -> str:
    """The table as Markdown."""

    def far(apart: dict[str, float] | None) -> str:
        if apart is None:
            return ""
        return ", ".join(
            f"{name} {'same bits' if value == 0 else f'{value:.1e}'}" for name, value in apart.items()
        )

    lines = [
        "| engine | from the simulation | from the loop | rounds | payload up, down | messages up, down |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in table.items():
        rounds, up, down = (sum(account[i] for account in row["books"].values()) for i in range(3))
        sent = " ".join(f"{n:,}" for n in row["wire"]) if any(row["wire"]) else ""
        columns = [name, far(row["to the simulation"]), far(row["to the loop"]), rounds, f"{up:,} {down:,}", sent]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines)


def parsed(text: str) -> Any:
    """A number, true, false or null; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    stay_on_loopback()
    settings = SETTINGS | {key: parsed(value) for key, _, value in (given.partition("=") for given in options.set)}
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray: Any = importlib.import_module("fedbilevel.engines.ray").ray  # with the environment that it sets
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)  # runs stay with it
    with tempfile.TemporaryDirectory() as place:
        table = compare(IN_PROCESS | ON_RAY | ON_FLARE, settings, Path(place))
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    print(shown(table))


if __name__ == "__main__":
    main()
