"""The course of a run: its state, its place in the budget, and its records. Its end is in `_ending`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import processes, rng
from .._divergence import Restart, Suspect, check_losses, largest_curvature, smaller, suspect
from ..advisor import Automatics, notes_on
from ..aggregate import Memory
from ..algorithms import Algorithm
from ..engines import ClientStates, Engine, Fusible
from ..errors import Diverged, SettingsError, UnknownName
from ..federation import Federation
from ..fused import Blocks, blocks_of
from ..ledger import Ledger
from ..loggers import LoggedRun, Logs
from ..own import own_part
from ..privacy import Accountant, Books, Privacy, Secret
from ..problem import Task
from ..problems import QuadraticTask
from ..record import BOOKS, Checkpoint, Plan, RunFolder, flatten_state, number, restore_state
from ..rng import Root
from ..schedules import decay_of, scheduled
from ..spec import EvaluateSettings, FederationSettings, StopSettings
from ..stepsizes import with_values
from ..theory import floor_of
from ._auto import EngineChoice
from ._budget import Budget
from ._evaluation import available, evaluate, figures_of
from ._rehearsal import rehearsed_rounds
from ._watching import Observer, Progress

RESTARTS = 8  # A run that still diverges after this many halvings ends.
ADVISOR = "advisor"  # the name in the memory under which automatic settings keep what they need of the past
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
    chosen  the engine that was chosen, if the run left that open
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
    chosen: EngineChoice | None = None
    draws: bool = True  # whether the folder is given a picture of the curve


@dataclass(frozen=True)
class _Good:
    """A state to go back to."""

    state: Any
    iteration: int
    ledger: dict[str, Any]
    records: int
    memory: Memory
    steps: dict[str, Any]


class Course:
    """The course of a run: its state, its place in the budget, and its records."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder | None,
        compilations: list[int],
        logs: Logs,
        costs: Callable[[Federation, int], Iterable[int]] | None = None,
    ) -> None:
        """`costs(fed, n)` gives the rounds of each of the next n iterations, if that is known."""
        self.setup, self.folder, self.logs, self._costs = setup, folder, logs, costs
        self.algorithm, self.automatics = setup.algorithm, Automatics.of(setup.algorithm)
        self.state = setup.algorithm.init(setup.task.problem, setup.task.clients.count)
        self.iteration, self.records, self.restarts = 0, list[dict[str, Any]](), list[Restart]()
        self.ended_early, self.notes = False, dict[str, str]()
        self.summary: dict[str, Any] = {}  # how the run ended, once it has
        self._remember = own_part(setup.task.problem) is not None
        private = setup.privacy.mode is not None
        self.accountant = Accountant(setup.privacy, remember=self._remember) if private else None
        self.writes, self.compilations = folder is not None and processes.is_first(), compilations
        self.states = setup.engine.capabilities.states
        self.probed = _probed_clients(setup)
        self._memory: Memory = {}
        self._choose(setup.chosen)
        self._fusible = setup.engine if isinstance(setup.engine, Fusible) else None
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

        def opened() -> tuple[int, dict[str, Any], list[dict[str, Any]], list[Restart], dict[str, Any]]:
            if self.folder is None:
                return 0, Ledger().to_mapping(), [], [], {}
            ways = dict(resume=resume, overwrite=overwrite, accept_change=accept_change)
            saved = self.folder.open(self.setup.plan, **ways)
            if saved is None:
                return 0, Ledger().to_mapping(), [], [], {}
            self.state = restore_state(self.state, saved.arrays)
            kept.update(saved.clients)
            self._memory = _copied(saved.memory)
            return saved.iteration, saved.ledger, self.folder.history(), [*saved.restarts], dict(saved.steps)

        self.iteration, books, self.records, restarts, steps = processes.from_first(opened)
        self._open_books()
        self.restarts = [Restart(*each) for each in restarts]
        for each in self.restarts:
            self.algorithm = smaller(self.algorithm, each.setting, each.after)
        self.state = processes.arrays_from_first(self.state)
        self._memory = _memory_from_first(self._memory)
        self._restore_steps(steps)
        if self.states is not None and self.folder is not None:
            self._open_states(self.states, self.folder.path / CLIENTS, kept)
        elif self.states is not None:
            self.states.clear()  # an engine that is given as an object may have those of an earlier run
        self._set_ledger(Ledger.from_mapping(books))
        records, every = self.records, self.setup.evaluate.every
        if records and records[-1]["iteration"] % every and not self._budget.spent(self.iteration, records):
            records.pop()  # the end of a smaller budget was evaluated off the schedule, and this run continues
            self._rewrite_history()
        place = None if self.folder is None else self.folder.path
        self.logs.start(LoggedRun(self.setup.title, self.setup.plan.values, place, tuple(records)))
        if not records:
            self._evaluate(self._federation(1.0) if self.setup.strict_start else self.fed)
        self._good = self._here()
        self._tell_floor()

    def _tell_floor(self) -> None:
        """Note where the method ends, if the problem has closed forms and all settings are known."""
        closed = self.setup.task.closed
        if self.automatics.waiting or not isinstance(closed, QuadraticTask) or decay_of(self.algorithm):
            return
        floor = floor_of(closed, self.algorithm)
        if floor is not None:
            start = float(np.linalg.norm(closed.hypergradient(self.setup.task.problem.flat_x.vector)))
            share = floor / max(start, 1e-30)
            told = "the stationary point" if share < 1e-6 else f"||∇f|| = {floor:.3g}, {share:.2g} of the start"
            self.notes["floor"] = f"closed form: full batches of all clients would end at {told}"

    def _open_books(self) -> None:
        """Continue the books of a private run, in which every release so far is booked."""
        if self.accountant is None:
            return
        own = () if self.folder is None else (self.folder.file(BOOKS),)
        files = (*own, *self.setup.books) if self.writes else ()
        books = Books(files, self.setup.name)
        if processes.are_several():  # only the first process has read the files
            lines = processes.from_first(lambda: books.lines)
            books = books if processes.is_first() else Books(name=self.setup.name, lines=lines)
        self.accountant = Accountant(self.setup.privacy, books, remember=self._remember)

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
        if self.automatics.waiting and not self.over:
            self._find_steps()
        while not self.over:
            before = self.state
            self._proceed(1 if observers else LONGEST)
            self._adjust_steps(before)
            last = self.look()
            if self._told_to_end(observers, self._progress()) and not last:
                self.ended_early = True
                if self.records[-1]["iteration"] != self.iteration:
                    self._evaluate()
                self._save()
                return

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self._budget.spent(self.iteration, self.records)

    @property
    def is_due(self) -> bool:
        """Whether the state is to be evaluated."""
        return self.iteration % self.setup.evaluate.every == 0 or self.over

    def look(self) -> bool:
        """Evaluate the state and save it, where that is due; return whether the budget is spent."""
        if self.is_due:
            self._evaluate()
        last = self.over
        if self.iteration % self.setup.evaluate.checkpoint_every == 0 or last:
            self._save()
        return last

    def until_due(self, most: int, costs: Callable[[int], Iterable[int]]) -> int:
        """How many iterations can be done at once, because nothing is due in between.

        most    at most so many
        costs   costs(n) gives the rounds of each of the next n iterations
        """
        for every in (self.setup.evaluate.every, self.setup.evaluate.checkpoint_every):
            most = min(most, every - self.iteration % every)
        return self._budget.ahead(self.iteration, most, costs)

    @property
    def left(self) -> int | None:
        """How many iterations are left, if the budget says so."""
        limit = self.setup.stop.iterations
        return None if limit is None else limit - self.iteration

    def arrive(self, state: Any, before: Any, iterations: int) -> None:
        """Take the state after some iterations, and the one before the last of them."""
        self.state, self._before = state, before
        self.iteration += iterations

    def go_on_alone(self) -> None:
        """Do one outer iteration, round by round."""
        self.fed.noted.clear()
        before = self.state
        self.arrive(scheduled(self.algorithm, self.iteration).step(self.fed, before), before, 1)

    def _find_steps(self) -> None:
        """Find the settings that are "auto". They are saved at once, so a run that is resumed measures no more."""
        self.algorithm, self.state = self.automatics.find(self.fed, self.algorithm, self.state, self.setup.seed)
        self.notes["steps"] = f"steps found: {self.automatics.in_words()}"
        self._memory[ADVISOR] = self.automatics.arrays
        self._tell_floor()
        self._save()

    def _adjust_steps(self, before: Any) -> None:
        """Give the automatic settings the values for the next iteration."""
        own = self.automatics
        if own.values:
            self.algorithm, self.state = own.follow(
                self.fed, self.algorithm, before, self.state, self.iteration - 1
            )
            limit = self.setup.stop.rounds
            left = None if limit is None else limit - self.ledger.rounds
            self.algorithm = own.track(self.fed, self.algorithm, self.state, self.iteration, left)

    def _restore_steps(self, saved: Mapping[str, Any]) -> None:
        """Continue with automatic settings as they were saved."""
        if saved:
            self.automatics.restore(saved, self._memory.get(ADVISOR, {}))
            self._memory[ADVISOR] = self.automatics.arrays
            self.algorithm = with_values(self.algorithm, self.automatics.values)

    def _proceed(self, most: int) -> None:
        """Do one outer iteration, or several at once if the engine can and nothing is due in between."""
        if self._fusible is None or not self._proceed_in_blocks(self._fusible, most):
            self.go_on_alone()

    def _proceed_in_blocks(self, engine: Fusible, most: int) -> bool:
        """Do several outer iterations at once; False if the next one has to be done round by round."""
        self.fed.noted.clear()
        try:
            if self._blocks is None:
                self._blocks = blocks_of(engine, self.algorithm, self.fed, self.state)
            due = self.until_due(most, self._blocks.rounds_ahead)
            done = self._blocks.advance(self.state, self.iteration, due, self.left)
        except SettingsError as error:  # the method cannot be traced, which is known only now
            if self.chosen is None:
                raise
            self._choose(self.chosen._replace(name="simulation", why=f"fused is not possible: {error}"))
            self._fusible = self._blocks = None
            return False
        if done is None:
            return False
        self.arrive(done.state, done.before, done.iterations)
        return True

    def _choose(self, chosen: EngineChoice | None) -> None:
        """Note which engine was chosen, if that was left open."""
        self.chosen = chosen
        if chosen is not None:
            self.notes["engine"] = str(chosen)

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
            tuple(self.notes.values()),
        )

    def _told_to_end(self, observers: Sequence[Observer], progress: Progress) -> bool:
        """Tell all observers; return whether one of them ends the run. The first process decides for all."""
        told = [observer(progress) for observer in observers]
        return processes.from_first(lambda: any(answer is True for answer in told))

    def blame(self, error: Diverged) -> Suspect | None:
        """The setting that is to blame for a divergence."""
        good, task, fed = self._good, self.setup.task, self.fed
        if own_part(task.problem) is not None:  # at its clock, clients have the own variables of the good state
            fed = self._federation(self.setup.federation.min_replies, Ledger.from_mapping(good.ledger))
        L = largest_curvature(fed, good.state, self.probed, self.setup.seed)
        shared, moved = task.problem.size_x > 0, self.iteration > good.iteration
        return suspect(self.algorithm, error, L, moved, task.clients.count, shared)

    def go_back(self, error: Diverged, found: Suspect | None) -> bool:
        """Return to the last good state with the value to try; False if that would not help."""
        if found is None or len(self.restarts) == RESTARTS:
            return False
        good = self._good
        lost = self.ledger.rounds - Ledger.from_mapping(good.ledger).rounds
        setting, value, suggested, _ = found
        self.restarts.append(Restart(good.iteration, setting, value, suggested, lost, str(error)))
        self.state, self.iteration, self._memory = good.state, good.iteration, _copied(good.memory)
        self._restore_steps(good.steps)
        self.algorithm = smaller(self.algorithm, setting, suggested)
        if setting in self.automatics.values:
            self.automatics.values[setting] = suggested
        self._set_ledger(Ledger.from_mapping(good.ledger))
        del self.records[good.records :]
        self._rewrite_history()
        return True

    def _set_ledger(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.fed = self._federation(self.setup.federation.min_replies)
        self._before = None
        self._blocks = None
        self._budget = Budget(self.setup.stop, self.fed, self._rehearse)

    def _rehearse(self) -> int | None:
        """The rounds of the next outer iteration, counted without doing it."""
        if self._costs is not None:
            return next(iter(self._costs(self.fed, 1)))
        return rehearsed_rounds(self.algorithm, self.fed, self.state)

    def _federation(self, min_replies: int | float | None, ledger: Ledger | None = None) -> Federation:
        setup, rules = self.setup, self.setup.federation
        return Federation(
            setup.engine,
            seed=setup.root,
            min_replies=min_replies,
            policies=rules.policies(setup.privacy),
            cohorts=rules.cohort,
            iteration=None if rules.cohort_by == "rounds" else lambda: self.iteration,
            weighting=rules.weighting,
            gather=rules.gather(setup.privacy, setup.secret),
            accountant=self.accountant,
            ledger=self.ledger if ledger is None else ledger,
            memory=self._memory,
        )

    def _save(self) -> None:
        """Make this the state to go back to, and to resume from."""
        self._good = self._here()
        if self.folder is not None and self.writes:
            kept = {} if self.states is None else self.states.save(self.ledger.clock)
            books, restarts = self.ledger.to_mapping(), tuple(self.restarts)
            arrays, memory = flatten_state(self.state), self._memory
            steps = self.automatics.to_mapping() if self.automatics.values else {}
            saved = Checkpoint(arrays, self.iteration, books, restarts, kept, memory, steps)
            self.folder.save(self.setup.plan, saved)
        self.fed.settle()

    def _here(self) -> _Good:
        memory, steps = _copied(self._memory), self.automatics.to_mapping() if self.automatics.values else {}
        return _Good(self.state, self.iteration, self.ledger.to_mapping(), len(self.records), memory, steps)

    def _rewrite_history(self) -> None:
        if self.folder is not None and self.writes:
            self.folder.write_history(self.records)

    def _evaluate(self, fed: Federation | None = None) -> dict[str, Any]:
        setup = self.setup
        record = evaluate(
            fed or self.fed,
            setup.task,
            setup.algorithm,
            self.accountant,
            self.state,
            self.iteration,
            self.probed,
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
        for name, value in self.automatics.moving(self.algorithm, setup.task.clients.count).items():
            record.setdefault(name, number(value))
        self.records.append(record)
        if self.folder is not None and self.writes:
            self.folder.append(record)
        self.logs.log(record)
        for series in self.fed.shown:
            for kind, text in notes_on(self.algorithm, series).items():
                self.notes.setdefault(kind, text)
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
