"""The page of a run, live and as a file: what it shows, whom it answers, and what a hostile folder does to it."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from commands import QUADRATIC, Command, contents, one_line
from fedbilevel.errors import RunFolderError
from fedbilevel.record import RunFolder, glance
from fedbilevel.record import _glance as looks
from fedbilevel.report import run_main, run_page
from fedbilevel.report._plot import _number
from fedbilevel.watch import Watch
from fedbilevel.watch import _server as server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "<img src=x onerror=alert(1)>\"'</script><script>document.title='hit'</script>"
STARTED = 1_000_000.0


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is over. No test changes it."""
    out = tmp_path_factory.mktemp("runs") / "quadratic"
    fb.run(fb.load_spec("demo", list(QUADRATIC)), out)
    return out


def line(iteration: int, **more: Any) -> dict[str, Any]:
    counts = {"rounds": 5 * iteration, "bytes_up": 10 * iteration, "bytes_down": 10 * iteration}
    return {"iteration": iteration, **counts, "seconds": float(iteration), "test_accuracy": 0.5} | more


def made(folder: Path, *, history: list[dict[str, Any]] | None = None, settings: str = "", **files: Any) -> Path:
    """A run folder that is written by hand: files by their names, as JSON."""
    folder.mkdir(exist_ok=True)
    (folder / "spec.toml").write_text(settings or "seed = 0\n[data]\nclients = 4\n[stop]\nrounds = 100\n")
    records = [line(i) for i in range(11)] if history is None else history
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    os.utime(folder / "history.jsonl", (STARTED + 20, STARTED + 20))
    begun = {"started": "1970-01-12T13:46:40+00:00", "revision": None, "iteration": 0}
    for name, value in ({"environment": begun} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def summary(**more: Any) -> dict[str, Any]:
    steps = {"gradients": dict(rounds=50, bytes_up=3_000_000, bytes_down=1_000_000, seconds=2.0, rejected=0)}
    figures = {"rounds": 50, "iterations": 10, "rounds_to": {}, "accuracy": {"last": 0.5, "best": 0.5}}
    return figures | {"ledger": steps, "rejected": {}} | more


# What it shows ----------------------------------------------------------------------------------------


def test_a_run_that_is_over_has_the_page_in_its_folder_and_it_loads_nothing(done: Path) -> None:
    page = (done / "report.html").read_text()
    assert "Finished" in page and "all well" in page and "rounds per outer iteration" in page
    for step in ("gradients", "lower_steps", "hypergradient", "upper_steps"):
        assert step in page
    assert not re.search(r"https?:|@import|url\(|<script|\bstyle=|\bon\w+=", page)
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page


def test_the_file_and_the_live_page_are_one_renderer(done: Path) -> None:
    look = glance(done)
    assert run_main(look, 0.0) in run_page(look, 0.0)
    with Watch(done, clock=lambda: 0.0) as watch:
        assert run_main(look, 0.0) == ask(watch, "now").text


def test_a_run_that_failed_says_why_first(tmp_path: Path) -> None:
    page = run_main(glance(made(tmp_path / "run", summary=summary(failure="y is not finite"))), 0.0)
    assert page.index("The run ended because: y is not finite") < page.index("<svg")


def test_the_time_left_is_that_of_the_second_half_and_counts_what_is_not_training(tmp_path: Path) -> None:
    """50 of 100 rounds took 20 s, 10 of them training; the last 25 rounds took 5 s, so the next 50 take 20 s."""
    folder = made(tmp_path / "run")
    with locked(folder):
        page = run_main(glance(folder), STARTED + 20)
        assert "Under way" in page and "about 20 s" in page and "50 of 100 rounds" in page
        assert "about 14 s" in run_main(glance(folder), STARTED + 26), "less what has passed since"
        late = run_main(glance(folder), STARTED + 3000)
    assert "There was no evaluation for 49 min" in late and "at most" not in late
    assert "No process has this run" in run_main(glance(folder), STARTED + 20), "the process is gone"


def test_a_run_with_a_goal_takes_at_most_that_long(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", settings="[stop]\nrounds = 100\naccuracy = 0.9\n")
    with locked(folder):
        assert "at most 20 s" in run_main(glance(folder), STARTED + 20)


def test_clients_that_do_not_answer_are_ill_and_those_who_do_again_are_not(tmp_path: Path) -> None:
    refused = {"0": {"no answer": 4}, "1": {"not finite": 3}, "2": {"late": 1}}
    ledger = {
        "steps": summary()["ledger"],
        "probes": {},
        "rejected": {"gradients": refused},
        "silent": {"0": [12, 4, "no answer"]},
        "exclusions": [{"client": 1, "round": 20, "until": 90}],
        "said": {"0": ["the disk is full"]},
    }
    told = {"client": {"0": 4, "1": 3, "2": 1, "3": 2}, "reason": {"late": 10}}
    folder = made(tmp_path / "run", history=[line(9), line(10, rejected=told)])
    checkpoint(folder, ledger, iteration=9)
    page = run_main(glance(folder), 0.0)
    assert "2 of 4 are ill" in page and "10 rejected replies so far" in page
    cells = re.findall(r'<li class="(\w+)"', page)
    assert cells == ["silent", "excluded", "recovered", "faltering"]
    assert "no valid reply since round 12: 4 not used; no answer" in page and "the disk is full" in page
    assert "As of the last checkpoint, after outer iteration 9." in page


def test_sites_have_their_names_and_a_failed_job_its_reason(tmp_path: Path) -> None:
    jobs = [{"sites": ["a"], "reason": "a site died", "seconds": 3.0, "from_iteration": 0}, {"started": 1.0}]
    federation = {"run": "r", "sites": ["north", "south", "west"], "jobs": jobs}
    folder = made(tmp_path / "run", federation=federation)
    with locked(folder):
        page = run_main(glance(folder), 0.0)
    assert "NVIDIA FLARE, 3 sites" in page and "north <i>well</i>" in page
    assert "a site died" in page and "<td>under way</td>" in page
    assert "waits for the sites" not in page, "there were evaluations since the second job was begun"


def test_while_a_job_waits_for_its_sites_the_page_says_so_and_why(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"started": STARTED, "sites": ["north"], "reason": "a site died", "seconds": 9.0}
    ]
    jobs.append({"started": STARTED + 60})
    folder = made(tmp_path / "run", federation={"run": "r", "sites": ["north", "south"], "jobs": jobs})
    with locked(folder):
        page = run_main(glance(folder), STARTED + 65)
    assert "Job 1 failed. Job 2 waits for the sites to be up. Why: a site died" in page
    assert '<td class="number">5 s</td>' in page, "the time that the job has taken so far"
    jobs[-1]["sites"] = ["north"]
    made(folder, federation={"run": "r", "sites": ["north", "south"], "jobs": jobs})
    with locked(folder):
        assert "waits for the sites" not in run_main(glance(folder), STARTED + 65)


def test_a_run_that_was_resumed_tells_both_times(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", history=[line(i, seconds=100.0 * i) for i in range(11)])
    with locked(folder):
        page = run_main(glance(folder), STARTED + 20)
    assert "of training, 20 s since it was resumed" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (0.25, "0.25"), (2500.0, "2,500"), (25_000.0, "25k"), (200_000.0, "200k"), (2.5e6, "2.5M")),
        *((1e12, "1e12"), (2.5e-4, "2.5e-4"), (3e-7, "3e-7")),
    ],
)
def test_numbers_beside_a_curve_are_short_and_exact(value: float, text: str) -> None:
    assert _number(value, percent=False) == text


