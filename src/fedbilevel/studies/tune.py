"""Search for settings by a grid, successive halving or Optuna's samplers; the best ones are written as a spec."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from ..engines import ENGINES, FusedSettings
from ..errors import SettingsError, UnknownName, one_line, shown
from ..files import results_folder
from ..record import Mode, direction, in_window
from ..report import markdown_table
from ..run import metrics_of, run_many
from ..runtime import forget_programs
from ..spec import Spec, load_spec, parse_value
from .runner import Runs, Workers, longest_of_each, run_all

Point = dict[str, Any]
Axis = list[Point]


class Range(NamedTuple):
    """A range of one setting: of whole numbers, or of numbers, on a logarithmic scale if they are above zero."""

    low: Point
    high: Point


Search = Literal["grid", "halving", "optuna"]
Sampler = Literal["tpe", "random", "cmaes"]
KEPT = 3  # successive halving keeps the best third
ASKED = 8  # so many trials are asked for at once; the sampler learns from them together


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
    search: Search = "grid",
    sampler: Sampler = "tpe",
    trials: int = 50,
) -> list[dict[str, Any]]:
    """Search the settings; write tune.md, tune.json and best.toml to `out`; return the rows, best first.

    The score is the mean of a metric over the last rounds (`evaluate.window`), averaged over seeds. By default the
    metric is that of the spec (`evaluate.metric`), else test_accuracy, else upper_loss. `mode` says whether larger
    or smaller scores are better. A metric that the runs will not have is refused before any of them is begun.

    search     "grid" runs all points to the end. "halving" runs them for a part of the rounds, goes on with the
               best third for three times as many, and so on; no run is begun again. "optuna" draws `trials` points
               with one of Optuna's samplers, where an axis may be a range such as `algorithm.alpha=0.01..0.5`

    Runs on the engine `fused` are done together, many in one program; others are done in processes.
    """
    if not grid:
        raise SettingsError("--grid is missing; write one, as in --grid 'algorithm.alpha=0.01;0.1'")
    axes = [parse_axis(text, ranges=search == "optuna") for text in grid]
    runs = Runs(out / "runs")

    def specs_of(point: Point) -> list[Spec]:
        texts = [f"{key}={json.dumps(value)}" for key, value in point.items()]
        return [load_spec(spec, [*sets, *texts, f"seed={seed}"]) for seed in range(seeds)]

    first = specs_of(_joined([axis.low if isinstance(axis, Range) else axis[0] for axis in axes]))
    if search == "optuna":
        study = _study(sampler, "maximize")  # it is refused before anything is made
        points, specs = list[Point](), [first]
    else:
        points = [_joined(parts) for parts in itertools.product(*axes)]
        specs = [specs_of(point) for point in points]
    score = _metric([group[0] for group in specs], metric)
    better = mode or direction(score)
    if search == "halving":
        rungs = _rungs(first[0], len(points))
    results_folder(out, "--out")

    def scores(groups: Sequence[list[Spec]]) -> list[float | None]:
        """Do the runs that are missing; the score of each group, None if one of its runs has none."""
        do_runs([s for group in groups for s in group], runs, jobs=jobs, console=console, workers=workers)
        means = []
        for group in groups:
            found = [in_window(runs.history(s), score, s.evaluate.window)["mean"] for s in group]
            failed = search != "grid" and any(runs.failure(s) is not None for s in group)
            means.append(None if None in found or failed else float(np.mean([v for v in found if v is not None])))
        return means

    with Workers(runs, jobs) as workers:
        if search == "halving":
            specs, values, order = _halved(specs, rungs, scores, better)
        elif search == "optuna":
            points, specs, values = _sampled(study, axes, trials, specs_of, scores, better)
            order = _best_first(values, better)
        else:
            values = scores(specs)
            order = _best_first(values, better)
    column, rows = "final" if score == "test_accuracy" else score, []
    for number in order:
        group, value = specs[number], values[number]
        row = {**points[number], column: None if value is None else float(f"{value:.4g}")}
        if score == "test_accuracy":
            to_90 = [runs.summary(s)["rounds_to"]["0.90"] for s in group]
            row["rounds_to_90"] = None if None in to_90 else float(np.mean(to_90))
        if search == "halving":
            row["rounds"] = group[0].stop.rounds
        diverged = sum(runs.failure(s) is not None for s in group)
        rows.append(row | ({"remark": f"{diverged} of {seeds} runs diverged"} if diverged else {}))
    (out / "tune.md").write_text(markdown_table(rows) + "\n")
    (out / "tune.json").write_text(json.dumps(rows, indent=2) + "\n")
    (out / "best.toml").write_text(specs[order[0]][0].to_toml())
    return rows


def do_runs(
    specs: Sequence[Spec],
    runs: Runs,
    *,
    jobs: int,
    console: Console,
    draw: bool = True,
    workers: Workers | None = None,
) -> None:
    """Do the runs that are not finished: many in one program on the engine `fused`, the others in processes."""
    fused = [s for s in longest_of_each(specs) if isinstance(s.federation.engine, FusedSettings)]
    waiting = {s.digest: s for s in fused if runs.share(s) < 1.0}
    if waiting:
        results_folder(runs.folder, "--runs")
        console.print(f"{len(waiting)} runs, many in one program")
        run_many([*waiting.values()], [runs.of(s).path for s in waiting.values()], draw=draw)
        forget_programs()
    others = [s for s in specs if not isinstance(s.federation.engine, FusedSettings)]
    run_all(others, runs, jobs=jobs, console=console, workers=workers)


def do_runs_or_alone(
    specs: Sequence[Spec], runs: Runs, *, jobs: int, console: Console, workers: Workers | None = None
) -> list[Spec]:
    """Do the runs that are missing; return the specs as they were run: on the engine `fused` if they can be."""
    how: dict[str, Any] = dict(jobs=jobs, console=console, draw=False, workers=workers)
    try:
        do_runs(specs, runs, **how)
        return [*specs]
    except SettingsError as error:
        if not any(isinstance(each.federation.engine, FusedSettings) for each in specs):
            raise
        console.print(f"not in one program: {error}", markup=False, highlight=False)
    made = [alone(each) for each in specs]
    do_runs(made, runs, **how)
    return made


def alone(spec: Spec) -> Spec:
    """The spec on the engine that does one round at a time."""
    return replace(spec, federation=replace(spec.federation, engine=ENGINES["simulation"]()))


def without_data(spec: Spec) -> Spec:
    """The spec without the data set that it has loaded, for those that keep many specs."""
    return replace(spec, data=replace(spec.data))


def _best_first(values: Sequence[float | None], mode: Mode) -> list[int]:
    sign = -1 if mode == "max" else 1
    return sorted(range(len(values)), key=lambda i: float("inf") if values[i] is None else sign * values[i])  # type: ignore[operator]


def _rungs(spec: Spec, points: int) -> list[int]:
    """The rounds after which runs are compared; the last ones are those of the spec."""
    rounds = spec.stop.rounds
    if rounds is None:
        raise SettingsError("stop.rounds is missing: --search halving compares runs by rounds; set it")
    count = 0
    while KEPT ** (count + 1) <= points and rounds // KEPT ** (count + 1) >= 1:
        count += 1
    return [rounds // KEPT**left for left in range(count, -1, -1)]


def _halved(
    specs: list[list[Spec]], rungs: Sequence[int], scores: Callable[..., list[float | None]], mode: Mode
) -> tuple[list[list[Spec]], list[float | None], list[int]]:
    """Run all for the first rung, and the best third for the next one; later rungs come first in the order.

    The specs that are returned have the rounds that each point was run for.
    """
    alive, values, order = [*range(len(specs))], list[float | None]([None] * len(specs)), list[int]()
    reached = [*specs]
    for rung, rounds in enumerate(rungs):
        for i in alive:
            reached[i] = [replace(s, stop=replace(s.stop, rounds=rounds)) for s in specs[i]]
        found = scores([reached[i] for i in alive])
        for i, value in zip(alive, found, strict=True):
            values[i] = value
        ranked = [alive[place] for place in _best_first(found, mode)]
        sound = [i for i in ranked if values[i] is not None]
        last = rung == len(rungs) - 1
        alive = ranked if last else sound[: max(1, -(-len(ranked) // KEPT))]
        order = [i for i in ranked if last or i not in alive] + order
        if not alive or last:
            break
    return reached, values, order


def _tpe(optuna: Any) -> Any:
    """The sampler TPE for batches: points that are under way count as bad ones, so it does not repeat them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # it says that of `constant_liar`
        return optuna.samplers.TPESampler(seed=0, constant_liar=True)


