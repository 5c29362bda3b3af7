"""The secret of a private run, and the noise that is drawn from it.

The seed of a run is no secret: it is in the spec and in the run folder, and all seeds that are in use can be
tried. Noise and cohorts of a private run are therefore drawn from 32 random bytes. They are in a file that only
its owner can read (`noise.key` in the folder of FEDBILEVEL_STATE, or in the user's folder for state), and nowhere
else: in no spec, no run folder, no message and no log.

    key of a run       HMAC(secret, the run's random name)
    cohorts, samples   HMAC(key of the run, seed), the secret root of all addresses
    noise              HMAC(key of the run, all that determines the release, and the clipped values themselves)

The noise of a release is not fresh, but it is as good as fresh. If the same values are released again by the same
call, as in a resumed run, the noise is the same and the second release tells nothing new. If a single bit of the
values differs, because a client is missing or a step size was halved, the noise is another one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from platformdirs import user_state_path

from ..engines import Call
from ..engines.flare.wire import descriptor_to_json
from ..errors import SettingsError
from ..files import sync_folder
from ..rng import Keys

KEY = "noise.key"
BITS = 256


@dataclass(frozen=True)
class Secret:
    """32 random bytes, from which the cohorts and the noise of a private run are drawn."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(BITS // 8), repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != BITS // 8:
            raise SettingsError(f"secret has {len(self.key)} bytes; give {BITS // 8} random ones")

    def of_run(self, name: str) -> Secret:
        """The secret of a run with this name, which tells nothing about those of other runs."""
        return Secret(self._digest(b"run", name.encode()))

    def root(self, seed: int) -> bytes:
        """The root of the addresses of a run with this seed."""
        return self._digest(b"root", str(seed).encode())

    def request(self, call: Call) -> bytes:
        """A digest of a call: everything that its replies depend on, except the clients' data."""
        samples = {name: descriptor_to_json(descriptor) for name, descriptor in sorted(call.samples.items())}
        drawn = call.address.root
        keys = {name: key.hex() for name, key in drawn.by_argument.items()} if isinstance(drawn, Keys) else {}
        asked = [
            call.step.address,
            call.kind.value,
            call.address.place,
            call.clients,
            samples,
            sorted(keys.items()),
        ]
        parts = [json.dumps(asked).encode(), repr(sorted(call.constants.items())).encode()]
        rows = {name: [each.values[client] for client in call.clients] for name, each in call.rows.items()}
        for given in (call.vectors, call.arrays, rows):
            for name, vector in sorted(given.items()):
                parts += [f"{name} {np.shape(vector)}".encode(), np.asarray(vector).tobytes()]
        return self._digest(b"request", *parts)

    def noise(self, *release: Any, shape: tuple[int, ...]) -> np.ndarray:
        """ξ, standard normal, for a release that is determined by these numbers, words, bytes and arrays."""
        parts = [r if isinstance(r, bytes) else repr(r).encode() for r in release]
        return standard_normal(self._digest(b"noise", *parts, repr(shape).encode()), shape)

    def _digest(self, purpose: bytes, *parts: bytes) -> bytes:
        """A keyed digest of parts. Their lengths enter, so that no two lists of parts have the same digest."""
        made = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in (purpose, *parts):
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.digest()


def standard_normal(key: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal float32 numbers from a key, by SHAKE-256 and the transform of Box and Muller.

    The generators of NumPy are made for simulation: nobody claims that the numbers which an attacker sees, for
    instance where all contributions are zero, tell nothing about the others. SHAKE-256 is made for that.
    """
    count = int(np.prod(shape, dtype=np.int64))
    pairs = (count + 1) // 2
    bits = np.frombuffer(hashlib.shake_256(key).digest(16 * pairs), "<u8")
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # inside of (0, 1)
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[:count].reshape(shape).astype(np.float32)


def machine_secret() -> Secret:
    """The secret of this user on this machine; it is made when it is missing."""
    return Secret(read_key(state_folder() / KEY))


def state_folder() -> Path:
    """The folder for what must outlive a run: FEDBILEVEL_STATE if it is set, else the user's folder for state."""
    return Path(os.environ.get("FEDBILEVEL_STATE") or user_state_path("fedbilevel")).expanduser()


def read_key(file: Path) -> bytes:
    """The secret in a file that only its owner can read. A missing file is made, whole or not at all."""
    try:
        if not file.exists():
            _make_key(file)
        with file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            text = stream.read(2 * BITS)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} cannot be used as a secret: {error}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise SettingsError(
            f"{file} is a secret that others can read: its mode is {stat.S_IMODE(found.st_mode):o} and its owner "
            f"{found.st_uid}; if nobody has read it, make it your own file with mode 600, else delete it"
        )
    try:
        return Secret(bytes.fromhex(text.decode("ascii").strip())).key
    except (ValueError, SettingsError):
        raise SettingsError(
            f"{file} is not a secret of {BITS} bits; restore it, or delete it to make another"
        ) from None


def _make_key(file: Path) -> None:
    """Write a new secret under another name first, so that no process ever reads half of one."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_hex(BITS // 8) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):  # another process was faster, and its secret counts
            os.link(temporary, file)
        sync_folder(file.parent)
    finally:
        temporary.unlink(missing_ok=True)
