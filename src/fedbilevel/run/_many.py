"""`train_many`: many runs in one program, each with a record of its own.

Every run has a `Course`, as if it were alone: its state, ledger, budget, records and folder. Only the outer
iterations between two evaluations are done for all runs at once (`ManyBlocks`), and so are the probes of an
evaluation. A run in which a reply is not finite does that iteration round by round, as it would alone, and so ends
with the same reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._divergence import smaller
from .._fitting import check_fit
from .._probes import Losses, losses
from ..algorithms import Algorithm
from ..data import Clients, Part
from ..engines import ENGINES, Call, Capabilities, Engine, FusedSettings, Fusible, Replies, make_call, perform
from ..errors import Diverged, FedBilevelError, SettingsError, StepError, TooFewReplies, one_line
from ..federation import Federation
from ..fused import Arrived, Blocks, Lane, ManyBlocks, Track, traceable
from ..layers import AttackSettings
from ..loggers import Logs, messages
from ..oracle import Arrays
from ..privacy import Privacy
from ..problem import BilevelProblem, Measure, Over, Problem, Task
from ..record import RunFolder
from ..rng import Address, Kind
from ..settings import choose, numbers_of, suggestion
from ..spec import (
    EvaluateSettings,
    FederationSettings,
    Spec,
    StopSettings,
    check_feasible,
    check_fusible,
    check_own,
    check_parts,
)
from ..steps import Draw, Sample
from ._course import LONGEST, Course, Setup
from ._train import (
    OnDivergence,
    carry_out,
    check_engine,
    counting_compilations,
    measured,
    plan_of,
    result_of,
    section,
    task_of,
    train,
    turn_back,
)
from ._watching import Result

MEMORY = 1024  # MiB for what the runs of one program compute
MIB = 2**20


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


def train_many(
    problem: BilevelProblem,
    clients: Clients,
    algorithm: Algorithm,
    *,
    settings: Sequence[Mapping[str, Any]] = ({},),
    seeds: Sequence[int] = (0,),
    stop: StopSettings | Mapping[str, Any],
    engine: Engine | Mapping[str, Any] | str | None = None,
    federation: FederationSettings | Mapping[str, Any] | None = None,
    evaluate: EvaluateSettings | Mapping[str, Any] | None = None,
    test: Part | None = None,
    measure: Measure | None = None,
    measure_train: Measure | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_divergence: OnDivergence = "stop",
    memory_limit: int = MEMORY,
    devices: int | None = None,
) -> list[Result]:
    """Train an algorithm with each of some settings and each of some seeds, many runs in one program.

    The results are in the order of the settings, and for each of them in the order of the seeds. Each is what
    `train` returns for this run alone on the engine `fused`, up to rounding, with the same ledger. A run that
    diverges raises nothing: `result.failure` has the reason.

    settings   for each run, the settings of the algorithm that it changes, such as `{"alpha": 0.1, "beta": 0.5}`;
               a setting within another one has a dot: `{"upper.learning_rate": 0.01}`
    seeds      the seeds with which each of them is run
    engine     the engine `fused`, as an object, a name or a table. By default it is used where it can be, and
               runs that it refuses are run alone on the simulation. On another engine all runs are run alone
    out        a folder for the run folders; 003-seed-1 is that of the fourth setting with seed 1
    memory_limit   MiB for what the runs of one program compute; more runs are done one part after the other
    devices    the number of devices over which the runs are spread (default: all)

    Numbers with a point, such as step sizes and momenta, are values of the program. Runs that differ in anything
    else, or in a number that the algorithm looks at, are in programs of their own. The other arguments are those
    of `train`.
    """
    if not settings or not seeds:
        raise SettingsError("settings and seeds need at least one element each")
    methods = [_changed(algorithm, own, number) for number, own in enumerate(settings)]
    width = max(3, len(str(len(settings) - 1)))
    jobs = [
        _Job(method, seed, None if out is None else Path(out) / f"{number:0{width}}-seed-{seed}", where)
        for number, (method, where) in enumerate(methods)
        for seed in seeds
    ]
    if out is None and (resume or overwrite):
        raise SettingsError("resume and overwrite need a folder; give out")
    rules = section(FederationSettings, federation, "federation")
    given: Any = engine
    if isinstance(engine, str | Mapping):
        rules, given = dataclasses.replace(rules, engine=choose(ENGINES, engine, "federation.engine")), None
    elif engine is not None:
        check_engine(engine, problem, clients)
    elif not isinstance(rules.engine, FusedSettings):
        rules = dataclasses.replace(rules, engine=FusedSettings())
    return _Many(
        task=measured(problem, clients, test, measure)._replace(measure_train=measure_train),
        rules=rules,
        engine=given,
        lenient=engine is None and (federation is None or not isinstance(_engine(federation), FusedSettings)),
        test=test,
        evaluate=section(EvaluateSettings, evaluate, "evaluate"),
        stop=section(StopSettings, stop, "stop"),
        opening=dict(resume=resume, overwrite=overwrite),
        on_divergence=on_divergence,
        memory_limit=memory_limit,
        devices=devices,
    ).run(jobs)


def run_many(specs: Sequence[Spec], folders: Sequence[Path], *, memory_limit: int = MEMORY) -> list[Result]:
    """Run specs for the engine `fused` into their folders, or continue the runs there, many in one program.

    Specs that agree in everything but the algorithm have the same problem and clients, and are run together.
    """
    together: dict[Any, list[int]] = {}
    for number, spec in enumerate(specs):
        own = {name: value for name, value in spec.to_mapping().items() if name != "algorithm"}
        together.setdefault(repr(own), []).append(number)
    results: dict[int, Result] = {}
    for numbers in together.values():
        first = specs[numbers[0]]
        task = task_of(first)
        task = task._replace(clients=first.clients(task))
        many = _Many(
            task=task,
            rules=first.federation,
            evaluate=first.evaluate,
            stop=first.stop,
            attack=first.attack,
            opening=dict(resume=True, overwrite=False),
            memory_limit=memory_limit,
        )
        jobs = [_Job(specs[n].algorithm, specs[n].seed, folders[n], "", specs[n]) for n in numbers]
        results |= dict(zip(numbers, many.run(jobs), strict=True))
    return [results[number] for number in range(len(specs))]


@dataclass(frozen=True)
class _Job:
    """A run that is wanted. `where` says in messages which one it is."""

    algorithm: Algorithm
    seed: int
    out: Path | None
    where: str
    spec: Spec | None = None


@dataclass(frozen=True, kw_only=True)
class _Many:
    """What many runs have in common.

    lenient   whether runs that the engine refuses may be run alone on the simulation
    """

    task: Task
    rules: FederationSettings
    evaluate: EvaluateSettings
    stop: StopSettings
    opening: dict[str, bool]
    engine: Engine | None = None
    lenient: bool = False
    test: Part | None = None
    attack: AttackSettings = field(default_factory=AttackSettings)
    privacy: Privacy = field(default_factory=Privacy)
    on_divergence: OnDivergence = "stop"
    memory_limit: int = MEMORY
    devices: int | None = None

    def run(self, jobs: Sequence[_Job]) -> list[Result]:
        """Do all runs; return their results in order."""
        task, problem = self.task, self.task.problem
        for where, algorithm in {job.where: job.algorithm for job in jobs}.items():
            with _naming(where):
                self._check(algorithm)
        if isinstance(problem, Problem):
            check_fit(problem, task.clients.load(0), self.test)
        with ExitStack() as stack:
            compilations = stack.enter_context(counting_compilations())
            base: Any = self.engine
            if base is None:
                try:
                    base = stack.enter_context(closing(self.rules.build(problem, task.clients)))
                except SettingsError as error:
                    return self._alone(jobs, str(error))
            if not isinstance(base, Fusible):
                return self._alone(jobs, "this engine does one round at a time")
            for where, algorithm in {job.where: job.algorithm for job in jobs}.items():
                try:
                    with _naming(where):
                        check_fusible(algorithm, problem, self.rules, self.attack, self.privacy, chaotic=False)
                except SettingsError as error:
                    return self._alone(jobs, str(error))
            found: dict[int, Result] = {}
            try:
                for numbers, algorithms, blocks in self._groups(base, jobs):
                    own = [dataclasses.replace(jobs[n], algorithm=algorithms[n]) for n in numbers]
                    found |= dict(zip(numbers, self._together(base, own, blocks, compilations), strict=True))
            except _Unfit as unfit:
                rest = [n for n in range(len(jobs)) if n not in found]
                found |= dict(zip(rest, self._alone([jobs[n] for n in rest], str(unfit)), strict=True))
        return [found[number] for number in range(len(jobs))]

    def _check(self, algorithm: Algorithm) -> None:
        count = self.task.clients.count
        check_parts(algorithm, count, self.rules, self.attack, self.privacy, self.evaluate, self.stop)
        check_feasible(algorithm, self.task.problem)
        check_own(algorithm, self.task.problem)
        if self.evaluate.train and self.task.measure_train is None:
            raise SettingsError("evaluate.train = true is wrong: give measure_train, or remove it")

    def _alone(self, jobs: Sequence[_Job], why: str) -> list[Result]:
        """Run every job by itself, one after the other."""
        fused = isinstance(self.engine, Fusible) if self.engine else isinstance(self.rules.engine, FusedSettings)
        if fused and not self.lenient:
            raise SettingsError(why)
        messages.warning("%d runs are run one after the other: %s", len(jobs), why)
        rules = dataclasses.replace(self.rules, engine=ENGINES["simulation"]()) if self.lenient else self.rules
        results = []
        for job in jobs:
            options: dict[str, Any] = dict(
                stop=self.stop,
                engine=self.engine,
                federation=rules,
                evaluate=self.evaluate,
                measure=self.task.measure,
                measure_train=self.task.measure_train,
                seed=job.seed,
                out=job.out,
                on_divergence=self.on_divergence,
                spec=job.spec,
                **self.opening,
            )
            try:
                made = train(self.task.problem, self.task.clients, job.algorithm, **options)
            except (Diverged, StepError, TooFewReplies) as error:
                if error.result is None:  # it failed before it began, as all others would
                    raise
                made = error.result
            results.append(made)
        return results

    def _groups(self, base: Any, jobs: Sequence[_Job]) -> Iterator[tuple[list[int], dict[int, Algorithm], Blocks]]:
        """The jobs that are in one program, each time with the program. They differ in numbers only."""
        alike: dict[Any, list[int]] = {}
        for number, job in enumerate(jobs):
            alike.setdefault(_structure(job.algorithm), []).append(number)
        todo = [(numbers, set[str]()) for numbers in alike.values()]
        programs = 0
        while todo:
            numbers, fixed = todo.pop(0)
            first = jobs[numbers[0]]
            values = [numbers_of(jobs[n].algorithm) for n in numbers]
            names = [n for n in values[0] if n not in fixed and len({own[n] for own in values}) > 1]
            looked = [] if not names else self._looked_at(base, first, names)
            if looked:  # the algorithm looks at these numbers, so runs that differ in them differ in structure
                parts: dict[Any, list[int]] = {}
                for n, own in zip(numbers, values, strict=True):
                    parts.setdefault(tuple(own[name] for name in looked), []).append(n)
                todo = [(part, fixed | set(looked)) for part in parts.values()] + todo
                continue
            programs += 1
            yield numbers, {n: jobs[n].algorithm for n in numbers}, self._blocks(base, first, names)
        if programs > 1:
            messages.info("%d runs are in %d programs, because they differ in structure", len(jobs), programs)

    def _looked_at(self, base: Any, job: _Job, names: Sequence[str]) -> list[str]:
        """The numbers among these that the algorithm looks at, so that they cannot be values of a program."""

        def fails(tried: Sequence[str]) -> bool:
            try:
                self._blocks(base, job, tried)
            except _Unfit:
                return True
            return False

        if not fails(names):
            return []
        self._blocks(base, job, ())  # raises if it is not because of a number
        return [name for name in names if fails([name])] or [*names]

    def _blocks(self, base: Any, job: _Job, names: Sequence[str]) -> Blocks:
        """What runs an algorithm with these numbers as values. That of an earlier call is used again."""
        fed = _federation(self._setup(base, job), base)
        others = tuple((n, value) for n, value in numbers_of(job.algorithm).items() if n not in names)
        key = "many", _structure(job.algorithm), tuple(names), others, fed.rules
        if key not in base.programs:
            state = job.algorithm.init(self.task.problem, self.task.clients.count)
            try:
                base.programs[key] = traceable(base, job.algorithm, fed, state, names)
            except SettingsError as error:
                raise _Unfit(str(error)) from None
        known: Blocks = base.programs[key]
        return known

    def _setup(self, engine: Any, job: _Job) -> Setup:
        task, count = self.task, self.task.clients.count
        plan = plan_of(
            task, job.algorithm, self.rules, self.attack, self.privacy, self.evaluate, self.stop, job.seed
        )
        title = f"{type(job.algorithm).__name__}, {count} clients"
        return Setup(
            task=task,
            algorithm=job.algorithm,
            engine=engine,
            federation=self.rules,
            privacy=self.privacy,
            evaluate=self.evaluate,
            stop=self.stop,
            seed=job.seed,
            root=job.seed,
            secret=None,
            name=None,
            books=(),
            strict_start=True,
            plan=plan if job.spec is None else job.spec.plan,
            title=title if job.spec is None else job.spec.title(count),
        )

    def _together(self, base: Any, jobs: Sequence[_Job], blocks: Blocks, compilations: list[int]) -> list[Result]:
        """Do runs that are in one program, in parts that fit the memory."""
        found = jax.local_devices()
        many = ManyBlocks(blocks, found[: self.devices or len(found)])
        fit = max(1, self.memory_limit * MIB // max(many.bytes_of_a_run, 1))
        # Runs with the same seed share what is drawn, so a part has few seeds rather than few runs of each.
        order = sorted(range(len(jobs)), key=lambda n: jobs[n].seed) if len(jobs) > fit else range(len(jobs))
        results: dict[int, Result] = {}
        for start in range(0, len(jobs), fit):
            part = [*order][start : start + fit]
            made = _Part(self, base, many, [jobs[n] for n in part], compilations).run()
            results |= dict(zip(part, made, strict=True))
        return [results[number] for number in range(len(jobs))]


class _Unfit(FedBilevelError):
    """A method cannot be traced."""


class _Part:
    """Runs that are in one program at once."""

    def __init__(
        self, many: _Many, base: Any, blocks: ManyBlocks, jobs: Sequence[_Job], compilations: list[int]
    ) -> None:
        self._many, self._blocks, self._jobs, self._compilations = many, blocks, jobs, compilations
        self._base = base
        self._losses = _LossesOfMany(base, len(jobs), min(many.evaluate.clients, many.task.clients.count))
        self._cost = 0.0  # the seconds of an iteration of all runs
        self._compiling = 0.0  # the seconds that the program took to compile

    def run(self) -> list[Result]:
        """Do the runs to their ends."""
        many = self._many
        with ExitStack() as stack:
            runs = []
            for job in self._jobs:
                engine = _Prepared(self._base)
                folder = None if job.out is None else stack.enter_context(closing(RunFolder(job.out)))
                run = _Run(many._setup(engine, job), folder, numbers_of(job.algorithm))
                run.course = Course(run.setup, folder, self._compilations, Logs(()), self._blocks.rounds_ahead)
                runs.append(run)
            runs[0].course.check_metrics()
            self._prepare(runs)
            for run in runs:
                run.course.open(**many.opening)  # what is wrong at the start is wrong for all, and is raised
            while active := [run for run in runs if run.result is None]:
                for run in [run for run in active if run.course.over]:
                    run.course.finish()
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
            wanted.append(Track([Lane(r.course.fed, r.course.state, r.numbers) for r in those], most))
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
                turn_back(course, error, self._many.on_divergence)
                carry_out(course, (), self._many.on_divergence)  # it has other settings now
                course.finish()
            except (Diverged, StepError, TooFewReplies):
                pass  # its summary has the reason
        except (StepError, TooFewReplies) as error:
            course.finish(failure=str(error))
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
        self._data, self._shape, problem = engine.data, (runs, clients), engine.problem
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

        self._program = program

    def __call__(self, probed: Sequence[Sequence[int]], states: Sequence[Any]) -> list[Losses]:
        """The losses of each of the runs, whose clients and states are given."""

        def filled(rows: list[Any]) -> np.ndarray:
            return np.stack([np.asarray(row) for row in [*rows, *[rows[0]] * (self._shape[0] - len(rows))]])

        x, y = filled([s.x for s in states]), filled([s.y for s in states])
        found = jax.device_get(self._program(self._data, len(states), filled([*probed]), x, y))
        return [Losses(found.upper[at], found.lower[at]) for at in range(len(states))]


def _federation(setup: Setup, engine: Any) -> Federation:
    """A federation with the rules of a run, to trace its method with."""
    rules = setup.federation
    return Federation(
        engine,
        seed=setup.seed,
        min_replies=rules.min_replies,
        policies=rules.policies(setup.privacy),
        cohorts=rules.cohort,
        weighting=rules.weighting,
    )


def _changed(algorithm: Algorithm, own: Mapping[str, Any], number: int) -> tuple[Algorithm, str]:
    """The algorithm with other settings, and a name for them in messages."""
    where = f"settings[{number}] = {one_line(str(dict(own)))}" if own else ""
    if own and not dataclasses.is_dataclass(algorithm):
        raise SettingsError(
            f"{where}: {type(algorithm).__name__} is not a dataclass, so its settings are not known; "
            "decorate it with fedbilevel.settings"
        )
    made = algorithm
    with _naming(where):
        for name, value in own.items():
            known = [each.name for each in dataclasses.fields(algorithm)]  # type: ignore[arg-type]
            outer, dot, _ = name.rpartition(".")
            if not (hasattr(getattr(made, outer, None), "having") if dot else name in known):
                raise SettingsError(f"{name} is not a setting; {suggestion(name, known)}")
            made = smaller(made, name, value)
    return made, where


def _engine(federation: Any) -> Any:
    return section(FederationSettings, federation, "federation").engine


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the name of a setting before the message of an error about it."""
    try:
        yield
    except SettingsError as error:
        raise (SettingsError(f"{where}: {error}") if where else error) from None


def _structure(algorithm: Algorithm) -> Any:
    """Everything that the program of an algorithm depends on, apart from the numbers that may be values of it."""
    if not dataclasses.is_dataclass(algorithm):
        return id(algorithm)
    numbers = numbers_of(algorithm)
    zero = tuple(sorted(name for name, value in numbers.items() if value == 0.0))  # a momentum of zero is none
    rest = []
    for each in dataclasses.fields(algorithm):
        value = getattr(algorithm, each.name)
        if isinstance(value, float):
            continue
        inner, arguments = numbers_of(value), getattr(value, "arguments", None)
        if inner and isinstance(arguments, dict):
            rest.append((value.name, *(_plain(a) for n, a in sorted(arguments.items()) if n not in inner)))
        else:
            rest.append((_plain(value),))
    return type(algorithm), tuple(sorted(numbers)), zero, tuple(rest)


def _plain(value: Any) -> Any:
    """The value, if it can be compared as a whole; otherwise only the same object is equal to it."""
    plain = value is None or isinstance(value, str | int | float | bool)
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return (type(value).__name__, value) if plain else id(value)
