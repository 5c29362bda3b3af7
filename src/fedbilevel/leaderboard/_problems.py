"""The problems of the leaderboard: one TOML each, in `problems/` or anywhere else.

title = "Quadratic"
select = "hypergradient_norm"    # the metric by which settings are chosen; smaller is better, never from test rows
show = "hypergradient_norm"      # the metric of the curves and the targets
relative = true                  # it is shown as a share of its value at the start
targets = [0.1, 0.01]
rounds = 400                     # the budget of a run
look = 4                         # about so many rounds are between two evaluations
cohort = 1.0                     # the clients of a cohort: a number, or a share
rows = "full"                    # the most rows of a level that a client draws in a round
alpha = [0.01, 1.0]              # the range of upper step sizes
beta = [0.1, 1.0]                # the range of all lower ones, times 1/L_g
floor = 10                       # a run of so many times the rounds shows where the chosen settings end; 0: none
quick = ["h1-all"]               # what of it belongs to --quick; true or false if nothing is varied

[spec]                           # everything else that decides a run
problem = { name = "quadratic" }

[vary.cohort]                    # one problem for each combination of these, named by the words
all = 1.0
half = 0.5
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import SettingsError, UnknownName, shown
from ..problems import PROBLEMS
from ..reading import Unreadable, parse_toml
from ..record import Mode, direction
from ..settings import suggestion


@dataclass(frozen=True)
class BoardProblem:
    """A problem, its budget, its metrics and the ranges that are searched; see the text of this module."""

    name: str
    title: str
    select: str
    show: str
    targets: tuple[float, ...]
    rounds: int
    alpha: tuple[float, float]
    beta: tuple[float, float]
    look: int = 1
    cohort: int | float = 1.0
    rows: int | str = "full"
    relative: bool = False
    floor: int = 0
    quick: bool = False
    spec: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> Mode:
        """Whether larger or smaller values of the shown metric are better."""
        return direction(self.show)

    @property
    def is_registered(self) -> bool:
        """Whether the problem that its spec names is there; another package may add it."""
        named = self.spec.get("problem", {})
        return (named.get("name") if isinstance(named, Mapping) else named) in PROBLEMS


def problem_names() -> list[str]:
    """The names of all problems of the leaderboard that can be run."""
    return [each.name for each in load_problems()]


def load_problems(names: Sequence[str] = ()) -> list[BoardProblem]:
    """The problems of these names, or all; a name may be that of a file, or the path of a TOML of one's own."""
    folder = resources.files("fedbilevel.leaderboard") / "problems"
    files = sorted(each.name for each in folder.iterdir() if each.name.endswith(".toml"))
    known = [p for file in files for p in _read((folder / file).read_text(), file.removesuffix(".toml"))]
    known = [each for each in known if each.is_registered]
    if not names:
        return known
    chosen: list[BoardProblem] = []
    for name in names:
        if name.endswith(".toml"):
            path = Path(name)
            if not path.is_file():
                raise SettingsError(f"--problems {name} is wrong: there is no such file")
            chosen += _read(path.read_text(encoding="utf-8"), path.stem)
            continue
        own = [each for each in known if each.name == name or each.name.startswith(f"{name}-")]
        if not own:
            raise UnknownName("--problems", name, [each.name for each in known])
        chosen += own
    return list({each.name: each for each in chosen}.values())


def _read(text: str, stem: str) -> list[BoardProblem]:
    """The problems of a file."""
    try:
        raw = parse_toml(text)
    except Unreadable as error:
        raise SettingsError(f"leaderboard problem {stem} {error}") from None
    vary, quick = raw.pop("vary", {}), raw.pop("quick", False)
    known = [each.name for each in fields(BoardProblem) if each.name != "name"]
    for key in raw:
        if key not in known:
            raise SettingsError(f"leaderboard problem {stem}: {key} is not a setting; {suggestion(key, known)}")
    missing = [key for key in ("title", "select", "show", "targets", "rounds", "alpha", "beta") if key not in raw]
    if missing:
        raise SettingsError(f"leaderboard problem {stem}: {', '.join(missing)} is missing; set it")
    if direction(raw["select"]) != "min":
        raise SettingsError(
            f"leaderboard problem {stem}: select = {shown(raw['select'])} is wrong: settings are chosen by a loss "
            "or a norm, of which smaller is better; use upper_loss"
        )
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    base = BoardProblem(name=stem, quick=quick is True, **plain)
    made = []
    for words in itertools.product(*(table.items() for table in vary.values())):
        one = base
        for key, (_, value) in zip(vary, words, strict=True):
            one = _with(one, key, value)
        label = "-".join(word for word, _ in words)
        title = (
            f"{base.title}, {', '.join(map(_told, vary, (value for _, value in words)))}" if words else base.title
        )
        own = quick is True or (isinstance(quick, list) and label in quick)
        made.append(replace(one, name=f"{stem}-{label}" if label else stem, title=title, quick=own))
    return made


def _with(problem: BoardProblem, key: str, value: Any) -> BoardProblem:
    """The problem with another value of one of its own settings, or of one of its spec."""
    if "." not in key:
        return replace(problem, **{key: value})
    spec = copy.deepcopy(dict(problem.spec))
    section, _, name = key.partition(".")
    spec[section] = {**spec.get(section, {}), name: value}
    return replace(problem, spec=spec)


def _told(key: str, value: Any) -> str:
    return f"{key.rpartition('.')[2]} {value:g}" if isinstance(value, int | float) else f"{key} {value}"
