"""Quadratic bilevel problems with heterogeneous clients, which are solved in closed form.

With z = (x, y), the losses of client i on row r are

    g_ir(x, y) = 1/2 yᵀ A_i y + yᵀ (B_i x + b_ir)        f_ir(x, y) = 1/2 zᵀ J_i z + zᵀ c_ir

The rows of a client differ only in b_ir and c_ir, by noise that sums to zero over the rows. So minibatches are
noisy, and full batches are exact. With bars for means over clients and J̄ in blocks (x, y):

    y*(x) = -Ā^{-1} (B̄ x + b̄)        ∇f(x) = ∇_x f - B̄ᵀ Ā^{-1} ∇_y f    at (x, y*(x))

and ∇f is affine in x, so the stationary point solves one linear system. If the lower level is local, with all
quantities of client i,

    y_i*(x) = -A_i^{-1} (B_i x + b_i)    ∇f(x) = mean_i [∇_x f_i - B_iᵀ A_i^{-1} ∇_y f_i]    at (x, y_i*(x))

All of it is computed in float64 from the float32 numbers that the clients have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from .. import rng
from ..batch import Batch
from ..data import ClientData, DataSettings, ListedClients, Part
from ..problem import LowerIs, Problem, Task
from ..settings import Size, about, settings

Matrix = np.ndarray


class Constants(NamedTuple):
    """The constants of the paper's assumptions. M and sigma_2 are for z in a ball.

    mu       strong convexity of every g_i in y                       (Assumption 1)
    L_g      Lipschitz constant of every ∇g_i in z                    (Assumption 2)
    L_f      Lipschitz constant of every ∇f_i in z                    (Assumption 2)
    M        Lipschitz constant of every f_ir on the ball             (Assumption 2)
    rho      Lipschitz constant of the second derivatives: 0          (Assumption 3)
    sigma_f  deviation of the gradient of f_i from one row            (Assumption 4)
    sigma_1  deviation of the gradient of g_i from one row            (Assumption 4)
    sigma_2  dissimilarity of the clients' ∇g_i on the ball           (Assumption 4)
    """

    mu: float
    L_g: float
    L_f: float
    M: float
    rho: float
    sigma_f: float
    sigma_1: float
    sigma_2: float

    @property
    def sigma_g(self) -> float:
        """max(σ_1, σ_2), as the paper sets it."""
        return max(self.sigma_1, self.sigma_2)


@dataclass(frozen=True)
class QuadraticTask:
    """A quadratic problem, its clients' data, and its closed forms.

    The lower losses have A (m, q, q), B (m, q, p) and b (m, r, q), the upper losses J (m, p+q, p+q) and
    c (m, r, p+q). `lower_is` says whether clients share one y or each has its own.
    """

    A: Matrix
    B: Matrix
    b: Matrix
    J: Matrix
    c: Matrix
    lower_is: LowerIs = field(default="global", kw_only=True)

    @property
    def size_x(self) -> int:
        return int(self.B.shape[2])

    @property
    def size_y(self) -> int:
        return int(self.B.shape[1])

    @cached_property
    def problem(self) -> Problem:
        """The problem as a federation sees it; both groups start at zero."""

        def lower(x: Any, y: Any, batch: Batch) -> Array:
            A, B, b = (batch.inputs[k] for k in "ABb")
            return batch.mean(0.5 * jnp.einsum("i,rij,j->r", y, A, y) + (B @ x + b) @ y)

        def upper(x: Any, y: Any, batch: Batch) -> Array:
            z = jnp.concatenate([x, y])
            return batch.mean(0.5 * jnp.einsum("i,rij,j->r", z, batch.inputs["J"], z) + batch.inputs["c"] @ z)

        p, q = self.size_x, self.size_y
        return Problem(jnp.zeros(p), jnp.zeros(q), lower, upper, lower_is=self.lower_is)

    @cached_property
    def clients(self) -> ListedClients:
        rows = self.b.shape[1]

        def repeat(matrix: Matrix) -> Matrix:
            return np.broadcast_to(matrix, (rows, *matrix.shape))

        return ListedClients(
            [
                ClientData(Part({"A": repeat(A), "B": repeat(B), "b": b}), Part({"J": repeat(J), "c": c}))
                for A, B, b, J, c in zip(self.A, self.B, self.b, self.J, self.c, strict=True)
            ]
        )

    @cached_property
    def means(self) -> tuple[Matrix, Matrix, Matrix, Matrix, Matrix]:
        """Ā, B̄, b̄, J̄ and c̄ in float64."""
        A, B, J = (m.astype(np.float64).mean(0) for m in (self.A, self.B, self.J))
        b, c = (m.astype(np.float64).mean((0, 1)) for m in (self.b, self.c))
        return A, B, b, J, c

    @cached_property
    def _levels(self) -> list[Matrix]:
        """A, B, b, J and c of every lower level: that of the means over clients, or one for each client."""
        if self.lower_is == "global":
            return [mean[None] for mean in self.means]
        A, B, b, J, c = (m.astype(np.float64) for m in (self.A, self.B, self.b, self.J, self.c))
        return [A, B, b.mean(1), J, c.mean(1)]

    def solution(self, x: Any) -> Matrix:
        """y*(x) = -Ā^{-1} (B̄ x + b̄); for a local lower level, y_i*(x) of every client as the rows of a matrix."""
        A, B, b, _, _ = self._levels
        rows = -np.linalg.solve(A, (B @ np.asarray(x, np.float64) + b)[..., None])[..., 0]
        return rows if self.lower_is == "local" else rows[0]

    def hypergradient(self, x: Any, y: Any = None) -> Matrix:
        """∇_x f - B̄ᵀ Ā^{-1} ∇_y f at (x, y). The default y is y*(x), which gives the true ∇f(x).

        For a local lower level it is the mean over clients of their own, and y may have a row for each client.
        """
        A, B, _, J, c = self._levels
        x = np.asarray(x, np.float64)
        rows = np.broadcast_to(self.solution(x) if y is None else np.asarray(y, np.float64), (len(A), A.shape[1]))
        gradient = (J @ np.concatenate([np.tile(x, (len(A), 1)), rows], 1)[..., None])[..., 0] + c
        v = np.linalg.solve(A, gradient[:, x.size :, None])[..., 0]
        return (gradient[:, : x.size] - np.einsum("iqp,iq->ip", B, v)).mean(0)

    @cached_property
    def stationary_point(self) -> Matrix:
        """The x with ∇f(x) = 0. It is unique, because ∇f is affine with a positive definite slope."""
        zero, unit = np.zeros(self.size_x), np.eye(self.size_x)
        offset = self.hypergradient(zero)
        slope = np.stack([self.hypergradient(e) - offset for e in unit], axis=1)
        return -np.linalg.solve(slope, offset)

    @cached_property
    def affine_directions(self) -> tuple[Matrix, Matrix]:
        """K (m, p+2q, p+2q) and k (m, p+2q) of the directions of single-loop methods, d_i(x, y, v) = K_i s + k_i.

        d_i = (∇_x f_i - B_iᵀ v, ∇_y g_i, A_i v - ∇_y f_i)
        """
        p, matrices, vectors = self.size_x, [], []
        for A, B, b, J, c in zip(
            *(m.astype(np.float64) for m in (self.A, self.B, self.b, self.J, self.c)), strict=True
        ):
            matrices.append(np.block([[J[:p], -B.T], [B, A, np.zeros_like(A)], [-J[p:], A]]))
            vectors.append(np.concatenate([c.mean(0)[:p], b.mean(0), -c.mean(0)[p:]]))
        return np.stack(matrices), np.stack(vectors)

    def constants(self, radius: float) -> Constants:
        """The constants of the paper's assumptions on the ball ||z|| ≤ radius.

        M and σ_2 bound an affine map on the ball by ||slope|| radius + ||offset||, so they hold but need not
        be attained.
        """
        A, B, b, J, c = (m.astype(np.float64) for m in (self.A, self.B, self.b, self.J, self.c))
        zeros = np.zeros((len(A), self.size_x, self.size_x))
        H = np.block([[zeros, B.transpose(0, 2, 1)], [B, A]])  # the second derivative of g_i in z
        l_f, l_g = np.linalg.norm(J, 2, axis=(1, 2)), np.linalg.norm(H, 2, axis=(1, 2))
        apart = np.linalg.norm(H - H.mean(0), 2, axis=(1, 2)) * radius
        apart += np.linalg.norm(b.mean(1) - b.mean((0, 1)), axis=1)
        return Constants(
            mu=float(np.linalg.eigvalsh(A).min()),
            L_g=float(l_g.max()),
            L_f=float(l_f.max()),
            M=float((l_f[:, None] * radius + np.linalg.norm(c, axis=2)).max()),
            rho=0.0,
            sigma_f=_deviation(c),
            sigma_1=_deviation(b),
            sigma_2=float(np.sqrt((apart**2).mean())),
        )

    def measure(self, x: Array, y: Array) -> dict[str, Any]:
        """The norm of the true hypergradient, and the distance of y from y*(x), if there is one y for all."""
        norm = np.linalg.norm(self.hypergradient(x))
        if self.lower_is == "local":
            return {"hypergradient_norm": norm}
        return {
            "hypergradient_norm": norm,
            "lower_gap": np.linalg.norm(np.asarray(y, np.float64) - self.solution(x)),
        }


def _deviation(rows: Matrix) -> float:
    """max_i sqrt(mean_r ||v_ir - mean_r v_ir||²)"""
    return float(np.sqrt(((rows - rows.mean(1, keepdims=True)) ** 2).sum(2).mean(1).max()))


Dimension = Annotated[int, Field(ge=1, le=10**4)]  # Each client has matrices of this size.


@settings
class Quadratic:
    """Quadratic losses, solved in closed form. The problem makes its own data."""

    size_x: Annotated[Dimension, about("upper dimension p")] = 10
    size_y: Annotated[Dimension, about("lower dimension q")] = 8
    condition: Annotated[float, Field(ge=1), about("the eigenvalues of every A_i lie in [1/condition, 1]")] = 10.0
    heterogeneity: Annotated[float, Field(ge=0), about("how much the clients differ; 0: not at all")] = 1.0
    noise: Annotated[float, Field(ge=0), about("deviation of a row's gradients from the client's")] = 0.0
    rows: Annotated[Size, about("rows of a client for each level")] = 8
    lower_is: Annotated[LowerIs, about("global: clients share one y; local: each has its own")] = "global"

    makes_data: ClassVar[bool] = True

    def make(self, clients: int, seed: int) -> QuadraticTask:
        """Draw the problem at (seed, "quadratic").

        Let h be the heterogeneity. Matrices are (1-t) common + t own with t = h/(1+h). Both have eigenvalues in
        the same interval, so h moves clients apart without leaving it. Vectors are common + h own.
        """
        g = rng.generator(seed, "quadratic")
        p, q, m, h = self.size_x, self.size_y, clients, self.heterogeneity
        t = h / (1 + h)

        def spread(size: int, low: float) -> Matrix:
            def one() -> Matrix:
                basis = np.linalg.qr(g.normal(size=(size, size)))[0]
                return (basis * np.linspace(low, 1.0, size)) @ basis.T

            common = one()
            return np.stack([(1 - t) * common + t * one() for _ in range(m)])

        def vectors(*shape: int, scale: float) -> Matrix:
            return scale * (g.normal(size=shape) + h * g.normal(size=(m, *shape)))

        def rows(vector: Matrix) -> Matrix:
            error = g.normal(size=(m, self.rows, vector.shape[1])) * self.noise / np.sqrt(vector.shape[1])
            return vector[:, None] + error - error.mean(1, keepdims=True)

        A, J = spread(q, 1 / self.condition), spread(p + q, 0.2)
        B = vectors(q, p, scale=0.5 / ((1 + h) * np.sqrt(max(p, q))))
        b, c = rows(vectors(q, scale=1.0)), rows(vectors(p + q, scale=1.0))
        return QuadraticTask(*(a.astype(np.float32) for a in (A, B, b, J, c)), lower_is=self.lower_is)

    def task(self, data: DataSettings, seed: int) -> Task:
        """The problem, its clients, its measure and its closed forms."""
        made = self.make(data.clients, seed)
        return Task(made.problem, made.clients, made.measure, closed=made)

    def remote(self) -> Problem:
        """The problem without clients, which is what a site needs beside its own rows."""
        p, q = self.size_x, self.size_y
        shapes = ((1, q, q), (1, q, p), (1, 1, q), (1, p + q, p + q), (1, 1, p + q))
        return QuadraticTask(*(np.zeros(shape, np.float32) for shape in shapes), lower_is=self.lower_is).problem
