"""The end of a run: its summary, what its folder is given, and its result.

A run that fails ends in the same way as one that ends well, with the reason in its summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..algorithms import SolvesAtClients
from ..own import KEPT, OwnVariables, own_part
from ..problem import Finding
from ..record import RunFolder, summarise
from ..report import draw_curve, draw_finding, draw_worst, ranked, write_run_page
from ..runtime import peak_memory
from ._course import Course
from ._evaluation import spent
from ._personal import join, own_lowers
from ._watching import Result


def finish(course: Course, **more: Any) -> None:
    """Sum up a run that has ended, well or not, and write the files of its folder that come last.

    more   further entries of the summary, such as `failure`
    """
    course.summary = summarise(
        course.records,
        course.ledger.to_mapping(),
        window=course.setup.evaluate.window,
        **_figures(course),
        **more,
    )
    if course.folder is not None and course.writes:
        _fill(course.folder, course)
    course.logs.finish(course.summary)


def result_of(course: Course) -> Result:
    """The result of a run that is finished. Its engine is still open."""
    problem, folder = course.setup.task.problem, course.folder
    x, y = (jnp.asarray(vector) for vector in (course.state.x, course.state.y))
    x, y = problem.flat_x.restore(x), problem.flat_y.restore(y)
    return Result(
        None if folder is None else folder.path,
        course.summary,
        course.records,
        x,
        y,
        _own(course),
        _lower(course),
        partial(join, problem, course.algorithm, course.state.x),
    )


def _figures(course: Course) -> dict[str, Any]:
    """What the summary has beside the records and the ledger."""
    figures: dict[str, Any] = {
        "seconds": course.ledger.seconds,
        "compilations": course.compilations[0],
        "peak_memory_mb": peak_memory(),
    }
    figures |= spent(course.accountant, course.fed)
    if course.restarts:
        figures["restarts"] = [each._asdict() for each in course.restarts]
    if course.automatics.values:
        figures["steps"] = course.automatics.to_mapping()
    if "floor" in course.notes:
        figures["floor"] = course.notes["floor"]
    if course.chosen is not None:
        figures["engine"] = course.chosen.to_mapping()
    if advice := [text for kind, text in course.notes.items() if kind not in ("steps", "engine", "floor")]:
        figures["notes"] = advice
    if course.ended_early:
        figures["ended_by"] = "observer"
    return figures | {"spec": course.setup.plan.identity, "clients": course.setup.task.clients.count}


def _fill(folder: RunFolder, course: Course) -> None:
    """Write the summary, the finding, the pictures and the page of the run."""
    folder.write_json("summary.json", course.summary)
    found, title = _finding(course), course.setup.title
    if found is not None:
        folder.write("finding.csv", ranked(found).encode())
    if not course.setup.draws:
        return
    draw_curve(course.records, folder.file("curve.png"), title, course.setup.evaluate.metric)
    if found is not None:
        draw_finding(found, folder.file("finding.png"), title)
        if found.picture is not None:
            draw_worst(found, folder.file("worst.png"), title)
    write_run_page(folder)


def _finding(course: Course) -> Finding | None:
    """What x says about clients, rows or other things, if the task has a word for it and x is finite."""
    find, x = course.setup.task.finding, course.state.x
    return None if find is None or not np.isfinite(x).all() else find(x, course.state.y)


def _own(course: Course) -> Mapping[int, Any] | None:
    """The own variables of every client, which last beyond the engine; None if they are not here."""
    part, states = own_part(course.setup.task.problem), course.states
    if part is None or states is None:
        return None
    kept = {client: states.read(client, course.ledger.clock).get(KEPT) for client in states}
    return OwnVariables(part, course.setup.task.clients, kept.get)


def _lower(course: Course) -> Mapping[int, Any] | None:
    """The y of every client that has kept one, as pytrees; None if clients keep none, or keep it elsewhere."""
    algorithm, states = course.algorithm, course.states
    if not isinstance(algorithm, SolvesAtClients) or not algorithm.own_lower().kept or states is None:
        return None
    return own_lowers(course.setup.task.problem, states, course.ledger.clock)
