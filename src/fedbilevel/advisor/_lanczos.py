"""The curvature of the mean lower loss, by two Lanczos runs at the server that share their rounds.

Clients send ∇²_y g_i v, and the mean of the replies is H v with H = ∇²_y g. From a vector v_1 the server builds
an orthonormal basis v_1, ..., v_k of the Krylov space and the tridiagonal matrix T = VᵀHV, with all vectors
orthogonalised again in float64. The eigenvalues of T (Ritz values) are within [mu, L_g], and the outer ones
approach mu and L_g. Each Ritz value θ_j with eigenvector s_j of T is at most |t_k s_kj| away from an eigenvalue of
H, where t_k is the length of what is left of the last product.

The first run starts from a random vector and finds mu and L_g. The second one starts from r = ∇_y f. It is the
method of conjugate gradients for H p = r in another form, p = ||r|| V T⁻¹ e_1, and it also tells what every
Neumann series makes of this very r: with w_j = s_1j²,

    ||p_n - p||² / ||p||² = Σ_j w_j ((1 - λ θ_j)^n / θ_j)² / Σ_j w_j / θ_j²,        p_n = λ Σ_{k<n} (I - λH)^k r

so a single run gives the bias of all n and λ without a further round. The worst r has (1 - λ mu)^n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .. import rng
from ..steps import Sample
from ._steps import Point, lanczos_products

SMALLEST = 1e-5  # A remainder that is smaller, relative to the matrix, is the rounding of float32.
Vector = np.ndarray


class Krylov:
    """One Lanczos run. `next` is the vector whose product is wanted; `add` takes the product."""

    def __init__(self, start: Vector) -> None:
        start = np.asarray(start, np.float64)
        self.length = float(np.linalg.norm(start))
        self._size = start.size
        self._basis = [start / self.length] if self.length > 0 else []
        self._diagonal, self._beside = list[float](), list[float]()
        self.complete = not self._basis  # whether the space is invariant: the Ritz values are then exact

    @property
    def next(self) -> Vector:
        """The newest vector of the basis; zeros if the basis is complete."""
        return np.zeros(self._size) if self.complete else self._basis[-1]

    def add(self, product: Vector) -> None:
        """Take the product of the matrix with `next`."""
        if self.complete:
            return
        product, v = np.asarray(product, np.float64), self._basis[-1]
        self._diagonal.append(float(v @ product))
        basis = np.stack(self._basis)
        for _ in range(2):  # once leaves what rounding adds; twice is enough
            product = product - basis.T @ (basis @ product)
        left = float(np.linalg.norm(product))
        self._beside.append(left)
        largest = max(abs(self._diagonal[-1]), *map(abs, self._diagonal))
        if left <= SMALLEST * largest or len(self._basis) == v.size:
            self.complete = True
        else:
            self._basis.append(product / left)

    @property
    def products(self) -> int:
        return len(self._diagonal)

    @property
    def _matrix(self) -> Vector:
        off = self._beside[: self.products - 1]
        return np.diag(self._diagonal) + np.diag(off, 1) + np.diag(off, -1)

    def ritz(self) -> tuple[Vector, Vector, Vector]:
        """The Ritz values in rising order, the squares of the first components w_j, and the errors |t_k s_kj|."""
        values, s = np.linalg.eigh(self._matrix)
        left = 0.0 if self.complete else self._beside[-1]
        return values, s[0] ** 2, np.abs(left * s[-1])

    def top(self) -> Vector:
        """The Ritz vector of the largest Ritz value."""
        _, s = np.linalg.eigh(self._matrix)
        return np.asarray(np.stack(self._basis[: self.products]).T @ s[:, -1])

    def solution(self) -> Vector:
        """p = ||r|| V T⁻¹ e_1, without the directions in which the curvature is not positive."""
        if not self.products:
            return np.zeros(self._size)
        k = self.products
        values, s = np.linalg.eigh(self._matrix)
        safe = values > SMALLEST * np.abs(values).max()
        inverse = np.where(safe, 1 / np.where(safe, values, 1.0), 0.0)
        return self.length * (np.stack(self._basis[:k]).T @ (s @ (inverse * s[0])))

    def pairs(self) -> Iterator[tuple[Vector, Vector]]:
        """Ritz vectors with their products, those of the largest curvature first. They are conjugate."""
        k = self.products
        if not k:
            return
        basis, (values, s) = np.stack(self._basis[:k]), np.linalg.eigh(self._matrix)
        left = np.zeros(self._size) if self.complete else self._beside[-1] * self._basis[k]
        for j in reversed(range(k)):
            vector = s[:, j] @ basis
            yield vector, values[j] * vector + s[-1, j] * left

    @property
    def residual(self) -> float:
        """||H p - r|| / ||r|| for the p of `solution`, which is |t_k e_kᵀ T⁻¹ e_1|."""
        if self.complete or not self.products:
            return 0.0 if self.complete else 1.0
        try:
            first = np.eye(self.products)[0]
            return float(abs(self._beside[-1] * np.linalg.solve(self._matrix, first)[-1]))
        except np.linalg.LinAlgError:
            return 1.0


@dataclass(frozen=True)
class Spectrum:
    """The curvature of the mean lower loss at a point.

    mu, L_g       the smallest and the largest Ritz value. The true mu is at most this one, the true L_g at least
    mu_error      a bound on the distance of mu to the nearest eigenvalue, and the same for L_g
    L_error
    products      the number of Hessian products, each a round
    exact         whether the Krylov space was complete, so that both ends are exact up to rounding
    values        the Ritz values of the run from ∇_y f
    weights       the share of ∇_y f that belongs to each of them
    """

    mu: float
    L_g: float
    mu_error: float
    L_error: float
    products: int
    exact: bool
    values: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def between(cls, mu: float, L_g: float) -> Spectrum:
        """A spectrum of which only the ends are known."""
        return cls(mu, L_g, 0.0, 0.0, 0, False, (mu, L_g), (0.5, 0.5))

    @property
    def condition(self) -> float:
        """L_g / mu; infinite if the lower loss is not strongly convex at the point."""
        return self.L_g / self.mu if self.mu > 0 else math.inf

    @property
    def safe_L(self) -> float:
        """An upper estimate of L_g: its Ritz value and the bound on the error."""
        return self.L_g + self.L_error

    def tail(self, lam: float, terms: int) -> float:
        """The relative bias that a Neumann series of so many terms has for the worst vector: (1 - λ mu)^terms."""
        return max(abs(1 - lam * self.mu), abs(1 - lam * self.L_g)) ** terms

    def bias(self, lam: float, terms: int) -> float:
        """The relative bias ||p_n - p|| / ||p|| of a Neumann series of so many terms, for ∇_y f at the point."""
        values, weights = np.asarray(self.values), np.asarray(self.weights)
        good = values > SMALLEST * max(abs(self.L_g), 1e-30)
        if not good.any():
            return 1.0
        values, weights = values[good], weights[good]
        part = weights / values**2
        return float(np.sqrt((part * (1 - lam * values) ** (2 * terms)).sum() / part.sum()))

    def terms_for(self, lam: float, bias: float, most: int) -> int:
        """The fewest terms whose bias is at most this one, or `most`."""
        low, high = 1, most
        if not self.bias(lam, most) <= bias:
            return most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.bias(lam, middle) <= bias else (middle + 1, high)
        return low


class Measured(NamedTuple):
    """The curvature at a point, and the two Lanczos runs that it comes from."""

    spectrum: Spectrum
    ends: Krylov
    solving: Krylov

    def solution(self) -> Vector:
        """p ≈ (∇²_y g)^{-1} r for the r of the second run."""
        return self.solving.solution()


def lanczos(point: Point, r: Vector, *, most: int, tolerance: float, seed: int) -> Measured:
    """Both Lanczos runs at a point, with one round for each product, and at most so many.

    They end when the bound on the error of L_g and the residual of p are below the tolerance.
    """
    start = rng.generator(seed, "lanczos").normal(size=r.size)
    ends, solving = Krylov(start), Krylov(r)
    for _ in range(most):
        sent = {name: jnp.asarray(run.next, jnp.float32) for name, run in (("a", ends), ("b", solving))}
        a, b = point.ask(lanczos_products, **sent, u=Sample("lower"))
        ends.add(np.asarray(a))
        solving.add(np.asarray(b))
        values, _, errors = ends.ritz()
        found = ends.complete or errors[-1] <= tolerance * abs(values[-1])
        if found and solving.residual <= tolerance:
            break
    values, _, errors = ends.ritz()
    own, weights, own_errors = solving.ritz() if solving.products else (values, np.ones_like(values), errors)
    low, high = int(own[0] < values[0]), int(own[-1] > values[-1])
    spectrum = Spectrum(
        mu=float(min(values[0], own[0])),
        L_g=float(max(values[-1], own[-1])),
        mu_error=float((errors, own_errors)[low][0]),
        L_error=float((errors, own_errors)[high][-1]),
        products=max(ends.products, solving.products),
        exact=ends.complete,
        values=tuple(map(float, own)),
        weights=tuple(map(float, weights)),
    )
    return Measured(spectrum, ends, solving)
