"""The algorithms: one paper, one file. To add one, write its file and add its line to `ALGORITHMS`."""

from __future__ import annotations

from typing import Any, Protocol

from ..federation import Federation
from ..problem import Problem
from .aggitd import AggITD
from .fednest import FedNest
from .gossip import Gossip
from .lfednest import LFedNest
from .madsbo import MADSBO


class Algorithm(Protocol):
    """A method: a settings class whose fields are its hyperparameters.

    Its state is a NamedTuple of arrays with `x` and `y` among its fields; all that a step needs of the past
    is in it, so a run can be resumed from it.
    """

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""

    def init(self, problem: Problem, clients: int = 1) -> Any:
        """The state before the first outer iteration, for this many registered clients."""

    def step(self, fed: Federation, s: Any) -> Any:
        """One outer iteration."""


ALGORITHMS: dict[str, type[Any]] = {
    "fbo-aggitd": AggITD,
    "fednest": FedNest,
    "lfednest": LFedNest,
    "gossip": Gossip,
    "ma-dsbo": MADSBO,
}

__all__ = ["ALGORITHMS", "MADSBO", "AggITD", "Algorithm", "FedNest", "Gossip", "LFedNest"]
