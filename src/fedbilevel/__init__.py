"""fedbilevel: federated bilevel optimisation, where one call is one communication round."""

from .aggregate import CentredClipping, GeometricMedian, Median, NormBound, TrimmedMean
from .algorithms import MADSBO, AggITD, FedNest, Gossip, LFedNest
from .check import check
from .data import ClientData, ClientSize, LazyClients, ListedClients, Part, clients_from
from .engines import Attack, Loop, Simulation
from .errors import (
    CheckpointError,
    CorruptData,
    DataUnavailable,
    FedBilevelError,
    RunFolderError,
    SettingsError,
    StepError,
    TooFewReplies,
    UnknownName,
)
from .federation import Federation
from .ledger import Ledger
from .oracle import Oracle
from .privacy import Privacy
from .batch import Batch
from .problem import Problem
from .problems import HyperRepresentation, Quadratic
from .run import Result, run
from .spec import Spec, load_spec
from .steps import Epochs, PerClient, Sample, Samples, Scalar, X, Y, client_step

__version__ = "0.1.0"

__all__ = [
    "MADSBO",
    "AggITD",
    "Attack",
    "Batch",
    "CentredClipping",
    "CheckpointError",
    "ClientData",
    "ClientSize",
    "CorruptData",
    "DataUnavailable",
    "Epochs",
    "FedBilevelError",
    "FedNest",
    "Federation",
    "GeometricMedian",
    "Gossip",
    "HyperRepresentation",
    "LFedNest",
    "LazyClients",
    "Ledger",
    "ListedClients",
    "Loop",
    "Median",
    "NormBound",
    "Oracle",
    "Part",
    "PerClient",
    "Privacy",
    "Problem",
    "Quadratic",
    "Result",
    "RunFolderError",
    "Sample",
    "Samples",
    "Scalar",
    "SettingsError",
    "Simulation",
    "Spec",
    "StepError",
    "TooFewReplies",
    "TrimmedMean",
    "UnknownName",
    "X",
    "Y",
    "check",
    "client_step",
    "clients_from",
    "load_spec",
    "run",
]
