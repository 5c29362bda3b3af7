"""The problems that come with the library. To add one, write its file and add its line here."""

from .quadratic import Quadratic, QuadraticTask
from .representation import HyperRepresentation, representation_problem

PROBLEMS = {"hyper-representation": HyperRepresentation, "quadratic": Quadratic}

__all__ = ["PROBLEMS", "HyperRepresentation", "Quadratic", "QuadraticTask", "representation_problem"]
