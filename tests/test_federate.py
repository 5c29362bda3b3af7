"""What `fedbilevel site` and `fedbilevel federate` settle before anything is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

import fedbilevel as fb
from fedbilevel import cli
from fedbilevel.data import ClientData, Part
from fedbilevel.federate import LoopbackFederation, commands
from fedbilevel.federate.commands import federated, registered
from fedbilevel.federate.job import PLACE, Order, read_key, read_order, write_job
from fedbilevel.federate.sitefile import write_rows


def refused(*arguments: str) -> str:
    """What a command line is refused for."""
    result = CliRunner().invoke(cli.app, ["federate", *arguments])
    assert isinstance(result.exception, fb.SettingsError), result.output
    return str(result.exception)


def test_a_run_on_sites_has_a_client_for_each_and_saves_every_iteration() -> None:
    spec = federated(None, ["federation.min_replies=5", "data.clients=9"], 5)
    assert spec.data.clients == 5 and spec.evaluate.checkpoint_every == 1
    assert spec.federation.min_replies == 5
    assert spec.to_mapping()["algorithm"]["participation"] == 1.0
    assert federated("demo", [], 4).to_mapping()["algorithm"]["participation"] == 0.1


def test_the_preset_of_sites_is_the_demo_with_its_number_of_lower_steps_on_all_sites() -> None:
    sites, demo = fb.load_spec("sites").to_mapping(), fb.load_spec("demo").to_mapping()
    differ = {
        (section, key)
        for section in ("problem", "data", "algorithm", "federation", "evaluate")
        for key in sites[section].keys() | demo[section].keys()
        if sites[section].get(key) != demo[section].get(key)
    }
    assert differ == {("data", "clients"), ("algorithm", "participation"), ("algorithm", "lower_steps")}
    rows = 60_000 // demo["data"]["clients"] * 8 // 10
    steps = rows // demo["algorithm"]["batch_zeta_local"] * demo["algorithm"]["lower_epochs"]
    assert sites["algorithm"]["lower_steps"] == steps == 240


def test_a_resumed_run_keeps_its_sites_also_when_one_is_down(tmp_path: Path) -> None:
    (tmp_path / "federation.json").write_text(json.dumps({"run": "r", "sites": ["a", "b", "c"], "jobs": []}))
    assert registered(tmp_path, None, True, lambda: ["a", "c"]) == ["a", "b", "c"]
    assert registered(tmp_path, None, False, lambda: ["a", "c"]) == ["a", "c"]
    assert registered(tmp_path, ["d", "b"], True, lambda: []) == ["b", "d"]
    with pytest.raises(fb.SettingsError, match=r"^no site is up; start them with `fedbilevel site`"):
        registered(tmp_path / "none", None, True, lambda: [])


def test_a_wrong_command_is_refused_before_anything_starts(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    assert refused("--simulate-sites", "3").startswith("--out is missing")
    assert refused(*out).startswith("give either --kit DIR")
    assert refused(*out, "--kit", str(tmp_path), "--simulate-sites", "3").startswith("give either --kit DIR")
    assert "is not the kit of an admin" in refused(*out, "--kit", str(tmp_path))
    assert "federation.min_replies = 4 is wrong" in refused(
        *out, "--simulate-sites", "3", "--set", "federation.min_replies=4"
    )
    assert "evaluate.train = true is wrong on a real federation" in refused(
        *out, "--simulate-sites", "3", "--set", "evaluate.train=true"
    )
    assert "attack.kind = " in refused(*out, "--simulate-sites", "3", "--set", "attack.kind=sign-flip")
    assert not (tmp_path / "run").exists()


def write_defaults(kit: Path) -> None:
    """The files of a kit that say what jobs may do in it."""
    (kit / "local").mkdir()
    (kit / "local" / "resources.json.default").write_text("{}")
    (kit / "local" / "authorization.json.default").write_text('{"permissions": {}}')


def test_a_site_says_what_it_loads_and_refuses_a_kit_that_is_none(tmp_path: Path) -> None:
    part = Part(np.ones((3, 2), np.float32), np.zeros(3, np.int32))
    write_rows(tmp_path / "rows.npz", ClientData(part, part))
    problem = '[problem]\nname = "hyper-representation"\nhidden = 3\nshape = [2, 1, 1]\nclasses = 2\n'
    (tmp_path / "site.toml").write_text(f'[data]\nnpz = "rows.npz"\n{problem}')
    loaded = CliRunner().invoke(cli.app, ["site", str(tmp_path / "site.toml")])
    assert loaded.exit_code == 0
    assert "3 lower and 3 upper rows; 9 parameters of x and 8 of y" in loaded.output
    wrong = CliRunner().invoke(cli.app, ["site", str(tmp_path / "site.toml"), "--kit", str(tmp_path)])
    assert "is not the kit of a site" in str(wrong.exception)


def test_a_loopback_federation_starts_what_the_commands_become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts FLARE itself, because each command would first start Python and JAX once more."""
    started: list[tuple[list[str], dict[str, str], dict[str, list[str]]]] = []
    kits: dict[str, Path] = {}

    def noted(command: list[str], environment: dict[str, str]) -> None:
        kit = Path(command[1]).parent.parent
        started.append((command, environment, {f.name: f.read_text().splitlines() for f in kit.glob("local/*")}))
        for file in ("resources.json", "authorization.json"):
            (kit / "local" / file).unlink()

    class Popen:
        def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
            noted(command, env)

    local = LoopbackFederation(tmp_path, {"site-1": tmp_path / "site.toml"})
    for name, kind in (("site-1", "client"), ("localhost", "server")):
        kits[name] = local.kit(name)
        (kits[name] / "startup").mkdir(parents=True)
        for needed in ("sub_start.sh", f"fed_{kind}.json"):
            (kits[name] / "startup" / needed).touch()
        write_defaults(kits[name])
    monkeypatch.setattr("subprocess.Popen", Popen)
    monkeypatch.setattr("os.execvpe", lambda _, command, environment: noted(command, environment))
    said = list[str]()
    local.start("site-1")
    commands.join(tmp_path / "site.toml", kits["site-1"], said.append)
    local.start("localhost")
    commands.serve(kits["localhost"], said.append)
    for ours, theirs in (started[:2], started[2:]):
        assert ours[0] == theirs[0] and ours[2] == theirs[2], "the same script, in a kit that was closed alike"
        assert theirs[1].items() - ours[1].items() <= {("PYTHONPATH", os.environ.get("PYTHONPATH"))}
    log = [
        line for name in ("site-1", "localhost") for line in (tmp_path / f"{name}.log").read_text().splitlines()
    ]
    assert log == said and len(said) == 4
    assert started[0][1]["FEDBILEVEL_SITE"] == str(tmp_path / "site.toml")


