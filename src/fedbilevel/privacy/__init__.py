"""Differential privacy of clients' uploads: its settings, its mechanism and its accounting."""

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
