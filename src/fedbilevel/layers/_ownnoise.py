"""A site's own privacy: it clips all that it sends and adds noise, whatever the server asks.

    [privacy]                                in the site's TOML
    noise = 1.0                              multiplier σ: the noise has deviation σ C
    clip = 1.0                               bound C, or one for each field: { q = 2.0, y = 0.03, ... }
    limit = 8.0                              refuse uploads that would raise epsilon above it (default: no limit)
    delta = 1e-5

The noise of an upload is drawn from the site's secret (`privacy.key`), the request, the noise multiplier, the
bound and the clipped contribution. A repeated request therefore gets the same bits, also after a crash, and
reveals nothing new. If anything differs, so does the noise. All uploads are counted in `privacy.json`, each with
its noise, before they are sent. The two files are made together, and a site that has lost one of them does not
start.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..engines import Call, Engine, Replies
from ..errors import Refused, SettingsError, StepError
from ..files import arrays_digest, write_whole
from ..privacy import Privacy, Secret, accounting, local_epsilon, noisy, read_key
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
        self._secret = Secret(_opened(folder))

    def replies(self, call: Call) -> Iterator[Replies]:
        if call.kind is not Kind.ROUND:
            raise Refused(f"{call.step.name}: this site has [privacy] and answers no probe")
        for chunk in self._engine.replies(call):
            made = noisy(chunk, call, self._privacy, self._secret)
            if made is None:
                raise StepError(f"{call.step.name}: its reply has no form to which noise could be added")
            released = {name: np.asarray(getattr(made.reply, name)) for name in present(made.reply)}
            self._book(arrays_digest(released, self._secret.request(call).hex()), len(released))
            yield made

    def close(self) -> None:
        self._engine.close()

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
                raise Refused(
                    f"this site uploads no more: epsilon would be {epsilon:.3g}, its limit is {self._limit:g}"
                )
            _write(self._folder / SPENT, spent)

    def _epsilon(self, precision: float) -> float:
        """ε of uploads with this sum of 1/σ²: together they are one upload, of σ = precision^(-1/2)."""
        return local_epsilon(1, precision**-0.5, self._privacy.delta)


def _opened(folder: Path) -> bytes:
    """The secret of a site, whose account of uploads must be beside it; both are made if neither is there.

    The account comes first. If the power fails between the two, there is an account of nothing, which is taken.
    """
    key, account = folder / KEY, folder / SPENT
    if account.exists() and not key.exists() and _read(account)["uploads"]:
        raise SettingsError(
            f"{account} counts uploads whose secret is missing; restore {key}, or delete both to begin anew: "
            "all that was uploaded before then has to be added to epsilon by hand"
        )
    if key.exists() and not account.exists():
        raise SettingsError(
            f"{key} has no account of its uploads beside it; restore {account}, or delete both to begin anew: all "
            "that was uploaded before then has to be added to epsilon by hand"
        )
    if not account.exists():
        _write(account, {"uploads": 0, "precision": 0.0, "recent": []})
    secret = read_key(key)
    _read(account)
    return secret


def _write(file: Path, spent: dict[str, Any]) -> None:
    try:
        write_whole(file, json.dumps(spent).encode(), file.with_name(f".{file.name}.tmp"))
    except OSError as error:
        raise SettingsError(f"{file} cannot be written, and counts uploads: {error.strerror}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        spent = json.loads(file.read_text())
        recent = [str(digest) for digest in spent["recent"]]
        return {"uploads": int(spent["uploads"]), "precision": float(spent["precision"]), "recent": recent}
    except (OSError, ValueError, KeyError, TypeError):
        raise SettingsError(f"{file} is damaged: it counts what was uploaded; restore it") from None
