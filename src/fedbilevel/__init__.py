"""fedbilevel: federated bilevel optimisation, where one call is one communication round."""

from .agents import Agents
from .aggregate import (
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
    gather_by,
)
from .algorithms import MADSBO, AggITD, Algorithm, FedNest, Gossip, LFedNest, NaiveITD
from .batch import Batch
from .check import check
from .data import ClientData, Clients, ClientSize, Dataset, LazyClients, ListedClients, Part, clients_from
from .engines import Call, Capabilities, ClientStates, Engine, Fault, Fused, Loop, Reason, Replies, Simulation
from .errors import (
    CheckpointError,
    CorruptData,
    DataUnavailable,
    Diverged,
    FedBilevelError,
    FedBilevelWarning,
    Refused,
    RunFolderError,
    SettingsError,
    StepError,
    StorageError,
    TooFewReplies,
    UnknownName,
)
from .federation import Federation
from .layers import Attack, Chaos, ChaosSettings, stacked
from .ledger import Ledger
from .loggers import Log, LoggedRun, Logger
from .oracle import Oracle
from .policies import Policies
from .privacy import Accountant, Privacy, Secret
from .problem import BilevelProblem, Problem, Task
from .problems import HyperRepresentation, Quadratic
from .run import Observer, Progress, Result, SavedRun, load_run, run, train
from .settings import about, settings
from .spec import Spec, load_spec
from .steps import (
    Draw,
    Epochs,
    Next,
    Own,
    PerClient,
    Sample,
    Samples,
    Scalar,
    Stream,
    X,
    Y,
    client_step,
    sgd,
    svrg,
    walk,
)
from .stepsizes import Inverse, Moves

__version__ = "0.1.0"

__all__ = [
    "MADSBO",
    "Accountant",
    "Agents",
    "AggITD",
    "Algorithm",
    "Attack",
    "Batch",
    "BilevelProblem",
    "Bucketing",
    "Call",
    "Capabilities",
    "CentredClipping",
    "Chaos",
    "ChaosSettings",
    "CheckpointError",
    "ClientData",
    "ClientSize",
    "ClientStates",
    "Clients",
    "CorruptData",
    "DataUnavailable",
    "Dataset",
    "Diverged",
    "Draw",
    "Engine",
    "Epochs",
    "Fault",
    "FedBilevelError",
    "FedBilevelWarning",
    "FedNest",
    "Federation",
    "Fused",
    "GeometricMedian",
    "Gossip",
    "HyperRepresentation",
    "Inverse",
    "LFedNest",
    "LazyClients",
    "Ledger",
    "ListedClients",
    "Log",
    "LoggedRun",
    "Logger",
    "Loop",
    "Median",
    "Moves",
    "MultiKrum",
    "NaiveITD",
    "Next",
    "NormBound",
    "Observer",
    "Oracle",
    "Own",
    "Part",
    "PerClient",
    "Policies",
    "Privacy",
    "Problem",
    "Progress",
    "Quadratic",
    "Reason",
    "Refused",
    "Replies",
    "Result",
    "RunFolderError",
    "Sample",
    "Samples",
    "SavedRun",
    "Scalar",
    "Secret",
    "SettingsError",
    "Simulation",
    "Spec",
    "StepError",
    "StorageError",
    "Stream",
    "Task",
    "TooFewReplies",
    "TrimmedMean",
    "UnknownName",
    "X",
    "Y",
    "about",
    "check",
    "client_step",
    "clients_from",
    "gather_by",
    "load_run",
    "load_spec",
    "run",
    "settings",
    "sgd",
    "stacked",
    "svrg",
    "train",
    "walk",
]
