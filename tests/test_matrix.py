"""One matrix: every registered algorithm on every problem and on every engine that can carry it.

The algorithms are those of the table of names, so a new one enters by being registered, also from an installed
package. The loop carries every algorithm on every problem. On `ridge`, the other engines are compared with it for
every algorithm, and on the other problems for `KINDS`, one algorithm of each kind. So every pair of an algorithm,
a problem and an engine is tried, and a new algorithm adds few programs to compile. On the quadratic every method
also has to come closer to the closed form. A method for a local lower level is tried on the same problems with
that kind of lower level. Ray's column is one process in a network namespace with only loopback.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS, lower_kinds
from fedbilevel.data import DataSettings
from fedbilevel.problem import LowerIs
from fedbilevel.problems import HyperRepresentation
from fedbilevel.settings import meanings
from loopback import loopback_only
from wires import in_process_sites

pytestmark = pytest.mark.slow

ITERATIONS = 3
CLIENTS = 6
# Settings that suit all problems here; a method takes those that it has.
SETTINGS: dict[str, Any] = dict(
    alpha=0.05, beta=0.05, gamma=0.05, lam=0.1, N=2, T=2, b=2, participation=1.0, lower_steps=2, batch_zeta_local=4
)
SETTINGS["tau"] = 2


def quadratic(kind: LowerIs = "global") -> fb.Task:
    made = fb.Quadratic(heterogeneity=1.0, rows=6, lower_is=kind).make(clients=CLIENTS, seed=0)
    return fb.Task(made.problem, made.clients, made.measure)


def digits() -> fb.Task:
    data = DataSettings(name="digits", clients=CLIENTS, partition="iid")
    return HyperRepresentation(hidden=4, regulariser="ridge").task(data, 0)


def ridge() -> fb.Task:
    """A problem as a user writes one: two losses and two pytrees, without an embedding."""
    g = np.random.default_rng(0)

    def rows() -> Any:
        a = g.normal(size=(8, 3)).astype(np.float32)
        return a, (a @ np.arange(3.0) + g.normal(size=8)).astype(np.float32)

    def error(y: Any, b: fb.Batch) -> Any:
        return b.mean((b.inputs @ y["w"] - b.targets) ** 2)

    problem = fb.Problem(
        x={"log": jnp.zeros(3)},
        y={"w": jnp.zeros(3)},
        lower=lambda x, y, b: error(y, b) + jnp.sum(jnp.exp(x["log"]) * y["w"] ** 2),
        upper=lambda x, y, b: error(y, b),
    )
    return fb.Task(problem, fb.clients_from([(rows(), rows()) for _ in range(CLIENTS)]))


PROBLEMS: dict[str, Callable[[], fb.Task]] = {"quadratic": quadratic, "digits": digits, "ridge": ridge}


ENGINES: dict[str, Callable[[Any, Any], fb.Engine]] = {
    "loop": fb.Loop,
    "simulation": functools.partial(fb.Simulation, devices=1),
    "simulation in turn": functools.partial(fb.Simulation, devices=1, over="map"),
    "flare": functools.partial(in_process_sites, modules=["fedbilevel_momentum"]),
}
CLOSE = 2e-5
EXACT = {
    ("flare", "quadratic"),
    ("flare", "ridge"),
}  # a site pads nothing, and there clients have equally many rows
KINDS = [
    "fbo-aggitd",  # many rounds in an iteration, which use what a client remembers of x
    "gossip",  # without a server
    "fedmsa",  # derivatives at other points than the x that is held
    "momentum-soba",  # its clients keep states
]
PAIRS = [(algorithm, "ridge") for algorithm in ALGORITHMS]
PAIRS += [(algorithm, problem) for algorithm in KINDS for problem in PROBLEMS if problem != "ridge"]
CELLS = [
    (algorithm, problem, engine)
    for algorithm, problem in PAIRS
    for engine in ENGINES
    if engine != "loop" and (engine, problem) != ("simulation in turn", "digits")
]


@functools.cache
def made(problem: str, kind: LowerIs) -> fb.Task:
    if problem == "quadratic":
        return quadratic(kind)
    shared: Any = PROBLEMS[problem]()
    return fb.Task(dataclasses.replace(shared.problem, lower_is=kind), shared.clients)


def task(problem: str, algorithm: str) -> fb.Task:
    """A problem, with the kind of lower level that the algorithm solves."""
    return made(problem, lower_kinds(ALGORITHMS[algorithm])[0])


def method(name: str) -> Any:
    cls = ALGORITHMS[name]
    return cls(**{k: v for k, v in SETTINGS.items() if k in {f.name for f in dataclasses.fields(cls)}})


def carried(algorithm: str, engine: fb.Engine, problem: str) -> dict[str, Any]:
    """A few iterations: x, y, rounds and payload, or the line by which it is refused."""
    chosen = method(algorithm)
    fed = fb.Federation(engine, seed=5)
    try:
        state = chosen.init(task(problem, algorithm).problem, CLIENTS)
        for _ in range(ITERATIONS):
            state = chosen.step(fed, state)
    except fb.SettingsError as error:
        return {"refused": str(error)}
    ledger = fed.ledger
    return {
        "x": np.asarray(state.x).tolist(),
        "y": np.asarray(state.y).tolist(),
        "cost": [ledger.rounds, ledger.bytes_up, ledger.bytes_down],
        "rejected": len(ledger.rejected),
    }


def on_a_fresh_one(algorithm: str, problem: str, make: Callable[[Any, Any], fb.Engine]) -> dict[str, Any]:
    engine = make(task(problem, algorithm).problem, task(problem, algorithm).clients)
    try:
        return carried(algorithm, engine, problem)
    finally:
        engine.close()


@functools.cache
def looped(algorithm: str, problem: str) -> dict[str, Any]:
    return on_a_fresh_one(algorithm, problem, ENGINES["loop"])


def agrees(found: dict[str, Any], expected: dict[str, Any], closest: float) -> None:
    assert found["cost"] == expected["cost"] and found["rejected"] == 0
    for name in ("x", "y"):
        scale = max(map(abs, expected[name])) or 1.0
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=closest * scale)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_the_loop_carries_it_and_every_setting_is_described(algorithm: str, problem: str) -> None:
    found = looped(algorithm, problem)
    assert np.isfinite(found["x"]).all() and np.isfinite(found["y"]).all() and found["cost"][0] > 0
    cls = ALGORITHMS[algorithm]
    assert all(meanings(cls)[field.name] for field in dataclasses.fields(cls))
    assert isinstance(cls.needs_server, bool)


@pytest.mark.parametrize("algorithm", [n for n in ALGORITHMS if not getattr(ALGORITHMS[n], "is_control", False)])
def test_a_method_comes_closer_to_the_closed_form(algorithm: str) -> None:
    own, chosen = task("quadratic", algorithm), method(algorithm)
    fed = fb.Federation(fb.Simulation(own.problem, own.clients, devices=1))
    state = chosen.init(own.problem, CLIENTS)
    before = own.measure(state.x, state.y)
    for _ in range(60):
        state = chosen.step(fed, state)
    after = own.measure(state.x, state.y)
    assert all(after[name] < before[name] for name in before)  # a local lower level has no one y to measure


@pytest.mark.parametrize(("algorithm", "problem", "engine"), CELLS)
def test_an_engine_agrees_with_the_loop(algorithm: str, problem: str, engine: str) -> None:
    found = on_a_fresh_one(algorithm, problem, ENGINES[engine])
    if not ALGORITHMS[algorithm].needs_server and engine == "flare":
        assert "the algorithm has no server" in found["refused"]
        return
    agrees(found, looped(algorithm, problem), 0.0 if (engine, problem) in EXACT else CLOSE)


@pytest.mark.usefixtures("namespace")
def test_ray_agrees_with_the_loop(tmp_path: Path) -> None:
    out = tmp_path / "ray.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the benchmarks are on it
    command = loopback_only(sys.executable, __file__, str(out))
    subprocess.run(command, env=environment, check=True, timeout=400)
    cells = json.loads(out.read_text())
    assert len(cells) == len(PAIRS)
    for algorithm, problem in PAIRS:
        agrees(cells[f"{algorithm} on {problem}"], looped(algorithm, problem), CLOSE)


def main(out: Path) -> None:
    """Ray's column of the matrix, in a process of its own. One engine serves all methods of a problem."""
    from fedbilevel.engines.ray import Ray

    cells = {}
    kinds = {kind for algorithm in ALGORITHMS.values() for kind in lower_kinds(algorithm)[:1]}
    for problem, kind in itertools.product(PROBLEMS, sorted(kinds)):  # one at a time: an engine takes a core
        names = [name for name, on in PAIRS if on == problem and lower_kinds(ALGORITHMS[name])[0] == kind]
        if not names:
            continue
        own = made(problem, kind)
        engine = Ray(own.problem, own.clients, actors=1, devices=1)
        for algorithm in names:
            states = engine.capabilities.states
            assert states is not None
            states.clear()
            cells[f"{algorithm} on {problem}"] = carried(algorithm, engine, problem)
        engine.close()
    out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
