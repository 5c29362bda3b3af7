"""Certificates renewed and a site revoked, as docs/federate.md says it, in a federation of one site.

    python -m pytest benchmarks/certificates.py

It shows what FLARE does, and not what this library does, so it is not among the tests.
"""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_equality import SETTINGS, spec_of
from fedbilevel.federate import LoopbackFederation, simulated_sites
from fedbilevel.federate.loopback import PROJECT, SERVER

SITE = "site-1"
PATIENCE = 120.0


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackFederation]:
    folder = tmp_path_factory.mktemp("certificates")
    with LoopbackFederation(folder, simulated_sites(spec_of(SETTINGS), folder / "sites", [SITE])) as made:
        yield made


def folder_of(local: LoopbackFederation) -> Path:
    return local.admin_kit.parents[3]


def joined(local: LoopbackFederation) -> int:
    """How often the server says that the site has joined."""
    return (folder_of(local) / f"{SERVER}.log").read_text().count(f"New client {SITE}")


def until(happened: Callable[[], bool]) -> bool:
    limit = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > limit:
            return False
        time.sleep(0.5)
    return True


def restart(local: LoopbackFederation) -> None:
    local.kill(SITE)
    local.start(SITE)


def renewed(local: LoopbackFederation) -> Path:
    """Forget the site's certificate and provision the same project again; return the site's new kit."""
    kits = folder_of(local) / "kits"
    file = kits / PROJECT / "state" / "cert.json"
    state = json.loads(file.read_text())
    del state[SITE]
    file.write_text(json.dumps(state))
    project = folder_of(local) / "project.json"
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(project), "-w", str(kits), "--force"]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return kits / PROJECT / "prod_01" / SITE


def handshake(local: LoopbackFederation, certificate: Path) -> bytes:
    """What the server says to a connection with this certificate; a refusal comes after the handshake."""
    startup = local.kit(SITE) / "startup"
    target = json.loads((startup / "fed_client.json").read_text())["servers"][0]["service"]["target"]
    host, _, port = target.partition(":")
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(str(certificate / "client.crt"), str(certificate / "client.key"))
    plain = socket.create_connection((host, int(port)), timeout=20)
    with context.wrap_socket(plain, server_hostname=host) as secure:
        secure.settimeout(3)
        try:
            return secure.recv(1)
        except TimeoutError:
            return b"accepted"


def session(local: LoopbackFederation) -> Any:
    from fedbilevel.federate.submit import Kit

    return Kit(local.admin_kit)


def test_a_renewed_certificate_joins_and_a_disabled_site_is_refused_until_it_is_enabled(
    local: LoopbackFederation, tmp_path: Path
) -> None:
    assert until(lambda: joined(local) == 1), "the site joins with its first certificate"
    startup = local.kit(SITE) / "startup"
    old = Path(shutil.copytree(startup, tmp_path / "old"))
    fresh = renewed(local) / "startup"
    assert (fresh / "rootCA.pem").read_bytes() == (old / "rootCA.pem").read_bytes(), "the authority is the same"
    assert (fresh / "client.crt").read_bytes() != (old / "client.crt").read_bytes()
    others = local.admin_kit.parents[1]
    same = [others / prod / SERVER / "startup" / "server.crt" for prod in ("prod_00", "prod_01")]
    assert same[0].read_bytes() == same[1].read_bytes(), "nobody else has to change anything"

    for name in ("client.crt", "client.key"):
        shutil.copy(fresh / name, startup / name)
    restart(local)
    assert until(lambda: joined(local) == 2), "the site joins with its new certificate"
    assert handshake(local, old) != b"", "there is no list of revoked certificates: the old one is still good"

    admin = session(local)
    try:
        admin.session(PATIENCE).disable_client(SITE)
        restart(local)
        log = folder_of(local) / f"{SERVER}.log"
        assert until(lambda: f"Reject disabled client registration: {SITE}" in log.read_text())
        assert joined(local) == 2 and admin.sites() == []
        admin.session(PATIENCE).enable_client(SITE)
        restart(local)
        assert until(lambda: joined(local) == 3), "the site joins again"
    finally:
        admin.drop()
