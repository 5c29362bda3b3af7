"""The spec of a run: everything that decides it, as checked and frozen objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from ..algorithms import ALGORITHMS, Algorithm
from ..data import Clients, DataSettings
from ..layers import AttackSettings
from ..names import PYTHON, Names, source_digest
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
ADDRESSES = (  # the settings that name code by its address
    "problem.function",
    "problem.class",
    "data.function",
    "algorithm.class",
    "algorithm.upper.function",
    "federation.engine.class",
    "federation.aggregator.class",
)
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
        """The name of the trajectory: specs that share it differ at most in when they stop and how they are shown.

        It covers the source of the modules that the spec names by an address.
        """
        return self.plan.identity

    @property
    def plan(self) -> Plan:
        """The facts about the run that its folder needs."""
        values, changed = self.to_mapping(), self.to_mapping(changed=True)
        return Plan(values, digest_of(changed), self.evaluate.every, changed, _sources(values))

    def title(self, clients: int) -> str:
        """The run in one line, with the number of clients that its task has."""
        data = self.data.name if self.problem.makes_data else f"{self.data.name}, {self.data.partition}"
        names = [named(CHOSEN[section], getattr(self, section))["name"] for section in ("algorithm", "problem")]
        return f"{names[0]} on {names[1]} ({data}), {clients} clients"

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


def _sources(values: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the modules that a spec names by an address, by setting."""
    found: dict[str, str | None] = {}
    for setting in ADDRESSES:
        *path, last = setting.split(".")
        table: Any = values
        for part in path:
            table = table.get(part, {})
        if table.get("name") == PYTHON and isinstance(table.get(last), str):
            found[setting] = source_digest(table[last])
    return {setting: digest for setting, digest in found.items() if digest is not None}
