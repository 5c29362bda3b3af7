"""A problem of one's own in a TOML: its arguments, its clients, and the source of its module in the digest."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from commands import Command, one_line
from fedbilevel import RunFolderError, SettingsError, load_spec, run
from fedbilevel.federate import load_site
from fedbilevel.federate.loopback import simulated_sites
from fedbilevel.spec import describe, parse

MODULE = """
import jax.numpy as jnp
import numpy as np
import fedbilevel as fb

def make(clients=3, penalty=None, rows=(4, 2)):
    weight = (penalty or {"weight": 0.5})["weight"]
    problem = fb.Problem(
        x=jnp.zeros(2), y=jnp.ones(2),
        lower=lambda x, y, b: b.mean(((b.inputs @ y - b.targets) ** 2)) + weight * jnp.sum((y - x) ** 2),
        upper=lambda x, y, b: b.mean((b.inputs @ y - b.targets) ** 2),
    )
    draw = np.random.default_rng(0)
    part = lambda n: (draw.normal(size=(n, 2)).astype("float32"), draw.normal(size=n).astype("float32"))
    own = fb.clients_from([(part(rows[0]), part(rows[1])) for _ in range(clients)])
    return fb.Task(problem, own, lambda x, y: {"auc": 0.5 + weight})

def alone(clients=0):
    return make().problem
"""
RAW: dict[str, Any] = {
    "problem": {"name": "python", "function": "my_own_problem:make", "clients": 5, "penalty": {"weight": 0.25}},
    "algorithm": {"participation": 1.0, "lower_steps": 1, "alpha": 0.01, "beta": 0.01},
    "evaluate": {"checkpoint_every": 1},
    "stop": {"iterations": 2},
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of the problem, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    file = tmp_path / "my_own_problem.py"
    file.write_text(MODULE)
    yield file
    sys.modules.pop("my_own_problem", None)


def raw(section: str = "problem", **more: Any) -> dict[str, Any]:
    return RAW | {section: RAW.get(section, {}) | more}


@pytest.mark.slow
def test_the_keys_of_the_problem_are_the_arguments_of_its_function(tmp_path: Path) -> None:
    spec = parse(raw(rows=[6, 3]))
    task = spec.task()
    assert task.clients.count == 5 and task.clients.size(0) == (6, 3)
    result = run(spec, tmp_path / "run")
    assert result.history[-1]["auc"] == 0.75 and result.summary["clients"] == 5
    assert spec.title(5).endswith("5 clients")
    assert parse(tomllib.loads(spec.to_toml())) == spec == load_spec(tmp_path / "run" / "spec.toml")
    assert parse(tomllib.loads(describe(spec))) == spec
    assert spec.digest != parse(raw(rows=[6, 2])).digest


def test_an_argument_is_set_on_the_command_line_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    sets = {"problem.name": "python", "problem.function": "my_own_problem:make", "problem.clients": 4}
    assert load_spec("demo", sets).task().clients.count == 4
    with pytest.raises(SettingsError, match=r"problem\.function = .* is called with depth, and raises Type"):
        parse(RAW | {"problem": {"name": "python", "function": "my_own_problem:make", "depth": 3}}).task()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"partition": "iid"}, r"data\.partition = 'iid' is not used: problem\.function makes its own data"),
        ({"name": "digits"}, r"data\.name = 'digits' is not used"),
        ({"clients": 8}, r"data\.clients = 8 is wrong: the task of .* has 5 clients; remove it, or use 5"),
    ],
)
def test_settings_of_data_that_are_not_used_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse(RAW | {"data": data}).task()
    assert parse(RAW | {"data": {"clients": 5}}).task().clients.count == 5


def test_a_function_may_return_a_problem_without_clients() -> None:
    spec = parse(RAW | {"problem": {"name": "python", "function": "my_own_problem:alone"}, "data": {"clients": 7}})
    assert spec.task().clients.count == 7


# The source of the module ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_module_has_changed_is_refused_with_both_digests(tmp_path: Path, module: Path) -> None:
    first = parse(RAW)
    run(first, tmp_path / "run")
    before, digest = json.loads((tmp_path / "run" / "sources.json").read_text()), first.digest
    module.write_text(MODULE.replace("0.5 + weight", "0.25 + weight"))
    sys.modules.pop("my_own_problem")
    changed = parse(raw("stop", iterations=4))
    assert changed.digest != digest
    old, new = before["sources"]["problem.function"], changed.plan.sources["problem.function"]
    with pytest.raises(RunFolderError, match=rf"problem\.function has changed .*{old[:16]}.*{new[:16]}"):
        run(changed, tmp_path / "run", resume=True)
    result = run(changed, tmp_path / "run", resume=True, accept_change=True)
    assert [r["auc"] for r in result.history] == [0.75, 0.75, 0.75, 0.5, 0.5]
    change = {"setting": "problem.function", "before": old, "after": new, "iteration": 2}
    stored = json.loads((tmp_path / "run" / "sources.json").read_text())
    assert stored == {"sources": {"problem.function": new}, "changes": [change]}
    run(parse(raw("stop", iterations=5)), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "sources.json").read_text()) == stored, "an accepted change is kept"


def test_a_module_that_is_unchanged_changes_nothing(tmp_path: Path) -> None:
    run(parse(RAW), tmp_path / "run")
    whole = run(parse(raw("stop", iterations=4)), tmp_path / "whole")
    resumed = run(parse(raw("stop", iterations=4)), tmp_path / "run", resume=True)
    keys = [key for key in whole.history[-1] if key != "seconds"]
    assert [[r[k] for k in keys if k in r] for r in resumed.history] == [
        [r[k] for k in keys if k in r] for r in whole.history
    ]


def test_a_class_at_an_address_has_its_source_in_the_digest_and_a_name_has_not(module: Path) -> None:
    address = "my_own_method:Mine"
    file = module.with_name("my_own_method.py")
    file.write_text("import fedbilevel as fb\nclass Mine(fb.AggITD): pass\n")
    spec = load_spec("paper", {"algorithm.name": "python", "algorithm.class": address})
    before = spec.digest
    assert list(spec.plan.sources) == ["algorithm.class"]
    file.write_text(file.read_text() + "# a remark\n")
    assert spec.digest != before
    assert load_spec("paper").plan.sources == {}
    assert load_spec("paper").digest == load_spec("paper").plan.digest
    sys.modules.pop("my_own_method", None)


def test_the_command_line_accepts_a_change(command: Command, tmp_path: Path, module: Path) -> None:
    (tmp_path / "spec.toml").write_text(parse(RAW).to_toml())
    words = ("run", tmp_path / "spec.toml", "--out", tmp_path / "run")
    assert command(*words).code == 0
    module.write_text(MODULE + "\n")
    one_line(command(*words, "--resume"), 2, "the module of problem.function has changed", "--accept-change")
    assert command(*words, "--resume", "--accept-change").code == 0


# Sites -------------------------------------------------------------------------------------------------


def test_every_client_of_a_task_can_be_a_simulated_site(tmp_path: Path) -> None:
    spec = parse(RAW | {"data": {"clients": 5}})
    files = simulated_sites(spec, tmp_path / "sites", [f"site-{i}" for i in range(5)])
    task = spec.task()
    for client, file in enumerate(files.values()):
        loaded = load_site(file)
        assert (loaded.problem.size_x, loaded.problem.size_y) == (2, 2)
        np.testing.assert_array_equal(loaded.data.lower.inputs, task.clients.load(client).lower.inputs)
    assert isinstance(task, fb.Task)
