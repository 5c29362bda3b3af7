"""The user's own problem in a spec: a Python function, given by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..data import ClientData, ClientSize, DataSettings
from ..errors import SettingsError
from ..names import locate, users_code
from ..problem import Problem, Task
from ..settings import about, settings


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

    makes_data: ClassVar[bool] = True

    def task(self, data: DataSettings, seed: int) -> Task:
        """The task that the function returns."""
        function = locate(self.function, "problem.function")
        wrong = f"problem.function = {self.function!r} is wrong"
        with users_code(f"{wrong}: it is called without arguments, and raises "):
            made = function()
        if isinstance(made, Problem):
            return Task(made, Elsewhere(data.clients))
        if isinstance(made, Task):
            return made
        raise SettingsError(
            f"{wrong}: it returns an object of type {type(made).__name__}; return a Problem or a Task"
        )
