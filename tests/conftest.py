"""What the tests share: small problems that compile quickly."""

from __future__ import annotations

import pytest

from fedbilevel.data import DataSettings
from fedbilevel.problem import Task
from fedbilevel.problems import HyperRepresentation, Quadratic, QuadraticTask


@pytest.fixture(scope="session")
def quadratic() -> QuadraticTask:
    """Twenty strongly heterogeneous clients with exact gradients."""
    return Quadratic(heterogeneity=3.0).make(clients=20, seed=0)


@pytest.fixture(scope="session")
def digits() -> Task:
    """A small hyper-representation task on the embedded digits, twenty clients of unequal size."""
    return HyperRepresentation(hidden=12).task(DataSettings(name="digits", clients=20, partition="dirichlet"), 0)
