"""Personal heads: the hypergradient against differences of the problem's value, and a whole run from a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
        return float(fed.probe(personal, beta=0.5, kept=False, names=(), shown=False, **given).upper)

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
