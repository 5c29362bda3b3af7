"""The problems that come with the library. To add one, write its file and add its line to `PROBLEMS`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..data import DataSettings
from ..names import Names
from ..problem import BilevelProblem, Task
from .cleaning import Cleaning
from .custom import Custom
from .fair import Fair
from .imbalance import Imbalance
from .mixtures import Mixtures
from .penalties import Penalties, PenaltiesTask
from .personal_heads import PersonalHeads
from .quadratic import Quadratic, QuadraticTask
from .representation import HyperRepresentation, representation_problem
from .weights import ClientWeights


class ProblemSettings(Protocol):
    """A problem as a section of a spec: a settings class that builds the task of a run."""

    @property
    def makes_data(self) -> bool:
        """Whether the problem makes its clients' data itself, so that `data.name` does not matter."""

    def task(self, data: DataSettings, seed: int) -> Task: ...


@runtime_checkable
class Detached(Protocol):
    """A problem of a spec that can also be made without its clients, so that their data need not be there."""

    def without_clients(self, data: DataSettings, seed: int) -> BilevelProblem: ...


PROBLEMS: Names[type[Any]] = Names(
    "problems",
    "problem.name",
    {
        "hyper-representation": HyperRepresentation,
        "client-weights": ClientWeights,
        "cleaning": Cleaning,
        "penalties": Penalties,
        "personal-heads": PersonalHeads,
        "fair": Fair,
        "imbalance": Imbalance,
        "mixtures": Mixtures,
        "quadratic": Quadratic,
        "python": Custom,
    },
    needs=("task", "makes_data"),
)

__all__ = [
    "PROBLEMS",
    "Cleaning",
    "ClientWeights",
    "Custom",
    "Detached",
    "Fair",
    "HyperRepresentation",
    "Imbalance",
    "Mixtures",
    "Penalties",
    "PenaltiesTask",
    "PersonalHeads",
    "ProblemSettings",
    "Quadratic",
    "QuadraticTask",
    "representation_problem",
]
