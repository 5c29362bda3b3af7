"""Running a spec: the budget, evaluation on a schedule, checkpoints, and the run folder at the end."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from . import processes, rng
from .errors import StepError, TooFewReplies
from .federation import Federation, Ledger
from .probes import losses
from .problem import Task
from .record import Checkpoint, RunFolder, number, summarise
from .report import draw_curve
from .spec import Spec
from .steps import Sample


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
) -> Result:
    """Run a spec into a folder, or go on with it.

    The data are loaded and everything is checked before the folder is made. A resumed run gives bit for bit
    the history that an uninterrupted one gives, but for seconds. Of several processes (`fedbilevel.processes`)
    the first alone reads and writes the folder; all return the same result.
    """
    task = spec.task()
    folder, writes = RunFolder(Path(out)), processes.is_first()
    with _counting_compilations() as compilations:
        engine, start = spec.engine(task), spec.algorithm.init(task.problem, task.clients.count)
        state = start

        def open_folder() -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
            nonlocal state
            saved = folder.open(spec, resume=resume, overwrite=overwrite)
            if saved is None:
                return 0, Ledger().to_mapping(), []
            state = type(start)(**{name: jnp.asarray(a) for name, a in saved.arrays.items()})
            return saved.iteration, saved.ledger, folder.history()

        iteration, books, records = processes.from_first(open_folder)
        state, ledger = processes.arrays_from_first(state), Ledger.from_mapping(books)
        fed = Federation(
            engine,
            seed=spec.seed,
            min_replies=spec.federation.min_replies,
            weighting=spec.federation.weighting,
            aggregator=spec.federation.rule(),
            privacy=spec.privacy,
            ledger=ledger,
        )
        probed = _probed_clients(spec, task)

        def evaluate() -> dict[str, Any]:
            record = _evaluate(fed, task, state, iteration, probed) | _reported(spec, state)
            records.append(record)
            if writes:
                folder.append(record)
            return record

        budget = _Budget(spec, fed)
        if records and records[-1]["iteration"] % spec.evaluate.every and not budget.spent(iteration, records[-1]):
            records.pop()  # the last word of a smaller budget, off the schedule: an uninterrupted run has it not
            if writes:
                folder.write_history(records)

        def finish(**more: Any) -> dict[str, Any]:
            figures: dict[str, Any] = {
                "seconds": ledger.seconds,
                "compilations": compilations[0],
                "peak_memory_mb": _peak_memory(),
            }
            figures |= _privacy(fed)
            summary = summarise(records, ledger.to_mapping(), **figures, spec=spec.digest, **more)
            if writes:
                folder.write_json("summary.json", summary)
                draw_curve(records, folder.file("curve.png"), _title(spec))
            return summary

        record = records[-1] if records else evaluate()
        try:
            while not budget.spent(iteration, record):
                state = spec.algorithm.step(fed, state)
                iteration += 1
                last = budget.spent(iteration, record)
                if iteration % spec.evaluate.every == 0 or last:
                    record = evaluate()
                    last = budget.spent(iteration, record)
                if writes and (iteration % spec.evaluate.checkpoint_every == 0 or last):
                    folder.save(spec, _checkpoint(state, iteration, ledger))
                progress = Progress(
                    iteration, ledger.rounds, ledger.seconds, budget.share(iteration, record), record
                )
                for observer in observers:
                    observer(progress)
        except (StepError, TooFewReplies) as error:
            finish(failure=str(error))  # what was reached is kept, with the reason why it ended
            raise
    problem = task.problem
    return Result(folder.path, finish(), records, problem.flat_x.restore(state.x), problem.flat_y.restore(state.y))


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
    }


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


def _checkpoint(state: Any, iteration: int, ledger: Ledger) -> Checkpoint:
    arrays = {name: np.asarray(value) for name, value in state._asdict().items()}
    return Checkpoint(arrays, iteration, ledger.to_mapping())


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
