"""The diagrams of figure 1: they show what a traced outer iteration sent, and nothing by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedbilevel.report import Exchange, Iteration, draw_iterations
from fedbilevel.studies import load_study
from fedbilevel.studies.exchanges import KEY, iteration_of


@pytest.fixture(scope="module")
def shown() -> dict[str, tuple[Iteration, list[dict[str, Any]]]]:
    study = load_study("figure1-exchanges")
    made = {run.label: iteration_of(run, run.spec(0), study.iteration) for run in study.runs}
    return {label.split()[0]: each for label, each in made.items()}


def sent(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(row["down"], row["step"], row["up"]) for row in rows]


def test_the_aid_based_method_has_two_loops_one_after_the_other(shown: Any) -> None:
    iteration, rows = shown["AID-based"]
    assert sent(rows) == [
        ("x, y^0", "lower_gradient", "q^0"),
        ("q^0", "lower_steps", "y^1"),
        ("y^1", "lower_gradient", "q^1"),
        ("q^1", "lower_steps", "y^2"),
        ("y^2", "upper_gradient", "r"),
        ("p_0", "hessian_product", "p_1"),
        ("p_1", "hessian_product", "p_2"),
        ("p_2", "hessian_product", "p_3"),
        ("p", "hypergradient", "h"),
        ("h", "upper_steps", "x^+"),
    ]
    assert iteration.loops == [(0, 4), (5, 8)]
    assert iteration.subtitle == "10 rounds, 2 loops  (2N + T + 3 with N = 2, T = 3)"


def test_aggitd_has_one_loop_in_which_the_hessian_products_travel_too(shown: Any) -> None:
    iteration, rows = shown["AggITD"]
    assert len(rows) == 7 and iteration.loops == [(0, 5)]
    assert iteration.subtitle == "7 rounds, one loop  (2N + 3 with N = 2)"
    start = next(place for place, row in enumerate(rows) if "z^" in row["up"])
    Q = start // 2  # whichever iterate was drawn
    assert (rows[start]["down"], rows[start]["step"]) == ("x, y^0" if Q == 0 else f"y^{Q}", "gradients")
    for t in range(Q + 1, 3):
        assert rows[2 * t]["down"] == f"y^{t}, z^{t - 1}" and rows[2 * t]["up"].endswith(f"z^{t}")
    assert all("z^" not in row["up"] for row in rows[:start])
    assert [row["loop"] for row in rows] == [1, 1, 1, 1, 1, None, None]
    assert [each.strong for each in iteration.exchanges] == ["z^" in row["up"] for row in rows]


def test_the_diagram_is_written_as_png_and_svg_and_has_room_for_its_key(tmp_path: Path, shown: Any) -> None:
    paths = [tmp_path / "a.png", tmp_path / "a.svg"]
    draw_iterations([iteration for iteration, _ in shown.values()], KEY, "a title", paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()
    short = Iteration("short", "one round", [Exchange("$x$", "$h$", "work", "$h$")], [])
    draw_iterations([short], ["line"] * 9, "a title", [tmp_path / "long.png"])
    draw_iterations([short], [], "a title", [tmp_path / "short.png"])
    height = {
        name: int.from_bytes((tmp_path / name).read_bytes()[20:24], "big") for name in ("long.png", "short.png")
    }
    assert height["long.png"] > height["short.png"] + 200