def _study(sampler: Sampler, direction: str) -> Any:
    """A study of Optuna, which is an extra."""
    try:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        samplers = optuna.samplers
        known: dict[str, Callable[[], Any]] = {
            "tpe": partial(_tpe, optuna),
            "random": lambda: samplers.RandomSampler(seed=0),
            "cmaes": lambda: samplers.CmaEsSampler(seed=0, warn_independent_sampling=False),
        }
        made = known[sampler]()
    except ImportError as error:
        raise SettingsError(
            f"--search optuna needs the extra fedbilevel[optuna] ({error.name} is not installed); "
            "pip install 'fedbilevel[optuna]'"
        ) from None
    return optuna.create_study(sampler=made, direction=direction)


def _sampled(
    study: Any,
    axes: Sequence[Axis | Range],
    trials: int,
    specs_of: Callable[[Point], list[Spec]],
    scores: Callable[..., list[float | None]],
    mode: Mode,
) -> tuple[list[Point], list[list[Spec]], list[float | None]]:
    """Points that a sampler draws, a few at a time. The sampler has a seed, so the same command draws the same."""
    points, specs, values = list[Point](), list[list[Spec]](), list[float | None]()
    while len(points) < trials:
        asked = [study.ask() for _ in range(min(ASKED, trials - len(points)))]
        new = [_joined([_suggested(t, str(n), axis) for n, axis in enumerate(axes)]) for t in asked]
        groups = [specs_of(point) for point in new]
        found = scores(groups)
        for trial, value in zip(asked, found, strict=True):
            if value is None:
                study.tell(trial, state=_failed())
            else:
                study.tell(trial, value if mode == "max" else -value)
        points, specs, values = points + new, specs + groups, values + found
    return points, specs, values


