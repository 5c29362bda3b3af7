"""Engines run client steps. They are interchangeable, and do not depend on the algorithm."""

from ._base import MAX_ROWS, Averaging, Broken, Capabilities, Engine, Fusible
from ._call import Call, Held, make_call, payload
from ._expected import Expected, expect
from ._replies import Averaged, Fault, Reason, Replies
from ._settings import (
    ENGINES,
    AutoSettings,
    BatchedSettings,
    FusedSettings,
    LoopSettings,
    RaySettings,
    SimulationSettings,
)
from ._states import ClientStates
from ._work import load_unpadded, native, pad, perform, prepare, recalled
from .fused import Fused
from .loop import Loop
from .simulation import Simulation

__all__ = [
    "ENGINES",
    "MAX_ROWS",
    "AutoSettings",
    "Averaged",
    "Averaging",
    "BatchedSettings",
    "Broken",
    "Call",
    "Capabilities",
    "ClientStates",
    "Engine",
    "Expected",
    "Fault",
    "Fused",
    "FusedSettings",
    "Fusible",
    "Held",
    "Loop",
    "LoopSettings",
    "RaySettings",
    "Reason",
    "Replies",
    "Simulation",
    "SimulationSettings",
    "expect",
    "load_unpadded",
    "make_call",
    "native",
    "pad",
    "payload",
    "perform",
    "prepare",
    "recalled",
]
