"""Runs that are in their folders: `load_run` reads one again, whether it ended, failed, or is under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..algorithms import ALGORITHMS
from ..engines import ClientStates
from ..errors import CheckpointError, RunFolderError, SettingsError
from ..ledger import Ledger
from ..own import KEPT, own_part
from ..problem import BilevelProblem, Flat, Measured
from ..record import Checkpoint, RunFolder, Status, flatten_state, status_of, summarise
from ..settings import choose
from ..spec import Spec, parse
from ._course import CLIENTS
from ._personal import NEWCOMER, Newcomer, join, own_lowers


@dataclass(frozen=True)
class SavedRun:
    """A run that was read from its folder.

    folder    the run folder
    settings  what spec.toml says, as nested values
    status    "finished", "failed" (then `summary["failure"]` says why), "under way" (a process has the folder), or
              "interrupted" (it can be resumed)
    history   one mapping for each evaluation so far
    given     the problem that `load_run` was given

    The checkpoint is read, and the problem made, when something is asked that needs them.
    """

    folder: Path
    settings: Mapping[str, Any]
    status: Status
    history: list[dict[str, Any]]
    given: BilevelProblem | None
    written: Mapping[str, Any] | None

    @property
    def is_of_objects(self) -> bool:
        """Whether the run was made by `train` from objects, so that no spec says how its problem is made."""
        problem = self.settings.get("problem")
        return isinstance(problem, Mapping) and "size_x" in problem and "name" not in problem

    @cached_property
    def spec(self) -> Spec | None:
        """The spec of the run, or None for a run of objects."""
        return None if self.is_of_objects else parse(self.settings)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary. For a run that is not over it is made from what there is; it is empty without a history."""
        if self.written is not None and self.status in ("finished", "failed"):
            return dict(self.written)
        if not self.history:
            return {}
        saved, last = self._checkpoint, self.history[-1]
        ledger = Ledger().to_mapping() if saved is None else saved.ledger
        return summarise(self.history, ledger, seconds=last["seconds"])

    @cached_property
    def problem(self) -> BilevelProblem | None:
        """The problem: as given, or as the spec makes it; None for a run of objects without a given one."""
        if self.given is not None or self.spec is None:
            return self.given
        return self.spec.without_clients()

    @property
    def iteration(self) -> int:
        """The outer iteration after which x and y were saved."""
        return self._saved.iteration

    @property
    def flat_x(self) -> np.ndarray:
        """x as a flat vector, from the newest checkpoint."""
        return self._vector("x")

    @property
    def flat_y(self) -> np.ndarray:
        """y as a flat vector, from the newest checkpoint."""
        return self._vector("y")

    @cached_property
    def x(self) -> Any:
        """x in the user's structure; the flat vector for a run of objects whose problem was not given."""
        return self.flat_x if self.problem is None else self._restored("x", self.problem.flat_x)

    @cached_property
    def y(self) -> Any:
        """y in the user's structure; the flat vector for a run of objects whose problem was not given."""
        return self.flat_y if self.problem is None else self._restored("y", self.problem.flat_y)

    @cached_property
    def own(self) -> dict[int, Any]:
        """The own variables of the clients that have moved theirs, as pytrees, by the client's number.

        They are those of the newest checkpoint. On a real federation they are at the sites, and none are here.
        """
        part, states = own_part(self._needed("own")), ClientStates(folder=self.folder / CLIENTS)
        states.load(self._saved.clients)
        kept = {client: states.read(client, self._clock).get(KEPT) for client in states}
        return {i: part.unpadded(each) for i, each in kept.items() if part is not None and each is not None}

    @cached_property
    def lower(self) -> dict[int, Any]:
        """The y of the clients that have kept one of their own, as pytrees, by the client's number.

        They are those of the newest checkpoint. On a real federation they are at the sites, and none are here.
        """
        states = ClientStates(folder=self.folder / CLIENTS)
        states.load(self._saved.clients)
        return own_lowers(self._needed("lower"), states, self._clock)

    def join(self, rows: Any, test: Any = None, *, steps: int = NEWCOMER, seed: int = 0) -> Newcomer:
        """What a client gets that joins after the run, with a local lower level: see `Result.join`."""
        algorithm = choose(ALGORITHMS, self.settings["algorithm"], "algorithm")
        return join(self._needed("join"), algorithm, self.flat_x, rows, test, steps=steps, seed=seed)

    def predict(self, inputs: Any) -> Any:
        """What the problem's `predict` says about rows of inputs, at the trained x and y."""
        problem = self._needed("predict")
        if not isinstance(problem, Measured) or problem.predict is None:
            raise SettingsError("the problem of this run has no predict; give it one: Problem(..., predict=...)")
        return problem.predict(self.x, self.y, inputs)

    def _needed(self, what: str) -> BilevelProblem:
        """The problem, without which something cannot be given."""
        if self.problem is None:
            raise SettingsError(
                f"{self.folder} is a run of objects; {what} needs its problem: load_run(folder, problem=problem)"
            )
        return self.problem

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters by readable names, such as "x.weight", and the vectors "flat_x" and "flat_y".

        A run of objects whose problem was not given has only the vectors.
        """
        flat: dict[str, Any] = {"flat_x": self.flat_x, "flat_y": self.flat_y}
        if self.problem is None:
            return flat
        return flatten_state({"x": _named(self.x), "y": _named(self.y)}) | flat

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint. A spec tells whose it must be, and a run of objects has none."""
        if self.spec is not None:
            return RunFolder(self.folder).checkpoint(self.spec.plan)
        return RunFolder(self.folder).newest(self._every(), None)

    @property
    def _saved(self) -> Checkpoint:
        if self._checkpoint is None:
            raise CheckpointError(
                f"{self.folder} has no checkpoint yet, and so no x and y; the run writes one every "
                "evaluate.checkpoint_every outer iterations and at its end"
            )
        return self._checkpoint

    @property
    def _clock(self) -> int:
        """The clock of the newest checkpoint, before which the states of clients were kept."""
        return Ledger.from_mapping(self._saved.ledger).clock

    def _every(self) -> int:
        """The outer iterations between two evaluations of a run of objects."""
        rules = self.settings.get("evaluate")
        every = rules.get("every", 1) if isinstance(rules, Mapping) else 1
        if not isinstance(every, int) or every < 1:
            raise RunFolderError(f"{self.folder / 'spec.toml'} has evaluate.every = {every!r}; put it back")
        return every

    def _vector(self, name: str) -> np.ndarray:
        arrays = self._saved.arrays
        if name not in arrays or arrays[name].ndim != 1:
            raise CheckpointError(
                f"the state in {self.folder} has no vector {name}; it has {', '.join(arrays)}: "
                "make x and y fields of the algorithm's state"
            )
        return arrays[name]

    def _restored(self, name: str, flat: Flat) -> Any:
        vector = self._vector(name)
        if vector.size != flat.vector.size:
            raise SettingsError(
                f"problem has {flat.vector.size} parameters of {name}, and the run in {self.folder} has "
                f"{vector.size}; give the problem that was trained"
            )
        return flat.restore(jnp.asarray(vector))


def load_run(folder: str | Path, problem: BilevelProblem | None = None) -> SavedRun:
    """Read the run in a folder: its settings, history and summary, and x and y.

    A run of a spec makes its problem again, so that x and y are the user's pytrees and `predict` works. A run that
    `train` made from objects has no spec that says how: give its `problem`, or x and y are flat vectors.

    A run that is under way, failed or was interrupted is read too, and `status` says so. Raises an error with one
    line if the folder holds no run, or a file is not as it was written.
    """
    place = Path(folder)
    files = RunFolder(place)
    if not files.file("spec.toml").exists():
        raise RunFolderError(f"{place} holds no run: there is no spec.toml in it; name a run folder")
    settings, history = files.settings(), files.history()
    written = files.summary() if files.file("summary.json").exists() else None
    return SavedRun(place, settings, status_of(files.in_use(), history, written), history, problem, written)


def _named(tree: Any) -> Any:
    """The arrays of a pytree, or of a module of PyTorch by the names of its parameters."""
    if hasattr(tree, "named_parameters"):
        return {name: np.asarray(value.detach().cpu()) for name, value in tree.named_parameters()}
    return eqx.filter(tree, eqx.is_array)
