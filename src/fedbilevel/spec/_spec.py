"""The spec of a run: everything that decides it, as checked and frozen objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from ..algorithms import ALGORITHMS, Algorithm
from ..data import Clients, DataSettings
from ..layers import AttackSettings
from ..names import Names
from ..privacy import Privacy
from ..problem import BilevelProblem, Task
from ..problems import PROBLEMS, Detached, ProblemSettings
from ..record import Plan, digest_of
from ..settings import named, to_mapping
from ._sections import EvaluateSettings, FederationSettings, StopSettings

CHOSEN: Mapping[str, Names[type[Any]]] = {"problem": PROBLEMS, "algorithm": ALGORITHMS}
SECTIONS: Mapping[str, type[Any]] = {
    "data": DataSettings,
    "federation": FederationSettings,
    "attack": AttackSettings,
    "privacy": Privacy,
    "evaluate": EvaluateSettings,
    "stop": StopSettings,
}
ORDER = ("problem", "data", "algorithm", "federation", "attack", "privacy", "evaluate", "stop")


@dataclass(frozen=True)
class Spec:
    """Everything that decides a run."""

    problem: ProblemSettings
    data: DataSettings
    algorithm: Algorithm
    federation: FederationSettings
    attack: AttackSettings
    privacy: Privacy
    evaluate: EvaluateSettings
    stop: StopSettings
    seed: int = 0

    def to_mapping(self, changed: bool = False) -> dict[str, Any]:
        """The resolved spec as TOML values, the inverse of `parse`. `changed` omits values that are defaults."""
        made: dict[str, Any] = {"seed": self.seed}
        for section in ORDER:
            value = getattr(self, section)
            if section in CHOSEN:
                made[section] = named(CHOSEN[section], value, changed)
            else:
                made[section] = to_mapping(value, changed)
        return {section: values for section, values in made.items() if values != {}}

    def to_toml(self) -> str:
        """The resolved spec as TOML."""
        return tomli_w.dumps(self.to_mapping())

    @property
    def digest(self) -> str:
        """The name of the trajectory: specs with one digest differ at most in when they stop and in the window."""
        return digest_of(self.to_mapping(changed=True))

    @property
    def plan(self) -> Plan:
        """The facts about the run that its folder needs."""
        return Plan(self.to_mapping(), self.digest, self.evaluate.every, self.to_mapping(changed=True))

    @property
    def title(self) -> str:
        """The run in one line."""
        data = self.data.name if self.problem.makes_data else f"{self.data.name}, {self.data.partition}"
        names = [named(CHOSEN[section], getattr(self, section))["name"] for section in ("algorithm", "problem")]
        return f"{names[0]} on {names[1]} ({data}), {self.data.clients} clients"

    def task(self) -> Task:
        """Load the data and build the problem."""
        return self.problem.task(self.data, self.seed)

    def without_clients(self) -> BilevelProblem:
        """The problem alone, for use after a run; data are loaded only where it cannot be made without them."""
        if isinstance(self.problem, Detached):
            return self.problem.without_clients(self.data, self.seed)
        return self.task().problem

    def clients(self, task: Task) -> Clients:
        """The clients of a task, with the labels that they use. An attack may have flipped these."""
        classes = None if self.problem.makes_data else self.data.classes
        return self.attack.wrap_clients(task.clients, classes, self.seed)
