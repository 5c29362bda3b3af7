"""What runs client steps: swappable, and never aware of an algorithm."""

from .attacks import Attack, AttackSettings
from .base import Call, Engine, Held, Replies
from .loop import Loop
from .simulation import Simulation

__all__ = ["Attack", "AttackSettings", "Call", "Engine", "Held", "Loop", "Replies", "Simulation"]
