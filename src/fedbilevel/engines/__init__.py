"""What runs client steps. Engines can be swapped, and none of them knows an algorithm."""

from .base import Broken, Capabilities, Engine
from .call import Call, Held, make_call, payload
from .expected import Expected, expect
from .loop import Loop
from .replies import Fault, Reason, Replies
from .settings import ENGINES, LoopSettings, RaySettings, SimulationSettings
from .simulation import Simulation
from .states import ClientStates

__all__ = [
    "ENGINES",
    "Broken",
    "Call",
    "Capabilities",
    "ClientStates",
    "Engine",
    "Expected",
    "Fault",
    "Held",
    "Loop",
    "LoopSettings",
    "RaySettings",
    "Reason",
    "Replies",
    "Simulation",
    "SimulationSettings",
    "expect",
    "make_call",
    "payload",
]