def test_nobody_is_called_well_before_anything_was_heard(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", history=[])
    with locked(folder):
        page = run_main(glance(folder), 0.0)
    assert "not heard of yet" in page and "all well" not in page and "<h2>Clients</h2></section>" not in page


def test_clients_that_are_well_again_do_not_hide_the_ledger(tmp_path: Path) -> None:
    refused = {str(client): {"late": 1} for client in range(40)}
    ledger = {"steps": summary()["ledger"], "probes": {}, "rejected": {"gradients": refused}}
    folder = made(tmp_path / "run", history=[line(9)])
    checkpoint(folder, ledger, iteration=9)
    page = run_main(glance(folder), 0.0)
    assert page.count("<td>well again</td>") == 5 and "35 more clients had replies rejected" in page


def test_privacy_that_is_spent_is_told(tmp_path: Path) -> None:
    history = [line(i, epsilon=1.0 + i) for i in range(4)]
    settings = "[privacy]\nmode = 'central'\nnoise = 2.0\n"
    page = run_main(glance(made(tmp_path / "run", history=history, settings=settings)), 0.0)
    assert (
        page.count("epsilon 4<") == 1
        and "Epsilon is 4 for all data of one client" in page
        and "mode = central, noise = 2.0" in page
    )


def checkpoint(folder: Path, ledger: Any, iteration: int) -> None:
    """A checkpoint of which only the header is there."""
    header = json.dumps({"__metadata__": {"ledger": json.dumps(ledger), "iteration": str(iteration)}}).encode()
    (folder / "checkpoint.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A process has the run, for the duration of a block."""
    with (folder / ".lock").open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def test_whoever_looks_does_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    spec = fb.load_spec("demo", [*QUADRATIC, "stop.iterations=1"])
    (tmp_path / "run").mkdir()
    stream = (tmp_path / "run" / ".lock").open("a+")
    fcntl.flock(stream, fcntl.LOCK_SH)
    threading.Timer(0.05, stream.close).start()
    folder = RunFolder(tmp_path / "run")
    folder.open(spec.plan, resume=False, overwrite=False)
    folder.close()


# Whom it answers --------------------------------------------------------------------------------------


class Answer:
    def __init__(self, status: int, headers: dict[str, str], text: str) -> None:
        self.status, self.headers, self.text = status, headers, text


def ask(watch: Watch, path: str = "", method: str = "GET", whole: str | None = None, **headers: str) -> Answer:
    """Ask for a path after the token, or for a whole path."""
    connection = http.client.HTTPConnection("127.0.0.1", watch.port, timeout=10)
    connection.putrequest(method, whole or f"/{watch.token}/{path}", skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    got = connection.getresponse()
    answer = Answer(got.status, dict(got.getheaders()), got.read().decode())
    connection.close()
    return answer


@pytest.fixture(scope="module")
def watch(done: Path) -> Iterator[Watch]:
    with Watch(done) as made:
        yield made


def test_the_page_is_served_on_loopback_with_a_strict_policy(watch: Watch) -> None:
    answer = ask(watch)
    assert answer.status == 200 and "Finished" in answer.text
    policy = answer.headers["Content-Security-Policy"]
    assert (
        policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    )
    assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["Cache-Control"] == "no-store"
    assert not re.search(r"https?:", answer.text)
    assert watch.address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("token", ["", "a" * 43, "wrong", "%00"])
def test_without_the_token_nothing_is_told(watch: Watch, token: str) -> None:
    answer = ask(watch, whole=f"/{token}/")
    assert answer.status == 403 and "quadratic" not in answer.text
    assert ask(watch, whole=f"/{watch.token[:-1]}/now").status == 403


def test_another_host_is_refused_as_after_dns_rebinding(watch: Watch) -> None:
    for host in ("evil.example", f"evil.example:{watch.port}", "127.0.0.1", f"127.0.0.1:{watch.port + 1}", ""):
        assert ask(watch, Host=host).status == 403, host
    assert ask(watch, Host=f"localhost:{watch.port}").status == 200


def test_another_origin_is_refused(watch: Watch) -> None:
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{watch.port}", "http://127.0.0.1:1"):
        assert ask(watch, "now", Origin=origin).status == 403, origin
    assert ask(watch, "now", Origin=f"http://127.0.0.1:{watch.port}").status == 200
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert ask(watch, Sec_Fetch_Site=site).status == status


def test_no_path_leads_to_a_file(watch: Watch) -> None:
    ways = ("spec.toml", "../spec.toml", "../../../etc/passwd", "..%2fspec.toml", "%2e%2e/", "now/", "now?x", "//")
    for way in ways:
        assert ask(watch, way).status == 404, way
    assert ask(watch, whole=f"http://127.0.0.1/{watch.token}/").status == 403
    assert ask(watch, whole=f"/../{watch.token}/").status == 403


def test_there_is_nothing_but_get(watch: Watch) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "HEAD"):
        assert ask(watch, method=method).status == 501


def test_looking_writes_nothing(done: Path, watch: Watch) -> None:
    before = contents(done)
    ask(watch), ask(watch, "now")
    assert contents(done) == before


def test_many_connections_are_bounded_and_slow_ones_are_ended(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.5)
    with Watch(done) as watch:
        open_ones = [socket.create_connection(("127.0.0.1", watch.port)) for _ in range(server.CONNECTIONS)]
        for each in open_ones:
            each.sendall(b"GET /")  # and no more
        time.sleep(0.1)
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(watch)
        deadline = time.monotonic() + 10
        while True:
            try:
                assert ask(watch, "now").status == 200
                break
            except (http.client.HTTPException, OSError):
                assert time.monotonic() < deadline, "slow connections keep their places"
                time.sleep(0.1)
        for each in open_ones:
            each.close()


# Hostile folders --------------------------------------------------------------------------------------


def hostile(folder: Path) -> Path:
    """A folder in which every text would be markup."""
    history = [line(i, **{HOSTILE: float(i)}, rejected={"client": {HOSTILE: 2}}) for i in range(3)]
    settings = "\n".join(
        [
            f"seed = {json.dumps(HOSTILE)}",
            *(f"[{section}]\nname = {json.dumps(HOSTILE)}" for section in ("problem", "data", "algorithm")),
            f"[evaluate]\nmetric = {json.dumps(HOSTILE)}",
        ]
    )
    ledger = {
        "steps": {HOSTILE: summary()["ledger"]["gradients"]},
        "rejected": {HOSTILE: {HOSTILE: {HOSTILE: 3}, "0": {HOSTILE: 1}}},
        "silent": {"0": [1, 5, HOSTILE], HOSTILE: [1, 5, HOSTILE]},
        "said": {"0": [HOSTILE]},
    }
    federation = {"run": "r", "sites": [HOSTILE, "b"], "jobs": [{"sites": [HOSTILE], "reason": HOSTILE}]}
    begun = {"started": HOSTILE, "revision": HOSTILE, HOSTILE: HOSTILE}
    made(folder, history=history, settings=settings, federation=federation, environment=begun)
    checkpoint(folder, ledger, 2)
    return folder


def elements(page: str) -> tuple[set[str], set[str]]:
    """The names of all elements of a page after its style, and of all of their attributes."""
    tags: set[str] = set()
    attributes: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            attributes.update(name for name, _ in attrs)

    Reader().feed(page)
    return tags, attributes


def test_no_text_of_a_folder_becomes_markup(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "<b>run")
    unfinished = run_page(glance(folder), 0.0)
    (folder / "summary.json").write_text(
        json.dumps(summary(iterations=2, failure=HOSTILE, notes=[HOSTILE], ledger={}))
    )
    for page in (unfinished, run_page(glance(folder), 0.0)):
        assert "<img" not in page and "<script" not in page and "<b>run" not in page
        assert page.count("&lt;img") > 10
        tags, attributes = elements(page)
        assert not tags & {"img", "script", "iframe", "a"} and not {a for a in attributes if a[:2] == "on"}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_follows_the_run_and_runs_nothing_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hostile(tmp_path / "run")
    looks: list[float] = []

    def clock() -> float:
        """The time of day. The run goes on when the page has been shown and its script asks again."""
        looks.append(time.time())
        if len(looks) == 2:
            made(folder, history=[line(i) for i in range(7)])
        return looks[-1]

    monkeypatch.setattr("fedbilevel.watch._server.FRESH", 0.0)  # the browser's clock runs ahead of ours
    home = f"--user-data-dir={tmp_path / 'home'}"
    quick = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", home]
    assert CHROMIUM is not None
    with Watch(folder, clock=clock) as watch:
        command = [CHROMIUM, *quick, "--virtual-time-budget=20000", "--dump-dom", watch.address]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None and "hit" not in found[1]
    assert "<img" not in dom and dom.count("<script") == 1
    assert len(looks) > 2 and "50.00%" in found[1], "the script has asked again, and has the new state"


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"revision": "TOP SECRET", "started": "TOP SECRET"}))
    folder = made(tmp_path / "run")
    (folder / "environment.json").unlink()
    (folder / "environment.json").symlink_to(secret)
    os.mkfifo(folder / "summary.json")
    (folder / "federation.json").mkdir()
    (folder / ".lock").symlink_to(secret)
    look = glance(folder)
    page = run_main(look, 0.0)
    assert "TOP SECRET" not in page
    assert "environment.json is a symbolic link, which is not followed" in page
    assert "summary.json is not a file" in page and "federation.json is not a file" in page
    (folder / "spec.toml").unlink()
    (folder / "spec.toml").symlink_to(secret)
    assert glance(folder).settings == {}


