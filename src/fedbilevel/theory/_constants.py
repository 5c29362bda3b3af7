"""Every constant and step size of the AggITD paper's analysis, declared with its formula and its place.

Where the paper contradicts itself this file follows the proofs. docs/theory.md lists every such place; three of
them change a number:

    D_h²    It is 12M² + ..., as Proposition 2 proves. The restated theorem prints 8M² + ...
    α_3(N)  It contains (1 - βμ/2)^N, as in Proposition 1. The theorem's proof prints (1 - βμ)^N once.
    c_3     It contains α_k, although it is meant to be independent of K. We replace that α_k by the larger ᾱ_2.

The paper does not resolve a fourth: c_3 takes β_k = β̄α_k/N, which the condition β_k ≥ λ/10 forbids once α_k is
small. `c_3` is the printed constant, and `c_3_at_beta` contains the β_k that is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..errors import SettingsError
from ._assumptions import ROUNDING, Assumed, check_assumed
from ._declare import Constant, Entry, constant


@dataclass(frozen=True)
class DerivedConstants:
    """The constants that the paper derives from those of its assumptions and from the settings of the method.

    given      the constants of Assumptions 1-4
    N          the number of lower rounds in an outer iteration
    lam        λ, which is at most min{10, 1/L_g}; the theory does not cover larger values
    K          the number of outer iterations
    alpha_bar  ᾱ, which the theorem leaves to be tuned
    beta       β (default: the lower end of the theorem's interval). The propositions need only
               β ≤ min{1, λ, 1/(6L_g)}; the theorem's bound also needs β to be at least the lower end.
    """

    given: Assumed
    N: int
    lam: float
    K: int = 10_000
    alpha_bar: float = 1.0
    beta: float | None = None

    def __post_init__(self) -> None:
        check_assumed(self.given)
        for name, value in {"N": self.N, "K": self.K, "alpha_bar": self.alpha_bar}.items():
            if not 0 < value < math.inf:
                raise SettingsError(f"{name} = {value} is wrong: it must be positive")
        most = min(10.0, 1 / self.given.L_g)
        if not 0 < self.lam <= most * ROUNDING:
            raise SettingsError(
                f"lam = {self.lam:.4g} is wrong: the theory needs 0 < lam <= min(10, 1/L_g) = {most:.4g}"
            )
        if self.beta is not None and not 0 < self.beta <= self.beta_high * ROUNDING:
            raise SettingsError(
                f"beta = {self.beta:.4g} is wrong: the theory needs 0 < beta <= min(1, lam, 1/(6 L_g)) = "
                f"{self.beta_high:.4g}"
            )

    def entries(self) -> Iterator[Entry]:
        """Yield every constant in the order in which this class declares them."""
        for attribute in vars(DerivedConstants).values():
            if isinstance(attribute, Constant):
                yield attribute.entry(self)

    # Lemma 4, in the appendix, and constants that follow from it

    @constant(symbol="κ_g", formula="L_g / μ", place="Corollary 1")
    def kappa_g(self) -> float:
        return self.given.L_g / self.given.mu

    @constant(symbol="L_y", formula="L_g / μ", place="Lemma 4")
    def L_y(self) -> float:
        return self.given.L_g / self.given.mu

    @constant(symbol="L_yx", formula="(ρ + ρL_y)/μ + L_g(ρ + ρL_y)/μ²", place="Lemma 4")
    def L_yx(self) -> float:
        g = self.given
        return (g.rho + g.rho * self.L_y) * (1 / g.mu + g.L_g / g.mu**2)

    @constant(symbol="M_f", formula="L_f + L_gL_f/μ + M/μ (ρ + L_gρ/μ)", place="Lemma 4")
    def M_f(self) -> float:
        g = self.given
        return g.L_f + g.L_g * g.L_f / g.mu + g.M / g.mu * (g.rho + g.L_g * g.rho / g.mu)

    @constant(symbol="L_f'", formula="L_f + L_g(L_f + M_f)/μ + M/μ (ρ + L_gρ/μ)", place="Lemma 4")
    def L_f_prime(self) -> float:
        g = self.given
        return g.L_f + g.L_g * (g.L_f + self.M_f) / g.mu + g.M / g.mu * (g.rho + g.L_g * g.rho / g.mu)

    @constant(symbol="η", formula="M_f / L_y", place="Theorem 1, appendix")
    def eta(self) -> float:
        return self.M_f / self.L_y

    # Propositions 1 and 2

    @constant(symbol="α_1(N)", formula="4(N+1)(1 - βμ/2)^N (ρ²/(λμ³) + 4ρ²/(βμ³))", place="Proposition 1")
    def alpha_1N(self) -> float:
        g, beta = self.given, self.beta_k
        decay = (1 - beta * g.mu / 2) ** self.N
        return 4 * (self.N + 1) * decay * g.rho**2 / g.mu**3 * (1 / self.lam + 4 / beta)

    @constant(symbol="α_2(N)", formula="N(N+1)(1 + (1-λμ)²) / (λμ³)", place="Proposition 1")
    def alpha_2N(self) -> float:
        mu = self.given.mu
        return self.N * (self.N + 1) * (1 + (1 - self.lam * mu) ** 2) / (self.lam * mu**3)

    @constant(symbol="α_3(N)", formula="3(N+1)(1 - βμ/2)^N / (λμ)", place="Proposition 1")
    def alpha_3N(self) -> float:
        mu = self.given.mu
        return 3 * (self.N + 1) * (1 - self.beta_k * mu / 2) ** self.N / (self.lam * mu)

    @constant(symbol="σ_h²", formula="λ(N+1)L_g²M² / μ", place="Proposition 2")
    def sigma_h2(self) -> float:
        g = self.given
        return self.lam * (self.N + 1) * g.L_g**2 * g.M**2 / g.mu

    @constant(
        symbol="D_h²",
        formula="12M² + 4λ(N+1)L_g²M² / μ",
        place="Proposition 2; the restated theorem prints 8M²",
    )
    def D_h2(self) -> float:
        return 12 * self.given.M**2 + 4 * self.sigma_h2

    # The step sizes of Theorem 1

    @constant(symbol="ᾱ_1", formula="1 / (8L_f' + 16M_fL_y + 8M_fL_yx/(ηL_y))", place="Theorem 1, appendix")
    def alpha_bar_1(self) -> float:
        return 1 / (4 * self.c_0)

    @constant(symbol="ᾱ_2", formula="1 / (324M_f² + 6M_f)", place="Theorem 1, appendix")
    def alpha_bar_2(self) -> float:
        return 1 / (324 * self.M_f**2 + 6 * self.M_f)

    @constant(
        symbol="β̄",
        formula="(M_fL_yᾱ_2/2 + 11M_fL_y + ηL_yxD_h²ᾱ_2 "
        "+ (6 + ᾱ_2/3)(N+1)λL_yL_g²/M_f (328ρ²M²/μ³ + 6L_f²/μ)) / μ",
        place="Theorem 1, appendix",
    )
    def beta_bar(self) -> float:
        g, a = self.given, self.alpha_bar_2
        source = 328 * g.rho**2 * g.M**2 / g.mu**3 + 6 * g.L_f**2 / g.mu
        last = (6 + a / 3) * (self.N + 1) * self.lam * self.L_y * g.L_g**2 / self.M_f * source
        product = self.M_f * self.L_y
        return (product * a / 2 + 11 * product + self.eta * self.L_yx * self.D_h2 * a + last) / g.mu

    @constant(symbol="ᾱ_3", formula="N min{1, λ, 1/(6L_g)} / (2β̄)", place="Theorem 1, appendix")
    def alpha_bar_3(self) -> float:
        return self.N * self.beta_high / (2 * self.beta_bar)

    @constant(symbol="α_k", formula="min{ᾱ_1, ᾱ_2, ᾱ_3, ᾱ/√K}", place="Theorem 1")
    def alpha_k(self) -> float:
        return min(self.alpha_bar_1, self.alpha_bar_2, self.alpha_bar_3, self.alpha_bar / math.sqrt(self.K))

    @constant(symbol="least β_k", formula="max{β̄α_k/N, λ/10}", place="Theorem 1")
    def beta_low(self) -> float:
        return max(self.beta_bar * self.alpha_k / self.N, self.lam / 10)

    @constant(symbol="most β_k", formula="min{1, λ, 1/(6L_g)}", place="Theorem 1")
    def beta_high(self) -> float:
        return min(1.0, self.lam, 1 / (6 * self.given.L_g))

    @constant(symbol="β_k", formula="the β that was given, or the least of the interval", place="Theorem 1")
    def beta_k(self) -> float:
        return self.beta_low if self.beta is None else self.beta

    # Lemma 2, on the warm start, with γ = M_f L_y α_k

    @constant(symbol="b_1(α_k)", formula="4L_y²α_k² + L_y²α_k²/(4γ) + 2L_yxα_k²/η, γ = M_fL_yα_k", place="Lemma 2")
    def b_1(self) -> float:
        return self.b_3 + self.L_y * self.alpha_k / (4 * self.M_f)

    @constant(symbol="b_2(α_k)", formula="1 + 4γ + ηL_yxD_h²α_k²/2, γ = M_fL_yα_k", place="Lemma 2")
    def b_2(self) -> float:
        return 1 + 4 * self.M_f * self.L_y * self.alpha_k + self.eta * self.L_yx * self.D_h2 * self.alpha_k**2 / 2

    @constant(symbol="b_3(α_k)", formula="4α_k²L_y² + 2L_yxα_k²/η", place="Lemma 2")
    def b_3(self) -> float:
        return self.alpha_k**2 * (4 * self.L_y**2 + 2 * self.L_yx / self.eta)

    # The constants of Theorem 1's bound

    @constant(symbol="c_0", formula="2L_f' + 4M_fL_y + 2L_yxM_f/(ηL_y)", place="Theorem 1, appendix")
    def c_0(self) -> float:
        return 2 * self.L_f_prime + 4 * self.M_f * self.L_y + 2 * self.L_yx * self.M_f / (self.eta * self.L_y)

    @constant(symbol="c_1", formula="1/4 + 4L_f' + 8M_fL_y + 4L_yxM_f/(ηL_y)", place="Theorem 1, appendix")
    def c_1(self) -> float:
        return 0.25 + 2 * self.c_0

    @constant(symbol="c_2", formula="1/2 + 4L_f' + 8M_fL_y + 4L_yxM_f/(ηL_y)", place="Theorem 1, appendix")
    def c_2(self) -> float:
        return 0.5 + 2 * self.c_0

    @constant(
        symbol="c_3",
        formula="25M_f/L_y [1 + (12 + 2ᾱ_2/3)(2ᾱ_2λ²L_g²M²ρ²L_yα_2(N)/(NM_f) + ᾱ_2λL_f²L_g²(N+1)L_y/(μM_f)) "
        "+ M_fL_yᾱ_2²/4 + 11ᾱ_2M_fL_y/2 + ηL_yxD_h²ᾱ_2²/2] β̄²/N",
        place="Theorem 1, appendix; ᾱ_2 for one α_k",
    )
    def c_3(self) -> float:
        return self._c_3_factor * self.beta_bar**2 / self.N

    @constant(
        symbol="c_3(β_k)",
        formula="25M_f/L_y [as in c_3] Nβ_k²/α_k²",
        place="ours: the step before the last of the theorem's proof",
    )
    def c_3_at_beta(self) -> float:
        return self._c_3_factor * self.N * (self.beta_k / self.alpha_k) ** 2

    @cached_property
    def _c_3_factor(self) -> float:
        """The factor that `c_3` and `c_3_at_beta` share: 25M_f/L_y times the bracket."""
        g, a = self.given, self.alpha_bar_2
        hessian = 2 * a * (self.lam * g.L_g * g.M * g.rho) ** 2 * self.L_y / (self.N * self.M_f) * self.alpha_2N
        source = a * self.lam * (g.L_f * g.L_g) ** 2 * (self.N + 1) * self.L_y / (g.mu * self.M_f)
        product = self.M_f * self.L_y
        rest = product * a**2 / 4 + 11 * a * product / 2 + self.eta * self.L_yx * self.D_h2 * a**2 / 2
        return 25 * self.M_f / self.L_y * (1 + (12 + 2 * a / 3) * (hessian + source) + rest)
