"""A site's own privacy: it clips all that it sends and adds noise, whatever the server asks.

    [privacy]                                in the site's TOML
    noise = 1.0                              multiplier σ: the noise has deviation σ C
    clip = 1.0                               bound C, or one for each field: { q = 2.0, y = 0.03, ... }
    limit = 8.0                              refuse uploads that would raise epsilon above it (default: no limit)
    delta = 1e-5

The noise of an upload is drawn from the site's secret (`privacy.key`, made when it is missing), the request and
the clipped contribution. A repeated request therefore gets the same bits, also after a crash, and reveals nothing
new. If anything differs, so does the noise. All uploads are counted in `privacy.json`, each with its noise.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jax import Array
from pydantic import Field

from ..engines import Call, Engine, Replies
from ..engines.flare.wire import descriptor_to_json
from ..errors import SettingsError, StepError
from ..privacy import Privacy, accounting, local_epsilon, noisy
from ..rng import Kind
from ..settings import Positive, about, settings
from ..steps import present

KEY, SPENT = "privacy.key", "privacy.json"
RECENT = 100  # the number of past replies that are recognised; an outer iteration has fewer


@settings
class SitePrivacy:
    """The section [privacy] of a site's TOML."""

    noise: Annotated[Positive, about("noise multiplier σ: the noise has deviation σ C")]
    clip: Annotated[Positive | dict[str, Positive], about("bound C on the norm of a contribution")] = 1.0
    delta: Annotated[Annotated[float, Field(gt=0, lt=1)], about("δ, at which epsilon is given")] = 1e-5
    limit: Annotated[Positive | None, about("largest epsilon that uploads may reach; default: no limit")] = None


class OwnNoise:
    """An engine of one client that adds noise. Its secret and its account of uploads are in a folder."""

    def __init__(self, engine: Engine, privacy: SitePrivacy, folder: Path) -> None:
        self.problem, self.clients = engine.problem, engine.clients
        self.capabilities = dataclasses.replace(engine.capabilities, adds_noise=True)
        self._engine, self._limit, self._folder = engine, privacy.limit, folder
        self._privacy = Privacy(mode="local", clip=privacy.clip, noise=privacy.noise, delta=privacy.delta)
        if self._limit is not None:
            accounting()
        self._secret = _secret(folder / KEY)
        _read(folder / SPENT)

    def replies(self, call: Call) -> Iterator[Replies]:
        if call.kind is not Kind.ROUND:
            raise StepError(f"{call.step.name}: this site has [privacy] and answers no probe")
        request = self._digest(call)

        def source(call: Call, name: str, clients: tuple[int, ...], rows: Array) -> list[np.random.Generator]:
            key = hmac.digest(request, name.encode() + np.asarray(rows).tobytes(), "sha256")
            return [np.random.Generator(np.random.Philox(np.random.SeedSequence(int.from_bytes(key))))]

        for chunk in self._engine.replies(call):
            made = noisy(chunk, call, self._privacy, source)
            if made is None:
                raise StepError(f"{call.step.name}: its reply has no form to which noise could be added")
            released = {name: np.asarray(getattr(made.reply, name)).tobytes() for name in present(made.reply)}
            self._book(hmac.digest(request, b"".join(released.values()), "sha256").hex(), len(released))
            yield made

    def close(self) -> None:
        self._engine.close()

    def _digest(self, call: Call) -> bytes:
        """The digest of the site's secret and of everything that a reply depends on, except the data."""
        samples = {name: descriptor_to_json(d) for name, d in call.samples.items()}
        address = [call.address.seed, call.address.kind.value, call.address.place]
        asked = [call.step.address, address, call.clients, sorted(call.constants.items()), samples]
        digest = hmac.new(self._secret, json.dumps(asked).encode(), hashlib.sha256)
        rows = {name: each.values[call.clients[0]] for name, each in call.rows.items()}
        for given in (call.vectors, call.arrays, rows):
            for name, vector in sorted(given.items()):
                digest.update(f"{name} {np.shape(vector)}".encode())
                digest.update(np.asarray(vector).tobytes())
        return digest.digest()

    def _book(self, released: str, uploads: int) -> None:
        """Count uploads before they are sent. A bitwise repetition, as after a crash, is counted only once."""
        with (self._folder / KEY).open() as lock:  # a site may take part in two runs at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            spent = _read(self._folder / SPENT)
            if released in spent["recent"]:
                return
            spent["uploads"] += uploads
            spent["precision"] += uploads / self._privacy.noise**2
            spent["recent"] = [*spent["recent"][1 - RECENT :], released]
            if self._limit is not None and (epsilon := self._epsilon(spent["precision"])) > self._limit:
                raise StepError(
                    f"this site uploads no more: epsilon would be {epsilon:.3g}, its limit is {self._limit:g}"
                )
            new = self._folder / f"{SPENT}.new"
            new.write_text(json.dumps(spent))
            new.replace(self._folder / SPENT)

    def _epsilon(self, precision: float) -> float:
        """ε of uploads with this sum of 1/σ²: together they are one upload, of σ = precision^(-1/2)."""
        return local_epsilon(1, precision**-0.5, self._privacy.delta)


def _secret(file: Path) -> bytes:
    """The secret in a file that only its owner can read. A missing file is created with a new secret."""
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_hex(32))
    except FileExistsError:
        pass
    except OSError as error:
        raise SettingsError(f"{file} cannot be made for [privacy]: {error.strerror}") from None
    secret = file.read_text().strip()
    if len(secret) < 32:
        raise SettingsError(f"{file} is not a secret; delete it, and a new one is made")
    return secret.encode()


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"uploads": 0, "precision": 0.0, "recent": []}
    try:
        spent = json.loads(file.read_text())
        recent = [str(digest) for digest in spent["recent"]]
        return {"uploads": int(spent["uploads"]), "precision": float(spent["precision"]), "recent": recent}
    except (OSError, ValueError, KeyError, TypeError):
        raise SettingsError(f"{file} is damaged: it counts what was uploaded; restore it") from None
