"""PyTorch problems as sites of a federation and in actors, in specs, and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.local import lower_gradient
from fedbilevel.data import ListedClients
from fedbilevel.engines.flare import Flare, Site
from fedbilevel.engines.ray import Part, answer
from fedbilevel.federate.sitefile import load_site, write_rows
from fedbilevel.rng import Address, Kind
from fedbilevel.steps import Sample
from wires import Wires, in_process_sites

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fedbilevel.torch import TorchProblem  # noqa: E402
from torch_cases import METHODS, clients, flat, jax_problem, rows, torch_metrics, torch_problem  # noqa: E402

METHOD = METHODS["fbo-aggitd"]
NAMES = ("a", "b", "c")
MODULE = '''"""A problem of PyTorch modules, for a spec."""

import fedbilevel as fb
from torch_cases import clients, rows, torch_problem


def make(lower_is="global"):
    problem = torch_problem(lower_is=lower_is)
    return fb.Task(problem, clients(), lambda x, y: problem.measure(x, y, fb.Part(*rows(40, 7))))


def alone():
    return torch_problem()
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working folder."""
    (tmp_path / "torch_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_mine", raising=False)
    return tmp_path


def three() -> ListedClients:
    return ListedClients(clients().data[:3])


def trained(problem: Any, engine: Any, **more: Any) -> Any:
    return fb.train(problem, three(), METHOD, engine=engine, stop={"iterations": 3}, **more)


def test_sites_of_pytorch_are_bit_for_bit_the_loop() -> None:
    problem = torch_problem()
    found, expected = trained(problem, in_process_sites(problem, three())), trained(problem, "loop")
    assert flat(found.x).tobytes() == flat(expected.x).tobytes()
    assert flat(found.y).tobytes() == flat(expected.y).tobytes()


def test_a_federation_of_jax_and_pytorch_sites_agrees_with_jax() -> None:
    ours = torch_problem()
    theirs: Any = jax_problem(ours)
    kinds = theirs, ours, theirs
    made = {n: Site(p, three().load(i)) for i, (n, p) in enumerate(zip(NAMES, kinds, strict=True))}
    found = trained(theirs, Flare(theirs, NAMES, Wires(made)), test=fb.Part(*rows(40, 7)))
    expected = trained(theirs, "loop")
    np.testing.assert_allclose(flat(found.x), flat(expected.x), rtol=1e-5, atol=1e-6)
    assert 0 <= found.history[-1]["test_accuracy"] <= 1


def with_buffer(value: float) -> Any:
    """The network with a frozen scale behind its layer."""
    problem = torch_problem()
    body = nn.Sequential(*problem.x, nn.BatchNorm1d(5)).eval()
    body[2].requires_grad_(False)
    body[2].running_mean += value
    return TorchProblem(body, problem.y, problem.lower, problem.upper, embed=problem.embed, metrics=torch_metrics)


def test_a_site_with_other_frozen_weights_is_refused_in_the_hello() -> None:
    same, other = with_buffer(0.0), with_buffer(0.1)
    assert same.constants_digest == with_buffer(0.0).constants_digest != other.constants_digest
    assert torch_problem().constants_digest is None
    made = {n: Site(p, three().load(i)) for i, (n, p) in enumerate(zip(NAMES, (same, other, same), strict=True))}
    engine = Flare(same, NAMES, Wires(made))
    assert list(engine.refused) == ["b"] and "frozen weights are not the server's" in engine.refused["b"]


def test_the_sites_are_compared_with_each_other_if_the_server_has_no_such_weights() -> None:
    theirs = jax_problem(torch_problem())
    kinds = (with_buffer(0.0), with_buffer(0.1), theirs)
    made = {n: Site(p, three().load(i)) for i, (n, p) in enumerate(zip(NAMES, kinds, strict=True))}
    engine = Flare(theirs, NAMES, Wires(made))
    assert list(engine.refused) == ["b"] and "not those of the other sites" in engine.refused["b"]


def test_an_actor_serves_a_problem_of_pytorch_by_the_loop() -> None:
    problem, own = torch_problem(), clients()
    part = Part(
        lower_gradient.address,
        Address(0, Kind.ROUND, 1),
        (1, 3, 3),
        2,
        (("x", 1), ("y", 1)),
        {},
        {"zeta": Sample("lower")},
        {},
    )
    held = np.asarray(problem.flat_x.vector), np.asarray(problem.flat_y.vector)
    found = answer(fb.Loop(problem, own), part, ({}, {}), held)
    assert found.fields["q"].shape == (2, problem.size_y)
    alone = part._replace(clients=(3,), asked=1)
    single = answer(fb.Loop(problem, own), alone, ({}, {}), held)
    np.testing.assert_array_equal(found.fields["q"][1], single.fields["q"][0])


def test_a_spec_chooses_the_loop_and_a_resumed_run_is_the_same(module: Path) -> None:
    whole = fb.run(_spec(4), module / "whole")
    assert whole.summary["engine"]["name"] == "loop"
    fb.run(_spec(2), module / "cut")
    again = fb.run(_spec(4), module / "cut", resume=True)
    assert flat(again.x).tobytes() == flat(whole.x).tobytes()
    drop = ("seconds",)
    histories = [[{k: v for k, v in line.items() if k not in drop} for line in r.history] for r in (again, whole)]
    assert histories[0] == histories[1]
    saved = fb.load_run(module / "whole")
    assert isinstance(saved.x, nn.Sequential) and flat(saved.x).tobytes() == flat(whole.x).tobytes()


def _spec(iterations: int) -> Any:
    text = f"""
[problem]
name = "python"
function = "torch_mine:make"

[algorithm]
participation = 1.0
alpha = 0.1
beta = 0.1
lower_steps = 2

[stop]
iterations = {iterations}

[evaluate]
checkpoint_every = 2
"""
    path = Path("torch-run.toml")
    path.write_text(text)
    return fb.load_spec(path)


def test_the_toml_of_a_site_may_name_a_problem_of_pytorch(module: Path) -> None:
    write_rows(module / "rows.npz", clients().load(0))
    (module / "site.toml").write_text('[data]\nnpz = "rows.npz"\n\n[problem]\npython = "torch_mine:alone"\n')
    assert load_site(module / "site.toml").problem.size_x == torch_problem().size_x


def test_clients_with_a_local_lower_level_measure_their_own_test_rows_and_others_join() -> None:
    problem = torch_problem(lower_is="local")
    result = fb.train(problem, clients(test=True), METHODS["local-lower"], stop={"iterations": 2})
    assert 0 <= result.history[-1]["worst_test_accuracy"] <= result.history[-1]["test_accuracy"] <= 1
    assert result.lower is not None and len(result.lower) == 4 and isinstance(result.lower[0], nn.Linear)
    newcomer = result.join(rows(10, 5), rows(10, 6), steps=20)
    assert isinstance(newcomer.y, nn.Linear) and 0 <= newcomer.metrics["test_accuracy"] <= 1
