"""The files for containers and for a host of repositories: consistent with each other and with the Makefile.

Nothing is built or started here; there may be no container runtime. deploy/README.md says what was run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedbilevel

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_compose_starts_a_server_and_the_sites_that_are_provisioned() -> None:
    compose, project = read(DEPLOY / "compose.yml"), read(DEPLOY / "project.yml")
    named = {each["name"]: each["type"] for each in project["participants"]}
    sites = {name for name, kind in named.items() if kind == "client"}
    services = compose["services"]
    assert services.keys() == sites | {"provision", "server", "admin"} and len(sites) == 3
    assert [services[site]["environment"] for site in sorted(sites)] == [
        {"SITE": site, "CLIENT": str(i)} for i, site in enumerate(sorted(sites))
    ]
    for name, service in services.items():
        assert "ports" not in service, "nothing is open to the host"
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source == "./" or source in compose["volumes"], (name, volume)
        for each in service["command"]:
            assert not each.startswith("/deploy/") or (DEPLOY / each.removeprefix("/deploy/")).exists()
    text = (DEPLOY / "submit.sh").read_text()
    assert ",".join(sorted(sites)) in text and next(n for n, k in named.items() if k == "admin") in text


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_one_that_a_shell_can_read(script: Path) -> None:
    subprocess.run(["sh", "-n", script], check=True)


def test_the_image_copies_what_exists_and_ignores_the_rest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    wanted = {word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert wanted and all((ROOT / word).exists() for word in wanted)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert wanted == allowed
    assert all((ROOT / lock).exists() for lock in re.findall(r"requirements/\w+\.txt", text))
    assert "USER fedbilevel" in text and "--require-hashes" in text
    json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())


def test_workflows_call_targets_of_the_makefile_and_need_no_more_rights_than_to_read() -> None:
    assert len(WORKFLOWS) >= 3
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for name, job in workflow["jobs"].items():
            commands = [step["run"] for step in job["steps"] if "run" in step]
            called = {target for command in commands for target in re.findall(r"^make ([a-z-]+)", command, re.M)}
            assert called and called <= TARGETS, (path.name, name)
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"actions/[\w-]+@v\d+", each) for each in used)


def test_hooks_before_a_commit_are_the_tools_of_the_lint_target() -> None:
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "mypy"}
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in hooks)


def test_there_is_one_version_and_it_is_the_one_to_cite() -> None:
    cited = read(ROOT / "CITATION.cff")
    assert cited["version"] == fedbilevel.__version__ and cited["license"] == "Apache-2.0"
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == fedbilevel.__version__ and (ROOT / "docs" / "releases" / f"{released[0]}.md").exists()
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


@pytest.mark.slow
def test_the_project_that_the_page_on_federations_shows_can_be_provisioned(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "federate.md").read_text()
    shown = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 1, "no other YAML is shown, so somebody runs all of it"
    (tmp_path / "project.yml").write_text(shown[0])
    nvflare = Path(sys.executable).with_name("nvflare")
    command = [str(nvflare), "provision", "-p", "project.yml", "-w", "kits"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    kits = {path.name for path in (tmp_path / "kits" / "fedbilevel" / "prod_00").iterdir()}
    assert kits == {each["name"] for each in yaml.safe_load(shown[0])["participants"]}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_no_job_of_a_workflow_can_hang_for_hours(workflow: Path) -> None:
    assert all(job["timeout-minutes"] <= 350 for job in read(workflow)["jobs"].values())
