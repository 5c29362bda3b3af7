"""The bounds of Lemmas 1, 2 and 3 of the paper, term by term.

Each lemma bounds one quantity of an outer iteration by others, which are measured or bounded elsewhere. With
x_v^i for the local upper iterates, y⁺ = y^N and bars for expectations given the lower iterates, they are

    gradient   E||∇f(x)||²
    direction  E||1/m Σ_i 1/τ_i Σ_v ∇_x f_i(x_v^i, y⁺) - h̄^I(x)||²
    bias       B^I(x, y), or its bound of Proposition 1
    drift      1/m Σ_i 1/τ_i Σ_v E||x_v^i - x||²
    gap        E||y⁺ - y*(x)||²
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ._constants import DerivedConstants


class DescentBound(NamedTuple):
    """The terms of Lemma 1, whose sum bounds E f(x⁺) - E f(x). The first two are gains, so they are negative.

    gradient   -α/2 E||∇f(x)||²
    direction  -α/2 (1 - 4αL_f') E||1/m Σ_i 1/τ_i Σ_v ∇_x f_i(x_v^i, y⁺) - h̄^I(x)||²
    noise      4α²(σ_h² + σ_f²)L_f'
    upper      2α²M²L_f'
    bias       3α/2 B^I(x, y)
    drift      3α/2 M_f²/m Σ_i 1/τ_i Σ_v E||x_v^i - x||²
    gap        3α/2 M_f² E||y⁺ - y*||²
    """

    gradient: float
    direction: float
    noise: float
    upper: float
    bias: float
    drift: float
    gap: float

    @property
    def total(self) -> float:
        """The bound itself, which is the sum of its terms."""
        return sum(self)

    @property
    def losses(self) -> float:
        """The sum of the terms that are not gains."""
        return sum(self[2:])


class WarmStartBound(NamedTuple):
    """The terms of Lemma 2, whose sum bounds E||y⁺ - y*(x⁺)||², the gap at the start of the next lower loop.

    direction  b_1(α) E||1/m Σ_i 1/τ_i Σ_v ∇_x f_i(x_v^i, y⁺) - h̄^I(x)||²
    gap        b_2(α) E||y⁺ - y*(x)||²
    noise      b_3(α) (2σ_h² + 2σ_f² + M²)
    """

    direction: float
    gap: float
    noise: float

    @property
    def total(self) -> float:
        """The bound itself, which is the sum of its terms."""
        return sum(self)


class DriftBound(NamedTuple):
    """The terms of Lemma 3, whose sum bounds E||x_v^i - x||² for every client i and local step v.

    The factor of all terms is 18τ_i²(α_i)², which is 18α² because α_i = α/τ_i.

    gap        18α² 3M_f² E||y⁺ - y*||²
    gradient   18α² 3E||∇f(x)||²
    bias       18α² B^I(x, y)
    estimator  18α² 3σ_h²
    noise      18α² 6σ_f²
    """

    gap: float
    gradient: float
    bias: float
    estimator: float
    noise: float

    @property
    def total(self) -> float:
        """The bound itself, which is the sum of its terms."""
        return sum(self)


@dataclass(frozen=True)
class LemmaBounds(DerivedConstants):
    """The paper's constants with the bounds of its three lemmas, at the upper step size α_k."""

    def descent_bound(
        self, *, gradient: float, direction: float, bias: float, drift: float, gap: float
    ) -> DescentBound:
        """Bound E f(x⁺) - E f(x) by Lemma 1."""
        g, alpha, smooth = self.given, self.alpha_k, self.L_f_prime
        return DescentBound(
            gradient=-alpha / 2 * gradient,
            direction=-alpha / 2 * (1 - 4 * alpha * smooth) * direction,
            noise=4 * alpha**2 * (self.sigma_h2 + g.sigma_f**2) * smooth,
            upper=2 * alpha**2 * g.M**2 * smooth,
            bias=3 * alpha / 2 * bias,
            drift=3 * alpha / 2 * self.M_f**2 * drift,
            gap=3 * alpha / 2 * self.M_f**2 * gap,
        )

    def warm_start_bound(self, *, direction: float, gap: float) -> WarmStartBound:
        """Bound E||y⁺ - y*(x⁺)||² by Lemma 2, with the γ that the proof of Theorem 1 takes."""
        g = self.given
        noise = self.b_3 * (2 * self.sigma_h2 + 2 * g.sigma_f**2 + g.M**2)
        return WarmStartBound(direction=self.b_1 * direction, gap=self.b_2 * gap, noise=noise)

    def drift_bound(self, *, gap: float, gradient: float, bias: float) -> DriftBound:
        """Bound E||x_v^i - x||² by Lemma 3, which needs α ≤ ᾱ_2."""
        factor = 18 * self.alpha_k**2
        return DriftBound(
            gap=factor * 3 * self.M_f**2 * gap,
            gradient=factor * 3 * gradient,
            bias=factor * bias,
            estimator=factor * 3 * self.sigma_h2,
            noise=factor * 6 * self.given.sigma_f**2,
        )
