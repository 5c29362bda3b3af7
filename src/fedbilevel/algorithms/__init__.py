"""The algorithms, with one file for each paper. To add one, write its file and add its line to `ALGORITHMS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from ..federation import Federation
from ..names import Names
from ..problem import BilevelProblem, LowerIs
from .aggitd import AggITD
from .fedavg import FedAvg
from .fedbioacc import FedBiOAcc
from .fedbioacclocal import FedBiOAccLocal
from .fedf2sa import FedF2SA
from .fedmsa import FedMSA
from .fednest import FedNest
from .fedsoba import FedSOBA
from .gossip import Gossip
from .lfednest import LFedNest
from .locallower import LocalLower
from .madsbo import MADSBO
from .naive_itd import NaiveITD
from .personal import OwnLower
from .qfedavg import QFedAvg
from .simfbo import FedBiO, ShroFBO, SimFBO


class Algorithm(Protocol):
    """A method: an object whose fields are its hyperparameters.

    Its state is any pytree of arrays that has the flat vectors `x` and `y` as attributes. Everything from the past
    that a step needs is in the state or kept by the clients, so a run can be resumed. A method that a spec names
    is a settings class (`fedbilevel.settings`); a method that is given to `train` may be any object.

    needs_server   whether clients talk only with a server; a method without a server uses `Agents`

    Further class attributes may say what else it can do: `projects` that it keeps feasible sets, and `lower_kinds`
    which kinds of lower level it solves: ("global",), which is the default, ("local",), or both.
    """

    needs_server: ClassVar[bool]

    def init(self, problem: BilevelProblem, clients: int) -> Any:
        """The state before the first outer iteration, for this many registered clients."""

    def step(self, fed: Federation, s: Any) -> Any:
        """One outer iteration."""


@runtime_checkable
class Checked(Protocol):
    """A method that can check its settings before the run."""

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""


@runtime_checkable
class Sampling(Protocol):
    """A method that draws a cohort for each outer iteration, so that a run can check the size of the cohorts.

    participation   a number of clients, or a share as a float, as `Federation.cohort` takes it
    """

    @property
    def participation(self) -> int | float: ...


@runtime_checkable
class MovesOwn(Protocol):
    """A method that moves the own variables of clients (`Problem.own`).

    own_step   the step size, or None for that of x
    """

    @property
    def own_step(self) -> float | None: ...


@runtime_checkable
class SolvesAtClients(Protocol):
    """A method for a local lower level, which says how a client finds its own y."""

    def own_lower(self, steps: int | None = None) -> OwnLower:
        """The steps to the client's y, as many as the method makes in a round or as asked for."""


def lower_kinds(algorithm: Any) -> tuple[LowerIs, ...]:
    """The kinds of lower level that a method, or a class of methods, solves; global if it does not say."""
    kinds: tuple[LowerIs, ...] = getattr(algorithm, "lower_kinds", ("global",))
    return kinds


@runtime_checkable
class Reporting(Protocol):
    """A method that adds its own figures to every evaluation."""

    def report(self, state: Any) -> Mapping[str, float]: ...


ALGORITHMS: Names[type[Any]] = Names(
    "algorithms",
    "algorithm.name",
    {
        "fbo-aggitd": AggITD,
        "fednest": FedNest,
        "lfednest": LFedNest,
        "naive-itd": NaiveITD,
        "gossip": Gossip,
        "ma-dsbo": MADSBO,
        "fedsoba": FedSOBA,
        "simfbo": SimFBO,
        "fedbio": FedBiO,
        "shrofbo": ShroFBO,
        "fedmsa": FedMSA,
        "fedbioacc": FedBiOAcc,
        "fed-f2sa": FedF2SA,
        "local-lower": LocalLower,
        "fedbioacc-local": FedBiOAccLocal,
        "fedavg": FedAvg,
        "q-fedavg": QFedAvg,
    },
    needs=("init", "step", "needs_server"),
)

__all__ = [
    "ALGORITHMS",
    "MADSBO",
    "AggITD",
    "Algorithm",
    "Checked",
    "FedAvg",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedF2SA",
    "FedMSA",
    "FedNest",
    "FedSOBA",
    "Gossip",
    "LFedNest",
    "LocalLower",
    "MovesOwn",
    "NaiveITD",
    "OwnLower",
    "QFedAvg",
    "Reporting",
    "Sampling",
    "ShroFBO",
    "SimFBO",
    "SolvesAtClients",
    "lower_kinds",
]
