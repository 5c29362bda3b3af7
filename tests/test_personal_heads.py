"""Personal heads: the hypergradient against differences of the problem's value, and a whole run from a spec."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel._probes import personal
from fedbilevel.algorithms import LocalLower
from fedbilevel.algorithms.locallower import anew_lower
from fedbilevel.data import DataSettings
from fedbilevel.problems import PersonalHeads
from fedbilevel.spec import parse
from fedbilevel.steps import Sample, Samples

FEW = DataSettings(name="digits", clients=4, partition="classes")


def test_the_direction_of_x_is_the_gradient_through_every_clients_own_head() -> None:
    task = PersonalHeads(hidden=3, decay=0.1).task(FEW, 0)
    fed = fb.Federation(fb.Simulation(task.problem, task.clients, devices=1))
    x, solving = task.problem.flat_x.vector, Samples("lower", None, 400)
    fed.hold(x=x)
    h = fed.round(
        anew_lower,
        alpha=1.0,
        beta=0.5,
        shared=False,
        implicit=True,
        products=30,
        zeta=solving,
        u=Sample("lower"),
        eta=Sample("upper"),
        xi=Samples("upper", None, 1),
        chi=Sample("lower"),
    ).h
    along, small = np.asarray(h) / np.linalg.norm(h), 0.001  # the ReLU has kinks

    def value(at: Any) -> float:
        """1/m Σ_i f_i(x, y_i*(x))"""
        given: dict[str, Any] = dict(solving=solving, xi=Sample("upper"), zeta=Sample("lower"), at={"x": at})
        return float(fed.probe(personal, beta=0.5, shared=False, kept=False, names=(), shown=False, **given).upper)

    slope = (value(x + small * along) - value(x - small * along)) / (2 * small)
    np.testing.assert_allclose(slope, np.linalg.norm(h), rtol=0.005)


def test_a_spec_of_personal_heads_trains_and_is_read_again(tmp_path: Path) -> None:
    spec = parse(
        {
            "problem": {"name": "personal-heads", "hidden": 4},
            "data": {"name": "digits", "clients": 4, "partition": "classes"},
            "algorithm": {"name": "local-lower", "participation": 1.0, "alpha": 0.1, "beta": 0.1},
            "stop": {"rounds": 4, "metric": "worst_test_accuracy", "at": 1.1},
            "evaluate": {"every": 2},
        }
    )
    result = fb.run(spec, tmp_path / "run")
    first, last = result.history[0], result.history[-1]
    assert last["upper_loss"] < first["upper_loss"]
    assert last["worst_test_accuracy"] <= last["test_accuracy"]
    saved = fb.load_run(tmp_path / "run")
    assert sorted(saved.lower) == [0, 1, 2, 3] and not np.any(saved.y.layers[0].weight)
    data = spec.data.load(7, own_test=True)[1].load(0)
    joined = saved.join(tuple(data.lower), tuple(data.test or ()), steps=50)
    assert joined.metrics["test_accuracy"] > 0.5  # two classes, of which a head of zeros tells none apart
    assert LocalLower().lower_kinds == ("local",)


SMALL: dict[str, Any] = dict(hidden=4, components=16, rows=40, valid=True, newcomers=2, newcomer_rows=10)


def test_controls_of_personal_heads_share_a_head_or_tune_it_or_share_nothing() -> None:
    made = {kind: PersonalHeads(**SMALL, heads=kind).task(FEW, 0) for kind in ("own", "shared", "tuned", "alone")}
    kinds = {name: task.problem.lower_is for name, task in made.items()}  # type: ignore[attr-defined]
    assert kinds == {"own": "local", "shared": "global", "tuned": "global", "alone": "local"}
    assert made["alone"].problem.size_x == 1
    assert made["alone"].problem.size_y == made["own"].problem.size_x + made["own"].problem.size_y
    for task in made.values():
        assert task.clients.count == 4 and task.clients.load(0).lower.rows + task.clients.load(0).upper.rows == 40


def test_a_tuned_head_is_the_result_of_gradient_steps_on_the_clients_own_rows() -> None:
    task: Any = PersonalHeads(**SMALL, heads="tuned", tuning_steps=3, tuning_step=0.2).task(FEW, 0)
    own: Any = PersonalHeads(**SMALL).task(FEW, 0)
    x, y = task.problem.flat_x.vector, task.problem.flat_y.vector
    right = []
    for client in range(4):
        data, head = own.clients.load(client), y
        slope = jax.grad(partial(task.problem.loss, "lower", x), argnums=0)
        for _ in range(3):
            head = head - 0.2 * slope(head, whole(task.problem, x, data.lower))
        scores = task.problem.flat_y.restore(head)(task.problem.features(x, data.test.inputs))
        odd = np.arange(data.test.rows) % 2 == 1
        right.append(np.mean((np.argmax(scores, -1) == data.test.targets)[odd]))
    found = task.measure(x, y)
    assert float(found["test_accuracy"]) == pytest.approx(np.mean(right), abs=1e-6)
    assert float(found["worst_test_accuracy"]) == pytest.approx(np.min(right), abs=1e-6)
    assert "new_accuracy" in found and "valid_accuracy" in found
    shown = task.finding(x, y)
    np.testing.assert_allclose(shown.values[:4], right, atol=1e-6)
    assert np.mean(shown.values[4:]) == pytest.approx(float(found["new_accuracy"]), abs=1e-6)
    assert [*shown.kinds] == ["took part"] * 4 + ["newcomer with 10 rows"] * 2


def whole(problem: Any, x: Any, part: Any) -> fb.Batch:
    return fb.Batch(part.inputs, part.targets, jnp.ones(part.rows), problem.features(x, part.inputs))