def test_a_huge_history_is_read_at_even_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "HISTORY", 100_000)
    monkeypatch.setattr(looks, "PIECE", 1000)
    folder = made(tmp_path / "run", history=[line(i) for i in range(5000)])
    look = glance(folder)
    places = [record["iteration"] for record in look.history]
    assert not look.whole and len(places) <= looks.PLACES
    assert places[0] == 0 and places[-1] == 4999 and places == sorted(places)
    assert "The history is long" in run_main(look, 0.0)


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    for name in ("summary.json", "environment.json", "history.jsonl"):
        with (folder / name).open("wb") as stream:
            stream.truncate(1 << 40)  # a terabyte of nothing, which takes no room
    started = time.monotonic()
    look = glance(folder)
    assert time.monotonic() - started < 5
    assert look.history == [] and any("summary.json is larger than" in each for each in look.troubles)


def test_lines_that_are_broken_are_left_out_and_told(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    with (folder / "history.jsonl").open("ab") as stream:
        stream.write(b'\xff\xfe\n[]\n{"iteration": -1}\n' + b"[" * 5000 + b'\n{"iteration": 11, "rou')
    look = glance(folder)
    assert len(look.history) == 11
    assert "history.jsonl has 4 lines that cannot be read" in look.troubles[0]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1e308, 1e308, 5e-324, 0.0, 1, True, "1", None, [1]]
)
def test_any_value_of_a_metric_can_be_shown(tmp_path: Path, value: Any) -> None:
    names = ("upper_loss", "my_accuracy", "update_x", "epsilon", "restarts", "rejected")
    history = [line(i, test_accuracy=None, **dict.fromkeys(names, value)) for i in range(3)]
    look = glance(made(tmp_path / "run", history=[*history, line(3, seconds=float("nan"))]))
    assert "Interrupted" in run_main(look, 0.0) and look.troubles == ()


