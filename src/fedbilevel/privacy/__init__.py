"""Differential privacy of what clients upload: its settings, its mechanism, and what it has spent."""

from ._accounting import Accountant, ClientUploads, CohortUploads, Release, accounting, epsilon_of, local_epsilon
from ._mechanism import NoisySum, noisy
from ._settings import Privacy

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
