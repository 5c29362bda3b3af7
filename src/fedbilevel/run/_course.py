"""The course of a run: its state, its place in the budget, and its records."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import processes, rng
from .._divergence import Restart, Suspect, check_losses, largest_curvature, smaller, suspect
from ..aggregate import Memory
from ..algorithms import Algorithm
from ..engines import ClientStates, Engine, Fusible
from ..errors import Diverged, SettingsError, UnknownName
from ..federation import Federation
from ..fused import Blocks, blocks_of
from ..ledger import Ledger
from ..loggers import LoggedRun, Logs
from ..privacy import Accountant, Books, Privacy, Secret
from ..problem import Task
from ..record import BOOKS, Checkpoint, Plan, RunFolder, flatten_state, restore_state, summarise
from ..report import draw_curve
from ..rng import Root
from ..spec import EvaluateSettings, FederationSettings, StopSettings
from ._budget import Budget
from ._evaluation import available, evaluate, figures_of, spent
from ._rehearsal import rehearsed_rounds
from ._watching import Observer, Progress

RESTARTS = 8  # A run that still diverges after this many halvings ends.
LONGEST = 1024  # the most outer iterations between two looks at the budget
CLIENTS = "clients"  # the folder of the clients' states, in the run folder


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a run is made of, as objects.

    root    the root of the run's random addresses: its seed, or for a private run a secret root
    secret  the secret of a private run
    name    the random name of a private run
    books   further files of the books of a private run, beside the one in its folder
    strict_start   whether the losses of all clients that are probed have to be finite at the start. It is so where
                   the data are in this process and no fault is injected: a client that fails there never recovers
    plan    the facts about the run that its folder needs
    title   the run in one line
    """

    task: Task
    algorithm: Algorithm
    engine: Engine
    federation: FederationSettings
    privacy: Privacy
    evaluate: EvaluateSettings
    stop: StopSettings
    seed: int
    root: Root
    secret: Secret | None
    name: str | None
    books: tuple[Path, ...]
    strict_start: bool
    plan: Plan
    title: str


@dataclass(frozen=True)
class _Good:
    """A state to go back to."""

    state: Any
    iteration: int
    ledger: dict[str, Any]
    records: int
    memory: Memory


