"""A whole federation on this machine, over the loopback address.

The federation is provisioned in a folder, and its server and its sites run as separate processes. Everything
else is as it is between machines: one authority signs all certificates, connections use mutual TLS, and every
participant has a kit. The server is named `localhost`, which FLARE binds to 127.0.0.1; with any other name it
would listen on every address.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from ..errors import FedBilevelError, SettingsError
from ..layers import SitePrivacy
from ..problems import Custom, HyperRepresentation, PersonalHeads
from ..settings import to_mapping
from ..spec import Spec
from .sitefile import write_rows
from .startup import Say, of_server, of_site

if TYPE_CHECKING:
    import psutil

ADMIN = "admin@fedbilevel.org"
PROJECT = "fedbilevel"
SERVER = "localhost"
_MARK = "FEDBILEVEL_KIT"  # This variable in the environment of a process says which participant it belongs to.


def simulated_sites(spec: Spec, folder: Path, names: list[str]) -> dict[str, Path]:
    """Write a folder for each site, with its rows and its TOML, and return the TOML files by name.

    Client i of the spec's data becomes site i.
    """
    task = spec.task()
    problem: dict[str, Any] = {"name": spec.to_mapping()["problem"]["name"], **to_mapping(spec.problem)}
    if isinstance(spec.problem, HyperRepresentation | PersonalHeads):
        dataset = spec.data.dataset
        problem |= {"shape": list(dataset.shape), "classes": dataset.classes}
    elif isinstance(spec.problem, Custom):
        problem = {"python": spec.problem.function, **spec.problem.arguments}
    elif not hasattr(spec.problem, "remote"):
        raise SettingsError(
            f"--simulate-sites has no problem {problem['name']}; start sites of your own with --kit"
        )
    module = type(spec.algorithm).__module__  # the module of the method whose steps the sites will run
    steps = [] if module.partition(".")[0] == "fedbilevel" else [module]
    files = {}
    for client, name in enumerate(names):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        write_rows(place / "rows.npz", task.clients.load(client))
        files[name] = place / "site.toml"
        content: dict[str, Any] = {"audit": "audit.jsonl", "steps": steps}
        content |= {"data": {"npz": "rows.npz"}, "problem": problem}
        if spec.privacy.mode == "local":
            asked = spec.privacy
            own = SitePrivacy(noise=asked.noise, clip=asked.clip, delta=asked.delta)
            content["privacy"] = to_mapping(own)
        files[name].write_text(tomli_w.dumps(content))
    return files


class LoopbackFederation:
    """A server and sites that run on this machine for the duration of a `with` block.

    folder  the folder for kits, logs and the files that FLARE writes
    sites   the TOML file of each site, by the name of the site
    """

    def __init__(self, folder: Path, sites: Mapping[str, Path]) -> None:
        self._folder, self._sites = folder.resolve(), dict(sites)
        self._kits = self._folder / "kits" / PROJECT / "prod_00"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts: dict[str, int] = {}
        self._before: Any = None

    @property
    def admin_kit(self) -> Path:
        """The kit of the admin, who submits runs."""
        return self.kit(ADMIN)

    def kit(self, name: str) -> Path:
        """The kit of a participant."""
        return self._kits / name

    def site_file(self, name: str) -> Path:
        """The TOML file of a site."""
        return self._sites[name]

    def __enter__(self) -> LoopbackFederation:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _leave)  # otherwise our processes would outlive us
        try:
            self.provision()
            self.start(SERVER)
            for name in self._sites:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self.processes, patience=10.0)
        self.processes.clear()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def start(self, name: str) -> None:
        """Start the server or a site, as `fedbilevel server` and `fedbilevel site --no-check` do.

        What they would say, and the output of FLARE, are appended to NAME.log.
        """
        modules = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path.cwd()))))
        own = {_MARK: str(self.kit(name)), "PYTHONPATH": modules}  # also those of a spec
        with (self._folder / f"{name}.log").open("a") as log:
            say: Say = partial(print, file=log, flush=True)
            kit = self.kit(name)
            start = of_server(kit, say) if name == SERVER else of_site(self._sites[name], kit, say)
            self.processes[name] = subprocess.Popen(
                start.command,
                env=start.environment | own,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.starts[name] = self.starts.get(name, 0) + 1

    def revive(self) -> list[str]:
        """Restart every participant whose process has ended, and return their names."""
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        for name in ended:
            self.kill(name)  # A killed parent may have left children behind.
            self.start(name)
        return ended

    def kill(self, name: str) -> None:
        """Kill the server or a site, and every process that it started, as `kill -9` does."""
        self._end([name], patience=0.0)

    def members(self, names: Iterable[str]) -> set[psutil.Process]:
        """Return all processes of these participants.

        They are found by their environment. FLARE starts the processes of a job in new sessions, and a process
        whose parent was killed is no longer a descendant of ours.
        """
        import psutil

        kits, found = {str(self.kit(name)) for name in names}, set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # The process ended meanwhile, or belongs to another user.
                if _environment(process).get(_MARK) in kits:
                    found.add(process)
        return found

    def _end(self, names: Iterable[str], patience: float) -> None:
        import psutil

        names, limit = list(names), time.monotonic() + patience
        asked: set[psutil.Process] = set()
        while (alive := self.members(names)) or any(self.processes[name].poll() is None for name in names):
            late = time.monotonic() >= limit
            for process in alive if late else alive - asked:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            asked |= alive
            time.sleep(0.05)

    def provision(self) -> None:
        """Create the authority and a kit for each participant, unless they exist already."""
        if self.admin_kit.exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        project = self._folder / "project.json"  # FLARE reads YAML, of which JSON is a subset.
        project.write_text(json.dumps(_project(list(self._sites), _free_port()), indent=2))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "nvflare.cli",
                "provision",
                "-p",
                str(project),
                "-w",
                str(self._folder / "kits"),
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if not self.admin_kit.exists():
            raise FedBilevelError(f"provisioning failed: {(done.stdout + done.stderr)[-500:]}")
        self._settle_server()

    def _settle_server(self) -> None:
        """Give the server a folder for its files; by default, all FLARE servers of a machine share one."""
        default = self.kit(SERVER) / "local" / "resources.json.default"
        text = default.read_text()
        resources = json.loads(text.replace("/tmp/nvflare", str(self._folder / "server")))
        resources["servers"][0]["heart_beat_timeout"] = 30
        default.write_text(json.dumps(resources, indent=2))


def _project(sites: list[str], port: int) -> dict[str, Any]:
    builders = ("workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder")
    return {
        "api_version": 3,
        "name": PROJECT,
        "description": "a federation on one machine",
        "participants": [
            {"name": SERVER, "type": "server", "org": PROJECT, "fed_learn_port": port, "admin_port": port},
            *({"name": name, "type": "client", "org": PROJECT} for name in sites),
            {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "project_admin"},
        ],
        "builders": [
            {"path": f"nvflare.lighter.impl.{builder}", "args": _ARGUMENTS.get(builder, {})}
            for builder in (*builders, "signature.SignatureBuilder")
        ],
    }


_ARGUMENTS = {"static_file.StaticFileBuilder": {"config_folder": "config", "scheme": "tcp"}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _leave(number: int, _: object) -> None:
    """Exit through `sys.exit`, so that every `with` block is left properly."""
    sys.exit(128 + number)


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process.

    It is empty for a moment while the process is in an `exec`, so we try a few times. It is always empty for a
    thread of the kernel, which has no executable.
    """
    tries = 10
    while not (found := process.environ()) and process.exe() and (tries := tries - 1):
        time.sleep(0.005)
    return found
