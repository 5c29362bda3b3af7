"""The benchmark: what it writes, and that its floor counts the products it says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fedbilevel import UnknownName
from fedbilevel.bench import CASES, STANDARD
from fedbilevel.bench.cases import Case
from fedbilevel.bench.floor import flop
from fedbilevel.bench.measure import measure
from fedbilevel.bench.ours import profile
from fedbilevel.bench.report import write
from fedbilevel.cli.bench import bench_command

TINY = Case("tiny", shape=(4, 4, 1), lower=12, upper=12, tau=2, cohort=2, registered=3)


def test_the_floor_of_the_standard_case_is_twelve_passes_the_head_and_the_minibatch_steps() -> None:
    """Head: the gradient q is two products, the Hessian product and its scores three, the hypergradient and the
    gradient of the source six, and each of four upper steps two. There are 149 steps of two products."""
    passes, head, steps = 12 * 300 * 784 * 200, (2 + 3 + 6 + 8) * 300 * 200 * 10, 149 * 2 * 10 * 200 * 10
    assert flop(CASES[STANDARD]) == 2 * 10 * (passes + head + steps)


def test_ten_lower_rounds_have_ten_times_the_minibatch_steps() -> None:
    one, ten = flop(CASES[STANDARD]), flop(CASES[f"{STANDARD}-N10"])
    head = (18 + 2 * 4) * 300 * 200 * 10  # nine more gradients, and on average four more Hessian products
    assert ten - one == 2 * 10 * (head + 9 * 149 * 2 * 10 * 200 * 10)


def test_every_method_but_the_one_with_matrices_has_a_case() -> None:
    assert {case.method for case in CASES.values()} == {
        "fbo-aggitd",
        "fednest",
        "lfednest",
        "naive-itd",
        "ma-dsbo",
    }
    for case in CASES.values():
        assert flop(case) > 0 and case.algorithm.check(case.registered) is None


def test_a_convolution_counts_forward_weights_and_inputs_but_no_input_of_the_first() -> None:
    one, two = (flop(Case("one", "cnn", lower=1, upper=1, tau=tau, cohort=1)) for tau in (1, 2))
    first, second, dense = 2 * 784 * 25 * 6, 2 * 100 * 150 * 16, 2 * 400 * 120
    head = 2 * 2 * (120 * 84 + 84 * 10)  # scores, and the gradient by the features
    assert two - one == 2 * first + 3 * second + 3 * dense + head


@pytest.mark.slow
def test_a_method_without_a_server_can_be_profiled() -> None:
    """Its agents work alone, for which the federation asks the engine what it is capable of."""
    parts = profile(dataclasses.replace(TINY, method="ma-dsbo", registered=2, terms=1), expected=4.0)
    assert {"drawing rows", "dispatch"} < parts.keys()


@pytest.mark.slow
def test_a_row_has_medians_ratios_and_where_the_time_goes(tmp_path: Path) -> None:
    row = measure(TINY, budget=0.1) | {"profile": profile(TINY, expected=1.0)}
    assert row["case"] == "tiny" and row["ours_s"] > 0 and row["floor_s"] > 0
    assert row["ours_over_floor"] == row["ours_s"] / row["floor_s"]
    assert {"embedding", "lower_steps", "gradients", "upper_steps", "dispatch"} <= row["profile"].keys()
    write([row], tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text()) == [row]
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_a_case_that_does_not_exist_is_refused_before_anything_runs() -> None:
    with pytest.raises(UnknownName, match="case 'nothing' is unknown"):
        bench_command(cases=["nothing"])
