"""Who and what gets through to a site and to the server's job, in a real federation on this machine.

Slow: it takes six processes.
One of two sites is hostile and attacks the others with what every participant has.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedbilevel as fb
import intruder_site
from engine_equality import SETTINGS, spec_of
from fedbilevel.engines.flare import verify_audit
from fedbilevel.federate import LoopbackFederation, simulated_sites
from fedbilevel.federate.job import write_job
from test_federate import ORDER

pytestmark = pytest.mark.slow

NAMES = ["site-1", "site-2"]
SPEC = spec_of(
    SETTINGS
    | {"data.clients": 2, "evaluate.clients": 2, "stop.iterations": 3}
    | {"federation.min_replies": 1, "federation.strikes": "never"}
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackFederation]:
    folder = tmp_path_factory.mktemp("doors")
    files = simulated_sites(SPEC, folder / "sites", NAMES)
    hostile = files["site-2"]
    shutil.copy(intruder_site.__file__, hostile.parent)
    own = tomllib.loads(hostile.read_text())
    del own["problem"]["name"]
    own["problem"] |= {"python": "intruder_site:make", "place": str(hostile.parent)}
    hostile.write_text(tomli_w.dumps(own))
    made = LoopbackFederation(folder, files)
    made.provision()
    policy = made.kit("localhost") / "local" / "authorization.json"  # the server lets jobs bring code to sites
    shutil.copy(f"{policy}.default", policy)
    with made:
        yield made


@pytest.fixture(scope="module")
def attacked(local: LoopbackFederation, tmp_path_factory: pytest.TempPathFactory) -> fb.Result:
    """A run in which the second site attacks."""
    from fedbilevel.federate.submit import Kit, Submission

    submitted = Submission(Kit(local.admin_kit), NAMES, patience=120.0, restarts=0)
    return submitted.run(SPEC, tmp_path_factory.mktemp("run") / "run", resume=False, overwrite=False)


@pytest.fixture(scope="module")
def loot(local: LoopbackFederation, attacked: fb.Result) -> dict[str, Any]:
    return json.loads((local.site_file("site-2").parent / "loot.json").read_text())


def test_a_site_gets_no_gradient_of_another(loot: dict[str, Any]) -> None:
    assert loot["gradient"]["hello"]["kind"] == "error", loot
    assert loot["gradient"]["gradient"] == {}


def test_a_site_can_neither_read_nor_end_the_run_at_the_server(loot: dict[str, Any], attacked: fb.Result) -> None:
    assert loot["pull"]["keys"] == []
    assert attacked.summary["iterations"] == 3


def test_a_site_cannot_speak_to_another_in_the_servers_name(loot: dict[str, Any], attacked: fb.Result) -> None:
    assert "session is another one" not in json.dumps(attacked.summary["rejected"])
    assert loot["forged"]["reply"]["kind"] == "error"


def test_the_attacked_site_writes_down_who_was_refused(local: LoopbackFederation, loot: dict[str, Any]) -> None:
    file = local.site_file("site-1").parent / "audit.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    refused = {(e["caller"], e["reason"].partition(";")[0]) for e in entries if e["what"] == "refused"}
    assert refused == {
        ("site-2", "this site answers the server of the job only, not site-2"),
        ("server", "the request has no valid seal"),  # the forged one, which FLARE takes for the server's
    }
    assert verify_audit(file).broken is None


def test_the_attacked_site_answers_the_server_to_the_end(attacked: fb.Result) -> None:
    assert {client for clients in attacked.summary["rejected"].values() for client in clients} <= {"1"}


# ------------------------------------------------------------------------------------------------ foreign code

CODE = """
from pathlib import Path
Path({mark!r}).touch()
class Component:
    pass
"""
FOREIGN = "nvflare.app_common.np.np_trainer.NPTrainer"  # FLARE's own list allows it


@pytest.fixture(scope="module")
def foreign(
    local: LoopbackFederation, attacked: fb.Result, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, Path]]:
    """The outcomes of two jobs of the first site: one brings code, and one names another class."""
    from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

    from fedbilevel.federate.loopback import ADMIN

    def job(name: str, path: str) -> Path:
        folder = write_job(tmp_path_factory.mktemp(name), replace(ORDER, keys={"site-1": "00"}))
        config = folder / "app_site_1" / "config" / "config_fed_client.json"
        content = json.loads(config.read_text())
        content["components"].append({"id": "foreign", "path": path, "args": {}})
        config.write_text(json.dumps(content))
        return folder

    mark = tmp_path_factory.mktemp("mark") / "ran"
    jobs = {"code": job("code", "brought.Component"), "class": job("class", FOREIGN)}
    custom = jobs["code"] / "app_site_1" / "custom"
    custom.mkdir(exist_ok=True)
    (custom / "brought.py").write_text(CODE.format(mark=str(mark)))
    session: Session = new_secure_session(ADMIN, str(local.admin_kit), timeout=60.0)
    try:
        submitted = {name: session.submit_job(str(folder)) for name, folder in jobs.items()}
        logs = {name: local.kit("site-1") / identity / "log.txt" for name, identity in submitted.items()}
        for identity in submitted.values():
            session.monitor_job(identity, timeout=180.0)
        states = {name: str(session.get_job_meta(identity)) for name, identity in submitted.items()}
    finally:
        session.close()
    return {name: (states[name], mark if name == "code" else logs[name]) for name in jobs}


def test_a_job_that_brings_code_is_refused_by_a_site(foreign: dict[str, tuple[str, Path]]) -> None:
    state, mark = foreign["code"]
    assert not mark.exists(), "the code that a job brought has run at the site"
    assert "BYOC not permitted" in state


def test_a_job_that_names_another_class_is_refused_by_a_site(foreign: dict[str, tuple[str, Path]]) -> None:
    _, log = foreign["class"]
    assert f"Component '{FOREIGN}'" in log.read_text() and "is not in allow_list" in log.read_text()


def test_a_run_needs_no_code_at_sites_that_forbid_it(local: LoopbackFederation, attacked: fb.Result) -> None:
    for name in NAMES:
        policy = json.loads((local.kit(name) / "local" / "authorization.json").read_text())["permissions"]
        assert all(rights.get("byoc", "none") == "none" for rights in policy.values())
    assert attacked.summary["iterations"] == 3
