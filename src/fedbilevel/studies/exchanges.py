"""The diagrams of figure 1, left and middle: the exchanges of an outer iteration that was really run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..report import Exchange, Iteration
from ..spec import Spec
from .study import StudyRun
from .trace import TracedRound, loops, trace

WORK = {  # what a client does in a round, by the derivatives that it takes
    ("g_y",): "lower gradient",
    ("f_y",): "upper gradient",
    ("g_yy",): "Hessian product",
    ("g_y", "f_y"): "lower and upper gradient",
    ("g_y", "g_yy"): "gradient, Hessian product",
    ("f_x", "g_xy"): "hypergradient",
}
FORMULA = {
    "g_y": r"\nabla_y g_i",
    "f_y": r"\nabla_y f_i",
    "f_x": r"\nabla_x f_i",
    "g_yy": r"\nabla_y^2 g_i\,{v}",
    "g_xy": r"\nabla_x\nabla_y g_i\,{v}",
}
ESTIMATE = {"f_y", "g_yy"}  # the derivatives of which the Hessian-inverse-vector product is made
KEY = (
    "Blue: the server sends. Red: clients reply, the server averages.",
    "$x$, $y$: upper and lower variable; $y^t$: a lower iterate; clients hold them",
    "$q^t$: mean lower gradient, which corrects the local steps",
    "$r$, $p_t$ and $z^t$: build $p \\approx (\\nabla_y^2 g)^{-1}\\, \\nabla_y f$ (rounds in bold)",
    "$h$: mean hypergradient; $x^+$: the next $x$",
)
INDEXED = ("y", "q", "z")  # the vectors that belong to a lower iterate y^t


def iteration_of(run: StudyRun, spec: Spec, number: int) -> tuple[Iteration, list[dict[str, Any]]]:
    """The outer iteration of this number as a diagram, and as rows of a table."""
    rounds = trace(spec, number)[-1]
    spans = loops([one.step for one in rounds])
    values = spec.to_mapping()["algorithm"]
    settings = ", ".join(f"{name} = {values[name]}" for name in ("N", "T") if name in values)
    count = "one loop" if len(spans) == 1 else f"{len(spans)} loops"
    subtitle = f"{len(rounds)} rounds, {count}  ({run.paper['formula']} with {settings})"
    exchanges, rows = [], []
    for place, (one, (down, up)) in enumerate(zip(rounds, _labels(rounds), strict=True)):
        strong = not ESTIMATE.isdisjoint(one.taken)
        exchanges.append(Exchange(_math(down), _math(up), _work(one), _formula(one, down), strong))
        inside = next((turn + 1 for turn, span in enumerate(spans) if span.start <= place < span.end), None)
        row = {"algorithm": run.label, "round": place + 1, "loop": inside, "step": one.step}
        rows.append({**row, "down": ", ".join(down), "up": ", ".join(up), "client": _work(one)})
    return Iteration(run.label, subtitle, exchanges, spans), rows


def _labels(rounds: Sequence[TracedRound]) -> Iterator[tuple[list[str], list[str]]]:
    """The vectors of each round with their indices: those that go down, and those that come back.

    The server gives clients a new y to hold for every lower iterate, so t is the number of those so far. A vector
    of the Hessian loop that is sent down and comes back has a counter of its own.
    """
    t, k = -1, 0
    for one in rounds:
        t += "y" in one.held
        given, back = [*one.held, *one.down], [*one.up]
        turning = set(given) & set(back) - set(INDEXED) - {"x"}

        def down(name: str, t: int = t, k: int = k, turning: set[str] = turning) -> str:
            if name in INDEXED:
                return f"{name}^{t - 1 if name == 'z' else t}"
            return f"{name}_{k}" if name in turning else name

        def up(name: str, t: int = t, k: int = k, turning: set[str] = turning) -> str:
            if name in INDEXED:
                return f"{name}^{t + 1 if name == 'y' else t}"
            return "x^+" if name == "x" else f"{name}_{k + 1}" if name in turning else name

        yield [down(name) for name in given], [up(name) for name in back]
        k += bool(turning)


def _work(one: TracedRound) -> str:
    if one.local:
        return f"local steps on {next(iter(one.up))}"
    return WORK.get(one.taken, ", ".join(one.taken))


def _formula(one: TracedRound, down: Sequence[str]) -> str:
    given = [label for label in down if label.partition("^")[0].partition("_")[0] in one.down]
    parts = [FORMULA[each].format(v=given[0] if given else "") for each in one.taken]
    if one.taken == ("f_x", "g_xy"):
        return f"${parts[0]} - {parts[1]}$"
    along = f" and ${given[0]}$" if one.local and given else ""
    return ", ".join(f"${part}$" for part in parts) + along


def _math(labels: Sequence[str]) -> str:
    return ",  ".join(f"${label}$" for label in labels)
