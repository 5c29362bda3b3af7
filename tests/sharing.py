"""The engines of a test process share what they compile, and runs of equal specs share their task.

Hundreds of tests run a small spec, some of them three times, and each run would trace and compile the same
programs again: 40 processor seconds of test_cohorts.py became 13. Here the programs belong to the problem, because
two simulations of one problem have the same programs, and so have two loops. A built-in problem is made once from
the same settings. Processes that tests start compile as usual.

The curve of a run takes 50 ms, and hundreds of runs have one. So it is drawn once, and the other runs of the
process get a copy of it. `tests/test_report.py` and `tests/test_metrics.py` draw curves and look at them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from fedbilevel.engines import Loop, Simulation
from fedbilevel.problem import Problem, Task
from fedbilevel.problems import HyperRepresentation, Quadratic
from fedbilevel.run import _ending
from fedbilevel.spec import Spec

EMBEDDED = ("digits", "generated")  # data that no test replaces


def _programs(engine: Any, *key: Any) -> None:
    """Give an engine the programs of the first engine of its kind on the same problem."""
    if isinstance(engine.problem, Problem):
        shared = vars(engine.problem).setdefault("_shared", {})
        engine._programs, engine._remember = shared.setdefault(key, (engine._programs, engine._remember))


def share() -> None:
    """Let engines, specs and runs of this process share. Tests that must see a compilation call the originals."""
    simulation, loop, make = Simulation.__init__, Loop.__init__, Spec.task

    @functools.wraps(simulation)
    def begin_simulation(self: Simulation, *arguments: Any, **options: Any) -> None:
        simulation(self, *arguments, **options)
        _programs(self, "simulation", self._over, self._mesh)

    @functools.wraps(loop)
    def begin_loop(self: Loop, *arguments: Any, **options: Any) -> None:
        loop(self, *arguments, **options)
        _programs(self, "loop")

    made: dict[Any, Task] = {}

    @functools.wraps(make)
    def task(self: Spec) -> Task:
        if not isinstance(self.problem, Quadratic | HyperRepresentation) or self.data.name not in EMBEDDED:
            return make(self)
        key = self.problem, self.data, self.seed
        if key not in made:
            made[key] = make(self)
        return made[key]

    draw, drawn = vars(_ending)["draw_curve"], list[bytes]()

    @functools.wraps(draw)
    def curve(history: Any, path: Path, *title: Any) -> None:
        if drawn:
            path.write_bytes(drawn[0])
        else:
            draw(history, path, *title)
            drawn.append(path.read_bytes())

    for kind, name, function in (
        (Simulation, "__init__", begin_simulation),
        (Loop, "__init__", begin_loop),
        (Spec, "task", task),
        (_ending, "draw_curve", curve),
    ):
        setattr(kind, name, function)
