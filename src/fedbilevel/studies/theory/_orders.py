"""The constants of the analysis beside the orders in κ_g that Corollary 1 claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...theory import Constant, DerivedConstants, Given, Theory
from ._fit import slope


class Quantity(NamedTuple):
    """A quantity whose order in κ_g is fitted, beside the order that the paper claims for it.

    symbol   the name of the quantity in tables and figures
    claimed  the order for ρ > 0 and N = κ_g in the proof of Corollary 1, or None where the proof gives none
    value    the function that computes the quantity
    """

    symbol: str
    claimed: int | None
    value: Callable[[Theory], float]


def _quantities(epsilon: float) -> list[Quantity]:
    """List the constants, the terms of the bound at K = 1, and the numbers of iterations and rounds for ε."""
    constants: list[tuple[Constant[DerivedConstants], int | None]] = [
        (Theory.L_y, 1),
        (Theory.L_yx, 3),
        (Theory.M_f, 2),
        (Theory.L_f_prime, 3),
        (Theory.eta, 1),
        (Theory.sigma_h2, 2),
        (Theory.D_h2, None),
        (Theory.alpha_bar_1, -3),
        (Theory.alpha_bar_2, -4),
        (Theory.alpha_bar_3, -3),
        (Theory.beta_bar, 4),
        (Theory.c_0, 3),
        (Theory.c_1, 3),
        (Theory.c_2, 3),
        (Theory.c_3, 8),
    ]
    return [
        *(Quantity(constant.symbol, order, constant.value) for constant, order in constants),
        Quantity("start·K", 4, lambda t: t.convergence_bound(1.0).start),
        Quantity("tuned·√K", 4, lambda t: t.convergence_bound(1.0).tuned),
        Quantity("upper·√K", None, lambda t: t.convergence_bound(1.0).upper),
        Quantity("estimator·√K", None, lambda t: t.convergence_bound(1.0).estimator),
        Quantity("noise_f·√K", None, lambda t: t.convergence_bound(1.0).noise_f),
        Quantity("noise_g·√K", 4, lambda t: t.convergence_bound(1.0).noise_g),
        Quantity("K(ε)", 8, lambda t: t.iterations(1.0, epsilon, truncation=False)),
        Quantity("N·K(ε)", 9, lambda t: t.N * t.iterations(1.0, epsilon, truncation=False)),
    ]


def order_study() -> dict[str, Any]:
    """Fit the orders of the constants and of the bound in κ_g.

    The other quantities are L_g = L_f = M = σ = λ = W⁰ = 1, N = κ_g, ᾱ = κ_g^-4 and ε = 0.1.
    """
    epsilon = 0.1
    kappas = [float(k) for k in np.geomspace(10, 1e5, 33)]

    def theory(kappa: float, rho: float, N: int | None = None) -> Theory:
        given = Given(mu=1 / kappa, L_g=1.0, L_f=1.0, M=1.0, rho=rho, sigma_f=1.0, sigma_g=1.0)
        return Theory(given, N or math.ceil(kappa), 1.0, K=1, alpha_bar=kappa**-4)

    def enough(kappa: float) -> int:
        """Return an N for which the truncation is at most ε/2. It is of order κ log(κ/ε)."""
        return math.ceil(math.log(epsilon / (2 * 8 * kappa**2 * 4)) / (2 * math.log1p(-1 / kappa)))

    quantities = _quantities(epsilon)
    values = {q.symbol: [q.value(theory(k, 1.0)) for k in kappas] for q in quantities}
    zero = Theory.L_yx.symbol  # It is 0 when ρ = 0 and has no order then.
    plain = {q.symbol: [q.value(theory(k, 0.0)) for k in kappas] for q in quantities if q.symbol != zero}
    logged = [theory(k, 1.0, enough(k)) for k in kappas]
    values["K(ε), N = κ log"] = [t.iterations(1.0, epsilon) for t in logged]
    values["N·K(ε), N = κ log"] = [t.N * t.iterations(1.0, epsilon) for t in logged]
    claimed = {q.symbol: q.claimed for q in quantities}
    claimed |= {"K(ε), N = κ log": 8, "N·K(ε), N = κ log": 9}
    last = [i for i, k in enumerate(kappas) if k >= 999]
    chosen = [kappas[i] for i in last]
    return {
        "kappa": kappas,
        "values": values,
        "claimed": claimed,
        "fitted": {s: slope(chosen, [v[i] for i in last]) for s, v in values.items()},
        "fitted_rho_0": {s: slope(chosen, [v[i] for i in last]) for s, v in plain.items()},
        "truncation_at_N_kappa": [theory(k, 1.0).convergence_bound(1.0).truncation for k in kappas],
        "epsilon": epsilon,
    }
