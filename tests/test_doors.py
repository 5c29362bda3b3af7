"""Who gets through to a site and to the server's job, in a real federation on this machine.

Slow: it takes six processes.
One of two sites is hostile and attacks the others with what every participant has.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import tomli_w

import fedbilevel as fb
import intruder_site
from engine_equality import SETTINGS, spec_of
from fedbilevel.federate import LoopbackFederation, simulated_sites

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
    with LoopbackFederation(folder, files) as made:
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


def test_the_attacked_site_answers_the_server_to_the_end(attacked: fb.Result) -> None:
    assert {client for clients in attacked.summary["rejected"].values() for client in clients} <= {"1"}
