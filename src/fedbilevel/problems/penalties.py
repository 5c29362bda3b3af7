"""Penalties: a ridge penalty for each feature, judged by other rows. The lower problem has a closed form.

    min_x 1/m Σ_i mean_r (a_rᵀ y*(x) - b_r)² / 2                                  on the upper rows of client i
    subject to  y*(x) = argmin_y 1/m Σ_i mean_r (a_rᵀ y - b_r)² / 2 + 1/2 Σ_j exp(x_j) y_j²

With the means S = mean a aᵀ and s = mean a b over clients, of the lower rows, and D = diag(exp(x)),

    y*(x) = (S + D)^{-1} s        v = (S + D)^{-1} ∇_y f        ∂F/∂x_j = -exp(x_j) y_j v_j

so the true hypergradient and the smallest outer loss are known on real data. They are computed in float64. x is in
a box: where a feature is of no use, its best penalty is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from pydantic import Field

from .. import rng
from ..batch import Batch
from ..data import ClientData, DataSettings, ListedClients, Part
from ..errors import SettingsError
from ..feasible import Box
from ..problem import Problem, Task
from ..settings import Size, about, settings

Matrix = npt.NDArray[np.float64]
LOW, HIGH = -8.0, 3.0


class Moments:
    """The means of a aᵀ, a b and b² over clients, each client's being a mean over its rows."""

    def __init__(self, parts: list[Part]) -> None:
        tables = [(np.asarray(p.inputs, np.float64), np.asarray(p.targets, np.float64)) for p in parts]
        self.S: Matrix = np.mean([a.T @ a / len(a) for a, _ in tables], axis=0)
        self.s: Matrix = np.mean([a.T @ b / len(a) for a, b in tables], axis=0)
        self.square = float(np.mean([b @ b / len(b) for _, b in tables]))

    def loss(self, y: Matrix) -> float:
        """mean (aᵀ y - b)² / 2"""
        return float(0.5 * (y @ self.S @ y - 2 * y @ self.s + self.square))

    def gradient(self, y: Matrix) -> Matrix:
        return self.S @ y - self.s


