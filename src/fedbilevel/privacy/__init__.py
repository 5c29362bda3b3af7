"""Differential privacy of clients' uploads: settings, secret, mechanism, books and accounting."""

from ._accounting import Accountant, accounting, epsilon_of, local_epsilon, spent_epsilon
from ._books import Books, ClientUploads, CohortUploads, Entry, Release, name_in_books
from ._mechanism import NoisySum, noisy
from ._secret import Secret, machine_secret, read_key, state_folder
from ._settings import Privacy

__all__ = [
    "Accountant",
    "Books",
    "ClientUploads",
    "CohortUploads",
    "Entry",
    "NoisySum",
    "Privacy",
    "Release",
    "Secret",
    "accounting",
    "epsilon_of",
    "local_epsilon",
    "machine_secret",
    "name_in_books",
    "noisy",
    "read_key",
    "spent_epsilon",
    "state_folder",
]