@pytest.mark.parametrize(
    "ledger", [[], {}, {"steps": {}}, {"steps": {"a": {"rounds": "<b>"}}, "rejected": {}}, "[", {"rejected": 3}]
)
def test_a_header_that_is_no_ledger_is_left_out_and_told(tmp_path: Path, ledger: Any) -> None:
    folder = made(tmp_path / "run")
    checkpoint(folder, ledger, 3)
    look = glance(folder)
    assert look.books == {} and look.troubles[0].startswith("checkpoint.safetensors ")
    (folder / "checkpoint.safetensors").write_bytes(b"\xff" * 100)
    assert "a header of more than" in glance(folder).troubles[0]
    (folder / "checkpoint.safetensors").write_bytes(b"")
    assert glance(folder).troubles


def test_a_folder_that_vanishes_is_told_and_one_that_comes_back_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FRESH", 0.0)
    folder = made(tmp_path / "run")
    with Watch(folder) as watch:
        assert "test accuracy" in ask(watch, "now").text
        shutil.rmtree(folder)
        answer = ask(watch, "now")
        assert answer.status == 200 and "cannot be read: No such file or directory" in answer.text
        folder.mkdir()
        assert "holds no run" in ask(watch, "now").text
        made(folder)
        assert "test accuracy" in ask(watch, "now").text
    with pytest.raises(RunFolderError, match="cannot be read"):
        glance(tmp_path / "nothing")


# The command ------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_or_refuses_in_one_line(command: Command, done: Path, tmp_path: Path) -> None:
    outcome = command("watch", done, "--out", tmp_path / "page.html")
    assert outcome.code == 0 and "Finished" in (tmp_path / "page.html").read_text()
    one_line(command("watch", tmp_path), 2, "holds no run", "name a run folder")
    with Watch(done) as other:
        one_line(command("watch", done, "--port", other.port), 2, f"--port {other.port} cannot be used")