@dataclass(frozen=True)
class PenaltiesTask:
    """A ridge problem with a penalty for each feature, its clients and its closed forms."""

    clients: ListedClients
    test: Part

    @cached_property
    def lower(self) -> Moments:
        return Moments([data.lower for data in self.clients.data])

    @cached_property
    def upper(self) -> Moments:
        return Moments([data.upper for data in self.clients.data])

    @property
    def features(self) -> int:
        return int(self.test.inputs.shape[1])

    @cached_property
    def problem(self) -> Problem:
        def error(y: Any, batch: Batch) -> Array:
            return 0.5 * batch.mean((batch.inputs @ y - batch.targets) ** 2)

        return Problem(
            x=jnp.zeros(self.features),
            y=jnp.zeros(self.features),
            lower=lambda x, y, batch: error(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
            upper=lambda x, y, batch: error(y, batch),
            predict=lambda x, y, inputs: inputs @ y,
            feasible_x=Box(LOW, HIGH),
        )

    def solution(self, x: npt.ArrayLike) -> Matrix:
        """y*(x) = (S + D)^{-1} s"""
        return np.asarray(np.linalg.solve(self._hessian(x), self.lower.s), np.float64)

    def outer_loss(self, x: npt.ArrayLike) -> float:
        """F(x) = f(x, y*(x))"""
        return self.upper.loss(self.solution(x))

    def hypergradient(self, x: npt.ArrayLike) -> Matrix:
        """∂F/∂x_j = -exp(x_j) y_j v_j"""
        y = self.solution(x)
        v = np.linalg.solve(self._hessian(x), self.upper.gradient(y))
        return -np.exp(np.asarray(x, np.float64)) * y * v

    @cached_property
    def smallest(self) -> float:
        """The smallest outer loss in the box that L-BFGS-B finds, from several starts."""
        from scipy.optimize import minimize

        start, bounds = np.zeros(self.features), [(LOW, HIGH)] * self.features
        how = dict(maxiter=2000, ftol=1e-14, gtol=1e-10)
        found = [
            minimize(
                self.outer_loss, start + at, jac=self.hypergradient, method="L-BFGS-B", bounds=bounds, options=how
            )
            for at in (-6.0, -3.0, 0.0)
        ]
        return min(float(each.fun) for each in found)

    def measure(self, x: Array, y: Array) -> dict[str, Any]:
        """The outer loss above its minimum, the hypergradient where the box leaves it, and the test error."""
        at, h = np.asarray(x, np.float64), self.hypergradient(x)
        stuck = ((at <= LOW) & (h > 0)) | ((at >= HIGH) & (h < 0))
        error = np.asarray(self.test.inputs, np.float64) @ np.asarray(y, np.float64) - self.test.targets
        return {
            "gap": self.outer_loss(at) - self.smallest,
            "hypergradient_norm": float(np.linalg.norm(np.where(stuck, 0.0, h))),
            "lower_gap": float(np.linalg.norm(np.asarray(y, np.float64) - self.solution(at))),
            "test_error": float(np.mean(error**2)),
        }

    def _hessian(self, x: npt.ArrayLike) -> Matrix:
        return self.lower.S + np.diag(np.exp(np.asarray(x, np.float64)))


@settings
class Penalties:
    """A ridge penalty for each feature is x, the coefficients y. The problem makes its own data."""

    table: Annotated[
        Literal["diabetes", "breast-cancer", "generated"],
        about(
            "scikit-learn's tables, standardised, with a third of the rows for each loss and for testing; "
            "generated: half of the features are of no use"
        ),
    ] = "diabetes"
    useless: Annotated[int, Field(ge=0, le=10**4), about("features of pure noise that are added")] = 0
    rows: Annotated[Size, about("generated: rows for each loss, over all clients, and for testing")] = 200
    features: Annotated[Size, about("generated: features")] = 20

    makes_data: ClassVar[bool] = True

    def make(self, clients: int, seed: int) -> PenaltiesTask:
        """Draw or load the table, shuffle it, and deal two thirds of it out to the clients."""
        g = rng.generator(seed, "penalties")
        a, b = self._table(g)
        a = np.concatenate([a, g.normal(size=(len(a), self.useless))], axis=1)
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean()) / b.std()
        order = g.permutation(len(a))
        thirds = np.array_split(order, 3)
        if len(thirds[-1]) < clients:
            raise SettingsError(
                f"data.clients = {clients} is too many for {len(a)} rows, a third of which is for each loss; "
                f"use at most {len(thirds[-1])}"
            )

        def those(rows: npt.NDArray[np.intp]) -> Part:
            return Part(a[rows].astype(np.float32), b[rows].astype(np.float32))

        lower, upper = (np.array_split(third, clients) for third in thirds[:2])
        data = [ClientData(those(low), those(up)) for low, up in zip(lower, upper, strict=True)]
        return PenaltiesTask(ListedClients(data), those(thirds[2]))

    def task(self, data: DataSettings, seed: int) -> Task:
        made = self.make(data.clients, seed)
        return Task(made.problem, made.clients, made.measure)

    def _table(self, g: np.random.Generator) -> tuple[Matrix, Matrix]:
        if self.table == "generated":
            a = g.normal(size=(3 * self.rows, self.features))
            useful = np.arange(self.features) < (self.features + 1) // 2
            return a, a @ (useful * g.normal(size=self.features)) + g.normal(size=len(a))
        from sklearn.datasets import load_breast_cancer, load_diabetes

        load = load_diabetes if self.table == "diabetes" else load_breast_cancer
        a, b = load(return_X_y=True)
        return np.asarray(a, np.float64), np.asarray(b, np.float64)
