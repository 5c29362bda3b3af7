"""Grid search: every combination of some settings is a run, and the best one is written as a spec."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..errors import SettingsError, UnknownName, one_line, shown
from ..files import results_folder
from ..record import Mode, direction, in_window
from ..report import markdown_table
from ..run import metrics_of
from ..spec import Spec, load_spec, parse_value
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
    metric: str | None = None,
    mode: Mode | None = None,
) -> list[dict[str, Any]]:
    """Run the grid; write tune.md, tune.json and best.toml to `out`; return the rows, best first.

    The score is the mean of a metric over the last rounds (`evaluate.window`), averaged over seeds. By default the
    metric is that of the spec (`evaluate.metric`), else test_accuracy, else upper_loss. `mode` says whether larger
    or smaller scores are better. A metric that the runs will not have is refused before any of them is begun.
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
    score = _metric([group[0] for group in specs], metric)
    mode = mode or direction(score)
    column = "final" if score == "test_accuracy" else score
    results_folder(out, "--out")
    run_all([s for group in specs for s in group], runs, jobs=jobs, console=console)
    rows = []
    for point, group in zip(points, specs, strict=True):
        found = [in_window(runs.history(s), score, s.evaluate.window)["mean"] for s in group]
        finite = [value for value in found if value is not None]
        row = {**point, column: float(f"{np.mean(finite):.4g}") if len(finite) == len(found) else None}
        if score == "test_accuracy":
            to_90 = [runs.summary(s)["rounds_to"]["0.90"] for s in group]
            row["rounds_to_90"] = None if None in to_90 else float(np.mean(to_90))
        diverged = sum(runs.failure(s) is not None for s in group)
        remark = {"remark": f"{diverged} of {seeds} runs diverged"} if diverged else {}
        rows.append(row | remark)
    worst, sign = float("inf"), -1 if mode == "max" else 1
    order = sorted(range(len(rows)), key=lambda i: worst if rows[i][column] is None else sign * rows[i][column])
    rows = [rows[i] for i in order]
    (out / "tune.md").write_text(markdown_table(rows) + "\n")
    (out / "tune.json").write_text(json.dumps(rows, indent=2) + "\n")
    (out / "best.toml").write_text(specs[order[0]][0].to_toml())
    return rows


def _metric(specs: Sequence[Spec], asked: str | None) -> str:
    """The metric by which the specs are compared. One that a spec does not have is refused."""
    known: dict[Any, list[str]] = {}
    for spec in specs:
        place = json.dumps(spec.to_mapping()["problem"]), spec.data, spec.privacy, type(spec.algorithm)
        if place not in known:
            known[place] = metrics_of(spec)
    chosen = asked or specs[0].evaluate.metric
    if chosen is None:
        chosen = "test_accuracy" if all("test_accuracy" in names for names in known.values()) else "upper_loss"
    for names in known.values():
        if chosen not in names:
            raise UnknownName("--metric", chosen, names)
    return chosen


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
