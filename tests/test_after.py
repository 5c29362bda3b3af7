"""After the run: a folder is read again, shown, exported and compared."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import fedbilevel as fb
from commands import DIGITS, Command, one_line, sets
from fedbilevel.problem import Task
from fedbilevel.problems import QuadraticTask
from fedbilevel.report import text_curve

METHOD = fb.AggITD(N=1, lower_steps=1, upper_steps=1, estimator="summed", participation=1.0)


@pytest.fixture(scope="module")
def spec_run(tmp_path_factory: pytest.TempPathFactory) -> fb.Result:
    """A run of a spec on the embedded digits. No test changes its folder."""
    spec = fb.load_spec("demo", list(DIGITS))
    return fb.run(spec, tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="module")
def object_run(quadratic: QuadraticTask, tmp_path_factory: pytest.TempPathFactory) -> fb.Result:
    """A run of objects. No test changes its folder."""
    out = tmp_path_factory.mktemp("runs") / "quadratic"
    stop = {"iterations": 3}
    return fb.train(quadratic.problem, quadratic.clients, METHOD, stop=stop, measure=quadratic.measure, out=out)


def folder_of(result: fb.Result) -> Path:
    assert result.folder is not None
    return result.folder


@pytest.fixture
def copy(object_run: fb.Result, tmp_path: Path) -> Path:
    """A copy of the run of objects, to be damaged."""
    for path in folder_of(object_run).iterdir():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "copy"


def same(a: Any, b: Any) -> bool:
    """Whether two pytrees have one structure and the same arrays, bit for bit."""
    assert str(jax.tree.structure(a)) == str(jax.tree.structure(b))
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(p), np.asarray(q)) for p, q in pairs)


# Loading ----------------------------------------------------------------------------------------------


def test_a_run_of_a_spec_is_read_again_as_it_ended(spec_run: fb.Result) -> None:
    run = fb.load_run(folder_of(spec_run))
    assert run.status == "finished"
    assert run.spec is not None and run.spec.data.name == "digits"
    assert run.history == spec_run.history
    assert run.summary == spec_run.summary
    assert same(run.x, spec_run.x) and same(run.y, spec_run.y)
    assert run.iteration == spec_run.summary["iterations"]


def test_its_problem_is_made_without_loading_data(
    spec_run: fb.Result, monkeypatch: pytest.MonkeyPatch, digits: Task
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("data were loaded")

    monkeypatch.setattr("fedbilevel.data._settings.load", refuse)
    assert same(fb.load_run(folder_of(spec_run)).x, spec_run.x)


def test_predict_gives_the_scores_by_which_the_accuracy_was_measured(spec_run: fb.Result) -> None:
    run = fb.load_run(folder_of(spec_run))
    assert run.spec is not None
    data = run.spec.data.dataset
    scores = run.predict(jnp.asarray(data.test_inputs))
    assert scores.shape == (len(data.test_targets), 10)
    accuracy = np.mean(np.argmax(scores, axis=-1) == data.test_targets)
    assert accuracy == pytest.approx(spec_run.history[-1]["test_accuracy"], abs=1e-6)


def test_a_run_of_objects_has_flat_vectors_and_with_its_problem_pytrees(
    object_run: fb.Result, quadratic: QuadraticTask
) -> None:
    run = fb.load_run(folder_of(object_run))
    assert run.spec is None and run.problem is None
    assert (run.x.shape, run.y.shape) == ((10,), (8,))
    assert run.summary == object_run.summary
    with pytest.raises(
        fb.SettingsError, match=r"run of objects; predict needs its problem: load_run\(folder, prob"
    ):
        run.predict(None)
    full = fb.load_run(folder_of(object_run), problem=quadratic.problem)
    assert same(full.x, object_run.x) and same(full.y, object_run.y)
    with pytest.raises(fb.SettingsError, match="the problem of this run has no predict"):
        full.predict(None)


def test_pytrees_and_predict_of_ones_own_problem_come_back(tmp_path: Path) -> None:
    def loss(x: Any, y: Any, batch: fb.Batch) -> jax.Array:
        return batch.mean((batch.inputs @ y["w"] * x["scale"] - batch.targets) ** 2)

    problem = fb.Problem(
        x={"scale": jnp.ones(())},
        y={"w": jnp.zeros(3), "names": "a"},
        lower=lambda x, y, b: loss(x, y, b) + 0.1 * jnp.sum(y["w"] ** 2),
        upper=loss,
        predict=lambda x, y, inputs: inputs @ y["w"] * x["scale"],
    )
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(40, 3)).astype(np.float32)
    part = fb.Part(rows, rows.sum(1))
    clients = fb.ListedClients([fb.ClientData(part, part)] * 2)
    method = fb.AggITD(N=1, lower_steps=1, upper_steps=1, estimator="summed", participation=1.0)
    result = fb.train(problem, clients, method, stop={"iterations": 2}, out=tmp_path / "run")
    run = fb.load_run(tmp_path / "run", problem=problem)
    assert run.y["names"] == "a"
    assert np.array_equal(run.predict(rows), rows @ result.y["w"] * result.x["scale"])
    assert sorted(run.arrays()) == ["flat_x", "flat_y", "x.scale", "y.w"]


def test_the_problem_of_another_run_is_refused(object_run: fb.Result, digits: Task) -> None:
    run = fb.load_run(folder_of(object_run), problem=digits.problem)
    with pytest.raises(
        fb.SettingsError, match=r"problem has \d+ parameters of x, and the run in .* has 10; give the"
    ):
        _ = run.x


# Runs that are not over, and damage -------------------------------------------------------------------


def test_a_run_under_way_says_so_and_has_what_there_is(quadratic: QuadraticTask, tmp_path: Path) -> None:
    seen: list[fb.SavedRun] = []

    def look(progress: fb.Progress) -> None:
        seen.append(fb.load_run(tmp_path / "run"))
        if progress.iteration == 1:
            with pytest.raises(fb.CheckpointError, match="has no checkpoint yet, and so no x and y"):
                _ = seen[-1].x
            assert seen[-1].summary["ledger"] == {}

    fb.train(
        quadratic.problem,
        quadratic.clients,
        METHOD,
        stop={"iterations": 3},
        evaluate={"checkpoint_every": 2},
        out=tmp_path / "run",
        observers=[look],
    )
    assert [run.status for run in seen] == ["under way"] * 3
    assert [run.summary["iterations"] for run in seen] == [1, 2, 3]
    assert seen[1].x.shape == (10,)
    assert fb.load_run(tmp_path / "run").status == "finished"


def test_a_killed_run_is_interrupted_and_a_failed_one_says_why(
    copy: Path, quadratic: QuadraticTask, command: Command, tmp_path: Path
) -> None:
    (copy / "summary.json").unlink()
    assert fb.load_run(copy).status == "interrupted"
    shown = command("show", copy)
    assert shown.code == 0 and "INTERRUPTED" in shown.out and "--resume" in shown.out
    method = fb.AggITD(N=1, alpha=1e9, beta=1e9, participation=1.0)
    with pytest.raises(fb.Diverged) as raised:
        fb.train(quadratic.problem, quadratic.clients, method, stop={"rounds": 400}, out=tmp_path / "failed")
    run = fb.load_run(tmp_path / "failed")
    assert (run.status, run.summary["failure"]) == ("failed", str(raised.value))
    shown = command("show", tmp_path / "failed")
    assert shown.code == 0 and "FAILED" in shown.out and str(raised.value) in shown.out.replace("\n", " ")


def test_a_run_that_was_resumed_with_more_and_killed_is_interrupted(copy: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"iterations": 2}))
    assert fb.load_run(copy).status == "interrupted"


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("spec.toml", None, 2, "holds no run: there is no spec.toml in it; name a run folder"),
        ("spec.toml", b"[stop", 2, "spec.toml is not TOML"),
        ("spec.toml", b"problem = 3", 2, "problem = 3 is wrong: it is a section"),
        ("history.jsonl", b"{}\n", 1, "history.jsonl is not as it was written (line 1"),
        ("summary.json", b"{", 1, "summary.json is not as it was written"),
        ("checkpoint.safetensors", b"nothing", 1, "checkpoint.safetensors cannot be read"),
        ("checkpoint.safetensors", None, 1, "has no checkpoint yet, and so no x and y"),
    ],
)
def test_a_damaged_or_missing_file_is_refused_in_one_line(
    command: Command, copy: Path, name: str, content: bytes | None, code: int, message: str
) -> None:
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    one_line(command("export", copy, "--out", copy.parent / "x.npz"), code, message)
    assert not (copy.parent / "x.npz").exists()


def test_a_history_that_was_changed_is_refused(command: Command, copy: Path) -> None:
    lines = (copy / "history.jsonl").read_text()
    (copy / "history.jsonl").write_text(lines.replace('"rounds": 5,', '"rounds": 6,'))
    one_line(command("export", copy), 1, "history.jsonl is not as it was written: up to iteration 3")


# show -------------------------------------------------------------------------------------------------


def test_show_prints_settings_results_ledger_and_curve(command: Command, spec_run: fb.Result) -> None:
    shown = command("show", folder_of(spec_run))
    assert (shown.code, shown.err) == (0, "")
    assert f"{folder_of(spec_run)}: finished\n" in shown.out
    for part in (
        "name = digits",
        "name = fbo-aggitd",
        "2 outer iterations, 10 rounds",
        "test accuracy: ",
        "│ all ",
    ):
        assert part in shown.out
    assert "│ privacy" not in shown.out, "a section that does nothing"
    assert text_curve(spec_run.history) in shown.out
    assert f"curve: {folder_of(spec_run) / 'curve.png'}" in shown.out


def test_a_run_without_accuracy_has_the_curve_of_its_hypergradient(object_run: fb.Result) -> None:
    curve = text_curve(object_run.history).splitlines()
    assert curve[0] == "norm of the true hypergradient"
    norms = [r["hypergradient_norm"] for r in object_run.history]
    assert curve[1].split()[0] == f"{max(norms):.4g}"
    assert curve[-2].split()[0] == f"{min(norms):.4g}"
    assert text_curve([{"rounds": 0, "test_accuracy": None}]) == ""


# export -----------------------------------------------------------------------------------------------


def test_the_exported_file_has_the_parts_by_name_and_the_flat_vectors(
    command: Command, spec_run: fb.Result, tmp_path: Path
) -> None:
    for kind in ("npz", "safetensors"):
        path = tmp_path / "new" / f"model.{kind}"
        outcome = command("export", folder_of(spec_run), "--to", kind, "--out", path)
        assert outcome.code == 0, outcome.err
        if kind == "npz":
            with np.load(path, allow_pickle=False) as found:
                arrays = dict(found)
        else:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                assert file.metadata() == {"run": "digits", "iteration": "2"}
        weight = "x.layers.0.weight"
        assert {weight, "y.layers.0.bias", "flat_x", "flat_y"} <= arrays.keys()
        assert np.array_equal(arrays[weight], spec_run.x.layers[0].weight)
        assert arrays["flat_x"].size == sum(a.size for name, a in arrays.items() if name.startswith("x."))


def test_a_run_of_objects_is_exported_flat_beside_its_folder(command: Command, copy: Path) -> None:
    outcome = command("export", copy)
    assert outcome.code == 0
    assert "a run of objects has flat x and y" in outcome.out
    with np.load(copy.parent / "copy.npz", allow_pickle=False) as found:
        assert sorted(found) == ["flat_x", "flat_y"]
    one_line(command("export", copy, "--to", "pickle"), 2, "--to pickle is wrong: use npz or safetensors")
    one_line(command("export", copy, "--out", copy), 2, "is a folder; name a file")


# compare ----------------------------------------------------------------------------------------------


@pytest.fixture
def page(command: Command, spec_run: fb.Result, tmp_path: Path) -> Iterator[str]:
    other = tmp_path / "b<other>"
    assert command("run", *sets(*DIGITS, "seed=1"), "--out", other, "--quiet") == (0, "", "")
    outcome = command("compare", folder_of(spec_run), other, "--out", tmp_path / "compared")
    assert outcome.code == 0, outcome.err
    assert "b<other>" in outcome.out
    yield (tmp_path / "compared" / "compare.html").read_text()
    assert (tmp_path / "compared" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_four_axes_in_light_and_dark_and_asks_for_nothing(page: str, spec_run: fb.Result) -> None:
    data = embedded(page)
    labels = [axis["label"] for axis in data["axes"]]
    assert labels == ["communication rounds", "megabytes, up and down", "seconds of training", "outer iterations"]
    assert 'name="viewport"' in page and "@media (prefers-color-scheme: dark)" in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|srcset|href)=\"(?!data:)|url\((?!#)|@import|//[a-z]+\.", outside_script(page)) == []
    assert "b<other>" not in page, "a name is never markup"
    mine, other = data["tables"][0]["entries"]
    assert other["label"] == "b<other>"
    assert mine["curve"]["mid"][-1] == spec_run.history[-1]["test_accuracy"]
    assert mine["curve"]["x"]["rounds"][-1] == spec_run.history[-1]["rounds"]
    assert fb.spec.parse(tomllib.loads(mine["spec"])).digest == fb.load_spec("demo", list(DIGITS)).digest


def embedded(page: str) -> Any:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def outside_script(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.S)


def test_runs_that_cannot_be_compared_are_refused(
    command: Command, spec_run: fb.Result, object_run: fb.Result, tmp_path: Path
) -> None:
    a, b, out = folder_of(spec_run), folder_of(object_run), tmp_path / "out"
    one_line(command("compare", a, a, "--out", out), 2, "a run is given twice")
    one_line(command("compare", a, tmp_path, "--out", out), 2, "holds no run")
    one_line(
        command("compare", a, b, "--out", out, "--measure", "lower_gap"), 2, "--measure 'lower_gap' is unknown"
    )
    done = command("compare", a, b, "--out", out)
    assert done.code == 0
    assert "by upper loss" in (out / "compare.html").read_text(), "the best measurement that both have"


@pytest.mark.slow
def test_the_page_marks_runs_that_did_not_finish(command: Command, copy: Path, tmp_path: Path) -> None:
    (copy / "summary.json").unlink()
    assert command("compare", copy, "--out", tmp_path / "out").code == 0
    assert "Not finished: copy (interrupted)." in (tmp_path / "out" / "compare.html").read_text()