def test_a_job_unpacks_no_tensors_of_pytorch() -> None:
    """FLARE imports PyTorch in every job where it is installed, unless its module for that cannot be had."""
    script = "import sys, fedbilevel.federate.app\n"
    script += "from nvflare.fuel.utils.import_utils import optional_import\n"
    script += "found = optional_import(module='nvflare.app_opt.pt.decomposers', name='TensorDecomposer')[1]\n"
    script += "sys.exit(found or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_federation_ends_with_all_that_it_started_also_what_left_its_session(tmp_path: Path) -> None:
    """As FLARE's job processes do; they went on writing into a folder that was being deleted."""
    local = LoopbackFederation(tmp_path, {})
    local.admin_kit.mkdir(parents=True)
    start = local.kit("localhost") / "startup" / "sub_start.sh"
    start.parent.mkdir(parents=True)
    (start.parent / "fed_server.json").touch()
    write_defaults(local.kit("localhost"))
    job = "echo $$ > own; mv own pid; while :; do date > written; sleep 0.02; done"
    start.write_text(f"cd {tmp_path}\nsetsid bash -c '{job}' &\nsleep 60\n")
    with local:
        while not (tmp_path / "pid").exists():
            assert local.processes["localhost"].poll() is None, (tmp_path / "localhost.log").read_text()
            time.sleep(0.01)
        alone = psutil.Process(int((tmp_path / "pid").read_text()))
        leader = local.processes["localhost"]
        assert os.getsid(alone.pid) == alone.pid != leader.pid
        leader.kill()
        assert leader.wait() and alone.is_running()
        assert local.revive() == ["localhost"] and alone not in local.members(["localhost"])
    assert local.members(["localhost"]) == set()


ORDER = Order(
    spec="", run="run7", sites=["a", "b", "c"], timeout=9.0, files={}, keys={"a": "a5a5", "b": "b6b6"}, key="c7c7"
)


def test_a_job_carries_no_code(tmp_path: Path) -> None:
    job = write_job(tmp_path, ORDER)
    files = [file for file in job.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json"} and all(
        json.loads(f.read_text()) is not None for f in files
    )
    assert not list(job.rglob("custom")), "FLARE takes a job with such a folder for one with code"


def test_a_job_gives_every_site_its_own_key_and_no_other(tmp_path: Path) -> None:
    job = write_job(tmp_path, ORDER)
    parts = json.loads((job / "meta.json").read_text())["deploy_map"]
    assert read_order(job / "app_server" / PLACE) == ORDER
    assert parts.pop("app_server") == ["server"] and sorted(parts.values()) == [["a"], ["b"]]
    for app, (site,) in parts.items():
        assert read_key(job / app / PLACE) == ORDER.keys[site]
        text = "".join(file.read_text() for file in (job / app).rglob("*.json"))
        assert not any(other in text for other in {"a5a5", "b6b6", "c7c7"} - {ORDER.keys[site]})


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "curve.png", "summary.json", ".lock", ""])
def test_an_order_writes_no_file_but_those_from_which_a_run_goes_on(tmp_path: Path, name: str) -> None:
    job = write_job(tmp_path, replace(ORDER, files={"spec.toml": "", name: ""}))
    with pytest.raises(
        fb.SettingsError, match=f"^the order has a file {re.escape(repr(name))}; a run goes on from"
    ):
        read_order(job / "app_server" / PLACE)
