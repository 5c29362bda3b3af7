"""Reproducing the paper: do the missing runs of its tables and figures, then write ours beside the paper's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..files import results_folder
from ..record import RunFolder, environment
from ..report import (
    ROWS,
    Line,
    Points,
    Section,
    csv_table,
    draw_iterations,
    draw_panels,
    draw_points,
    markdown_table,
    write_report,
)
from ..spec import Spec
from .cost import cost_row
from .exchanges import KEY, iteration_of
from .kept import keep, take
from .runner import Runs, run_all
from .study import Study, StudyRun


def reproduce(
    studies: Sequence[Study],
    *,
    seeds: int,
    out: Path,
    runs: Runs,
    jobs: int,
    console: Console,
    kept: Path | None = None,
) -> list[Section]:
    """Do the missing runs; write each study's table or figure, and one report of them all, to `out`.

    Finished runs are taken from the folder `kept`, and are added to it at the end, also if one of them has failed
    or the study is interrupted.
    """
    specs = [spec for study in studies for run in study.runs for spec in _specs(study, run, seeds)]
    results_folder(out, "--out")
    if kept is not None:
        take(runs, specs, kept)
    try:
        run_all(specs, runs, jobs=jobs, console=console)
    finally:
        if kept is not None:
            keep(runs, specs, kept)
    sections = [_write(study, seeds, out, runs) for study in studies]
    write_report(out / "report.html", sections, environment(), f"seeds {', '.join(map(str, range(seeds)))}")
    return sections


def _specs(study: Study, run: StudyRun, seeds: int) -> list[Spec]:
    count = 1 if study.is_costed else seeds
    return [run.spec(seed, study.share) for seed in range(count)]


def _write(study: Study, seeds: int, out: Path, runs: Runs) -> Section:
    shown = [iteration_of(run, run.spec(0), study.iteration) for run in study.runs if study.kind == "exchanges"]
    if shown:
        rows = [row for _, exchanges in shown for row in exchanges]
    else:
        rows = [_row(study, run, _specs(study, run, seeds), runs) for run in study.runs]
    text = markdown_table(rows)
    command = f"fedbilevel reproduce {study.name} --seeds {seeds}" + _options(study)
    made = [runs.of(spec).environment()["revision"] for run in study.runs for spec in _specs(study, run, seeds)]
    revision = ", ".join(dict.fromkeys(map(str, made)))
    head = f"# {study.title}\n\n{_remarks(study, seeds)}\n\n`{command}`, revision {revision}.\n\n"
    (out / f"{study.name}.md").write_text(head + text + "\n")
    (out / f"{study.name}.json").write_text(json.dumps(rows, indent=2) + "\n")
    (out / f"{study.name}.csv").write_text(csv_table(rows))
    picture = None
    if study.kind == "curves":
        picture = out / f"{study.name}.png"
        lines = [
            Line(run.label, run.panel, [runs.history(s) for s in _specs(study, run, seeds)], _readings(run), run.y)
            for run in study.runs
        ]
        draw_panels(
            lines,
            {name: study.axes.get(panel, study.x) for panel, name in enumerate(study.panels)},
            study.title + _short(study),
            [picture, picture.with_suffix(".svg")],
        )
    if study.kind == "points":
        picture = out / f"{study.name}.png"
        draw_points(
            _points(study, rows),
            study.panels,
            study.title + _short(study),
            study.x,
            [picture, picture.with_suffix(".svg")],
        )
    if shown:
        picture = out / f"{study.name}.png"
        draw_iterations([each for each, _ in shown], KEY, study.title, [picture, picture.with_suffix(".svg")])
    ledger = runs.of(_specs(study, study.runs[-1], 1)[0]).summary()
    return Section(
        study.name,
        study.title + _short(study),
        _remarks(study, seeds),
        rows,
        picture,
        command,
        f"{study.runs[-1].label}, seed 0",
        ledger,
    )


def _points(study: Study, rows: list[dict[str, Any]]) -> list[Points]:
    """A line for each label of a panel, through the accuracies of its runs."""
    lines: dict[tuple[str, int], list[tuple[float | str | None, float]]] = {}
    for run, row in zip(study.runs, rows, strict=True):
        lines.setdefault((run.label, run.panel), []).append((row["at"], row["accuracy"]))
    return [Points(label, panel, places) for (label, panel), places in lines.items()]


def _place(study: Study, run: StudyRun, folders: list[RunFolder]) -> float | str | None:
    """The place of a run on the axis of a study of points: the setting it varies, or the epsilon it spent."""
    if not study.x.startswith("epsilon"):
        return run.at
    spent = [folder.summary().get("privacy") for folder in folders]
    return max((s["epsilon"] for s in spent if s is not None), default=None)


def _row(study: Study, run: StudyRun, specs: list[Spec], runs: Runs) -> dict[str, Any]:
    """One row: the measured values, and the paper's value."""
    if study.kind == "rounds":
        return cost_row(run, specs[0], runs.of(specs[0]).summary())
    summaries = [runs.summary(spec, run.y) for spec in specs]
    to_90 = [s["rounds_to"]["0.90"] for s in summaries]
    row: dict[str, Any] = {"run": run.label}
    if len({each.y for each in study.runs}) > 1:
        row["rows"] = ROWS[run.y]
    if study.panels and len(study.panels) > 1:
        row["panel"] = study.panels[run.panel]
    diverged = [runs.history(spec)[-1]["rounds"] for spec in specs if runs.failure(spec) is not None]
    remark = {"remark": f"diverged after {', '.join(map(str, diverged))} rounds"} if diverged else {}
    if study.kind == "points":
        row |= {
            "at": _place(study, run, [runs.of(spec) for spec in specs]),
            "accuracy": _mean(summaries, "last"),
            "best": _mean(summaries, "best"),
            "rounds": summaries[0]["rounds"],
            "minutes": round(float(np.mean([s["seconds"] for s in summaries])) / 60, 2),
        }
        return row | remark
    row |= {
        "rounds_to_90": float(np.mean(to_90)) if None not in to_90 else None,
        "final": _mean(summaries, "mean"),
        "last": _mean(summaries, "last"),
        "best": _mean(summaries, "best"),
        "swing": _mean(summaries, "std"),
        "minutes": round(float(np.mean([s["seconds"] for s in summaries])) / 60, 2),
    }
    if remark:
        row |= remark
    elif "final" in run.paper:
        row["remark"] = _remark(row["final"], run.paper["final"])
    if "final" in run.paper:
        row["paper_rounds_to_90"], row["paper_final"] = run.paper["rounds_to_90"], run.paper["final"]
    elif run.paper:
        row["paper"] = "; ".join(f"{v:.1%} at {x:g}" for x, v in run.paper["readings"])
    return row


