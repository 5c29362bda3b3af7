"""The benchmark: what it writes, and that its floor counts the products it says."""

from __future__ import annotations

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


def test_the_floor_of_the_standard_case_is_twelve_products() -> None:
    assert flop(CASES[STANDARD]) == 12 * 2 * 10 * 300 * 784 * 200


def test_a_convolution_counts_forward_weights_and_inputs_but_no_input_of_the_first() -> None:
    case = Case("one", "cnn", lower=1, upper=1, tau=1, cohort=1)
    first, second, dense = 2 * 784 * 25 * 6, 2 * 100 * 150 * 16, 2 * 400 * 120
    assert flop(case) == 2 * (2 * first + 3 * second + 3 * dense)


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
