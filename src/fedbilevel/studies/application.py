"""An application: methods and controls (rows) on settings of one problem (columns), tuned and compared alike.

Each application is one TOML file in `applications/`:

title = "Client weights: which clients help?"
spec = "client-weights"          # the spec that every run begins from
metric = "test_accuracy"         # what the table shows
select = "valid_accuracy"        # the metric by which settings are chosen; never from test rows
also = ["test_loss"]             # further metrics, with a table each
found = ["auc"]                  # the same, for what bilevel methods have found: controls are left out
points = 6                       # so many points are tried of every row in every column
over_time = { weight = "weight of a client" }   # metrics to draw over the rounds, for the first bilevel row
equal_bytes = true               # also the metric when every row has sent as much as the row that sends least
quality = true                   # also the angle between the way of x and the true hypergradient
note = "..."

[common]                         # settings of all runs
"stop.rounds" = 300

[[columns]]
label = "MNIST, half bad"
set = { "data.name" = "mnist" }
spec = "cleaning"                # the spec of this column, if it is another one


[[rows]]
label = "bilevel"
kind = "bilevel"                 # bilevel; control; or oracle, which knows what nobody knows
set = { "algorithm.name" = "fedsoba" }
tries = { "algorithm.alpha" = [50.0, 100.0, 200.0], "algorithm.beta" = [0.3, 0.5] }
columns = ["MNIST, half bad"]    # the columns in which it is run, if not all

[rows.tries_in."MNIST, half bad"]  # other lists in a column, of as many points
"algorithm.alpha" = [5.0, 10.0, 20.0]

The points of a row are the product of its lists. A key may name several settings that have the same value:
`"algorithm.beta,algorithm.lam"`. Points are tried with seed 0, and the table has the seeds from 1 on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal, get_args

from ..errors import SettingsError, UnknownName
from ..reading import parse_toml
from ..record import Mode, direction
from ..settings import suggestion
from ..spec import Spec, load_spec

Kind = Literal["bilevel", "control", "oracle"]
Overrides = Mapping[str, Any]
SHORTEST = 20  # rounds of a shortened run
TUNING = 0  # the seed with which points are tried; the table has the seeds after it


@dataclass(frozen=True)
class Column:
    """A setting in which all rows are compared. `spec` is its own spec, if it is not that of the application."""

    label: str
    set: Overrides
    spec: str | None = None


@dataclass(frozen=True)
class Row:
    """A method or a control, and the points of it that are tried. `columns` are those it is run in; empty: all.

    `tries_in` has the lists of columns that need others, such as step sizes of another order.
    """

    label: str
    kind: Kind
    set: Overrides
    tries: Mapping[str, tuple[Any, ...]]
    columns: tuple[str, ...] = ()
    tries_in: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)

    def points(self, column: Column) -> list[dict[str, Any]]:
        """The settings of each point in a column."""
        made, lists = [], {**self.tries, **self.tries_in.get(column.label, {})}
        for values in itertools.product(*lists.values()):
            pairs = zip(lists, values, strict=True)
            made.append({name.strip(): value for names, value in pairs for name in names.split(",")})
        return made


@dataclass(frozen=True)
class Application:
    """Rows and columns of a comparison; see the text of this module. `share` shortens the runs."""

    name: str
    title: str
    spec: str
    metric: str
    select: str
    points: int
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    also: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    note: str = ""
    common: Overrides = field(default_factory=dict)
    over_time: Mapping[str, str] = field(default_factory=dict)
    equal_bytes: bool = False
    quality: bool = False
    share: float = 1.0

    @property
    def mode(self) -> Mode:
        """Whether larger or smaller values of the metric are better."""
        return direction(self.metric)

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics that are written, the main one first."""
        return (self.metric, *self.also, *self.found)

    @property
    def cells(self) -> list[tuple[Row, Column]]:
        """Every row in every column that it is run in, one column after the other."""
        return [(r, c) for c in self.columns for r in self.rows if not r.columns or c.label in r.columns]

    def of(self, row: Row, column: Column, point: Overrides, seed: int) -> Spec:
        """The spec of a point of a row in a column."""
        values = {**self.common, **column.set, **row.set, **point, "seed": seed}
        spec = load_spec(
            column.spec or self.spec, {key: None if value == "none" else value for key, value in values.items()}
        )
        if self.share < 1.0 and spec.stop.rounds is not None:
            spec = replace(
                spec, stop=replace(spec.stop, rounds=max(SHORTEST, round(spec.stop.rounds * self.share)))
            )
        return spec

    def shortened(self, share: float) -> Application:
        return replace(self, share=share)


def application_names() -> list[str]:
    """The applications that come with the library."""
    folder = resources.files("fedbilevel.studies") / "applications"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def load_application(name: str) -> Application:
    """Read an application of the library."""
    if name not in application_names():
        raise UnknownName("application", name, application_names())
    return read_application(
        (resources.files("fedbilevel.studies") / "applications" / f"{name}.toml").read_text(), name
    )


def read_application(text: str, name: str) -> Application:
    """Read an application and check its specs. Every row must try the same number of points."""
    raw = parse_toml(text)
    known = [*Application.__dataclass_fields__]
    for key in raw:
        if key not in known:
            raise SettingsError(f"application {name}: {key} is not a setting; {suggestion(key, known)}")
    columns = tuple(Column(each["label"], each.get("set", {}), each.get("spec")) for each in raw.pop("columns"))
    rows = tuple(
        Row(
            each["label"],
            each.get("kind", "control"),
            each.get("set", {}),
            _lists(each.get("tries", {})),
            tuple(each.get("columns", ())),
            {label: _lists(lists) for label, lists in each.get("tries_in", {}).items()},
        )
        for each in raw.pop("rows")
    )
    lists: dict[str, Any] = {key: tuple(raw.pop(key, ())) for key in ("also", "found")}
    made = Application(name=name, columns=columns, rows=rows, **lists, **raw)
    for row in rows:
        _check(made, row)
    return made


def _lists(raw: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {key: tuple(values) for key, values in raw.items()}


def _check(made: Application, row: Row) -> None:
    where = f"application {made.name}, {row.label}"
    if row.kind not in get_args(Kind):
        raise UnknownName(f"{where}: kind =", row.kind, get_args(Kind))
    labels = [column.label for column in made.columns]
    for name, given in (("columns", row.columns), ("tries_in", tuple(row.tries_in))):
        for label in given:
            if label not in labels:
                raise UnknownName(f"{where}: {name} =", label, labels)
    for other, column in made.cells:
        if other == row:
            if len(row.points(column)) != made.points:
                raise SettingsError(
                    f"{where}: it tries {len(row.points(column))} points, and points = {made.points}: every row "
                    "has the same budget; give its lists that many combinations"
                )
            for point in row.points(column):
                try:
                    spec = made.of(row, column, point, TUNING)
                except SettingsError as error:
                    raise SettingsError(f"{where}, {column.label}: {error}") from None
                if (
                    spec.stop.rounds is not None
                    and 2 * spec.evaluate.window > spec.stop.rounds
                    and made.share == 1.0
                ):
                    raise SettingsError(
                        f"{where}: evaluate.window = {spec.evaluate.window} is more than half of stop.rounds = "
                        f"{spec.stop.rounds}; figures at the end are means over the window, so set a shorter one"
                    )
