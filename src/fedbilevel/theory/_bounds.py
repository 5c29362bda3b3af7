"""The bounds of Proposition 1 and Theorem 1, term by term, and `Theory`, which computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SettingsError
from ._assumptions import ROUNDING
from ._lemmas import LemmaBounds


class BiasBound(NamedTuple):
    """The terms of Proposition 1, whose sum bounds the bias B^I.

    start_hessian  4λ²L_g²M² α_1(N) E||y - y*||²           the Hessians are taken at early y^t; 0 when ρ = 0
    start_source   4λ²L_f²L_g² α_3(N) E||y - y*||²         ∇_y f is taken at an early y^Q
    truncation     4L_g²M² (1-λμ)^(2N+2) / μ²              the Neumann series ends at N
    drift_hessian  400λ²β²L_g²M²σ_g²ρ² α_2(N)              the noise and client drift of y reach the Hessians
    drift_source   200λβ²σ_g²L_f²L_g² N(N+1) / μ           the noise and client drift of y reach ∇_y f
    """

    start_hessian: float
    start_source: float
    truncation: float
    drift_hessian: float
    drift_source: float

    @property
    def total(self) -> float:
        """The bound itself, which is the sum of its terms."""
        return sum(self)

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self._asdict().items(), key=lambda item: item[1])[0]


class ConvergenceBound(NamedTuple):
    """The terms of the last explicit inequality of Theorem 1, whose sum bounds 1/K Σ_k E||∇f(x_k)||².

    start       4W⁰ / (min{ᾱ_1, ᾱ_2, ᾱ_3} K)
    tuned       4W⁰ / (ᾱ √K)
    upper       4c_0 M² ᾱ / √K
    estimator   4c_1 σ_h² ᾱ / √K
    noise_f     4c_2 σ_f² ᾱ / √K
    noise_g     4c_3 σ_g² ᾱ / √K
    truncation  8L_g²M² (1-λμ)^(2N+2) / μ² (3 + α_k/6)
    """

    start: float
    tuned: float
    upper: float
    estimator: float
    noise_f: float
    noise_g: float
    truncation: float

    @property
    def total(self) -> float:
        """The bound itself, which is the sum of its terms."""
        return sum(self)

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self._asdict().items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class Theory(LemmaBounds):
    """The paper's analysis for one set of assumptions and settings: its constants, step sizes and bounds.

    `DerivedConstants` describes the arguments and declares the constants, and `LemmaBounds` adds the lemmas.
    """

    def lower_gap_bound(self, gap: float, t: int) -> float:
        """Bound E||y^t - y*||² by (1 - βμ/2)^t E||y - y*||² + 25Nβ²σ_g², as the proof of Proposition 1 does.

        `gap` is E||y - y*||² at the start of the lower loop.
        """
        beta = self.beta_k
        return (1 - beta * self.given.mu / 2) ** t * gap + 25 * self.N * (beta * self.given.sigma_g) ** 2

    def bias_bound(self, gap: float) -> BiasBound:
        """Bound the bias B^I by Proposition 1, for gap = E||y - y*(x)||²."""
        g, lam, N = self.given, self.lam, self.N
        drift = (self.beta_k * g.L_g * g.sigma_g) ** 2
        return BiasBound(
            start_hessian=4 * (lam * g.L_g * g.M) ** 2 * self.alpha_1N * gap,
            start_source=4 * (lam * g.L_f * g.L_g) ** 2 * self.alpha_3N * gap,
            truncation=4 * (g.L_g * g.M / g.mu) ** 2 * max(0.0, 1 - lam * g.mu) ** (2 * N + 2),
            drift_hessian=400 * (lam * g.M * g.rho) ** 2 * drift * self.alpha_2N,
            drift_source=200 * lam * drift * g.L_f**2 * N * (N + 1) / g.mu,
        )

    def convergence_bound(self, start: float, *, at_beta: bool = False) -> ConvergenceBound:
        """Bound the mean squared hypergradient of K iterations by Theorem 1.

        `start` is W⁰ - inf f, with W⁰ = f(x_0, y*(x_0)) + M_f/L_y ||y_0 - y*(x_0)||². The paper writes W⁰ alone,
        which is right for f ≥ 0. With `at_beta` the term 4c_3σ_g²ᾱ/√K is replaced by 4c_3(β_k)σ_g²α_k.
        """
        g = self.given
        if self.beta_k < self.beta_low / ROUNDING:
            raise SettingsError(
                f"beta = {self.beta_k:.4g} is wrong: Theorem 1 needs it in [{self.beta_low:.4g}, "
                f"{self.beta_high:.4g}]; remove it to use the lower end"
            )
        slow, root = self.alpha_bar / math.sqrt(self.K), math.sqrt(self.K)
        truncation = 8 * (g.L_g * g.M / g.mu) ** 2 * max(0.0, 1 - self.lam * g.mu) ** (2 * self.N + 2)
        return ConvergenceBound(
            start=4 * start / (min(self.alpha_bar_1, self.alpha_bar_2, self.alpha_bar_3) * self.K),
            tuned=4 * start / (self.alpha_bar * root),
            upper=4 * self.c_0 * g.M**2 * slow,
            estimator=4 * self.c_1 * self.sigma_h2 * slow,
            noise_f=4 * self.c_2 * g.sigma_f**2 * slow,
            noise_g=4 * g.sigma_g**2 * (self.c_3_at_beta * self.alpha_k if at_beta else self.c_3 * slow),
            truncation=truncation * (3 + self.alpha_k / 6),
        )

    def iterations(self, start: float, epsilon: float, *, truncation: bool = True) -> float:
        """Return the least K for which the theorem's bound is at most ε.

        It is infinite when the truncation term is ε or more, because that term does not vanish as K grows. The
        term is taken at K = 1, where the α_k in it is largest. With `truncation=False` it is not used, as in
        Corollary 1.
        """
        one = Theory(self.given, self.N, self.lam, 1, self.alpha_bar).convergence_bound(start)
        left = epsilon - (one.truncation if truncation else 0.0)
        if left <= 0:
            return math.inf
        root = one.tuned + one.upper + one.estimator + one.noise_f + one.noise_g
        # The equation start/K + root/√K = left is quadratic in √K.
        return ((root + math.sqrt(root**2 + 4 * one.start * left)) / (2 * left)) ** 2
