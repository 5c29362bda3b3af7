"""`train_many`: many runs in one program, each with a record of its own.

Every run has a `Course`, as if it were alone: its state, ledger, budget, records and folder. Only the outer
iterations between two evaluations are done for all runs at once (`ManyBlocks`), and so are the probes of an
evaluation. A run in which a reply is not finite does that iteration round by round, as it would alone, and so ends
with the same reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from .._divergence import smaller
from .._fitting import check_fit
from ..algorithms import Algorithm
from ..data import Clients, Part
from ..engines import ENGINES, Engine, FusedSettings, Fusible
from ..errors import Diverged, FedBilevelError, SettingsError, StepError, TooFewReplies, one_line
from ..federation import Federation
from ..fused import Blocks, ManyBlocks, traceable
from ..layers import AttackSettings
from ..loggers import messages
from ..privacy import Privacy
from ..problem import BilevelProblem, Fitting, Measure, Problem, Task
from ..settings import choose, numbers_of, suggestion
from ..spec import (
    EvaluateSettings,
    FederationSettings,
    Spec,
    StopSettings,
    check_fusible,
    check_parts,
    check_problem,
)
from ._course import Setup
from ._structure import structure_of
from ._together import Job, Together
from ._train import (
    OnDivergence,
    check_engine,
    counting_compilations,
    measured,
    plan_of,
    section,
    task_of,
    train,
)
from ._watching import Result

MEMORY = 1024  # MiB for what the runs of one program compute
MIB = 2**20


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
        Job(method, seed, None if out is None else Path(out) / f"{number:0{width}}-seed-{seed}", where)
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


def run_many(
    specs: Sequence[Spec], folders: Sequence[Path], *, memory_limit: int = MEMORY, draw: bool = True
) -> list[Result]:
    """Run specs for the engine `fused` into their folders, or continue the runs there, many in one program.

    Specs that agree in everything but the algorithm have the same problem and clients, and are run together. With
    `draw` every folder has a picture of its curve, which may take longer than a small run.
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
            draw=draw,
        )
        jobs = [Job(specs[n].algorithm, specs[n].seed, folders[n], "", specs[n]) for n in numbers]
        results |= dict(zip(numbers, many.run(jobs), strict=True))
    return [results[number] for number in range(len(specs))]


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
    draw: bool = True

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Do all runs; return their results in order."""
        task, problem = self.task, self.task.problem
        for where, algorithm in {job.where: job.algorithm for job in jobs}.items():
            with _naming(where):
                self._check(algorithm)
        if isinstance(problem, Problem | Fitting):
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
        check_problem(algorithm, self.task.problem)
        if self.evaluate.train and self.task.measure_train is None:
            raise SettingsError("evaluate.train = true is wrong: give measure_train, or remove it")

    def _alone(self, jobs: Sequence[Job], why: str) -> list[Result]:
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

    def _groups(self, base: Any, jobs: Sequence[Job]) -> Iterator[tuple[list[int], dict[int, Algorithm], Blocks]]:
        """The jobs that are in one program, each time with the program. They differ in numbers only."""
        alike: dict[Any, list[int]] = {}
        for number, job in enumerate(jobs):
            start = jax.tree.structure(job.algorithm.init(self.task.problem, self.task.clients.count))
            alike.setdefault((structure_of(job.algorithm), start), []).append(number)
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

    def _looked_at(self, base: Any, job: Job, names: Sequence[str]) -> list[str]:
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

    def _blocks(self, base: Any, job: Job, names: Sequence[str]) -> Blocks:
        """What runs an algorithm with these numbers as values. That of an earlier call is used again."""
        fed = _federation(self._setup(base, job), base)
        others = tuple((n, value) for n, value in numbers_of(job.algorithm).items() if n not in names)
        key = "many", structure_of(job.algorithm), tuple(names), others, fed.rules
        if key not in base.programs:
            state = job.algorithm.init(self.task.problem, self.task.clients.count)
            try:
                base.programs[key] = traceable(base, job.algorithm, fed, state, names)
            except SettingsError as error:
                raise _Unfit(str(error)) from None
        known: Blocks = base.programs[key]
        return known

    def _setup(self, engine: Any, job: Job) -> Setup:
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
            draws=self.draw,
        )

    def _together(self, base: Any, jobs: Sequence[Job], blocks: Blocks, compilations: list[int]) -> list[Result]:
        """Do runs that are in one program, in parts that fit the memory."""
        found = jax.local_devices()
        many = ManyBlocks(blocks, found[: self.devices or len(found)])
        fit = max(1, self.memory_limit * MIB // max(many.bytes_of_a_run, 1))
        # Runs with the same seed share what is drawn, so a part has few seeds rather than few runs of each.
        order = sorted(range(len(jobs)), key=lambda n: jobs[n].seed) if len(jobs) > fit else range(len(jobs))
        results: dict[int, Result] = {}
        for start in range(0, len(jobs), fit):
            part = [*order][start : start + fit]
            those = [jobs[n] for n in part]
            how = self._setup, self.opening, self.on_divergence
            made = Together(base, many, those, *how, compilations).run()
            results |= dict(zip(part, made, strict=True))
        return [results[number] for number in range(len(jobs))]


class _Unfit(FedBilevelError):
    """A method cannot be traced."""


def _federation(setup: Setup, engine: Any) -> Federation:
    """A federation with the rules of a run, to trace its method with."""
    rules = setup.federation
    return Federation(
        engine,
        seed=setup.seed,
        min_replies=rules.min_replies,
        policies=rules.policies(setup.privacy),
        cohorts=rules.cohort,
        iteration=None if rules.cohort_by == "rounds" else lambda: 0,
        weighting=rules.weighting,
        gather=rules.gather(setup.privacy, None),
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
