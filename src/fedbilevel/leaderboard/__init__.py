"""The leaderboard: every method on every problem under one rule, with what each of them costs."""

from ._board import GRID, QUICK_SEEDS, SEEDS, leaderboard
from ._entries import Entry, entries
from ._problems import BoardProblem, load_problems, problem_names

__all__ = [
    "GRID",
    "QUICK_SEEDS",
    "SEEDS",
    "BoardProblem",
    "Entry",
    "entries",
    "leaderboard",
    "load_problems",
    "problem_names",
]
