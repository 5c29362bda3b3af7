"""Running a spec: the budget, evaluation on a schedule, checkpoints, and the run folder at the end."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import jax

from . import processes, rng
from .divergence import Restart, advice, check_losses, smaller, suspect
from .engines import Chaos, ChaosSettings, Engine
from .errors import Diverged, SettingsError, StepError, TooFewReplies
from .federation import Federation
from .ledger import BY, Ledger, counted
from .probes import losses
from .problem import Task
from .record import Checkpoint, RunFolder, flatten_state, number, restore_state, summarise
from .report import draw_curve
from .spec import Spec
from .steps import Sample

OnDivergence = Literal["stop", "restart"]
RESTARTS = 8  # halvings after which a run that still diverges ends


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, summary and history, and the final parameters as the user's pytrees."""

    folder: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    x: Any
    y: Any


@dataclass(frozen=True)
class Progress:
    """What an observer is told after every outer iteration. `share` is how much of the budget is used."""

    iteration: int
    rounds: int
    seconds: float
    share: float
    record: dict[str, Any]


class Observer(Protocol):
    """Somebody who watches a run: a progress bar, a logger."""

    def __call__(self, progress: Progress, /) -> None: ...


def run(
    spec: Spec,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    observers: Sequence[Observer] = (),
    on_divergence: OnDivergence = "stop",
    chaos: ChaosSettings | None = None,
    build: Callable[[Task], Engine] | None = None,
) -> Result:
    """Run a spec into a folder, or go on with it.

    `build` makes the engine in the place of the spec's; `chaos` puts faults around it.

    The data are loaded and everything is checked before the folder is made. A resumed run gives bit for bit
    the history that an uninterrupted one gives, but for seconds. Of several processes (`fedbilevel.processes`)
    the first alone reads and writes the folder; all return the same result. A run that diverges stops, or with
    "restart" goes back to its last good state and halves the step size that is likely to blame.
    """
    task = _task(spec)
    folder = RunFolder(Path(out))
    with _counting_compilations() as compilations, closing(folder), ExitStack() as stack:
        engine = stack.enter_context(closing((build or spec.engine)(task)))
        engine = engine if chaos is None else Chaos(engine, chaos)
        course = _Course(spec, task, engine, folder, compilations)
        course.open(resume=resume, overwrite=overwrite)
        while True:
            try:
                course.advance(observers)
                break
            except Diverged as error:
                if on_divergence == "restart" and course.go_back(error):
                    continue
                where = f"outer iteration {course.iteration or 1}: "
                told = Diverged(f"{where}{error}{advice(course.algorithm, error)}", error.fields, error.numbers)
                course.finish(failure=str(told))
                raise told from None
            except (StepError, TooFewReplies) as error:
                course.finish(failure=str(error))  # what was reached is kept, with the reason why it ended
                raise
        summary = course.finish()
    x, y = task.problem.flat_x.restore(course.state.x), task.problem.flat_y.restore(course.state.y)
    return Result(folder.path, summary, course.records, x, y)


def _task(spec: Spec) -> Task:
    try:
        return spec.task()
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise SettingsError(
            f"the problem and its data do not fit into memory; use less in problem or data ({_first_line(error)})"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True)
class _Good:
    """A state to go back to."""

    state: Any
    iteration: int
    ledger: dict[str, Any]
    records: int


