"""Methods on one problem of the leaderboard: the runs of a grid, the choice of a point, and its other seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console

from .._divergence import largest_curvature
from ..algorithms.local import State
from ..engines import ENGINES, FusedSettings
from ..errors import FedBilevelError, SettingsError
from ..federation import Federation
from ..problem import Task
from ..problems import Quadratic
from ..report import Reached
from ..spec import Spec, check_problem, parse
from ..stepsizes import step_sizes
from ..studies import Runs, alone, do_runs_or_alone
from ..studies.counting import Cost, costs
from ..theory import floor_of
from ..trials import trials_of
from ._entries import Entry, Point, at_edge, grid
from ._problems import BoardProblem
from ._results import AXES, Seen, at_the_end, seen, stays

MEASURED = 20  # clients on which the curvature of a problem is measured
ALIKE = 30  # outer iterations whose work is counted before all others are taken to be like them
WITHIN = 2.0  # a point is about as good as the best one within this factor


@dataclass
class Bench:
    """A problem of the leaderboard, on which methods are tried."""

    problem: BoardProblem
    runs: Runs
    jobs: int
    console: Console
    tasks: dict[int, Task] = field(default_factory=dict)
    known: dict[Any, Cost] = field(default_factory=dict)
    L: float = 0.0

    def enter(self, method: Entry, seeds: int, points: int) -> Entered:
        """Tune a method and run the chosen settings."""
        try:
            if self.problem.cohort != 1.0 and not method.samples:
                raise SettingsError("it has no cohorts: all clients take part in every iteration")
            self.L = self.L or self._curvature()
            tried = grid(method, self.problem, self.L, points)
            made, refused = self._specs(method, tried)
            done = dict(zip(made, self._do([*made.values()]), strict=True))
        except FedBilevelError as error:
            return Entered(method, refused=_first_part(error))
        values = [self._value(done[number]) if number in done else None for number in range(len(tried))]
        sound = [number for number, value in enumerate(values) if value is not None]
        entered = Entered(method, tried=tried, values=values, outside=refused)
        if not sound:
            return entered
        best = min(sound, key=lambda number: values[number] or 0.0)
        entered.chosen, entered.edge = tried[best], at_edge(method, tried[best], tried)
        chosen = [self._spec(method, tried[best], seed) for seed in range(1, seeds + 1)]
        if not isinstance(done[best].federation.engine, FusedSettings):
            chosen = [alone(each) for each in chosen]
        long = [self._longer(each) for each in chosen] if self.problem.floor else []
        self._do([*long, *chosen])
        entered.spec = chosen[0]
        entered.failures = [self.runs.failure(each) for each in chosen]
        entered.runs = [self._seen(each) for each in chosen]
        if long:
            closed, ends = [self._closed(each) for each in chosen], [self._end_of(each) for each in long]
            entered.closed = _median(closed)
            entered.floor = _median([_larger(a, b) for a, b in zip(closed, ends, strict=True)])
        return entered

    def _specs(self, method: Entry, tried: Sequence[Point]) -> tuple[dict[int, Spec], int]:
        """The specs of the points that the method accepts, by number, and how many it refuses.

        A method that refuses all of them does not fit the problem. One that refuses some says that its settings
        have limits, such as a weight of at most one.
        """
        made, wrong = dict[int, Spec](), list[SettingsError]()
        for number, point in enumerate(tried):
            try:
                made[number] = self._spec(method, point, 0)
            except SettingsError as error:
                wrong.append(error)
        if not made:
            raise wrong[0]
        return made, len(wrong)

    def _value(self, spec: Spec) -> float | None:
        """The metric by which settings are chosen, at the end of a run; None if the run diverged."""
        return None if self.runs.failure(spec) else at_the_end(self.runs.history(spec), self.problem.select)

    def _do(self, specs: Sequence[Spec]) -> list[Spec]:
        return do_runs_or_alone(specs, self.runs, jobs=self.jobs, console=self.console)

    def _longer(self, spec: Spec) -> Spec:
        """The spec of the long run that shows the floor. It is evaluated less often."""
        times, every = self.problem.floor, spec.evaluate.every
        rare = replace(spec.evaluate, every=times * every, checkpoint_every=20 * times * every)
        return replace(spec, evaluate=rare, stop=replace(spec.stop, rounds=times * self.problem.rounds))

    def _closed(self, spec: Spec) -> float | None:
        """The floor of a method from its closed form on a quadratic with all clients, as it is shown, if known."""
        if not isinstance(spec.problem, Quadratic) or self.problem.show != "hypergradient_norm":
            return None
        made = spec.problem.make(spec.data.clients, spec.seed)
        found, start = (
            floor_of(made, spec.algorithm),
            float(np.linalg.norm(made.hypergradient(np.zeros(made.size_x)))),
        )
        return found / start if found is not None and self.problem.relative else found

    def _spec(self, method: Entry, point: Point, seed: int) -> Spec:
        """The spec of a point. Its rows and its evaluations follow from what an iteration draws and costs."""
        problem, known = self.problem, trials_of(method.kind)
        own: dict[str, Any] = {"name": method.name, **point}
        if method.samples:
            own["participation"] = problem.cohort
        own |= dict.fromkeys(known.rows, problem.rows)
        spec = self._parsed(own, seed, every=1)
        task = self._task(seed, spec)
        check_problem(spec.algorithm, task.problem)
        sizes = {each.setting for each in step_sizes(spec.algorithm)}
        alike = method, tuple((name, value) for name, value in point.items() if name not in sizes)
        if alike not in self.known:  # what an iteration costs does not depend on the values of its step sizes
            self.known[alike] = next(iter(costs(alone(spec), task)))
        cost = self.known[alike]
        if isinstance(problem.rows, int) and cost.rows > problem.rows:
            own |= dict.fromkeys(known.rows, max(1, problem.rows**2 // cost.rows))
        return self._parsed(own, seed, every=max(1, round(problem.look / max(cost.rounds, 1))))

    def _parsed(self, algorithm: dict[str, Any], seed: int, every: int) -> Spec:
        base = self.problem.spec
        return parse(
            {
                **base,
                "seed": seed,
                "algorithm": algorithm,
                "federation": {**base.get("federation", {}), **self._cohorts(algorithm)},
                "evaluate": {**base.get("evaluate", {}), "every": every, "checkpoint_every": 20 * every},
                "stop": {"rounds": self.problem.rounds},
            }
        )

    @staticmethod
    def _cohorts(algorithm: dict[str, Any]) -> dict[str, Any]:
        return {"cohort_by": "iterations"} if "participation" in algorithm else {}

    def _task(self, seed: int, spec: Spec) -> Task:
        if seed not in self.tasks:
            self.tasks[seed] = spec.task()
        return self.tasks[seed]

    def _curvature(self) -> float:
        """L_g: the largest norm of ∇²_y g_i among some clients at the start, measured once for all methods."""
        spec = self._parsed({"name": "fedsoba"}, 0, every=1)
        task = self._task(0, spec)
        x, y = task.problem.flat_x.vector, task.problem.flat_y.vector
        with closing(ENGINES["simulation"]().build(task.problem, task.clients)) as engine:
            fed = Federation(engine)
            found = largest_curvature(fed, State(x, y), fed.clients[:MEASURED], 0)
        if not found:
            raise SettingsError("the curvature of the lower loss could not be measured at the start")
        return found

    def _end_of(self, spec: Spec) -> float | None:
        """The shown metric at the end of a run."""
        history = self.runs.history(spec)
        end, first = at_the_end(history, self.problem.show), history[0].get(self.problem.show)
        return end / first if end is not None and first and self.problem.relative else end

    def _seen(self, spec: Spec) -> list[Seen]:
        """A run as it is shown, with what its clients have computed."""
        history, task = self.runs.history(spec), self._task(spec.seed, spec)
        iterations = max((record["iteration"] for record in history), default=0)
        each = costs(alone(spec), task)
        known = [cost.work for cost in itertools.islice(each, min(iterations, ALIKE))]
        if len(set(known)) == 1:  # a method that draws nothing of its own does the same in every iteration
            known *= iterations
        known += [cost.work for cost in itertools.islice(each, max(0, iterations - len(known)))]
        work = [0.0, *np.cumsum(known).tolist()]
        return seen(history, self.problem, work, task.clients.count)


@dataclass
class Entered:
    """What came out for a method on a problem.

    refused    why it cannot be run on the problem, if so
    tried      the points of its grid, with the value of each at the end; None if it diverged
    outside    how many of them the method refuses, because a setting has a limit
    chosen     the point with the smallest value; none if all diverged
    edge       the step sizes of it that are at the end of the range
    spec       the chosen point with the first of the seeds
    runs       its runs, and why any of them failed
    closed     the floor of the chosen point by its closed form, if there is one; the median over the seeds
    floor      the larger one of it and of the shown metric at the end of a long run, in the same way
    """

    method: Entry
    refused: str | None = None
    tried: list[Point] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    outside: int = 0
    chosen: Point | None = None
    edge: list[str] = field(default_factory=list)
    spec: Spec | None = None
    runs: list[list[Seen]] = field(default_factory=list)
    failures: list[str | None] = field(default_factory=list)
    closed: float | None = None
    floor: float | None = None

    @property
    def diverged(self) -> int:
        return sum(value is None for value in self.values) - self.outside

    @property
    def within(self) -> float:
        """The share of the grid that ends within twice the best value."""
        sound = [value for value in self.values if value is not None]
        return sum(value <= WITHIN * min(sound) for value in sound) / len(self.values) if sound else 0.0

    def final(self) -> float | None:
        """The median over the seeds of the shown metric over the last tenth; None if no run ended well."""
        ends = [
            float(np.mean([each.value for each in run[-max(1, len(run) // 10) :]]))
            for run, failure in zip(self.runs, self.failures, strict=True)
            if run and failure is None
        ]
        return float(np.median(ends)) if ends else None

    def reached(self, problem: BoardProblem) -> list[Reached]:
        """For each target the median place on each axis from which on runs stay there."""
        made = []
        for target in problem.targets:
            places = [
                None if failure else stays(run, target, problem.mode)
                for run, failure in zip(self.runs, self.failures, strict=True)
            ]
            there = [place for place in places if place is not None]
            enough = 2 * len(there) > len(places)
            at = {
                axis.key: float(np.median([np.inf if p is None else p[axis.key] for p in places]))
                for axis in AXES
                if enough
            }
            floor = self.floor is not None and problem.mode == "min" and self.floor > target
            made.append(Reached(at or None, len(there), len(places), forbidden=floor and not enough))
        return made


def _larger(a: float | None, b: float | None) -> float | None:
    return max((each for each in (a, b) if each is not None), default=None)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if len(known) == len(values) else None


def _first_part(error: FedBilevelError) -> str:
    """What is wrong, without the remedy; the method is what the table is about, so it is not named again."""
    text = str(error).splitlines()[0].partition("; ")[0]
    return text.partition(" is wrong: ")[2] if text.startswith("algorithm.name") else text
