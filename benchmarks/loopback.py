"""A network namespace where nothing but loopback is up: Ray listens on every address that it finds."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys


def loopback_only(*command: str) -> list[str]:
    """A command in a network namespace of its own."""
    return ["unshare", "-r", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def can_unshare() -> bool:
    return bool(shutil.which("unshare") and shutil.which("ip")) and not subprocess.call(loopback_only("true"))


def stay_on_loopback() -> None:
    """Start this script anew in a namespace of its own, unless it is in one; end it where that cannot be done."""
    if {name for _, name in socket.if_nameindex()} == {"lo"}:
        return
    if not can_unshare():
        raise SystemExit("needs Linux namespaces: unshare -r -n and ip")
    command = loopback_only(sys.executable, *sys.argv)
    os.execvp(command[0], command)
