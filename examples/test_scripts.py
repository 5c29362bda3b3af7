"""Every example runs, and its numbers are those that README.md in this folder has. `make examples` runs this file.

Figures are left in runs/examples. Tolerances are wide enough for another machine, and narrow enough that a method
which does not work fails.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

HERE = Path(__file__).parent
Play = Callable[[str], dict[str, Any]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Run a script as `python examples/NAME.py` would, and return its variables."""
    matplotlib.use("Agg")

    def run(name: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name])
        found = runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
        (figure,) = found["out"].glob("*.png")
        assert figure.stat().st_size < 60_000
        return found

    yield run
    plt.close("all")


def test_ridge_agrees_with_the_exact_hypergradient_and_comes_close_to_the_exact_minimum(play: Play) -> None:
    found = play("ridge")
    assert found["hypergradient_error"] < 1e-3
    start = float(found["outer"](found["start"]))
    assert 0 <= found["reached"] - found["minimum"] < 0.05 * (start - found["minimum"])
    assert found["result"].summary["rounds"] == 1150
    errors = found["errors"]
    assert errors["RidgeCV"] < errors["bilevel, federated"] < errors["no penalty"]


def test_client_weights_tell_good_clients_from_bad_ones(play: Play) -> None:
    found = play("client_weights")
    good, weights = found["good"], np.asarray(found["weights"])
    assert weights[good].min() > 0.9 and weights[~good].max() < 0.1
    ours, oracle, *others = found["accuracies"].values()
    assert abs(ours - oracle) < 0.01 and ours > max(others) + 0.03


def test_hyper_cleaning_finds_the_wrong_labels_and_beats_what_does_not_look_for_them(play: Play) -> None:
    found = play("hyper_cleaning")
    assert found["precision"] > 0.9 and found["recall"] > 0.8
    ours, oracle, agreement, *others = found["accuracies"].values()
    assert max(others) + 0.02 < ours < oracle and abs(ours - agreement) < 0.02


def test_logistic_regression_with_one_client_comes_close_to_the_exact_minimum(play: Play) -> None:
    found = play("logistic")
    begun, reached, minimum = found["begun"], found["reached"], found["minimum"]
    assert 0 <= reached - minimum < 0.05 * (begun - minimum)
    ours, exact, validated, start = found["errors"].values()
    assert validated < exact < ours < 0.9 * start


def test_a_network_of_ones_own_is_as_good_as_the_same_network_in_one_place(play: Play) -> None:
    ours, together, linear, drawn = play("network")["accuracies"].values()
    assert ours > 0.95 and abs(ours - together) < 0.02 and ours > linear - 0.005 and ours > drawn + 0.08


def test_the_penalties_of_words_find_those_that_mislead(play: Play) -> None:
    found = play("text")
    ours, oracle, *others = found["accuracies"].values()
    assert max(others) + 0.03 < ours < oracle
    sections, penalties = np.isin(found["words"], found["SECTIONS"]), np.asarray(found["found"])
    assert np.median(penalties[sections]) > 5 * np.median(penalties[~sections])
    assert sections[penalties.argmax()]


def test_three_tables_are_read_from_their_files_and_are_worth_more_together_than_alone(play: Play) -> None:
    found = play("tabular")
    ours, _, pooled, *alone = found["errors"].values()
    assert ours < min(alone) and ours < pooled + 0.005
    assert len(list(found["out"].glob("*/rows.csv"))) == 4
    largest = np.array(found["COLUMNS"])[np.argsort(-np.asarray(found["found"]))]
    assert set(largest[:3]) <= set(found["IDLE"])


def test_a_real_federation_of_three_sites_is_its_simulation_bit_for_bit(play: Play) -> None:
    pytest.importorskip("nvflare")
    found = play("federation")
    assert found["difference"] == 0.0
    assert found["real"].status == "finished" and found["real"].summary["rounds"] == 104
    losses = [record["upper_loss"] for record in found["real"].history[1:]]
    assert losses[-1] < 0.98 * losses[0]


def test_a_residual_network_of_pytorch_serves_its_clients_as_well_as_one_place(play: Play) -> None:
    pytest.importorskip("torch")
    ours, plain, still, one_place = play("torch_network")["accuracies"].values()
    assert ours > 0.95 and ours > plain - 0.01 and abs(ours - one_place) < 0.02 and still < 0.8