class _Course:
    """The course of a run: its state, its place, and what is written down of it."""

    def __init__(self, spec: Spec, task: Task, engine: Engine, folder: RunFolder, compilations: list[int]) -> None:
        self.spec, self.task, self.engine, self.folder = spec, task, engine, folder
        self.algorithm = spec.algorithm
        self.state = spec.algorithm.init(task.problem, task.clients.count)
        self.iteration, self.records, self.restarts = 0, list[dict[str, Any]](), list[Restart]()
        self._writes, self._compilations = processes.is_first(), compilations
        self._probed = _probed_clients(spec, task)
        self._set_ledger(Ledger())

    def open(self, *, resume: bool, overwrite: bool) -> None:
        """Make the folder ready; go on from its checkpoint, or evaluate the start."""

        def opened() -> tuple[int, dict[str, Any], list[dict[str, Any]], list[Restart]]:
            saved = self.folder.open(self.spec.plan, resume=resume, overwrite=overwrite)
            if saved is None:
                return 0, Ledger().to_mapping(), [], []
            self.state = restore_state(self.state, saved.arrays)
            return saved.iteration, saved.ledger, self.folder.history(), [*saved.restarts]

        self.iteration, books, self.records, restarts = processes.from_first(opened)
        self.restarts = [Restart(*each) for each in restarts]
        for each in self.restarts:
            self.algorithm = smaller(self.algorithm, each.setting, each.after)
        self.state = processes.arrays_from_first(self.state)
        self._set_ledger(Ledger.from_mapping(books))
        records, every = self.records, self.spec.evaluate.every
        if records and records[-1]["iteration"] % every and not self._budget.spent(self.iteration, records[-1]):
            records.pop()  # the last word of a smaller budget, off the schedule: an uninterrupted run has it not
            if self._writes:
                self.folder.write_history(records)
        if not records:
            self._evaluate()
        self._good = self._here()

    def advance(self, observers: Sequence[Observer]) -> None:
        """Outer iterations until the budget is spent."""
        spec, budget, record = self.spec, self._budget, self.records[-1]
        while not budget.spent(self.iteration, record):
            self.state = self.algorithm.step(self.fed, self.state)
            self.iteration += 1
            last = budget.spent(self.iteration, record)
            if self.iteration % spec.evaluate.every == 0 or last:
                record = self._evaluate()
                last = budget.spent(self.iteration, record)
            if self.iteration % spec.evaluate.checkpoint_every == 0 or last:
                self._good = self._here()
                if self._writes:
                    self.folder.save(spec.plan, self._checkpoint())
            share = budget.share(self.iteration, record)
            progress = Progress(self.iteration, self.ledger.rounds, self.ledger.seconds, share, record)
            for observer in observers:
                observer(progress)

    def go_back(self, error: Diverged) -> bool:
        """To the last good state with half of the step size to blame; False when there is no use in it."""
        found = suspect(self.algorithm, error)
        if found is None or len(self.restarts) == RESTARTS:
            return False
        (setting, value), good = found, self._good
        lost = self.ledger.rounds - Ledger.from_mapping(good.ledger).rounds
        self.restarts.append(Restart(good.iteration, setting, value, value / 2, lost, str(error)))
        self.algorithm = smaller(self.algorithm, setting, value / 2)
        self.state, self.iteration = good.state, good.iteration
        back = Ledger.from_mapping(good.ledger)
        back.releases = self.ledger.releases  # what was uploaded was uploaded
        self._set_ledger(back)
        del self.records[good.records :]
        if self._writes:
            self.folder.write_history(self.records)
        return True

    def finish(self, **more: Any) -> dict[str, Any]:
        """The summary and the curve, of a run that ended well or not."""
        ledger = self.ledger
        figures: dict[str, Any] = {
            "seconds": ledger.seconds,
            "compilations": self._compilations[0],
            "peak_memory_mb": _peak_memory(),
        }
        figures |= _privacy(self.fed)
        if self.restarts:
            figures["restarts"] = [each._asdict() for each in self.restarts]
        summary = summarise(self.records, ledger.to_mapping(), **figures, spec=self.spec.digest, **more)
        if self._writes:
            self.folder.write_json("summary.json", summary)
            draw_curve(self.records, self.folder.file("curve.png"), _title(self.spec))
        return summary

    def _set_ledger(self, ledger: Ledger) -> None:
        rules = self.spec.federation
        self.ledger = ledger
        self.fed = Federation(
            self.engine,
            seed=self.spec.seed,
            min_replies=rules.min_replies,
            policies=rules.policies(),
            weighting=rules.weighting,
            aggregator=rules.rule(),
            privacy=self.spec.privacy,
            ledger=ledger,
        )
        self._budget = _Budget(self.spec, self.fed)

    def _checkpoint(self) -> Checkpoint:
        books, restarts = self.ledger.to_mapping(), tuple(self.restarts)
        return Checkpoint(flatten_state(self.state), self.iteration, books, restarts)

    def _here(self) -> _Good:
        return _Good(self.state, self.iteration, self.ledger.to_mapping(), len(self.records))

    def _evaluate(self) -> dict[str, Any]:
        record = _evaluate(self.fed, self.task, self.state, self.iteration, self._probed)
        record |= _reported(self.spec, self.state)
        if self.restarts:
            record["restarts"] = len(self.restarts)
        self.records.append(record)
        if self._writes:
            self.folder.append(record)
        check_losses(record, self.records[0])
        return record


