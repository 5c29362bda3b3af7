"""How long a cohort works (`federation.cohort`): an outer iteration, a phase of it, or a round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fakes import Watching
from fedbilevel.algorithms import FedNest, LFedNest
from fedbilevel.engines import Call, prepare
from fedbilevel.privacy import CohortUploads
from fedbilevel.problems import QuadraticTask
from fedbilevel.spec import parse
from wires import in_process_sites

KINDS = ("iteration", "phase", "round")
P, Q = 10, 8
# The rounds of an outer iteration with N = 2, cut into the lower part and the upper part.
METHODS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "fbo-aggitd": (fb.AggITD(N=2, participation=0.25, lower_steps=2), (5, 2)),
    "fednest": (FedNest(N=2, T=3, participation=0.25, lower_steps=2), (4, 6)),
    "lfednest": (LFedNest(N=2, T=3, participation=0.25, lower_steps=2), (4, 1)),
    "naive-itd": (fb.NaiveITD(N=2, participation=0.25, lower_steps=2), (4, 4)),
    "released": (FedNest(N=2, T=3, participation=0.25, lower_steps=2, mode="released_code"), (2, 2, 6)),
}


def watched(task: QuadraticTask, method: Any, kind: Any, iterations: int = 2) -> tuple[list[Call], fb.Federation]:
    engine = Watching(fb.Simulation(task.problem, task.clients))
    fed = fb.Federation(engine, cohorts=kind)
    state = method.init(task.problem, task.clients.count)
    for _ in range(iterations):
        state = method.step(fed, state)
    return engine.calls, fed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_a_cohort_works_for_as_long_as_the_setting_says(quadratic: QuadraticTask, name: str, kind: str) -> None:
    method, phases = METHODS[name]
    calls, _ = watched(quadratic, method, kind)
    if kind == "round":
        phases = (1,) * sum(phases)
    elif kind == "iteration" and name != "released":  # the released scripts always draw a cohort for each phase
        phases = (sum(phases),)
    assert len(calls) == 2 * sum(phases)
    seen = iter(calls)
    groups = [[next(seen).clients for _ in range(length)] for length in phases * 2]
    assert all(len(set(group)) == 1 and len(group[0]) == 5 for group in groups)
    assert len({group[0] for group in groups}) == len(groups), "two cohorts of five out of twenty are the same"


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_is_sent_a_held_vector_once_for_each_of_its_values(quadratic: QuadraticTask, kind: str) -> None:
    method, _ = METHODS["fbo-aggitd"]
    calls, fed = watched(quadratic, method, kind)
    received: set[tuple[str, int, int]] = set()
    billed = 0
    for call in calls:
        for name, held in call.held.items():
            has = {client for client in call.clients if (name, held.version, client) in received}
            assert set(held.missing) == set(call.clients) - has
            received |= {(name, held.version, client) for client in call.clients}
            billed += len(held.missing) * held.value.nbytes
        billed += len(call.clients) * sum(a.nbytes for a in call.arrays.values() if np.ndim(a))
    assert fed.ledger.bytes_down == billed
    assert fed.ledger.rounds == 2 * 7


def test_a_phase_costs_the_new_cohort_x_and_y_and_nothing_else(quadratic: QuadraticTask) -> None:
    method = fb.AggITD(N=1, participation=0.25, lower_steps=1, estimator="summed")
    down = {kind: watched(quadratic, method, kind, 1)[1].ledger.bytes_down for kind in KINDS}
    calls, _ = watched(quadratic, method, "phase", 1)
    new = len(set(calls[-1].clients) - set(calls[0].clients))
    assert new > 0 and down["phase"] == down["iteration"] + new * 4 * (P + Q)


def test_the_first_cohort_is_that_of_the_default(quadratic: QuadraticTask) -> None:
    """So runs that differ only in how long a cohort works begin alike."""
    method, _ = METHODS["fbo-aggitd"]
    assert len({watched(quadratic, method, kind, 1)[0][0].clients for kind in KINDS}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("fbo-aggitd", "phase"), ("fbo-aggitd", "round"), ("fednest", "phase"), ("released", "round")],
)
def test_all_engines_draw_the_same_cohorts_and_agree(quadratic: QuadraticTask, name: str, kind: Any) -> None:
    method, _ = METHODS[name]
    engines: list[Callable[[], fb.Engine]] = [
        lambda: fb.Simulation(quadratic.problem, quadratic.clients),
        lambda: fb.Loop(quadratic.problem, quadratic.clients),
        lambda: in_process_sites(quadratic.problem, quadratic.clients),
    ]
    ends = []
    for make in engines:
        fed = fb.Federation(make(), cohorts=kind)
        state = method.init(quadratic.problem, quadratic.clients.count)
        for _ in range(2):
            state = method.step(fed, state)
        ends.append((state, fed.ledger.rounds, fed.ledger.bytes_up, fed.ledger.bytes_down))
    for state, *books in ends[1:]:
        np.testing.assert_allclose(state.x, ends[0][0].x, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state.y, ends[0][0].y, rtol=1e-4, atol=1e-6)
        assert books == list(ends[0][1:])


SPEC: dict[str, Any] = {
    "problem": {"name": "quadratic"},
    "data": {"clients": 12},
    "algorithm": {"name": "fbo-aggitd", "N": 2, "participation": 0.5, "lower_steps": 2},
    "evaluate": {"checkpoint_every": 2},
    "stop": {"iterations": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"), [("phase", "plain"), ("round", "chaos"), ("phase", "central"), ("round", "local")]
)
def test_a_run_is_resumed_bit_for_bit(kind: str, more: str, tmp_path: Path) -> None:
    raw = SPEC | {"federation": {"cohort": kind}}
    given: dict[str, Any] = {}
    if more == "chaos":
        given["chaos"] = fb.ChaosSettings(drop=0.2, nan=0.1)
    if more in ("central", "local"):
        raw["privacy"] = {"mode": more, "noise": 0.1, "clip": 1.0}
        given["secret"] = fb.Secret(bytes(range(32)))
    whole = fb.run(parse(raw), tmp_path / "whole", **given)
    part = parse(raw | {"stop": {"iterations": 3}})
    fb.run(part, tmp_path / "parts", **given)
    resumed = fb.run(parse(raw), tmp_path / "parts", resume=True, **given)
    leave = ("seconds", "epsilon")
    histories = [[{k: v for k, v in r.items() if k not in leave} for r in run.history] for run in (whole, resumed)]
    assert histories[0] == histories[1]
    np.testing.assert_array_equal(whole.x, resumed.x)


@pytest.mark.parametrize(("kind", "cohorts"), [("iteration", 1), ("phase", 2), ("round", 7)])
def test_privacy_charges_a_cohort_for_what_it_uploaded(quadratic: QuadraticTask, kind: Any, cohorts: int) -> None:
    privacy = fb.Privacy(mode="central", noise=1.0)
    accountant = fb.Accountant(privacy)
    engine = fb.Simulation(quadratic.problem, quadratic.clients)
    fed = fb.Federation(engine, cohorts=kind, accountant=accountant)
    method = fb.AggITD(N=2, participation=0.25, lower_steps=1, estimator="summed")
    method.step(fed, method.init(quadratic.problem))
    releases = {key: count for key, count in accountant.releases.items() if isinstance(key, CohortUploads)}
    assert sum(releases.values()) == cohorts
    # 2N vectors q and y, N+1 vectors z, and one h and one x: the same uploads, whoever makes them.
    assert sum(key.vectors * count for key, count in releases.items()) == 2 * 2 + 3 + 2


def test_methods_with_different_rounds_have_the_same_cohorts_by_iterations(quadratic: QuadraticTask) -> None:
    """FedMSA asks all clients first, so its cohorts are drawn after an odd number of rounds."""
    methods = (fb.FedSOBA(participation=5), fb.FedMSA(participation=5, tau=2), METHODS["fbo-aggitd"][0])
    found = []
    for method in methods:
        engine, done = Watching(fb.Simulation(quadratic.problem, quadratic.clients)), [0]
        fed = fb.Federation(engine, iteration=partial(min, done))
        state = method.init(quadratic.problem, quadratic.clients.count)
        for done[0] in range(3):
            state = method.step(fed, state)
        found.append(list(dict.fromkeys(call.clients for call in engine.calls if len(call.clients) == 5)))
    assert len(found[0]) == 3 and found[0] == found[1] == found[2]
    released = METHODS["released"][0]
    engine = Watching(fb.Simulation(quadratic.problem, quadratic.clients))
    released.step(fb.Federation(engine, iteration=lambda: 0), released.init(quadratic.problem))
    assert len({call.clients for call in engine.calls}) == 3, "further cohorts of an iteration are other ones"


def test_the_fused_engine_has_the_cohorts_of_the_simulation_by_iterations(quadratic: QuadraticTask) -> None:
    def trained(engine: str, by: str) -> np.ndarray:
        done = fb.train(
            quadratic.problem,
            quadratic.clients,
            fb.FedMSA(participation=3, tau=2),
            stop={"iterations": 5},
            federation={"engine": engine, "cohort_by": by},
            evaluate={"every": 5},
        )
        return np.asarray(done.x)

    together = trained("fused", "iterations")
    np.testing.assert_allclose(together, trained("simulation", "iterations"), rtol=1e-4, atol=1e-6)
    assert np.abs(together - trained("fused", "rounds")).max() > 1e-4


def test_a_method_without_a_server_has_no_cohorts() -> None:
    with pytest.raises(fb.SettingsError, match=r"federation\.cohort = 'phase' is wrong: the algorithm has no"):
        parse({"algorithm": {"name": "gossip"}, "federation": {"cohort": "phase"}})


def test_local_steps_can_use_the_rows_of_the_hypergradient() -> None:
    task = fb.Quadratic(rows=12, noise=1.0).make(clients=4, seed=0)
    rows = {}
    for same in (True, False):
        engine = Watching(fb.Loop(task.problem, task.clients))
        method = fb.AggITD(batch_xi=3, batch_xi_local=3, upper_steps=2, participation=1.0, same_samples=same)
        method.step(fb.Federation(engine), method.init(task.problem))
        first, later = (
            [prepare(call, task.problem, c, task.clients.size(c), task.clients.capacity)["xi"] for c in range(4)]
            for call in engine.calls[-2:]
        )
        rows[same] = [
            [sorted(stream.draws.index[step].tolist()) == sorted(drawn.index.tolist()) for step in range(2)]
            for drawn, stream in zip(first, later, strict=True)
        ]
    assert all(all(steps) for steps in rows[True])
    assert not any(any(steps) for steps in rows[False])


def test_the_same_rows_are_drawn_at_a_site_that_is_given_only_keys() -> None:
    task = fb.Quadratic(rows=12, noise=1.0).make(clients=3, seed=0)
    method = fb.AggITD(batch_xi=3, upper_steps=2, participation=1.0, same_samples=True, lower_steps=2)
    ends = []
    for engine in (fb.Loop(task.problem, task.clients), in_process_sites(task.problem, task.clients)):
        ends.append(method.step(fb.Federation(engine), method.init(task.problem)))
    np.testing.assert_array_equal(ends[0].x, ends[1].x)
