"""Differential privacy of what clients upload: its settings, its mechanism, and what it has spent."""

from .accounting import Accountant, ClientUploads, CohortUploads, Release, accounting, epsilon_of, local_epsilon
from .mechanism import NoisySum, noisy
from .settings import Privacy

__all__ = [
    "Accountant",
    "ClientUploads",
    "CohortUploads",
    "NoisySum",
    "Privacy",
    "Release",
    "accounting",
    "epsilon_of",
    "local_epsilon",
    "noisy",
]
