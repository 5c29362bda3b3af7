"""Loops that are compiled from C when the library is installed, each with a way that needs no compiler.

`hatch_build.py` compiles the files of this room where there is a C compiler. What is missing is done by NumPy or
by operations of XLA, with the same result up to rounding.
"""

from ._permutations import as_numpy, permutations, smallest_type
from ._softmax import softmax_walk

__all__ = ["as_numpy", "permutations", "smallest_type", "softmax_walk"]
