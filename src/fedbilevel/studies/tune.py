"""Grid search: every combination of some settings is a run, and the best one is written as a spec."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..errors import SettingsError, one_line, shown
from ..files import results_folder
from ..report import markdown_table
from ..spec import load_spec, parse_value
from .runner import Runs, run_all

Axis = list[dict[str, Any]]


def tune(
    spec: str | None,
    sets: Sequence[str],
    grid: Sequence[str],
    *,
    seeds: int,
    out: Path,
    jobs: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Run the grid; write tune.md, tune.json and best.toml to `out`; return the rows, best first.

    The score is the mean test accuracy of the last rounds (`evaluate.window`), averaged over seeds.
    """
    if not grid:
        raise SettingsError("--grid is missing; write one, as in --grid 'algorithm.alpha=0.01;0.1'")
    runs = Runs(out / "runs")
    points = [
        {key: value for part in combination for key, value in part.items()}
        for combination in itertools.product(*map(parse_axis, grid))
    ]

    def specs_of(point: dict[str, Any]) -> list[Any]:
        texts = [f"{key}={json.dumps(value)}" for key, value in point.items()]
        return [load_spec(spec, [*sets, *texts, f"seed={seed}"]) for seed in range(seeds)]

    specs = [specs_of(point) for point in points]
    results_folder(out, "--out")
    run_all([s for group in specs for s in group], runs, jobs=jobs, console=console)
    rows = []
    for point, group in zip(points, specs, strict=True):
        summaries = [runs.summary(s) for s in group]
        scores = [s["accuracy"]["mean"] for s in summaries]
        to_90 = [s["rounds_to"]["0.90"] for s in summaries]
        rounds = None if None in to_90 else float(np.mean(to_90))
        diverged = sum(runs.failure(s) is not None for s in group)
        remark = {"remark": f"{diverged} of {seeds} runs diverged"} if diverged else {}
        rows.append({**point, "final": round(float(np.mean(scores)), 4), "rounds_to_90": rounds, **remark})
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["final"])
    rows = [rows[i] for i in order]
    (out / "tune.md").write_text(markdown_table(rows) + "\n")
    (out / "tune.json").write_text(json.dumps(rows, indent=2) + "\n")
    (out / "best.toml").write_text(specs[order[0]][0].to_toml())
    return rows


def parse_axis(text: str) -> Axis:
    """`a.b=1;2;3`, or settings that move together: `a.b,a.c=1,10;2,20`."""
    names, equals, values = text.partition("=")
    keys = [name.strip() for name in names.split(",")]
    if not equals or not all(keys):
        raise SettingsError(f"--grid {one_line(text)} is wrong: write key=v1;v2, or key1,key2=a1,a2;b1,b2")
    axis = []
    for point in values.split(";"):
        parts = [part.strip() for part in point.split(",")]
        if len(parts) != len(keys):
            raise SettingsError(
                f"--grid {one_line(text)} is wrong: {shown(point)} has {len(parts)} values for {len(keys)} keys; "
                "give each key one value"
            )
        axis.append({key: parse_value(part, f"--grid {key}") for key, part in zip(keys, parts, strict=True)})
    return axis
