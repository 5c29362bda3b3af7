"""The leaderboard: equal grids, selection on validation, times until a target is kept, costs, and its page."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.errors import SettingsError
from fedbilevel.leaderboard import BoardProblem, entries, leaderboard, load_problems
from fedbilevel.leaderboard._entries import grid
from fedbilevel.leaderboard._results import Seen, at_the_end, curve, stays
from fedbilevel.report import Board, BoardEntry, BoardTable, Reached, board_page
from fedbilevel.studies import Runs
from fedbilevel.trials import trials_of

TINY = """
title = "Tiny"
select = "upper_loss"
show = "hypergradient_norm"
relative = true
targets = [0.9, 1e-9]
rounds = 12
look = 3
cohort = 2
rows = 4
alpha = [0.01, 0.3]
beta = [0.3, 1.0]
floor = 2

[spec]
problem = { name = "quadratic", size_x = 3, size_y = 2, rows = 4 }
data = { clients = 4 }
federation = { engine = { name = "fused" } }
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("board")
    (folder / "tiny.toml").write_text(TINY)
    return folder, board(folder)


def board(folder: Path) -> list[dict[str, Any]]:
    chosen = load_problems([str(folder / "tiny.toml")])
    methods = entries(["simfbo", "ma-dsbo"])
    how: dict[str, Any] = dict(seeds=2, out=folder / "out", jobs=1, console=Console(quiet=True), points=2)
    return leaderboard(chosen, methods, **how)


def specs_in(folder: Path) -> list[Any]:
    return [json.loads((each / "summary.json").read_text()) for each in (folder / "out" / "runs").iterdir()]