def _failed() -> Any:
    import optuna

    return optuna.trial.TrialState.FAIL


def _suggested(trial: Any, name: str, axis: Axis | Range) -> Point:
    if not isinstance(axis, Range):
        return axis[trial.suggest_categorical(name, range(len(axis)))]
    ((key, low),), ((_, high),) = axis.low.items(), axis.high.items()
    if isinstance(low, int) and isinstance(high, int):
        return {key: trial.suggest_int(name, low, high)}
    return {key: float(f"{trial.suggest_float(name, low, high, log=low > 0):.4g}")}


def _joined(parts: Sequence[Point]) -> Point:
    return {key: value for part in parts for key, value in part.items()}


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


def parse_axis(text: str, ranges: bool = False) -> Axis | Range:
    """`a.b=1;2;3`, or settings that move together: `a.b,a.c=1,10;2,20`; with `ranges` also `a.b=0.01..0.5`."""
    names, equals, values = text.partition("=")
    keys = [name.strip() for name in names.split(",")]
    if not equals or not all(keys):
        raise SettingsError(f"--grid {one_line(text)} is wrong: write key=v1;v2, or key1,key2=a1,a2;b1,b2")
    low, dots, high = values.partition("..")
    if ranges and dots and len(keys) == 1:
        ends = [parse_value(end.strip(), f"--grid {keys[0]}") for end in (low, high)]
        numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
        if len(numbers) < 2 or numbers[0] >= numbers[1]:
            raise SettingsError(f"--grid {one_line(text)} is wrong: a range goes from a number to a larger one")
        return Range({keys[0]: numbers[0]}, {keys[0]: numbers[1]})
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