class _Budget:
    """When a run is over.

    An outer iteration that would exceed the rounds is not begun, as far as its cost is known: the first one
    always is. Clocks differ, so of several processes the first decides.
    """

    def __init__(self, spec: Spec, fed: Federation) -> None:
        self._stop, self._fed = spec.stop, fed

    def spent(self, iteration: int, record: dict[str, Any]) -> bool:
        ledger, stop = self._fed.ledger, self._stop
        cost = ledger.rounds // iteration if iteration else 0
        spent = bool(
            (stop.rounds is not None and ledger.rounds + max(cost, 1) > stop.rounds)
            or (stop.iterations is not None and iteration >= stop.iterations)
            or (stop.seconds is not None and ledger.seconds >= stop.seconds)
            or (stop.accuracy is not None and (record.get("test_accuracy") or 0.0) >= stop.accuracy)
        )
        return processes.from_first(lambda: spent)

    def share(self, iteration: int, record: dict[str, Any]) -> float:
        ledger, stop = self._fed.ledger, self._stop
        if self.spent(iteration, record):
            return 1.0
        parts = [(ledger.rounds, stop.rounds), (iteration, stop.iterations), (ledger.seconds, stop.seconds)]
        return max((used / limit for used, limit in parts if limit is not None), default=0.0)


def _evaluate(fed: Federation, task: Task, state: Any, iteration: int, probed: tuple[int, ...]) -> dict[str, Any]:
    under_way = task.measure(state.x, state.y)  # not waited for until the probe is done too
    upper = lower = epsilon = None
    if fed.privacy is None:
        means = fed.probe(losses, clients=probed, x=state.x, y=state.y, xi=Sample("upper"), zeta=Sample("lower"))
        upper, lower = number(means.upper), number(means.lower)
    else:  # losses of clients would be uploads without noise
        epsilon = fed.epsilon
    measured = {name: number(value) for name, value in under_way.items()}
    ledger = fed.ledger
    return {
        "iteration": iteration,
        "rounds": ledger.rounds,
        "bytes_up": ledger.bytes_up,
        "bytes_down": ledger.bytes_down,
        "seconds": round(ledger.seconds, 4),
        "test_accuracy": measured.pop("test_accuracy", None),
        "test_loss": measured.pop("test_loss", None),
        "upper_loss": upper,
        "lower_loss": lower,
        **measured,
        **({} if epsilon is None else {"epsilon": number(epsilon)}),
        **_refused(ledger),
    }


def _refused(ledger: Ledger) -> dict[str, Any]:
    """The replies that were not used so far, by reason and by client; nothing where all were."""
    if not ledger.rejected:
        return {}
    return {"rejected": {by: counted(ledger.rejected, by) for by in BY}}


def _reported(spec: Spec, state: Any) -> dict[str, float | None]:
    """What the algorithm itself has to say of its state, such as the disagreement of agents."""
    report = getattr(spec.algorithm, "report", None)
    return {} if report is None else {name: number(value) for name, value in report(state).items()}


def _privacy(fed: Federation) -> dict[str, Any]:
    """What a private run has spent, for its summary."""
    if fed.privacy is None or fed.epsilon is None:
        return {}
    mode, releases = fed.privacy.mode, fed.ledger.releases
    spent = {"mode": mode, "epsilon": number(fed.epsilon), "delta": fed.privacy.at_delta}
    uploads = dict(releases) if mode == "central" else max(releases.values(), default=0)
    return {"privacy": spent | {"noise": fed.privacy.multiplier, "uploads": uploads}}


def _probed_clients(spec: Spec, task: Task) -> tuple[int, ...]:
    """The clients whose losses are probed: the same ones throughout a run, so that curves are smooth."""
    count = min(spec.evaluate.clients, task.clients.count)
    chosen = rng.generator(spec.seed, "evaluate").choice(task.clients.count, count, replace=False)
    return tuple(int(c) for c in sorted(chosen))


def _title(spec: Spec) -> str:
    values = spec.to_mapping()
    data = spec.data.name if spec.problem.makes_data else f"{spec.data.name}, {spec.data.partition}"
    return f"{values['algorithm']['name']} on {values['problem']['name']} ({data}), {spec.data.clients} clients"


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


@contextmanager
def _counting_compilations() -> Iterator[list[int]]:
    """Counts the programs that XLA compiles meanwhile."""
    count = [0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
