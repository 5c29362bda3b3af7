"""What runs client steps: swappable, and never aware of an algorithm."""

from .attacks import Attack, AttackSettings
from .base import Call, Engine, Held, Replies
from .chaos import Chaos, ChaosSettings, load_chaos
from .loop import Loop
from .simulation import Simulation

__all__ = [
    "Attack",
    "AttackSettings",
    "Call",
    "Chaos",
    "ChaosSettings",
    "Engine",
    "Held",
    "Loop",
    "Replies",
    "Simulation",
    "load_chaos",
]
