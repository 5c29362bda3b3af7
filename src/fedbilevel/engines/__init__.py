"""What runs client steps. Engines can be swapped, and none of them knows an algorithm."""

from .base import Broken, Capabilities, Engine
from .call import Call, Held, make_call, payload
from .expected import Expected, expect
from .loop import Loop
from .replies import Fault, Reason, Replies
from .simulation import Simulation
from .states import ClientStates

__all__ = [
    "Broken",
    "Call",
    "Capabilities",
    "ClientStates",
    "Engine",
    "Expected",
    "Fault",
    "Held",
    "Loop",
    "Reason",
    "Replies",
    "Simulation",
    "expect",
    "make_call",
    "payload",
]
