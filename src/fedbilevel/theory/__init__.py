"""The constants, step sizes and bounds of the AggITD paper's analysis.

`Theory(given, N, lam)` computes all of them from the constants of Assumptions 1-4. The files are:

    assumptions  the constants that the paper assumes
    declare      how a constant is declared with its symbol, formula and place
    constants    every constant and step size that the paper derives from the assumed ones; the two bounds of
                 Proposition 2, σ_h² and D_h², are among them
    lemmas       the bounds of Lemmas 1, 2 and 3, on one outer iteration
    floors       where methods end on a quadratic problem, in closed form
    bounds       the bounds of Proposition 1 and Theorem 1, and `Theory`, which has all of the above

Where the paper contradicts itself the code follows the proofs. docs/theory.md lists every such place.
"""

from ._assumptions import Assumed, Given, assumed_entries
from ._bounds import BiasBound, ConvergenceBound, Theory
from ._constants import DerivedConstants
from ._declare import Constant, Entry
from ._floors import fixed_point, floor_of
from ._lemmas import DescentBound, DriftBound, LemmaBounds, WarmStartBound

__all__ = [
    "Assumed",
    "BiasBound",
    "Constant",
    "ConvergenceBound",
    "DerivedConstants",
    "DescentBound",
    "DriftBound",
    "Entry",
    "Given",
    "LemmaBounds",
    "Theory",
    "WarmStartBound",
    "assumed_entries",
    "fixed_point",
    "floor_of",
]
