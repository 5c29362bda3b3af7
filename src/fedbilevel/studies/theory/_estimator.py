"""The estimator beside the bounds of Propositions 1 and 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...problems.quadratic import Quadratic
from ._sampling import Case, Dials, compare, hard_case, random_case

NAMES = {
    "bias": "Proposition 1: bias B^I",
    "variance": "Proposition 2: variance of h_i^I against σ_h²",
    "upper": "Proposition 2: upper direction against D_h²",
    "lower": "proof of Proposition 1: E‖y^t - y*‖², worst t",
}


def estimator_study(quick: bool) -> dict[str, Any]:
    """Measure bias and variance over N and over λ on one quadratic, on 50 random ones, and on a hard one."""
    trials = 100 if quick else 400
    task = Quadratic(size_x=6, size_y=5, condition=10.0, heterogeneity=1.0, noise=0.3).make(clients=8, seed=1)
    L_g = task.constants(0.0).L_g
    g = np.random.default_rng(0)
    x, y = g.normal(size=6), 2.0 * g.normal(size=5)

    def at(N: int, share: float) -> dict[str, float]:
        lam = share / L_g
        case = Case(task, x, y, Dials(N, lam, min(1.0, lam, 1 / (6 * L_g)), tau=4))
        rows, theory = compare(case, trials)
        gap = float(((y - task.solution(x)) ** 2).sum())
        found: dict[str, float] = {"N": N, "lam": lam, "lam_L_g": share, **theory.bias_bound(gap)._asdict()}
        for row in rows:
            found |= {f"{row.name}_measured": row.measured, f"{row.name}_bound": row.bound}
        return found

    lengths = sorted({round(n) for n in np.geomspace(1, 200, 10 if quick else 22)})
    shares = [float(s) for s in np.geomspace(0.01, 1.0, 9 if quick else 19)]
    noisy = [compare(random_case(seed), trials)[0] for seed in range(50)]
    hard = {N: compare(hard_case(N))[0] for N in (5, 20, 50, 200)}
    return {
        "kappa": L_g / task.constants(0.0).mu,
        "over_N": [at(n, 1.0) for n in lengths],
        "over_lam": [at(20, s) for s in shares],
        "random": [{row.name: [row.measured, row.bound, row.ratio] for row in rows} for rows in noisy],
        "worst": {name: max(r.ratio for rows in noisy for r in rows if r.name == name) for name in NAMES},
        "median": {
            name: float(np.median([r.ratio for rows in noisy for r in rows if r.name == name])) for name in NAMES
        },
        "hard": {str(N): {row.name: row.ratio for row in rows} for N, rows in hard.items()},
    }
