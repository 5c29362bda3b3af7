"""The user's own problem in a spec: a Python function, given by its name."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from ..data import ClientData, ClientSize, DataSettings
from ..errors import SettingsError
from ..names import locate, users_code
from ..problem import Fitting, Problem, Task
from ..settings import about, settings, to_mapping


@dataclass(frozen=True)
class Elsewhere:
    """Clients of which only the number is known, because their data are at the sites."""

    count: int
    capacity: ClassVar[ClientSize] = ClientSize(0, 0)

    def size(self, client: int) -> ClientSize:
        return self.capacity

    def load(self, client: int) -> ClientData:
        raise SettingsError(
            "the function of problem.function gives no clients; return a Task with clients, or use `federate`"
        )


@settings
class Custom:
    """The user's own problem, made by a Python function."""

    function: Annotated[
        str, about("module:function that returns a Problem, or a Task with clients and a measure")
    ] = "my_problem:make"
    arguments: Annotated[dict[str, Any], about("any other key is an argument of the function")] = field(
        default_factory=dict
    )

    makes_data: ClassVar[bool] = True
    rest: ClassVar[str] = "arguments"  # the field that holds the keys that are not fields

    def task(self, data: DataSettings, seed: int) -> Task:
        """The task that the function returns."""
        function = locate(self.function, "problem.function")
        wrong = f"problem.function = {self.function!r} is wrong"
        told = f"with {', '.join(self.arguments)}" if self.arguments else "without arguments"
        with users_code(f"{wrong}: it is called {told}, and raises "):
            made = function(**copy.deepcopy(self.arguments))
        if isinstance(made, Problem | Fitting):
            problem: Any = made
            return Task(problem, Elsewhere(data.clients))
        if not isinstance(made, Task):
            raise SettingsError(
                f"{wrong}: it returns an object of type {type(made).__name__}; return a Problem or a Task"
            )
        if "clients" in to_mapping(data, changed=True) and data.clients != made.clients.count:
            raise SettingsError(
                f"data.clients = {data.clients} is wrong: the task of problem.function = {self.function!r} has "
                f"{made.clients.count} clients; remove it, or use {made.clients.count}"
            )
        return made