def test_a_finished_leaderboard_is_not_run_again(
    tiny: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows = tiny
    assert len(list((folder / "out" / "runs").iterdir())) == 2 + 2 + 2, "two points, two seeds, two long runs"

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a run is done again")

    monkeypatch.setattr(importlib.import_module("fedbilevel.studies.tune"), "run_many", refuse)
    assert board(folder) == rows


def test_the_chosen_point_has_the_smallest_upper_loss_of_its_grid(tiny: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, rows = tiny
    ends: dict[int, float] = {}
    for each in (folder / "out" / "runs").iterdir():
        history = [json.loads(line) for line in (each / "history.jsonl").read_text().splitlines()]
        text = (each / "spec.toml").read_text()
        if 'name = "simfbo"' in text and re.search(r"^seed = 0$", text, re.M):
            found = at_the_end(history, "upper_loss")
            assert found is not None
            ends[int(re.findall(r"^tau = (\d+)", text, re.M)[0])] = found
    assert set(ends) == {5, 20}
    chosen = next(row for row in rows if row["method"] == "simfbo")["settings"]
    assert f"tau {min(ends, key=ends.__getitem__)}," in chosen


def test_costs_come_from_the_ledger_and_the_oracle(tiny: tuple[Path, list[dict[str, Any]]]) -> None:
    """SimFBO's p + 2q numbers go down and up between the server and two of four clients, in every round."""
    folder, _ = tiny
    page = (folder / "out" / "leaderboard.html").read_text()
    data = embedded(page)
    (table,) = data["tables"]
    entry = table["entries"][0]
    x = entry["curve"]["x"]
    assert x["rounds"] == [0, 3, 6, 9, 12]
    assert x["megabytes"][-1] == pytest.approx(12 * 2 * 4 * (3 + 2 * 2) * 2 / 4 / 1e6, rel=1e-3)
    # At most four rows of a level a round, so the local steps have one row or none to spare: 4 // tau, at least 1.
    tau = entry["settings"]["tau"]
    assert re.findall(r"^batch_zeta = (\d+)", entry["spec"], re.M) == [str(max(1, 4 // tau))]
    assert x["work"][-1] == pytest.approx(12 * tau * 4 * (max(1, 4 // tau) / 4) / 2)
    assert len(x["seconds"]) == len(entry["curve"]["mid"]) == 5
    assert entry["curve"]["mid"][0] == 1.0, "as a share of the start"
    assert all(a <= b <= c for a, b, c in zip(*(entry["curve"][k] for k in ("low", "mid", "high")), strict=True))
    assert [each["at"] for each in entry["reached"]][1] is None
    assert entry["reached"][1]["forbidden"], "a long run ends above 1e-9, so the target is no matter of time"
    assert (folder / "out" / "specs" / "tiny--simfbo.toml").exists()


def test_a_method_that_does_not_fit_a_problem_is_told_so_and_not_ranked(
    tiny: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, rows = tiny
    assert "it has no cohorts" in rows[1]["note"] and rows[1]["at the end"] is None
    entry = embedded((folder / "out" / "leaderboard.html").read_text())["tables"][0]["entries"][1]
    assert entry["curve"] is None and entry["reached"] == [] and entry["spec"] == ""


def test_a_run_that_dips_below_a_target_has_not_reached_it() -> None:
    run = [Seen({"rounds": at}, value) for at, value in enumerate([1.0, 0.05, 0.3, 0.09, 0.08])]
    assert stays(run, 0.1, "min") == {"rounds": 3}
    assert stays(run, 0.01, "min") is None
    assert stays(run, 0.5, "min") == {"rounds": 1}
    assert stays(run, 0.04, "max") == {"rounds": 0}
    assert stays(run, 0.09, "max") is None, "it is below at the end"


def test_curves_are_quantiles_over_the_runs_that_are_there() -> None:
    at = dict.fromkeys(("rounds", "megabytes", "work", "seconds"), 1.0)
    made = curve(
        [[Seen(at, value), Seen(at, 1.0)] for value in (0.0, 10.0, 20.0, 30.0, 40.0)] + [[Seen(at, 50.0)]]
    )
    assert (made["low"][0], made["mid"][0], made["high"][0]) == (10.0, 25.0, 40.0)
    assert made["mid"][1] == 1.0


PROBLEM = BoardProblem("p", "p", "upper_loss", "upper_loss", (0.1,), 10, (0.01, 1.0), (0.1, 1.0))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_registered_method_enters_with_the_same_number_of_points(name: str) -> None:
    for entry in entries([name]):
        points = grid(entry, PROBLEM, 2.0, 24)
        assert len(points) == 24 and len({repr(point) for point in points}) == 24


def test_the_grid_of_a_method_is_what_its_settings_declare() -> None:
    (aggitd,) = entries(["fbo-aggitd"])
    points = grid(aggitd, PROBLEM, 2.0, 24)
    assert {point["N"] for point in points} == {1, 10}
    assert all(point["lam"] == point["beta"] for point in points), "both are multiples of 1/L_g"
    assert {point["beta"] for point in points} == {0.05, 0.158, 0.5}
    assert len({point["alpha"] for point in points}) == 4
    (lower,) = entries(["fedavg lower-only"])
    points = grid(lower, PROBLEM, 2.0, 24)
    assert {point["control"] for point in points} == {"lower-only"}
    assert "alpha" not in points[0] and len({point["beta"] for point in points}) == 12, "it does not move x"
    assert [each.label for each in entries(["fedavg"])] == [
        "fedavg joint", "fedavg lower-only", "fedavg upper-only", "fedavg first-order",
    ]  # fmt: skip
    assert trials_of(ALGORITHMS["simfbo"]).rows == ("batch_zeta", "batch_xi")


def test_the_template_of_a_method_is_found_and_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    made = types.ModuleType("my_method")
    monkeypatch.setitem(sys.modules, "my_method", made)
    exec(compile(code, "my_method.py", "exec", dont_inherit=True), made.__dict__)
    monkeypatch.setitem(ALGORITHMS._known, "my-method", made.MyMethod)
    (entry,) = entries(["my-method"])
    points = grid(entry, PROBLEM, 1.0, 24)
    assert len(points) == 24 and {point["delta"] for point in points} == {0.0, 0.01}
    task = fb.Quadratic(size_x=3, size_y=2).make(clients=4, seed=0)
    method = made.MyMethod(participation=1.0, alpha=0.2, beta=0.5)
    done = fb.train(task.problem, task.clients, method, stop={"rounds": 60}, measure=task.measure, engine="fused")
    assert done.history[-1]["hypergradient_norm"] < 0.1 * done.history[0]["hypergradient_norm"]


def test_a_wrong_problem_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for old, new, why in (
        ("rounds = 12", "round = 12", "round is not a setting; did you mean rounds"),
        ("rounds = 12", "", "rounds is missing"),
        ('select = "upper_loss"', 'select = "test_accuracy"', "settings are chosen by a loss or a norm"),
        ("rounds = 12", "rounds =", "is not TOML"),
    ):
        file.write_text(TINY.replace(old, new, 1))
        with pytest.raises(SettingsError, match=re.escape(why)):
            load_problems([str(file)])
    with pytest.raises(SettingsError, match="--problems 'quadratik' is unknown"):
        load_problems(["quadratik"])


def test_all_problems_of_the_library_are_distinct_and_some_are_quick() -> None:
    found = load_problems()
    names = [each.name for each in found]
    assert len(set(names)) == len(names) >= 20
    assert {each.cohort for each in found if each.name.startswith("quadratic-h3-k100")} == {1.0, 0.5, 0.1}
    assert 0 < sum(each.quick for each in found) < 5


def page_of_two() -> str:
    """A page with two problems and a method whose name would be markup."""
    places = {"rounds": [0, 10, 20], "megabytes": [0, 5, 10]}
    bad = "</script><b>x</b>"

    def entry(label: str, reached: float | None, values: list[float]) -> BoardEntry:
        at = None if reached is None else {"rounds": reached, "megabytes": reached / 2}
        made = {"x": places, "low": values, "mid": values, "high": [1.2 * v for v in values]}
        return BoardEntry(
            label, spec=f"label = '{label}'", curve=made, reached=[Reached(at, 3 if at else 0, 3, at is None)]
        )

    tables = [
        BoardTable(name, name, "norm", "min", True, [0.1], [entry("a", 20, [1, 0.5, 0.05]), entry(bad, *other)])
        for name, other in (("one", (10.0, [1, 0.08, 0.01])), ("two", (None, [1, 0.9, 0.8])))
    ]
    axes: Any = [type("A", (), {"key": k, "label": k}) for k in ("rounds", "megabytes")]
    return board_page(Board("Two & <two>", "none", axes, tables))


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_page_loads_nothing_and_takes_no_text_for_markup() -> None:
    page = page_of_two()
    assert page.count("</script>") == 2 and "<b>" not in page
    assert "Two &amp; &lt;two&gt;" in page
    assert embedded(page)["tables"][0]["entries"][1]["label"] == "</script><b>x</b>"
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//cdn|@import|url\((?!#)|\b(?:fetch|XMLHttpRequest|innerHTML)\b", without_names)
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_page_in_a_browser_sorts_switches_and_shows_specs(tmp_path: Path) -> None:
    drive = """<script>
    const told = [], text = (what) => [...document.querySelectorAll(what)].map((each) => each.textContent);
    const choose = (at, value) => {
      const box = document.querySelectorAll("select")[at];
      box.value = value;
      box.dispatchEvent(new Event("change"));
    };
    told.push(text("main > .scroll tbody td:first-child"), text("svg[role] polyline title"));
    document.querySelector("th button").click();
    told.push(text("main > .scroll tbody td:first-child").slice(0, 2));
    choose(1, 1);
    told.push(text("main > .scroll tbody tr:first-child td").slice(0, 2));
    choose(0, 1);
    told.push(text("main > .scroll tbody td:nth-child(2)").slice(0, 2), text("h2"));
    document.querySelector("td a").click();
    told.push([document.querySelector("dialog").open, document.querySelector("dialog pre").textContent]);
    document.querySelector(".legend button").click();
    told.push(text("svg[role] polyline title"), document.querySelectorAll("b").length);
    document.body.replaceChildren(JSON.stringify(told));
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page_of_two().replace("</body>", drive))
    assert CHROMIUM is not None
    home = f"--user-data-dir={tmp_path / 'home'}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", home, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<body>(.*)</body>", done.stdout, re.S)
    assert found is not None
    first, curves, by_name, by_bytes, other, heads, opened, left, bold = json.loads(
        found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )
    bad = "</script><b>x</b>"
    assert first[:2] == [bad, "a"], "sorted by the rounds to the target"
    assert curves == ["a", bad]
    assert by_name == [bad, "a"] and by_bytes == [bad, "5"]
    assert other == ["floor", "10"] or other == ["10", "floor"]
    assert any(head.startswith("Ranks, megabytes") for head in heads)
    assert opened[0] is True and opened[1].startswith("label = ")
    assert left == [bad] and bold == 0


def test_the_command_lists_and_refuses(command: Any, tmp_path: Path) -> None:
    done = command("leaderboard", "--list", "--problems", "quadratic-h1", "--methods", "fedsoba")
    assert done.code == 0 and "quadratic-h1-k10-half" in done.out and "methods: fedsoba" in done.out
    done = command("leaderboard", "--methods", "fedsobo", "--out", tmp_path / "out")
    assert done.code == 2 and "--methods 'fedsobo' is unknown" in done.err


def test_runs_are_named_by_their_digest(tiny: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = tiny
    runs = Runs(folder / "out" / "runs")
    assert {summary["spec"] for summary in specs_in(folder)} == {each.name for each in runs.folder.iterdir()}
