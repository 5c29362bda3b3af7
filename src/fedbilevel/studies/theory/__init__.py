"""The paper's theory beside measurement.

The estimator is compared with Propositions 1 and 2, outer iterations with Lemmas 1, 2 and 3, runs with Theorem 1,
and the constants with the orders that Corollary 1 claims.

`run_theory(out, quick)` writes four figures, `theory.json` with every number and `theory.md` with the tables.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ...files import results_folder
from ._convergence import convergence_study, gentle_task
from ._estimator import estimator_study
from ._figures import draw_convergence, draw_estimator, draw_lemmas, draw_orders
from ._lemmas import lemma_study
from ._markdown import markdown
from ._orders import order_study
from ._table import theory_table

__all__ = [
    "convergence_study",
    "estimator_study",
    "gentle_task",
    "lemma_study",
    "order_study",
    "run_theory",
    "theory_table",
]


def run_theory(out: Path, quick: bool = False) -> dict[str, Any]:
    """Run the study into a folder and return all of its numbers."""
    results_folder(out, "--out")
    begun = time.perf_counter()
    result: dict[str, Any] = {
        "estimator": estimator_study(quick),
        "lemmas": lemma_study(quick),
        "convergence": convergence_study(quick),
        "orders": order_study(),
    }
    draw_estimator(result["estimator"], out / "theory-estimator")
    draw_lemmas(result["lemmas"], out / "theory-lemmas")
    draw_convergence(result["convergence"], out / "theory-convergence")
    draw_orders(result["orders"], out / "theory-orders")
    result["quick"], result["seconds"] = quick, round(time.perf_counter() - begun, 1)
    (out / "theory.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "theory.md").write_text(markdown(result))
    return result
