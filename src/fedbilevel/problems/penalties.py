"""Penalties: a ridge penalty for each feature or group, judged by other rows. Its hypergradient is known exactly.

    min_x 1/m Σ_i mean_r l(a_rᵀ y*(x), b_r)                                       on the upper rows of client i
    subject to  y*(x) = argmin_y 1/m Σ_i mean_r l(a_rᵀ y, b_r) + 1/2 Σ_j exp(x_{k(j)}) y_j²

with the squared error l(z, b) = (z - b)² / 2, or the logistic loss l(z, b) = log(1 + e^z) - b z for labels 0 and
1. k(j) is the group of feature j; by default a feature is a group. With D = diag(exp(x_{k(j)})) and the Hessian
S of the mean lower loss at y,

    v = (S + D)^{-1} ∇_y f        ∂F/∂x_k = -Σ_{j in k} exp(x_k) y_j v_j

For the squared error  y*(x) = (S + D)^{-1} s  with  s = mean a b; the logistic loss takes Newton steps. So the
true hypergradient and the smallest outer loss are known on real data. They are computed in float64. x is in a box:
where a feature is of no use, its best penalty is infinite.

`start` has two controls of scikit-learn's, RidgeCV and LassoCV (or their logistic versions) on the rows of both
levels: y begins there, and `fedavg` with `control = "upper-only"` leaves it there, as ∇_x f = 0.
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
from ..problem import Finding, Problem, Task
from ..settings import Size, about, settings

Matrix = npt.NDArray[np.float64]
LOW, HIGH = -8.0, 3.0
NEWTON = 50  # Newton steps of the logistic loss, at most
USELESS = "of no use"


Loss = Literal["squares", "logistic"]
Start = Literal["equal", "ridge-cv", "lasso-cv"]


class Moments:
    """The mean loss over clients, each client's being a mean over its rows, with its gradient and its Hessian."""

    def __init__(self, parts: list[Part], loss: Loss = "squares") -> None:
        self.kind, count = loss, len(parts)
        a = np.concatenate([np.asarray(p.inputs, np.float64) for p in parts])
        self.a, self.b = a, np.concatenate([np.asarray(p.targets, np.float64) for p in parts])
        self.weights: Matrix = np.concatenate([np.full(p.rows, 1 / (p.rows * count)) for p in parts])
        self.S: Matrix = (self.weights[:, None] * a).T @ a
        self.s: Matrix = a.T @ (self.weights * self.b)
        self.square = float(self.weights @ self.b**2)

    def loss(self, y: Matrix) -> float:
        """mean (aᵀ y - b)² / 2, or mean log(1 + e^z) - b z with z = aᵀ y"""
        if self.kind == "squares":
            return float(0.5 * (y @ self.S @ y - 2 * y @ self.s + self.square))
        z = self.a @ y
        return float(self.weights @ (np.logaddexp(0.0, z) - self.b * z))

    def gradient(self, y: Matrix) -> Matrix:
        if self.kind == "squares":
            return self.S @ y - self.s
        return np.asarray(self.a.T @ (self.weights * (self._chance(y) - self.b)))

    def hessian(self, y: Matrix) -> Matrix:
        if self.kind == "squares":
            return self.S
        p = self._chance(y)
        return np.asarray((self.a * (self.weights * p * (1 - p))[:, None]).T @ self.a)

    def solution(self, penalties: Matrix) -> Matrix:
        """argmin_y of the loss with these penalties of features."""
        if self.kind == "squares":
            return np.asarray(np.linalg.solve(self.S + np.diag(penalties), self.s), np.float64)
        y = np.zeros(len(penalties))
        for _ in range(NEWTON):
            slope = self.gradient(y) + penalties * y
            if np.linalg.norm(slope) < 1e-13:
                break
            step = np.linalg.solve(self.hessian(y) + np.diag(penalties), slope)
            halvings = (y - step / 2**k for k in range(20))
            most = self._penalised(y, penalties) * (1 + 1e-15)  # near the solution the loss no longer tells
            y = next((each for each in halvings if self._penalised(each, penalties) <= most), y)
        return y

    def _penalised(self, y: Matrix, penalties: Matrix) -> float:
        return self.loss(y) + 0.5 * float(penalties @ y**2)

    def _chance(self, y: Matrix) -> Matrix:
        """The probability of the label 1."""
        return np.asarray(0.5 * (1 + np.tanh(0.5 * (self.a @ y))))


