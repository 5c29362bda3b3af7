"""Runs that are in one program at once, each with a `Course` of its own as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._probes import Losses, losses
from ..algorithms import Algorithm
from ..data import Clients
from ..engines import Call, Capabilities, Replies, make_call, perform
from ..errors import Diverged, StepError, TooFewReplies
from ..fused import Arrived, Lane, ManyBlocks, Track
from ..loggers import Logs
from ..oracle import Arrays
from ..problem import BilevelProblem, Over
from ..record import RunFolder
from ..rng import Address, Kind
from ..settings import numbers_of
from ..spec import Spec
from ..steps import Draw, Sample
from ._course import LONGEST, Course, Setup
from ._ending import finish, result_of
from ._train import OnDivergence, carry_out, turn_back
from ._watching import Result


@dataclass(frozen=True)
class Job:
    """A run that is wanted. `where` says in messages which one it is."""

    algorithm: Algorithm
    seed: int
    out: Path | None
    where: str
    spec: Spec | None = None


@dataclass
class _Run:
    """One of many runs, and what became of it."""

    setup: Setup
    folder: RunFolder | None
    numbers: dict[str, float]
    course: Any = None  # a Course, while the run is under way
    apart: bool = False  # whether the next iteration is done round by round
    result: Result | None = None

    @property
    def at(self) -> Any:
        """The track of the run: runs that agree in this draw the same until something is due."""
        ledger = self.course.ledger
        return self.setup.seed, ledger.rounds, ledger.local, self.course.iteration


class Together:
    """Runs that are in one program at once."""

    def __init__(
        self,
        base: Any,
        blocks: ManyBlocks,
        jobs: Sequence[Job],
        setup: Callable[[Any, Job], Setup],
        opening: Mapping[str, bool],
        on_divergence: OnDivergence,
        compilations: list[int],
    ) -> None:
        self._base, self._blocks, self._jobs, self._setup = base, blocks, jobs, setup
        self._opening, self._on_divergence, self._compilations = opening, on_divergence, compilations
        self._cost = 0.0  # the seconds of an iteration of all runs
        self._compiling = 0.0  # the seconds that the program took to compile

    def run(self) -> list[Result]:
        """Do the runs to their ends."""
        with ExitStack() as stack:
            runs = []
            for job in self._jobs:
                engine = _Prepared(self._base)
                folder = None if job.out is None else stack.enter_context(closing(RunFolder(job.out)))
                run = _Run(self._setup(engine, job), folder, numbers_of(job.algorithm))
                run.course = Course(run.setup, folder, self._compilations, Logs(()), self._blocks.rounds_ahead)
                runs.append(run)
            runs[0].course.check_metrics()
            self._losses = _LossesOfMany(self._base, len(runs), len(runs[0].course.probed))
            self._prepare(runs)
            for run in runs:
                run.course.open(**self._opening)  # what is wrong at the start is wrong for all, and is raised
            while active := [run for run in runs if run.result is None]:
                for run in [run for run in active if run.course.over]:
                    finish(run.course)
                    self._end(run)
                self._advance([run for run in active if run.result is None])
        assert all(run.result is not None for run in runs)
        return [run.result for run in runs if run.result is not None]

    def _advance(self, active: list[_Run]) -> None:
        """Do some iterations of every run, until something is due."""
        for run in [run for run in active if run.apart or _watched(run.course.ledger)]:
            run.apart = False
            active.remove(run)
            run.course.state = jax.tree.map(jnp.asarray, run.course.state)
            if self._attempt(run, run.course.go_on_alone):
                self._attempt(run, run.course.look)
        if not active:
            return
        tracks: dict[Any, list[_Run]] = {}
        for run in active:
            tracks.setdefault(run.at, []).append(run)
        wanted = []
        for those in tracks.values():
            course = those[0].course
            most = course.until_due(LONGEST, partial(self._blocks.rounds_ahead, course.fed))
            wanted.append(
                Track([Lane(r.course.fed, r.course.state, r.numbers, r.course.iteration) for r in those], most)
            )
        self._resize(wanted, active[0].course)
        lefts = [r.course.left for r in active]
        arrived = self._blocks.advance(wanted, None if None in lefts else max(lefts))
        seconds, compiling = self._blocks.seconds
        self._cost = (seconds - compiling) / max(track.iterations for track in wanted)
        self._compiling = max(compiling, self._compiling)
        moved = []
        for those, track, ends in zip(tracks.values(), wanted, arrived, strict=True):
            for run, end in zip(those, ends, strict=True):
                self._take(run, end, track.iterations)
                if end.iterations:
                    moved.append(run)
        self._prepare([run for run in moved if run.course.is_due])
        for run in moved:
            self._attempt(run, run.course.look)

    @staticmethod
    def _take(run: _Run, end: Arrived, asked: int) -> None:
        """Take a run's place at the end of a block."""
        course = run.course
        run.apart = end.iterations < asked
        if end.iterations:
            course.fed.noted.clear()
            course.fed.note(**end.notes)
            course.arrive(end.state, end.before, end.iterations)

    def _resize(self, tracks: Sequence[Track], course: Course) -> None:
        """Choose the shape of the program: another one if runs do not fit, or if it saves more than it costs."""
        needed, now = self._blocks.needed(tracks), self._blocks.shape
        if now == needed:
            return
        fits = all(a <= b for a, b in zip(needed, now, strict=True))
        if fits:
            spared, left = 1 - needed[0] * needed[1] / (now[0] * now[1]), self._left(course)
            if spared < 0.5 if left is None else left * self._cost * spared < self._compiling:
                return
        self._blocks.shape = needed

    @staticmethod
    def _left(course: Course) -> int | None:
        """How many iterations are left of a run, as far as its budget tells."""
        left, stop = [] if course.left is None else [course.left], course.setup.stop
        if stop.rounds is not None and course.iteration:
            each = max(course.ledger.rounds // course.iteration, 1)
            left.append((stop.rounds - course.ledger.rounds) // each)
        return min(left) if left else None

    def _prepare(self, runs: Sequence[_Run]) -> None:
        """Compute the losses that the evaluations of these runs ask for, at once."""
        if runs and self._base.problem.chances is None:
            states = [run.course.state for run in runs]
            found = self._losses([run.course.probed for run in runs], states)
            for run, own in zip(runs, found, strict=True):
                run.setup.engine.tell(run.course.state, own)  # type: ignore[attr-defined]

    def _attempt(self, run: _Run, work: Callable[[], Any]) -> bool:
        """Do something for a run; return whether it goes on. One that fails ends with the reason."""
        course = run.course
        try:
            work()
            return True
        except Diverged as error:
            try:
                turn_back(course, error, self._on_divergence)
                carry_out(course, (), self._on_divergence)  # it has other settings now
                finish(course)
            except (Diverged, StepError, TooFewReplies):
                pass  # its summary has the reason
        except (StepError, TooFewReplies) as error:
            finish(course, failure=str(error))
        self._end(run)
        return False

    @staticmethod
    def _end(run: _Run) -> None:
        run.result, run.course = result_of(run.course), None


def _watched(ledger: Any) -> bool:
    """Whether the conduct of a client has to be noted in every round."""
    return bool(ledger.conduct.strikes or ledger.conduct.until or ledger.silent)


class _Prepared:
    """The engine of one of many runs. It knows the losses of a state that were computed for all runs at once."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._told: tuple[Any, Losses] | None = None

    @property
    def problem(self) -> BilevelProblem:
        return self._base.problem

    @property
    def clients(self) -> Clients:
        return self._base.clients

    @property
    def capabilities(self) -> Capabilities:
        return self._base.capabilities

    @property
    def programs(self) -> dict[Any, Any]:
        return self._base.programs

    @property
    def over(self) -> Over:
        return self._base.over

    @property
    def single(self) -> bool | None:
        return self._base.single

    @property
    def data(self) -> Arrays:
        return self._base.data

    def tell(self, state: Any, found: Losses) -> None:
        """Take the losses of the probed clients at a state."""
        self._told = state, found

    def replies(self, call: Call) -> Iterator[Replies]:
        if call.kind is Kind.PROBE and call.step is losses and self._told is not None:
            state, found = self._told
            if (
                call.arrays["x"] is state.x
                and call.arrays["y"] is state.y
                and len(call.clients) == len(found.upper)
            ):
                yield Replies(clients=call.clients, reply=found)
                return
        yield from self._base.replies(call)

    def close(self) -> None:
        """The engine is closed by those who made it."""


class _LossesOfMany:
    """The losses of the probed clients of many runs, in one program that serves one run after the other."""

    def __init__(self, engine: Any, runs: int, clients: int) -> None:
        self._data, self._shape = engine.data, (runs, clients)
        if self._shape not in engine.measurements:  # another grid on the same engine has the same program
            engine.measurements[self._shape] = _losses_program(engine, runs, clients)
        self._program = engine.measurements[self._shape]

    def __call__(self, probed: Sequence[Sequence[int]], states: Sequence[Any]) -> list[Losses]:
        """The losses of each of the runs, whose clients and states are given."""

        def filled(rows: list[Any]) -> np.ndarray:
            return np.stack([np.asarray(row) for row in [*rows, *[rows[0]] * (self._shape[0] - len(rows))]])

        x, y = filled([s.x for s in states]), filled([s.y for s in states])
        found = jax.device_get(self._program(self._data, len(states), filled([*probed]), x, y))
        return [Losses(found.upper[at], found.lower[at]) for at in range(len(states))]


def _losses_program(engine: Any, runs: int, clients: int) -> Any:
    """The program of `_LossesOfMany`, for the first `count` runs."""
    problem = engine.problem
    start = {"x": problem.flat_x.vector, "y": problem.flat_y.vector}
    rows = {"xi": Sample("upper"), "zeta": Sample("lower")}
    call = make_call(losses, Address(0, Kind.PROBE, 0), range(clients), {**start, **rows})
    draws = dict.fromkeys(rows, Draw(None, None))

    def one(vectors: Any, data: Any) -> Any:
        return perform(problem, call, {}, vectors, {}, draws, {}, data, None)[0]

    def each(data: Any, vectors: Any) -> Any:
        if engine.over == "vmap":
            return jax.vmap(one, (None, 0))(vectors, data)
        return lax.map(lambda own: one(vectors, own), data)

    @jax.jit
    def program(data: Any, count: Any, probed: Any, x: Any, y: Any) -> Any:
        def body(at: Any, made: Any) -> Any:
            own = jax.tree.map(lambda a: a[probed[at]], data)
            found = each(own, {"x": x[at], "y": y[at]})
            return jax.tree.map(lambda all_, new: all_.at[at].set(new), made, found)

        return lax.fori_loop(0, count, body, Losses(*2 * [jnp.zeros((runs, clients), jnp.float32)]))

    return program
