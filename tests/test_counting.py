"""The work of clients, counted by the oracle itself, against formulas for each kind of step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fedbilevel.problem import Task
from fedbilevel.spec import Spec, parse
from fedbilevel.studies.counting import Cost, costs

FULL = {"batch_zeta": "full", "batch_xi": "full"}
OF_TEN = {"participation": 5, "lower_steps": 4, "upper_steps": 3, "batch_zeta_local": "full"}


def spec_of(algorithm: dict[str, Any], clients: int = 10) -> Spec:
    problem = {"name": "quadratic", "size_x": 3, "size_y": 2, "rows": 8}
    data = {"clients": clients}
    return parse({"problem": problem, "data": data, "algorithm": algorithm, "stop": {"rounds": 9}})


def first_costs(algorithm: dict[str, Any], count: int = 1, task: Task | None = None) -> list[Cost]:
    spec = spec_of(algorithm)
    return list(itertools.islice(costs(spec, spec.task() if task is None else task), count))


@pytest.mark.parametrize(
    ("algorithm", "rounds", "work"),
    [
        # The three directions: 1 for both gradients of f, 3 for those of g; half of the clients do them.
        ({"name": "fedsoba", "participation": 1.0, **FULL}, 1, 4),
        ({"name": "fedsoba", "participation": 5, **FULL}, 1, 4 / 2),
        ({"name": "simfbo", "participation": 1.0, "tau": 5, **FULL}, 1, 5 * 4),
        # A minibatch of two of eight rows is a quarter of a gradient.
        ({"name": "simfbo", "participation": 1.0, "tau": 5, "batch_zeta": 2, "batch_xi": 2}, 1, 5 * 4 / 4),
        ({"name": "simfbo", "participation": 1.0, "tau": [1] * 5 + [9] * 5, **FULL}, 1, 5 * 4),
        # All clients once; then the cohort at both ends of every local step but the first.
        ({"name": "fedmsa", "participation": 5, "tau": 3, **FULL}, 2, 4 + 2 * 2 * 4 / 2),
        # ∇_y g twice, ∇_y f, ∇_x g twice, ∇_x f.
        ({"name": "fed-f2sa", "participation": 1.0, **FULL}, 1, 6),
        ({"name": "fedavg", "participation": 1.0, "tau": 3, **FULL}, 1, 3 * 4),
        ({"name": "fedavg", "control": "lower-only", "participation": 1.0, "tau": 3, **FULL}, 1, 3),
        # Three local steps, and the loss F_i, which is a pass over all rows.
        ({"name": "q-fedavg", "participation": 1.0, "tau": 3, **FULL}, 1, 3 + 1),
        # q, four corrected lower steps (the anchor once, and none for the first), ∇_y f, T products, the
        # hypergradient, and three corrected upper steps.
        ({"name": "fednest", "T": 3, **OF_TEN}, 8, (1 + 4 + 1 + 3 * 2 + 3 + 3) / 2),
        # On minibatches of one row the anchor of a lower step is computed with the step: twice 3/8 of a gradient.
        ({"name": "fednest", "T": 3, **OF_TEN, "batch_zeta_local": 1}, 8, (1 + 2 * 3 / 8 + 1 + 3 * 2 + 3 + 3) / 2),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_the_work_of_an_iteration_is_that_of_its_formula(
    algorithm: dict[str, Any], rounds: int, work: float
) -> None:
    (found,) = first_costs(algorithm)
    assert found.rounds == rounds
    assert found.work == pytest.approx(work)


def test_a_choice_of_the_server_changes_the_work_of_an_iteration() -> None:
    """AggITD with N = 1 takes one Hessian product if Q = 0, and none if Q = 1."""
    found = first_costs({"name": "fbo-aggitd", "N": 1, **OF_TEN}, 20)
    without = (1 + 4 + 1 + 3 + 3) / 2
    assert {each.work for each in found} == {without, without + 1}


def test_rows_of_a_round_are_those_of_its_largest_draw() -> None:
    (found,) = first_costs({"name": "simfbo", "participation": 1.0, "tau": 5, "batch_zeta": 3, "batch_xi": 2})
    assert found.rows == 15
