"""What `fedbilevel site` and `fedbilevel server` write into a kit, and what they leave as its owner wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.federate.kit import SITE_CLASSES, close_kit

RESOURCES: dict[str, Any] = {"class_allow_list": ["nvflare.app_common.np.np_trainer.NPTrainer"], "components": [1]}
POLICY: dict[str, Any] = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": "any",
        "lead": {"submit_job": "any", "byoc": "any"},
        "member": {"view": "any"},
    },
}


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    local = tmp_path / "local"
    local.mkdir()
    (local / "resources.json.default").write_text(json.dumps(RESOURCES))
    (local / "authorization.json.default").write_text(json.dumps(POLICY))
    return tmp_path


def read(kit: Path, name: str) -> Any:
    return json.loads((kit / "local" / name).read_text())


def rights(kit: Path, role: str, right: str) -> bool:
    """Whether FLARE would grant a right to a role by the kit's policy."""
    from nvflare.fuel.sec.authz import AuthzContext, Person, parse_policy_config
    from nvflare.security.security import COMMAND_CATEGORIES

    policy, error = parse_policy_config(read(kit, "authorization.json"), COMMAND_CATEGORIES)
    assert policy is not None, error
    user = Person("ada", "ours", role)
    granted, _ = policy.evaluate("ours", AuthzContext(right, user, user))
    return bool(granted)


def test_a_new_kit_gets_a_list_of_our_classes_and_a_policy_against_code(kit: Path) -> None:
    said = close_kit(kit, SITE_CLASSES)
    made = read(kit, "resources.json")
    assert made["class_allow_list"] == list(SITE_CLASSES) and made["class_list_enforcement_mode"] == "enforce"
    assert made["components"] == [1], "all else is as provisioned"
    assert made["allow_log_streaming"] is False, "the errors of a job stay at the site"
    assert len(said) == 2 and all(line.startswith("wrote ") for line in said)
    assert close_kit(kit, SITE_CLASSES) == [], "a second start finds its own files and has nothing to say"


@pytest.mark.parametrize("role", ["project_admin", "org_admin", "lead", "member", "unknown"])
def test_the_policy_lets_nobody_bring_code_and_takes_nothing_else_away(kit: Path, role: str) -> None:
    close_kit(kit, SITE_CLASSES)
    assert not rights(kit, role, "byoc") and not rights(kit, role, "server-predeployed-flwr")
    assert rights(kit, role, "submit_job") == (role in ("project_admin", "lead"))
    assert rights(kit, role, "abort") == (role == "project_admin")
    assert rights(kit, role, "check_status") == (role in ("project_admin", "member"))


def test_a_role_that_may_do_everything_may_still_do_everything_else(kit: Path) -> None:
    """Also send app commands, by which the submitter of a run gets its files."""
    from nvflare.apis.fl_constant import AdminCommandNames
    from nvflare.security.security import COMMAND_CATEGORIES

    close_kit(kit, SITE_CLASSES)
    commands = {name for key, name in vars(AdminCommandNames).items() if not key.startswith("_")}
    assert {"app_command", "submit_job", "clone_job", *COMMAND_CATEGORIES} <= commands
    assert {name for name in commands if not rights(kit, "project_admin", name)} == set()


def test_what_the_owner_wrote_stays_and_is_named(kit: Path) -> None:
    own = RESOURCES | {"class_allow_list": ["fedbilevel.federate.app.", "nvflare.collab."]}
    for name, content in (("resources.json", own), ("authorization.json", POLICY)):
        (kit / "local" / name).write_text(json.dumps(content))
    before = {file.name: file.read_bytes() for file in (kit / "local").iterdir()}
    resources, policy = close_kit(kit, SITE_CLASSES)
    assert (
        "resources.json is yours and stays; it also lets jobs name fedbilevel.federate.app., nvflare.coll"
        in resources
    )
    assert "authorization.json is yours and stays; it lets project_admin, lead bring code" in policy
    assert {file.name: file.read_bytes() for file in (kit / "local").iterdir()} == before


def test_a_list_of_the_owner_that_does_not_allow_a_run_is_an_error_that_names_the_classes(kit: Path) -> None:
    (kit / "local" / "resources.json").write_text(json.dumps(RESOURCES))
    with pytest.raises(
        fb.SettingsError, match=r"resources.json does not allow .*CollabExecutor, .*SiteApp; add them"
    ):
        close_kit(kit, SITE_CLASSES)


def test_a_kit_of_the_owner_that_sends_logs_to_the_server_needs_the_class_that_does_so(kit: Path) -> None:
    streamer = {"path": "nvflare.app_common.logging.site_log_streamer.SiteLogStreamer"}
    own = {"class_allow_list": list(SITE_CLASSES), "components": [streamer]}
    (kit / "local" / "resources.json").write_text(json.dumps(own))
    with pytest.raises(
        fb.SettingsError, match=r"JobLogStreamer is needed as long as allow_log_streaming is not f"
    ):
        close_kit(kit, SITE_CLASSES)
    (kit / "local" / "resources.json").write_text(json.dumps(own | {"allow_log_streaming": False}))
    assert len(close_kit(kit, SITE_CLASSES)) == 1, "only the policy is written"


@pytest.mark.parametrize("text", ["{", "[]", '{"class_allow_list": 3}'])
def test_a_file_of_the_owner_that_cannot_be_read_is_named(kit: Path, text: str) -> None:
    (kit / "local" / "resources.json").write_text(text)
    with pytest.raises(fb.SettingsError, match=r"resources.json is wrong: "):
        close_kit(kit, SITE_CLASSES)


def test_a_folder_without_the_files_of_a_kit_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        fb.SettingsError, match=r"resources.json.default is wrong: .*give the folder that was prov"
    ):
        close_kit(tmp_path, SITE_CLASSES)
