"""What runs client steps: swappable, and never aware of an algorithm."""

from .base import Call, Engine, Held, Replies
from .loop import Loop
from .simulation import Simulation

__all__ = ["Call", "Engine", "Held", "Loop", "Replies", "Simulation"]
