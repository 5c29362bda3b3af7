"""A study: the runs of one table or figure of the paper, with the paper's values beside them.

Each study is one TOML file in `specs/`. It has `common` settings, and `[[runs]]`, each with a label, its settings
and the paper's values. `vary` makes one run for each value of a setting. `in_panels` repeats all runs in each
panel, with the panel's own settings. A run is identified by the digest of its resolved spec, so studies can share
runs. `y` is the accuracy that a study or one of its runs is about, on test rows or on training rows; a list gives
one line for each, and the paper's values belong to the first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

from ..errors import SettingsError, UnknownName
from ..report import ROWS
from ..spec import Spec, load_spec
from .application import application_names

Kind = Literal["rounds", "accuracy", "curves", "points", "exchanges"]
QUICK = 0.05  # the share of the rounds that a quick study runs


@dataclass(frozen=True)
class StudyRun:
    """One line of a table or a figure: a spec without its seed, and the paper's values for it."""

    label: str
    panel: int
    overrides: Mapping[str, Any]
    paper: Mapping[str, Any]
    at: float | str | None = None  # its place on the axis of a study of points
    y: str = "test_accuracy"  # the accuracy that its line shows

    def spec(self, seed: int, share: float = 1.0) -> Spec:
        """The resolved spec for a seed; `share` shortens its budget of rounds."""
        spec = load_spec("paper", {**self.overrides, "seed": seed})
        if share < 1.0 and spec.stop.rounds is not None:
            spec = replace(spec, stop=replace(spec.stop, rounds=max(20, round(spec.stop.rounds * share))))
        return spec


@dataclass(frozen=True)
class Study:
    """A table or a figure: its title, its runs, and how it is drawn.

    `share` is the share of the paper's rounds that is run. If it is below one, the written results say so.
    """

    name: str
    title: str
    kind: Kind
    runs: tuple[StudyRun, ...]
    panels: tuple[str, ...] = ()
    note: str = ""
    x: str = "rounds"  # for curves, rounds, iterations or minutes; for points, the meaning of the axis
    axes: Mapping[int, str] = field(default_factory=dict)  # the panels of curves that have another axis
    share: float = 1.0
    iteration: int = 1  # for exchanges, the outer iteration that is drawn

    @property
    def is_costed(self) -> bool:
        """Whether the study shows what outer iterations cost, for which one seed and a few of them suffice."""
        return self.kind in ("rounds", "exchanges")

    def shortened(self, share: float) -> Study:
        return self if self.is_costed else replace(self, share=share)


def study_names() -> list[str]:
    """The studies that come with the library."""
    folder = resources.files("fedbilevel.studies") / "specs"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def load_study(name: str) -> Study:
    """Read a study and check all of its specs."""
    if name not in study_names():
        raise UnknownName("study", name, [*study_names(), *application_names()])
    text = (resources.files("fedbilevel.studies") / "specs" / f"{name}.toml").read_text()
    raw = tomllib.loads(text)
    common = raw.get("common", {})
    parts = raw.get("in_panels", [{}])
    runs = tuple(
        made
        for panel, own in enumerate(parts)
        for run in raw["runs"]
        for made in _runs({"panel": panel, "y": raw.get("y", "test_accuracy"), **run}, {**common, **own})
    )
    study = Study(
        name,
        raw["title"],
        raw["kind"],
        runs,
        tuple(raw.get("panels", ())),
        raw.get("note", ""),
        raw.get("x", "rounds"),
        share=raw.get("share", 1.0),
        axes={int(panel): axis for panel, axis in raw.get("axes", {}).items()},
        iteration=raw.get("iteration", 1),
    )
    for run in runs:
        try:
            if run.y not in ROWS:
                raise UnknownName("y =", run.y, ROWS)
            if run.y == "train_accuracy" and not run.spec(0).evaluate.train:
                raise SettingsError("y = 'train_accuracy' needs evaluate.train = true")
            run.spec(0)
        except SettingsError as error:
            raise SettingsError(f"study {name}, {run.label}: {error}") from None
    return study


def _runs(run: Mapping[str, Any], common: Mapping[str, Any]) -> list[StudyRun]:
    """The run, or one for each accuracy that it shows and each value of the key that it varies."""
    shown = [run["y"]] if isinstance(run["y"], str) else run["y"]
    settings, paper = _overrides({**common, **run["set"]}), run.get("paper", {})
    made = [StudyRun(run["label"], run["panel"], settings, {} if i else paper, y=y) for i, y in enumerate(shown)]
    if "vary" not in run:
        return made
    ((key, values),) = run["vary"].items()
    return [
        replace(each, overrides={**each.overrides, **_overrides({key: value})}, at=value)
        for each in made
        for value in values
    ]


def _overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if value == "none" else value for key, value in values.items()}
