"""The quality of a hypergradient, and what rows have reached at equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.report import Truthful, draw_quality
from fedbilevel.report._quality import spread
from fedbilevel.spec import load_spec
from fedbilevel.studies import comparison
from fedbilevel.studies.application import Column, Row
from fedbilevel.studies.cells import Cell
from fedbilevel.studies.comparison_page import bought
from fedbilevel.studies.quality import cosine_of, true_hypergradient

QUADRATIC = {
    "problem.name": "quadratic",
    "data.name": "generated",
    "data.clients": 4,
    "algorithm.participation": 1.0,
    "federation.engine": "simulation",
}


def test_the_true_hypergradient_is_that_of_the_closed_form() -> None:
    made = fb.Quadratic().make(clients=5, seed=0)
    truth = true_hypergradient(made.problem, made.clients)
    x = jnp.asarray(np.random.default_rng(0).normal(size=made.problem.size_x), jnp.float32)
    found = truth(x, made.problem.flat_y.vector)
    np.testing.assert_allclose(found.h, made.hypergradient(x), rtol=2e-4, atol=2e-5)
    assert float(found.residual) < 1e-4


def test_a_method_with_the_true_direction_has_the_cosine_one_and_one_that_stays_has_zero() -> None:
    exact = {
        "algorithm.name": "fbo-aggitd",
        "algorithm.estimator": "cg",
        "algorithm.N": 30,
        "algorithm.cg_steps": 40,
    }
    steps = {"algorithm.cg_tolerance": 1e-5, "algorithm.alpha": 0.01, "algorithm.beta": 0.3, "algorithm.lam": 0.3}
    local = {"algorithm.lower_steps": 1, "algorithm.batch_zeta_local": "full"}
    assert cosine_of(load_spec(None, QUADRATIC | exact | steps | local)) > 0.999
    still = {"algorithm.name": "fedavg", "algorithm.control": "lower-only", "algorithm.beta": 0.1}
    assert cosine_of(load_spec(None, QUADRATIC | still)) == 0.0


def test_equal_bytes_are_those_of_the_row_that_sends_least() -> None:
    class Histories:
        def history(self, spec: Any) -> list[dict[str, Any]]:
            return [{"bytes_up": spec * n, "bytes_down": 0, "test_accuracy": n / 10} for n in range(1, 6)]

    class Metric:
        metric = "test_accuracy"

    row: Any = None
    cheap, dear = Cell(row, row, specs=[10]), Cell(row, row, specs=[20])  # type: ignore[list-item]
    comparison._at_equal_bytes([cheap, dear], Metric(), Histories())  # type: ignore[arg-type]
    assert cheap.at_bytes == [0.5] and dear.at_bytes == [0.2]  # 50 bytes are five evaluations, or two


def test_the_picture_of_quality_is_drawn(tmp_path: Path) -> None:
    points = [Truthful("a", "bilevel", "c", 0.9, 0.8, 0.7), Truthful("b", "control", "c", 0.0, 0.5, None)]
    draw_quality(points, ["c"], "test accuracy", True, tmp_path / "q.png")
    assert (tmp_path / "q.png").stat().st_size > 5000


def test_names_beside_points_keep_their_order_and_a_distance() -> None:
    heights = spread([0.5, 0.9, 0.5, 0.91], 0.1, 0.0, 1.0)
    assert sorted(range(4), key=lambda place: heights[place]) == [0, 2, 1, 3]
    assert np.diff(sorted(heights)).min() > 0.0999 and max(heights) <= 1.0
    assert spread([0.2, 0.8], 0.1, 0.0, 1.0) == [0.2, 0.8]  # what is apart stays where it is


def test_the_text_names_the_truest_direction_and_the_best_at_equal_rounds_and_bytes() -> None:
    made: Any = type("Made", (), {"metric": "test_accuracy", "mode": "max", "columns": (Column("c", {}),)})

    def cell(label: str, cosine: float, rounds: float, up: float) -> Cell:
        row = Row(label, "bilevel", {}, {})
        values: dict[str, list[float | None]] = {"test_accuracy": [rounds, rounds]}
        return Cell(row, made.columns[0], chosen={}, values=values, cosine=cosine, at_bytes=[up, up])

    (text,) = bought(
        made, [cell("blind", 0.0, 0.5, 0.5), cell("cheap", 0.8, 0.9, 0.9), cell("true", 1.0, 0.8, 0.6)]
    )
    assert "that of blind (cosine 0.00), which ends at 50.00" in text
    assert "the truest that of true (1.00), which ends at 80.00" in text
    assert "best at equal rounds is cheap (0.80) with 90.00" in text
    assert "At equal bytes it is cheap with 90.00 ± 0.00, and the truest has 60.00 ± 0.00 there." in text
    assert bought(made, [cell("alone", 1.0, 0.8, 0.6)]) == []