@dataclass(frozen=True)
class PenaltiesTask:
    """A problem with a penalty for each feature or group, its clients and its exact solutions."""

    clients: ListedClients
    test: Part
    loss: Loss = "squares"
    groups: tuple[int, ...] = ()
    start: Matrix | None = None
    names: tuple[str, ...] = ()  # of the features, if they have any
    kinds: tuple[str, ...] = ()  # what is true of each feature, if it is known

    @cached_property
    def lower(self) -> Moments:
        return Moments([data.lower for data in self.clients.data], self.loss)

    @cached_property
    def upper(self) -> Moments:
        return Moments([data.upper for data in self.clients.data], self.loss)

    @cached_property
    def both(self) -> Moments:
        """The loss on the rows of both levels."""
        return Moments([each for data in self.clients.data for each in (data.lower, data.upper)], self.loss)

    @property
    def features(self) -> int:
        return int(self.test.inputs.shape[1])

    @cached_property
    def group(self) -> npt.NDArray[np.intp]:
        """The group of every feature."""
        return np.asarray(self.groups or range(self.features), np.intp)

    @cached_property
    def problem(self) -> Problem:
        group = self.group

        def error(y: Any, batch: Batch) -> Array:
            z = batch.inputs @ y
            if self.loss == "squares":
                return 0.5 * batch.mean((z - batch.targets) ** 2)
            return batch.mean(jnp.logaddexp(0.0, z) - batch.targets * z)

        return Problem(
            x=jnp.zeros(int(group.max()) + 1),
            y=jnp.zeros(self.features) if self.start is None else jnp.asarray(self.start, jnp.float32),
            lower=lambda x, y, batch: error(y, batch) + 0.5 * jnp.sum(jnp.exp(x[group]) * y**2),
            upper=lambda x, y, batch: error(y, batch),
            predict=lambda x, y, inputs: inputs @ y,
            feasible_x=Box(LOW, HIGH),
        )

    def penalties(self, x: npt.ArrayLike) -> Matrix:
        """exp(x) for every feature."""
        return np.asarray(np.exp(np.asarray(x, np.float64))[self.group])

    def solution(self, x: npt.ArrayLike) -> Matrix:
        """y*(x)"""
        return self.lower.solution(self.penalties(x))

    def outer_loss(self, x: npt.ArrayLike) -> float:
        """F(x) = f(x, y*(x))"""
        return self.upper.loss(self.solution(x))

    def hypergradient(self, x: npt.ArrayLike) -> Matrix:
        """∂F/∂x_k = -Σ_{j in k} exp(x_k) y_j v_j"""
        y, each = self.solution(x), self.penalties(x)
        v = np.linalg.solve(self.lower.hessian(y) + np.diag(each), self.upper.gradient(y))
        return np.bincount(self.group, -each * y * v).astype(np.float64)

    @cached_property
    def smallest(self) -> float:
        """The smallest outer loss in the box that L-BFGS-B finds, from several starts."""
        from scipy.optimize import minimize

        count = int(self.group.max()) + 1
        start, bounds = np.zeros(count), [(LOW, HIGH)] * count
        how = dict(maxiter=2000, ftol=1e-14, gtol=1e-10)
        found = [
            minimize(
                self.outer_loss, start + at, jac=self.hypergradient, method="L-BFGS-B", bounds=bounds, options=how
            )
            for at in (-6.0, -3.0, 0.0)
        ]
        return min(float(each.fun) for each in found)

    def finding(self, x: Array, y: Array) -> Finding:
        """The logarithm of the penalty of every feature."""
        logarithms = np.log10(self.penalties(x)).tolist()
        return Finding("feature", "log₁₀ penalty", logarithms, self.kinds, names=self.names)

    def test_error(self, y: Matrix) -> float:
        """The mean squared error on test rows, or the share of wrong labels."""
        z = np.asarray(self.test.inputs, np.float64) @ y
        if self.loss == "squares":
            return float(np.mean((z - self.test.targets) ** 2))
        return float(np.mean((z > 0) != (np.asarray(self.test.targets) > 0.5)))

    def measure(self, x: Array, y: Array) -> dict[str, Any]:
        """The outer loss above its minimum, the hypergradient where the box leaves it, and the test errors.

        The refit error is that of coefficients on the rows of both levels, with the penalties that were found.
        """
        at, h, own = np.asarray(x, np.float64), self.hypergradient(x), np.asarray(y, np.float64)
        stuck = ((at <= LOW) & (h > 0)) | ((at >= HIGH) & (h < 0))
        again = own if self.start is not None else self.both.solution(self.penalties(at))
        return {
            "gap": self.outer_loss(at) - self.smallest,
            "hypergradient_norm": float(np.linalg.norm(np.where(stuck, 0.0, h))),
            "lower_gap": float(np.linalg.norm(own - self.solution(at))),
            "test_error": self.test_error(own),
            "refit_error": self.test_error(again),
        }


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
    loss: Annotated[
        Loss, about("squares: the squared error; logistic: the logistic loss, for a table with two labels")
    ] = "squares"
    groups: Annotated[
        int,
        Field(ge=0, le=10**4),
        about("0: a penalty for each feature; else so many groups of neighbours share one"),
    ] = 0
    start: Annotated[
        Start,
        about("ridge-cv, lasso-cv: y starts at what scikit-learn finds on the rows of both levels, as a control"),
    ] = "equal"
    rows: Annotated[Size, about("generated: rows for each loss, over all clients, and for testing")] = 200
    features: Annotated[Size, about("generated: features")] = 20

    makes_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.loss == "logistic" and self.table == "diabetes":
            raise SettingsError(
                "problem.loss = 'logistic' is wrong with problem.table = 'diabetes', which has no labels; use "
                "breast-cancer or generated"
            )

    def make(self, clients: int, seed: int) -> PenaltiesTask:
        """Draw or load the table, shuffle it, and deal two thirds of it out to the clients."""
        g = rng.generator(seed, "penalties")
        a, b, names, kinds = self._table(g)
        a = np.concatenate([a, g.normal(size=(len(a), self.useless))], axis=1)
        a, b = (a - a.mean(0)) / a.std(0), b - b.mean()
        b = b / b.std() if self.loss == "squares" else (b > 0).astype(np.float64)
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
        count = a.shape[1]
        if self.groups > count:
            raise SettingsError(f"problem.groups = {self.groups} is too much: there are {count} features")
        groups = tuple(np.arange(count) * self.groups // count) if self.groups else ()
        begun = None if self.start == "equal" else self._by_scikit_learn(a, b, np.concatenate(thirds[:2]))
        if self.useless:
            names = (*names, *(f"noise {i + 1}" for i in range(self.useless))) if names else ()
            kinds = (*(kinds or ["of the table"] * (count - self.useless)), *[USELESS] * self.useless)
        return PenaltiesTask(ListedClients(data), those(thirds[2]), self.loss, groups, begun, names, kinds)

    def _by_scikit_learn(self, a: Matrix, b: Matrix, rows: npt.NDArray[np.intp]) -> Matrix:
        """The coefficients that cross-validation on these rows finds. The losses here have no intercept."""
        from sklearn.linear_model import LassoCV, LogisticRegression, RidgeCV
        from sklearn.model_selection import GridSearchCV

        a, b, ridge = a[rows], b[rows], self.start == "ridge-cv"
        if self.loss == "squares":
            alphas = np.logspace(-3, 4, 40)
            found = RidgeCV(alphas, fit_intercept=False) if ridge else LassoCV(fit_intercept=False, cv=5)
            return np.asarray(found.fit(a, b).coef_, np.float64)
        model = LogisticRegression(l1_ratio=0.0 if ridge else 1.0, solver="liblinear", fit_intercept=False)
        search = GridSearchCV(model, {"C": np.logspace(-3, 2, 15)}, cv=5).fit(a, b)
        return np.asarray(search.best_estimator_.coef_[0], np.float64)

    def task(self, data: DataSettings, seed: int) -> Task:
        made = self.make(data.clients, seed)
        return Task(made.problem, made.clients, made.measure, finding=made.finding)

    def _table(self, g: np.random.Generator) -> tuple[Matrix, Matrix, tuple[str, ...], tuple[str, ...]]:
        """Inputs, targets, the names of the features, and what is true of them, where that is known."""
        if self.table == "generated":
            a = g.normal(size=(3 * self.rows, self.features))
            useful = np.arange(self.features) < (self.features + 1) // 2
            b = a @ (useful * g.normal(size=self.features)) + g.normal(size=len(a))
            return a, b, (), tuple("of use" if each else USELESS for each in useful)
        from sklearn.datasets import load_breast_cancer, load_diabetes

        found = (load_diabetes if self.table == "diabetes" else load_breast_cancer)()
        names = tuple(map(str, found.feature_names))
        return np.asarray(found.data, np.float64), np.asarray(found.target, np.float64), names, ()