def _remark(ours: float, theirs: float) -> str:
    """A remark on whether our final accuracy is within a point of the paper's."""
    apart = 100 * (ours - theirs)
    return f"{apart:+.1f} points from the paper" if abs(apart) > 1 else "within a point"


def _mean(summaries: list[dict[str, Any]], field: str) -> float:
    return round(float(np.mean([s["accuracy"][field] for s in summaries])), 4)


def _readings(run: StudyRun) -> list[tuple[float, float]]:
    return [(float(x), float(v)) for x, v in run.paper.get("readings", ())]


def _remarks(study: Study, seeds: int) -> str:
    runs = f"Seeds: {1 if study.is_costed else seeds}."
    if study.kind in ("accuracy", "curves"):
        windows = sorted({run.spec(0).evaluate.window for run in study.runs})
        span = " or ".join(f"{window:,}" for window in windows)
        runs = f"Final accuracy and swing are the mean and the deviation over the last {span} rounds. {runs}"
    if study.share < 1:
        runs += f" SHORT: {study.share:.0%} of the paper's rounds; not to be compared with its final values."
    return f"{study.note} {runs}".strip()


def _options(study: Study) -> str:
    return "" if study.share >= 1 else f" --share {study.share:g}"


def _short(study: Study) -> str:
    return "" if study.share >= 1 else f" [short: {study.share:.0%} of the rounds]"
