"""`train` runs objects, with or without a folder. `run` makes the objects of a spec and trains them."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
from jax import Array

from .. import processes
from .._divergence import advice
from .._fitting import check_fit
from ..algorithms import ALGORITHMS, Algorithm
from ..data import Clients, Part, part_from
from ..engines import ENGINES, AutoSettings, Engine, Fusible
from ..errors import Diverged, SettingsError, StepError, TooFewReplies
from ..layers import AttackSettings, ChaosSettings, stacked
from ..loggers import Logger, Logs, make_logger
from ..names import address_of
from ..own import own_part
from ..privacy import Privacy, Secret, machine_secret, name_in_books
from ..problem import BilevelProblem, Finding, Measure, Measured, Task, lower_kind, task_with_test
from ..record import BOOKS, Plan, RunFolder, digest_of
from ..settings import choose, from_mapping, is_settings, named, to_mapping
from ..spec import (
    EvaluateSettings,
    FederationSettings,
    Spec,
    StopSettings,
    check_fusible,
    check_parts,
    check_problem,
)
from ._auto import choose_engine
from ._course import Course, Setup
from ._ending import finish, result_of
from ._evaluation import available
from ._watching import Observer, Result

OnDivergence = Literal["stop", "restart"]
S = TypeVar("S")


def train(
    problem: BilevelProblem,
    clients: Clients,
    algorithm: Algorithm,
    *,
    stop: StopSettings | Mapping[str, Any],
    engine: Engine | Mapping[str, Any] | str | None = None,
    federation: FederationSettings | Mapping[str, Any] | None = None,
    evaluate: EvaluateSettings | Mapping[str, Any] | None = None,
    privacy: Privacy | Mapping[str, Any] | None = None,
    attack: AttackSettings | Mapping[str, Any] | None = None,
    chaos: ChaosSettings | Mapping[str, Any] | None = None,
    test: Part | Any = None,
    measure: Measure | None = None,
    measure_train: Measure | None = None,
    finding: Callable[[Array, Array], Finding] | None = None,
    closed: Any = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observers: Sequence[Observer] = (),
    loggers: Sequence[Logger | Mapping[str, Any] | str] = (),
    on_divergence: OnDivergence = "stop",
    secret: Secret | None = None,
    books: Sequence[Path] = (),
    spec: Spec | None = None,
    accept_change: bool = False,
) -> Result:
    """Train a problem on clients with an algorithm, until the budget is spent.

    problem, clients, algorithm   any objects of these kinds, this library's or the user's own
    stop            the budget: `{"rounds": 60}`, iterations, seconds, accuracy, or a value of any metric, as in
                    `{"metric": "auc", "at": 0.9}`
    engine          an engine, its name, or a table such as `{"name": "ray", "actors": 4}`; it replaces the engine
                    of `federation`. "auto" is "fused" for small problems if the run can be fused, and else
                    "simulation"; for a problem that JAX cannot trace, it and the default are "loop". The summary
                    says which was chosen and why. An engine that is given as an object is not closed
    federation, evaluate, privacy, attack, chaos   the settings of these sections, as objects or as mappings
    test            rows at the server, on which the problem's metrics are measured: a `Part`, an (inputs, targets)
                    pair, or a data set of PyTorch
    measure         measure(x, y) gives other numbers by name, at the flat vectors x and y
    measure_train   the same on training rows; it is used if `evaluate` has `train = True`
    finding         finding(x, y) says what x means for many things, such as clients; the folder gets it as a
                    ranked table (finding.csv) and a picture (finding.png)
    closed          the closed forms of the problem, a `QuadraticTask`: the run then tells where the method ends
    out             a run folder. With it, the run can be resumed bit for bit, and leaves its history, its summary
                    and a curve
    observers       called after every outer iteration; an observer that returns True ends the run
    loggers         the names of loggers ("tensorboard", "mlflow", "wandb"), tables such as
                    `{"name": "mlflow", "experiment": "digits"}`, or loggers of one's own. Each is given every line
                    of the history; what it raises is told once, and the run goes on without it
    on_divergence   "stop" ends a run that diverges; with "restart" it goes back to its last checkpoint and changes
                    the step size that is to blame
    secret          the secret of a private run, from which its cohorts and its noise are drawn; by default it is
                    made from the secret of this machine and the run's random name. A secret of your own must be
                    used for one run only
    books           further files in which every release of a private run is booked
    spec            the spec that the objects were made from, for the folder; `run` gives it
    accept_change   resume a run although the source of a module that its spec names has changed since

    Everything is checked before the folder is made. With several processes (`fedbilevel.processes`) only the first
    reads and writes the folder, and all of them return the same result.
    """
    rules = section(FederationSettings, federation, "federation")
    test = None if test is None else part_from(test, "test")
    task = measured(problem, clients, test, measure)._replace(
        measure_train=measure_train, finding=finding, closed=closed
    )
    evaluation, budget = section(EvaluateSettings, evaluate, "evaluate"), section(StopSettings, stop, "stop")
    private, liars = section(Privacy, privacy, "privacy"), section(AttackSettings, attack, "attack")
    faults = None if chaos is None else section(ChaosSettings, chaos, "chaos")
    told = [make_logger(each) for each in loggers]
    if isinstance(engine, str | Mapping):
        rules = dataclasses.replace(rules, engine=choose(ENGINES, engine, "federation.engine"))
    if not (engine is None or isinstance(engine, str | Mapping)):
        check_engine(engine, problem, clients)
    check_parts(algorithm, clients.count, rules, liars, private, evaluation, budget)
    check_problem(algorithm, problem)
    if evaluation.train and measure_train is None:
        raise SettingsError(
            "evaluate.train = true is wrong: this problem has no measure of training rows; remove it, or give one "
            "(measure_train of train, or of the Task)"
        )
    here = engine is None or isinstance(engine, str | Mapping) or engine.capabilities.states is not None
    if here and min(clients.capacity) > 0:  # otherwise the data are elsewhere
        check_fit(problem, clients.load(0), test)
    if spec is None and liars.kind == "label-flip":  # `run` gives clients whose labels are flipped already
        raise SettingsError(
            "attack.kind = 'label-flip' is wrong: the classes are not known here; give clients with flipped "
            "labels, as attack.wrap_clients(clients, classes, seed) makes them"
        )
    if out is None and (resume or overwrite):
        raise SettingsError("resume and overwrite need a run folder; give out")
    with ExitStack() as stack:
        compilations = stack.enter_context(counting_compilations())
        folder = None if out is None else stack.enter_context(closing(RunFolder(Path(out))))

        def check() -> None:
            check_fusible(algorithm, problem, rules, liars, private, chaotic=faults is not None)

        chosen = None
        if not (engine is None or isinstance(engine, str | Mapping)):
            base = engine
        elif isinstance(rules.engine, AutoSettings) or (engine is None and rules.must_loop(problem)):
            base, chosen = choose_engine(rules, problem, clients, algorithm, check)
            stack.enter_context(closing(base))
        else:
            base = stack.enter_context(closing(rules.build(problem, clients, exactly=engine is not None)))
        if isinstance(base, Fusible):
            check()
        name = None
        if private.mode is not None:
            own = [folder.file(BOOKS)] if folder is not None and resume else []
            name, secret = _private([*own, *books], folder is not None or bool(books), secret)
        setup = Setup(
            task=task,
            algorithm=algorithm,
            engine=stacked(base, privacy=private, secret=secret, attack=liars, chaos=faults, seed=seed),
            federation=rules,
            privacy=private,
            evaluate=evaluation,
            stop=budget,
            seed=seed,
            root=seed if name is None or secret is None else secret.root(seed),
            secret=secret,
            name=name,
            books=tuple(books),
            strict_start=faults is None and base.capabilities.states is not None,
            plan=plan_of(task, algorithm, rules, liars, private, evaluation, budget, seed),
            title=f"{type(algorithm).__name__}, {clients.count} clients",
            chosen=chosen,
        )
        if spec is not None:
            setup = dataclasses.replace(setup, plan=spec.plan, title=spec.title(clients.count))
        logs = stack.enter_context(Logs(told if processes.is_first() else ()))
        course = Course(setup, folder, compilations, logs)
        course.check_metrics()
        course.open(resume=resume, overwrite=overwrite, accept_change=accept_change)
        try:
            carry_out(course, observers, on_divergence)
            finish(course)
        except (Diverged, StepError, TooFewReplies) as error:
            error.result = result_of(course)
            raise
        return result_of(course)


def run(
    spec: Spec,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    observers: Sequence[Observer] = (),
    loggers: Sequence[Logger | Mapping[str, Any] | str] = (),
    on_divergence: OnDivergence = "stop",
    chaos: ChaosSettings | None = None,
    task: Task | None = None,
    engine: Engine | None = None,
    secret: Secret | None = None,
    books: Sequence[Path] = (),
    accept_change: bool = False,
) -> Result:
    """Run a spec into a folder, or continue the run there: make the objects of the spec, and train them.

    `task` and `engine` replace those that the spec would make; `chaos` injects faults into the engine's replies.
    """
    made = task_of(spec) if task is None else task
    return train(
        made.problem,
        spec.clients(made),
        spec.algorithm,
        stop=spec.stop,
        engine=engine,
        federation=spec.federation,
        evaluate=spec.evaluate,
        privacy=spec.privacy,
        attack=spec.attack,
        chaos=chaos,
        measure=made.measure,
        measure_train=made.measure_train,
        finding=made.finding,
        closed=made.closed,
        seed=spec.seed,
        out=out,
        resume=resume,
        overwrite=overwrite,
        observers=observers,
        loggers=loggers,
        on_divergence=on_divergence,
        secret=secret,
        books=books,
        spec=spec,
        accept_change=accept_change,
    )


def metrics_of(spec: Spec) -> list[str]:
    """The metrics that a run of this spec may have, from one measurement of its start."""
    task = task_of(spec)
    state = spec.algorithm.init(task.problem, task.clients.count)
    return available(task, spec.algorithm, spec.evaluate, spec.privacy, state)


def _private(files: Sequence[Path], lasting: bool, given: Secret | None) -> tuple[str, Secret]:
    """The name of a private run and its secret. A run that is resumed has the name that is in its books.

    A run that does not last beyond this process needs nothing of this machine.
    """

    def make() -> list[str]:
        name = name_in_books(files) or secrets.token_hex(16)
        own = given or (machine_secret().of_run(name) if lasting else Secret())
        return [name, own.key.hex()]

    name, key = processes.from_first(make)
    return name, Secret(bytes.fromhex(key))


def carry_out(course: Course, observers: Sequence[Observer], on_divergence: OnDivergence) -> None:
    """Advance to the end. After an error, the results so far are kept with the reason why the run ended."""
    while True:
        try:
            course.advance(observers)
            return
        except Diverged as error:
            turn_back(course, error, on_divergence)
        except (StepError, TooFewReplies) as error:
            finish(course, failure=str(error))
            raise


def turn_back(course: Course, error: Diverged, on_divergence: OnDivergence) -> None:
    """Return a run that diverged to its last good state, or end it and raise with what is to blame."""
    found = None if error.at_start else course.blame(error)
    # A value that the user has not chosen is corrected without being asked.
    restart = on_divergence == "restart" or (found is not None and found.setting in course.automatics.names)
    if restart and course.go_back(error, found):
        return
    what = "" if error.at_start else advice(found, len(course.restarts) if restart else None)
    told = error.told(f"outer iteration {course.iteration or 1}: {error}{what}")
    finish(course, failure=str(told))
    raise told from None


def section(cls: type[S], given: S | Mapping[str, Any] | None, where: str) -> S:
    """The settings of a section: as given, from a mapping, or the defaults."""
    if given is None or isinstance(given, Mapping):
        return from_mapping(cls, given or {}, where)
    return given


def check_engine(engine: Engine, problem: BilevelProblem, clients: Clients) -> None:
    """An engine that is given as an object has a problem and clients of its own, which have to be these."""
    sizes = [(p.size_x, p.size_y) for p in (engine.problem, problem)]
    counts = engine.clients.count, clients.count
    if sizes[0] != sizes[1] or counts[0] != counts[1]:
        raise SettingsError(
            f"engine was made for {counts[0]} clients and {sizes[0]} parameters of x and y, and train is given "
            f"{counts[1]} clients and {sizes[1]}; make the engine for the same problem and clients"
        )


def measured(problem: BilevelProblem, clients: Clients, test: Part | None, measure: Measure | None) -> Task:
    """The problem and its clients, with all measurements at the server."""
    if test is not None and lower_kind(problem) == "local":
        raise SettingsError(
            "test is wrong with lower_is = 'local': it has rows at the server, and no client's y is there; give "
            "the clients test rows of their own, as in clients_from([(lower, upper, test), ...])"
        )
    if test is None:
        return Task(problem, clients, measure or (lambda x, y: {}))
    if not isinstance(problem, Measured) or problem.metrics is None:
        raise SettingsError("test has rows, and the problem has no metrics to measure on them; give it metrics")
    own = task_with_test(problem, clients, test)
    if measure is None:
        return own
    return own._replace(measure=lambda x, y: {**own.measure(x, y), **measure(x, y)})


def plan_of(
    task: Task,
    algorithm: Algorithm,
    federation: FederationSettings,
    attack: AttackSettings,
    privacy: Privacy,
    evaluate: EvaluateSettings,
    stop: StopSettings,
    seed: int,
) -> Plan:
    """The plan of a run of objects, with the settings that TOML can express."""
    sizes: dict[str, Any] = {"size_x": task.problem.size_x, "size_y": task.problem.size_y}
    sizes |= {"own": str(part)} if (part := own_part(task.problem)) is not None else {}

    def values(changed: bool) -> dict[str, Any]:
        own = {"class": address_of(type(algorithm))}
        if is_settings(type(algorithm)):
            own = named(ALGORITHMS, algorithm, changed)
        return {
            "seed": seed,
            "problem": {"class": address_of(type(task.problem)), **sizes},
            "data": {"clients": task.clients.count},
            "algorithm": own,
            "federation": to_mapping(federation, changed),
            "attack": to_mapping(attack, changed),
            "privacy": to_mapping(privacy, changed),
            "evaluate": to_mapping(evaluate, changed),
            "stop": to_mapping(stop, changed),
        }

    return Plan(values(False), digest_of(values(True)), evaluate.every, values(True))


def task_of(spec: Spec) -> Task:
    try:
        return spec.task()
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise SettingsError(
            f"the problem and its data do not fit into memory; use less in problem or data ({_first_line(error)})"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def counting_compilations() -> Iterator[list[int]]:
    """Count the programs that XLA compiles inside of the block."""
    count = [0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
