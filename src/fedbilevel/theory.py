"""The constants, bounds and step sizes of the AggITD paper's analysis.

`Theory(given, N, lam)` computes all of them from the constants of Assumptions 1-4. Every property is one
constant; its docstring is `symbol = formula [place in the paper]`, and `Theory.entries` lists them with values.

Where the paper contradicts itself this file follows the proofs; docs/theory.md lists every place. The three
that change a number:

    D_h²    12M² + ..., as Proposition 2 proves; the restated theorem prints 8M² + ...
    α_3(N)  with (1 - βμ/2)^N, as Proposition 1 has it; the theorem's proof prints (1 - βμ)^N once
    c_3     contains α_k though it is to be independent of K; we put the larger ᾱ_2 there

and one that the paper does not resolve: c_3 takes β_k = β̄α_k/N, which the condition β_k ≥ λ/10 forbids once
α_k is small. `c_3` is the printed one; `c_3_at_beta` has the β_k that is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from .errors import SettingsError

ROUNDING = 1 + 1e-9  # λ = 1 / L_g computed in floats must not be refused


class Assumed(Protocol):
    """The constants of Assumptions 1-4; `problems.quadratic.Constants` is one such object."""

    @property
    def mu(self) -> float: ...
    @property
    def L_g(self) -> float: ...
    @property
    def L_f(self) -> float: ...
    @property
    def M(self) -> float: ...
    @property
    def rho(self) -> float: ...
    @property
    def sigma_f(self) -> float: ...
    @property
    def sigma_g(self) -> float: ...


class Given(NamedTuple):
    """The constants of Assumptions 1-4, written down by hand. The deviations are σ, not σ²."""

    mu: float
    L_g: float
    L_f: float
    M: float
    rho: float = 0.0
    sigma_f: float = 0.0
    sigma_g: float = 0.0


class Entry(NamedTuple):
    """One constant: its symbol, value, formula, and place in the paper."""

    symbol: str
    value: float
    formula: str
    place: str


class BiasBound(NamedTuple):
    """Proposition 1, term by term:  B^I ≤ their sum.

    start_hessian  4λ²L_g²M² α_1(N) E||y - y*||²           Hessians at early y^t; 0 when ρ = 0
    start_source   4λ²L_f²L_g² α_3(N) E||y - y*||²         ∇_y f at an early y^Q
    truncation     4L_g²M² (1-λμ)^(2N+2) / μ²              the Neumann series ends at N
    drift_hessian  400λ²β²L_g²M²σ_g²ρ² α_2(N)              noise and client drift of y in the Hessians
    drift_source   200λβ²σ_g²L_f²L_g² N(N+1) / μ           noise and client drift of y in ∇_y f
    """

    start_hessian: float
    start_source: float
    truncation: float
    drift_hessian: float
    drift_source: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self._asdict().items(), key=lambda item: item[1])[0]


class ConvergenceBound(NamedTuple):
    """The last explicit inequality of Theorem 1, term by term:  1/K Σ_k E||∇f(x_k)||² ≤ their sum.

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
        return sum(self)

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self._asdict().items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class Theory:
    """The paper's analysis for one set of assumptions and settings.

    given      the constants of Assumptions 1-4
    N          lower rounds an outer iteration
    lam        λ; at most min{10, 1/L_g}, or there is no theory
    K          outer iterations
    alpha_bar  ᾱ, which the theorem leaves to be tuned
    beta       β; the lower end of the theorem's interval when left out. The propositions need only
               β ≤ min{1, λ, 1/(6L_g)}; the theorem's bound also asks for the lower end.
    """

    given: Assumed
    N: int
    lam: float
    K: int = 10_000
    alpha_bar: float = 1.0
    beta: float | None = None

    def __post_init__(self) -> None:
        g = self.given
        if not 0 < g.mu <= g.L_g * ROUNDING:
            raise SettingsError(f"mu = {g.mu:.4g} is wrong: it lies above 0 and at most at L_g = {g.L_g:.4g}")
        for name in ("L_f", "M", "rho", "sigma_f", "sigma_g"):
            value = getattr(g, name)
            if not 0 <= value < math.inf or (name == "L_f" and value == 0):
                raise SettingsError(f"{name} = {value} is wrong: give a finite number that is not negative")
        for name in ("N", "K", "alpha_bar"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingsError(f"{name} = {getattr(self, name)} is wrong: it must be positive")
        most = min(10.0, 1 / g.L_g)
        if not 0 < self.lam <= most * ROUNDING:
            raise SettingsError(
                f"lam = {self.lam:.4g} is wrong: the theory needs 0 < lam <= min(10, 1/L_g) = {most:.4g}"
            )
        if self.beta is not None and not 0 < self.beta <= self.beta_high * ROUNDING:
            raise SettingsError(
                f"beta = {self.beta:.4g} is wrong: the theory needs 0 < beta <= min(1, lam, 1/(6 L_g)) = "
                f"{self.beta_high:.4g}"
            )

    # Lemma 4, in the appendix

    @cached_property
    def kappa_g(self) -> float:
        """κ_g = L_g / μ [Corollary 1]"""
        return self.given.L_g / self.given.mu

    @cached_property
    def L_y(self) -> float:
        """L_y = L_g / μ [Lemma 4]"""
        return self.given.L_g / self.given.mu

    @cached_property
    def L_yx(self) -> float:
        """L_yx = (ρ + ρL_y)/μ + L_g(ρ + ρL_y)/μ² [Lemma 4]"""
        g = self.given
        return (g.rho + g.rho * self.L_y) * (1 / g.mu + g.L_g / g.mu**2)

    @cached_property
    def M_f(self) -> float:
        """M_f = L_f + L_gL_f/μ + M/μ (ρ + L_gρ/μ) [Lemma 4]"""
        g = self.given
        return g.L_f + g.L_g * g.L_f / g.mu + g.M / g.mu * (g.rho + g.L_g * g.rho / g.mu)

    @cached_property
    def L_f_prime(self) -> float:
        """L_f' = L_f + L_g(L_f + M_f)/μ + M/μ (ρ + L_gρ/μ) [Lemma 4]"""
        g = self.given
        return g.L_f + g.L_g * (g.L_f + self.M_f) / g.mu + g.M / g.mu * (g.rho + g.L_g * g.rho / g.mu)

    @cached_property
    def eta(self) -> float:
        """η = M_f / L_y [Theorem 1, appendix]"""
        return self.M_f / self.L_y

    # Propositions 1 and 2

    @cached_property
    def alpha_1N(self) -> float:
        """α_1(N) = 4(N+1)(1 - βμ/2)^N (ρ²/(λμ³) + 4ρ²/(βμ³)) [Proposition 1]"""
        g, beta = self.given, self.beta_k
        decay = (1 - beta * g.mu / 2) ** self.N
        return 4 * (self.N + 1) * decay * g.rho**2 / g.mu**3 * (1 / self.lam + 4 / beta)

    @cached_property
    def alpha_2N(self) -> float:
        """α_2(N) = N(N+1)(1 + (1-λμ)²) / (λμ³) [Proposition 1]"""
        mu = self.given.mu
        return self.N * (self.N + 1) * (1 + (1 - self.lam * mu) ** 2) / (self.lam * mu**3)

    @cached_property
    def alpha_3N(self) -> float:
        """α_3(N) = 3(N+1)(1 - βμ/2)^N / (λμ) [Proposition 1]"""
        mu = self.given.mu
        return 3 * (self.N + 1) * (1 - self.beta_k * mu / 2) ** self.N / (self.lam * mu)

    @cached_property
    def sigma_h2(self) -> float:
        """σ_h² = λ(N+1)L_g²M² / μ [Proposition 2]"""
        g = self.given
        return self.lam * (self.N + 1) * g.L_g**2 * g.M**2 / g.mu

    @cached_property
    def D_h2(self) -> float:
        """D_h² = 12M² + 4λ(N+1)L_g²M² / μ [Proposition 2; the restated theorem prints 8M²]"""
        return 12 * self.given.M**2 + 4 * self.sigma_h2

    # the step sizes of Theorem 1

    @cached_property
    def alpha_bar_1(self) -> float:
        """ᾱ_1 = 1 / (8L_f' + 16M_fL_y + 8M_fL_yx/(ηL_y)) [Theorem 1, appendix]"""
        return 1 / (4 * self.c_0)

    @cached_property
    def alpha_bar_2(self) -> float:
        """ᾱ_2 = 1 / (324M_f² + 6M_f) [Theorem 1, appendix]"""
        return 1 / (324 * self.M_f**2 + 6 * self.M_f)

    @cached_property
    def beta_bar(self) -> float:
        """β̄ = (M_fL_yᾱ_2/2 + 11M_fL_y + ηL_yxD_h²ᾱ_2
        + (6 + ᾱ_2/3)(N+1)λL_yL_g²/M_f (328ρ²M²/μ³ + 6L_f²/μ)) / μ [Theorem 1, appendix]"""
        g, a = self.given, self.alpha_bar_2
        source = 328 * g.rho**2 * g.M**2 / g.mu**3 + 6 * g.L_f**2 / g.mu
        last = (6 + a / 3) * (self.N + 1) * self.lam * self.L_y * g.L_g**2 / self.M_f * source
        product = self.M_f * self.L_y
        return (product * a / 2 + 11 * product + self.eta * self.L_yx * self.D_h2 * a + last) / g.mu

    @cached_property
    def alpha_bar_3(self) -> float:
        """ᾱ_3 = N min{1, λ, 1/(6L_g)} / (2β̄) [Theorem 1, appendix]"""
        return self.N * self.beta_high / (2 * self.beta_bar)

    @cached_property
    def alpha_k(self) -> float:
        """α_k = min{ᾱ_1, ᾱ_2, ᾱ_3, ᾱ/√K} [Theorem 1]"""
        return min(self.alpha_bar_1, self.alpha_bar_2, self.alpha_bar_3, self.alpha_bar / math.sqrt(self.K))

    @cached_property
    def beta_low(self) -> float:
        """least β_k = max{β̄α_k/N, λ/10} [Theorem 1]"""
        return max(self.beta_bar * self.alpha_k / self.N, self.lam / 10)

    @cached_property
    def beta_high(self) -> float:
        """most β_k = min{1, λ, 1/(6L_g)} [Theorem 1]"""
        return min(1.0, self.lam, 1 / (6 * self.given.L_g))

    @cached_property
    def beta_k(self) -> float:
        """β_k = the β that was given, or the least of the interval [Theorem 1]"""
        return self.beta_low if self.beta is None else self.beta

    # Lemma 2, the warm start, with γ = M_f L_y α_k

    @cached_property
    def b_1(self) -> float:
        """b_1(α_k) = 4L_y²α_k² + L_y²α_k²/(4γ) + 2L_yxα_k²/η, γ = M_fL_yα_k [Lemma 2]"""
        return self.b_3 + self.L_y * self.alpha_k / (4 * self.M_f)

    @cached_property
    def b_2(self) -> float:
        """b_2(α_k) = 1 + 4γ + ηL_yxD_h²α_k²/2, γ = M_fL_yα_k [Lemma 2]"""
        return 1 + 4 * self.M_f * self.L_y * self.alpha_k + self.eta * self.L_yx * self.D_h2 * self.alpha_k**2 / 2

    @cached_property
    def b_3(self) -> float:
        """b_3(α_k) = 4α_k²L_y² + 2L_yxα_k²/η [Lemma 2]"""
        return self.alpha_k**2 * (4 * self.L_y**2 + 2 * self.L_yx / self.eta)

    # the constants of the bound

    @cached_property
    def c_0(self) -> float:
        """c_0 = 2L_f' + 4M_fL_y + 2L_yxM_f/(ηL_y) [Theorem 1, appendix]"""
        return 2 * self.L_f_prime + 4 * self.M_f * self.L_y + 2 * self.L_yx * self.M_f / (self.eta * self.L_y)

    @cached_property
    def c_1(self) -> float:
        """c_1 = 1/4 + 4L_f' + 8M_fL_y + 4L_yxM_f/(ηL_y) [Theorem 1, appendix]"""
        return 0.25 + 2 * self.c_0

    @cached_property
    def c_2(self) -> float:
        """c_2 = 1/2 + 4L_f' + 8M_fL_y + 4L_yxM_f/(ηL_y) [Theorem 1, appendix]"""
        return 0.5 + 2 * self.c_0

    @cached_property
    def c_3(self) -> float:
        """c_3 = 25M_f/L_y [1 + (12 + 2ᾱ_2/3)(2ᾱ_2λ²L_g²M²ρ²L_yα_2(N)/(NM_f) + ᾱ_2λL_f²L_g²(N+1)L_y/(μM_f))
        + M_fL_yᾱ_2²/4 + 11ᾱ_2M_fL_y/2 + ηL_yxD_h²ᾱ_2²/2] β̄²/N [Theorem 1, appendix; ᾱ_2 for one α_k]"""
        return self._c_3_factor * self.beta_bar**2 / self.N

    @cached_property
    def c_3_at_beta(self) -> float:
        """c_3(β_k) = 25M_f/L_y [as in c_3] Nβ_k²/α_k² [ours: the step before the last of the theorem's proof]"""
        return self._c_3_factor * self.N * (self.beta_k / self.alpha_k) ** 2

    @cached_property
    def _c_3_factor(self) -> float:
        g, a = self.given, self.alpha_bar_2
        hessian = 2 * a * (self.lam * g.L_g * g.M * g.rho) ** 2 * self.L_y / (self.N * self.M_f) * self.alpha_2N
        source = a * self.lam * (g.L_f * g.L_g) ** 2 * (self.N + 1) * self.L_y / (g.mu * self.M_f)
        product = self.M_f * self.L_y
        rest = product * a**2 / 4 + 11 * a * product / 2 + self.eta * self.L_yx * self.D_h2 * a**2 / 2
        return 25 * self.M_f / self.L_y * (1 + (12 + 2 * a / 3) * (hessian + source) + rest)

    # bounds

    def lower_gap_bound(self, gap: float, t: int) -> float:
        """E||y^t - y*||² ≤ (1 - βμ/2)^t E||y - y*||² + 25Nβ²σ_g² (proof of Proposition 1)."""
        beta = self.beta_k
        return (1 - beta * self.given.mu / 2) ** t * gap + 25 * self.N * (beta * self.given.sigma_g) ** 2

    def bias_bound(self, gap: float) -> BiasBound:
        """Proposition 1's bound on B^I for gap = E||y - y*(x)||²."""
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
        """Theorem 1's bound for start = W⁰ - inf f, with W⁰ = f(x_0, y*(x_0)) + M_f/L_y ||y_0 - y*(x_0)||².

        The paper writes W⁰ alone, for f ≥ 0. `at_beta` has 4c_3(β_k)σ_g²α_k in place of 4c_3σ_g²ᾱ/√K.
        """
        g = self.given
        if self.beta_k < self.beta_low / ROUNDING:
            raise SettingsError(
                f"beta = {self.beta_k:.4g} is wrong: Theorem 1 needs it in [{self.beta_low:.4g}, "
                f"{self.beta_high:.4g}]; leave it out to take the lower end"
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
        """The least K for which the theorem's bound is at most ε; infinite when N leaves more than ε of it.

        `truncation=False` leaves the term of N out, as Corollary 1 does.
        """
        one = Theory(self.given, self.N, self.lam, 1, self.alpha_bar).convergence_bound(start)
        left = epsilon - (one.truncation if truncation else 0.0)
        if left <= 0:
            return math.inf
        root = one.tuned + one.upper + one.estimator + one.noise_f + one.noise_g  # start/K + root/√K = left
        return ((root + math.sqrt(root**2 + 4 * one.start * left)) / (2 * left)) ** 2

    def entries(self) -> Iterator[Entry]:
        """Every constant in the order of this class, with its value, formula and place in the paper."""
        for name, attribute in vars(type(self)).items():
            if isinstance(attribute, cached_property) and not name.startswith("_"):
                text = " ".join((attribute.func.__doc__ or "").split())
                found = re.fullmatch(r"(.+?) = (.+) \[(.+)\]", text)
                symbol, formula, place = found.groups() if found else (name, "", "")
                yield Entry(symbol, float(getattr(self, name)), formula, place)