class Course:
    """The course of a run: its state, its place in the budget, and its records."""

    def __init__(self, setup: Setup, folder: RunFolder | None, compilations: list[int], logs: Logs) -> None:
        self.setup, self.folder, self._logs = setup, folder, logs
        self.algorithm = setup.algorithm
        self.state = setup.algorithm.init(setup.task.problem, setup.task.clients.count)
        self.iteration, self.records, self.restarts = 0, list[dict[str, Any]](), list[Restart]()
        self.ended_early = False
        self._accountant = None if setup.privacy.mode is None else Accountant(setup.privacy)
        self._writes, self._compilations = folder is not None and processes.is_first(), compilations
        self._states = setup.engine.capabilities.states
        self._probed = _probed_clients(setup)
        self._memory: Memory = {}
        self._blocks: Blocks | None = None  # what does several iterations at once, if the engine can
        self._before: Any = None  # the state before the last iteration, if it was done in this process
        self._set_ledger(Ledger())

    def check_metrics(self) -> None:
        """Raise if a setting names a metric that the run will not have. The start is measured once."""
        setup = self.setup
        asked = {"evaluate.metric": setup.evaluate.metric, "stop.metric": setup.stop.metric}
        named = {field: name for field, name in asked.items() if name is not None}
        if not named:
            return
        known = available(setup.task, self.algorithm, setup.evaluate, setup.privacy, self.state)
        for field, name in named.items():
            if name not in known:
                raise UnknownName(f"{field} =", name, known)

    def open(self, *, resume: bool, overwrite: bool, accept_change: bool = False) -> None:
        """Make the folder ready; continue from its checkpoint, or evaluate the start."""
        kept: dict[str, str] = {}

        def opened() -> tuple[int, dict[str, Any], list[dict[str, Any]], list[Restart]]:
            if self.folder is None:
                return 0, Ledger().to_mapping(), [], []
            ways = dict(resume=resume, overwrite=overwrite, accept_change=accept_change)
            saved = self.folder.open(self.setup.plan, **ways)
            if saved is None:
                return 0, Ledger().to_mapping(), [], []
            self.state = restore_state(self.state, saved.arrays)
            kept.update(saved.clients)
            self._memory = _copied(saved.memory)
            return saved.iteration, saved.ledger, self.folder.history(), [*saved.restarts]

        self.iteration, books, self.records, restarts = processes.from_first(opened)
        self._open_books()
        self.restarts = [Restart(*each) for each in restarts]
        for each in self.restarts:
            self.algorithm = smaller(self.algorithm, each.setting, each.after)
        self.state = processes.arrays_from_first(self.state)
        self._memory = _memory_from_first(self._memory)
        if self._states is not None and self.folder is not None:
            self._open_states(self._states, self.folder.path / CLIENTS, kept)
        self._set_ledger(Ledger.from_mapping(books))
        records, every = self.records, self.setup.evaluate.every
        if records and records[-1]["iteration"] % every and not self._budget.spent(self.iteration, records):
            records.pop()  # the end of a smaller budget was evaluated off the schedule, and this run continues
            self._rewrite_history()
        place = None if self.folder is None else self.folder.path
        self._logs.start(LoggedRun(self.setup.title, self.setup.plan.values, place, tuple(records)))
        if not records:
            self._evaluate(self._federation(1.0) if self.setup.strict_start else self.fed)
        self._good = self._here()

    def _open_books(self) -> None:
        """Continue the books of a private run, in which every release so far is booked."""
        if self._accountant is None:
            return
        own = () if self.folder is None else (self.folder.file(BOOKS),)
        files = (*own, *self.setup.books) if self._writes else ()
        books = Books(files, self.setup.name)
        if processes.are_several():  # only the first process has read the files
            lines = processes.from_first(lambda: books.lines)
            books = books if processes.is_first() else Books(name=self.setup.name, lines=lines)
        self._accountant = Accountant(self.setup.privacy, books)

    def _open_states(self, states: ClientStates, folder: Path, kept: dict[str, str]) -> None:
        """Continue from the states that clients kept.

        With several processes, only the first uses the run folder. It sends the files to the others, which store
        them in temporary folders.
        """
        if processes.is_first():
            states.place(folder)
        states.load(processes.from_first(lambda: kept))
        if processes.are_several():
            files = processes.from_first(states.packed)
            if not processes.is_first():
                states.unpack(files)

    def advance(self, observers: Sequence[Observer]) -> None:
        """Do outer iterations until the budget is spent, or an observer ends the run."""
        rules, budget, records = self.setup.evaluate, self._budget, self.records
        while not budget.spent(self.iteration, records):
            self._proceed(1 if observers else LONGEST)
            last = budget.spent(self.iteration, records)
            if self.iteration % rules.every == 0 or last:
                self._evaluate()
                last = budget.spent(self.iteration, records)
            if self.iteration % rules.checkpoint_every == 0 or last:
                self._save()
            if self._told_to_end(observers, self._progress()) and not last:
                self.ended_early = True
                if records[-1]["iteration"] != self.iteration:
                    self._evaluate()
                self._save()
                return

    def _proceed(self, most: int) -> None:
        """Do one outer iteration, or several at once if the engine can and nothing is due in between."""
        rules = self.setup.evaluate
        self.fed.noted.clear()
        if self._blocks is None and isinstance(self.setup.engine, Fusible):
            self._blocks = blocks_of(self.setup.engine, self.algorithm, self.fed, self.state)
        if self._blocks is not None:
            for every in (rules.every, rules.checkpoint_every):
                most = min(most, every - self.iteration % every)
            most = self._budget.ahead(self.iteration, most, self._blocks.rounds_ahead)
            limit = self.setup.stop.iterations
            done = self._blocks.advance(self.state, most, None if limit is None else limit - self.iteration)
            if done is not None:
                self.state, self._before = done.state, done.before
                self.iteration += done.iterations
                return
        before = self.state
        self.state = self.algorithm.step(self.fed, self.state)
        self._before = before
        self.iteration += 1

    def _progress(self) -> Progress:
        """What observers are told: the parameters are restored only if one of them asks."""
        problem, state = self.setup.task.problem, self.state
        return Progress(
            self.iteration,
            self.ledger.rounds,
            self.ledger.seconds,
            self._budget.share(self.iteration, self.records),
            self.records[-1],
            lambda: (problem.flat_x.restore(state.x), problem.flat_y.restore(state.y)),
        )

    def _told_to_end(self, observers: Sequence[Observer], progress: Progress) -> bool:
        """Tell all observers; return whether one of them ends the run. The first process decides for all."""
        told = [observer(progress) for observer in observers]
        return processes.from_first(lambda: any(answer is True for answer in told))

    def blame(self, error: Diverged) -> Suspect | None:
        """The setting that is to blame for a divergence."""
        good = self._good
        L = largest_curvature(self.fed, good.state, self._probed, self.setup.seed)
        return suspect(self.algorithm, error, L, self.iteration > good.iteration, self.setup.task.clients.count)

    def go_back(self, error: Diverged, found: Suspect | None) -> bool:
        """Return to the last good state with the value to try; False if that would not help."""
        if found is None or len(self.restarts) == RESTARTS:
            return False
        good = self._good
        lost = self.ledger.rounds - Ledger.from_mapping(good.ledger).rounds
        setting, value, suggested, _ = found
        self.restarts.append(Restart(good.iteration, setting, value, suggested, lost, str(error)))
        self.algorithm = smaller(self.algorithm, setting, suggested)
        self.state, self.iteration, self._memory = good.state, good.iteration, _copied(good.memory)
        self._set_ledger(Ledger.from_mapping(good.ledger))
        del self.records[good.records :]
        self._rewrite_history()
        return True

    def finish(self, **more: Any) -> dict[str, Any]:
        """Write the summary and the curve, whether the run ended well or not."""
        ledger = self.ledger
        figures: dict[str, Any] = {
            "seconds": ledger.seconds,
            "compilations": self._compilations[0],
            "peak_memory_mb": _peak_memory(),
        }
        figures |= spent(self._accountant, self.fed)
        if self.restarts:
            figures["restarts"] = [each._asdict() for each in self.restarts]
        if self.ended_early:
            figures["ended_by"] = "observer"
        figures |= {"spec": self.setup.plan.identity, "clients": self.setup.task.clients.count, **more}
        summary = summarise(self.records, ledger.to_mapping(), window=self.setup.evaluate.window, **figures)
        if self.folder is not None and self._writes:
            self.folder.write_json("summary.json", summary)
            draw_curve(self.records, self.folder.file("curve.png"), self.setup.title, self.setup.evaluate.metric)
        self._logs.finish(summary)
        return summary

    def _set_ledger(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.fed = self._federation(self.setup.federation.min_replies)
        self._before = None
        self._blocks = None
        self._budget = Budget(self.setup.stop, self.fed, self._rehearse)

    def _rehearse(self) -> int | None:
        """The rounds of the next outer iteration, counted without doing it."""
        return rehearsed_rounds(self.algorithm, self.fed, self.state)

    def _federation(self, min_replies: int | float | None) -> Federation:
        setup, rules = self.setup, self.setup.federation
        return Federation(
            setup.engine,
            seed=setup.root,
            min_replies=min_replies,
            policies=rules.policies(setup.privacy),
            cohorts=rules.cohort,
            weighting=rules.weighting,
            gather=rules.gather(setup.privacy, setup.secret),
            accountant=self._accountant,
            ledger=self.ledger,
            memory=self._memory,
        )

    def _save(self) -> None:
        """Make this the state to go back to, and to resume from."""
        self._good = self._here()
        if self.folder is not None and self._writes:
            kept = {} if self._states is None else self._states.save(self.ledger.clock)
            books, restarts = self.ledger.to_mapping(), tuple(self.restarts)
            arrays, memory = flatten_state(self.state), self._memory
            self.folder.save(self.setup.plan, Checkpoint(arrays, self.iteration, books, restarts, kept, memory))
        self.fed.settle()

    def _here(self) -> _Good:
        memory = _copied(self._memory)
        return _Good(self.state, self.iteration, self.ledger.to_mapping(), len(self.records), memory)

    def _rewrite_history(self) -> None:
        if self.folder is not None and self._writes:
            self.folder.write_history(self.records)

    def _evaluate(self, fed: Federation | None = None) -> dict[str, Any]:
        setup = self.setup
        record = evaluate(
            fed or self.fed,
            setup.task,
            setup.algorithm,
            self._accountant,
            self.state,
            self.iteration,
            self._probed,
            training=setup.evaluate.train,
            figures={} if self._before is None else figures_of(self._before, self.state, self.fed),
        )
        wanted = setup.stop.metric
        if self.iteration and wanted is not None and wanted not in record:
            raise SettingsError(
                f"stop.metric = {wanted!r} is wrong: this method does not give it; use another metric"
            )
        if self.restarts:
            record["restarts"] = len(self.restarts)
        self.records.append(record)
        if self.folder is not None and self._writes:
            self.folder.append(record)
        self._logs.log(record)
        check_losses(record, self.records[0])
        return record


def _copied(memory: Mapping[str, Mapping[str, np.ndarray]]) -> Memory:
    """A memory that changes on its own. Its arrays are replaced as a whole, so they can be shared."""
    return {step: dict(fields) for step, fields in memory.items()}


def _memory_from_first(memory: Memory) -> Memory:
    """The memory of the first process, which alone has read a checkpoint."""
    if not processes.are_several():
        return memory
    sizes = processes.from_first(lambda: {s: {f: a.size for f, a in own.items()} for s, own in memory.items()})
    if not sizes:
        return {}
    known = memory or {s: {f: np.zeros(n, np.float32) for f, n in own.items()} for s, own in sizes.items()}
    return {s: {f: np.asarray(a) for f, a in own.items()} for s, own in processes.arrays_from_first(known).items()}


def _probed_clients(setup: Setup) -> tuple[int, ...]:
    """The clients whose losses are probed: the same ones throughout a run, so that curves are smooth."""
    clients = setup.task.clients.count
    count = min(setup.evaluate.clients, clients)
    chosen = rng.generator(setup.seed, "evaluate").choice(clients, count, replace=False)
    return tuple(int(c) for c in sorted(chosen))


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))
