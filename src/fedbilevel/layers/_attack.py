"""Clients that lie, to test how robust a federation is. A fixed set of attackers is drawn from a seed.

Attackers follow the protocol: their replies have the right fields and shapes, and are finite. Let u_i be the
honest contribution of client i to a field. It is the client's reply or, if the reply is the next value of a
vector, the difference to that vector; with the target "message" it is always the reply. Let μ and σ be the mean
and the standard deviation of u_i over the honest clients of the cohort. The attackers contribute

    sign-flip    -s u_i
    scaled        s u_i
    alie          μ - s σ      (Baruch et al. 2019): as far from μ as possible without standing out
    ipm          -s μ          (Xie et al. 2020): against the mean of the honest clients
    label-flip    honest work on the labels C-1, ..., 0 instead of 0, ..., C-1

The attackers of `alie` and `ipm` know the honest replies of their round. Probes are answered honestly, because
they are our measurements; a client with flipped labels answers them from its flipped data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from .. import rng
from ..data import ClientData, Clients, ClientSize, Part, test_rows
from ..engines import Call, Engine, Replies
from ..errors import SettingsError
from ..rng import Kind
from ..settings import Positive, about, settings
from ..steps import present

Lie = Literal["sign-flip", "scaled", "alie", "ipm"]
Target = Literal["update", "message"]
FACTORS: dict[str, float] = {"sign-flip": -1.0, "scaled": 10.0, "ipm": -0.5}


@settings
class AttackSettings:
    """Clients that lie, to test how robust the aggregator is. Without a kind there is no attack."""

    kind: Annotated[
        Literal["sign-flip", "scaled", "alie", "ipm", "label-flip"] | None,
        about("sign-flip, scaled, alie, ipm (change replies) or label-flip (changes data); default: no attack"),
    ] = None
    share: Annotated[Annotated[float, Field(ge=0, le=1)], about("share of the clients that attack")] = 0.2
    scale: Annotated[
        Positive | None,
        about("factor; default: 1 for sign-flip, 10 for scaled, 0.5 for ipm, the largest that hides for alie"),
    ] = None
    target: Annotated[
        Target, about("what attackers change if a reply is a vector's next value: its update, or the message")
    ] = "update"

    def wrap_clients(self, clients: Clients, classes: int | None, seed: int) -> Clients:
        """The clients with the labels that they use; attackers have flipped labels if the kind says so."""
        if self.kind != "label-flip":
            return clients
        if classes is None:
            raise SettingsError("attack.kind = 'label-flip' is wrong: the problem has no labels; use sign-flip")
        return FlippedLabels(clients, attackers(clients.count, self.share, seed), classes)

    def wrap(self, engine: Engine, seed: int) -> Engine:
        """The engine with the attack around it, if the attack changes replies."""
        if self.kind is None or self.kind == "label-flip":
            return engine
        return Attack(engine, kind=self.kind, share=self.share, scale=self.scale, target=self.target, seed=seed)


class Attack:
    """An engine in which some clients lie in every round.

    kind    the attack
    share   the share of the registered clients that attack
    scale   s of the table above (default: a value that fits the kind)
    target  what u_i is if a reply is the next value of a vector: "update", the difference to it, or "message"
    seed    decides which clients attack
    """

    def __init__(
        self,
        engine: Engine,
        *,
        kind: Lie,
        share: float = 0.2,
        scale: float | None = None,
        target: Target = "update",
        seed: int = 0,
    ) -> None:
        self.problem, self.clients = engine.problem, engine.clients
        self.capabilities = engine.capabilities
        self.attackers = attackers(engine.clients.count, share, seed)
        self._engine, self._kind, self._scale, self._of = engine, kind, scale, target
        usual = FACTORS.get(kind, 0.0)
        self._factor = np.float32(usual if scale is None else math.copysign(scale, usual))

    def replies(self, call: Call) -> Iterator[Replies]:
        """The replies of the engine, with those of the attackers replaced in rounds."""
        if call.kind is not Kind.ROUND:
            yield from self._engine.replies(call)
            return
        if self._kind in ("sign-flip", "scaled"):
            for chunk in self._engine.replies(call):
                yield self._corrupted(call, chunk, lambda name, own: self._factor * own)
            return
        chunks = list(self._engine.replies(call))
        target = {name: self._target(call, name, chunks) for name in _fields(chunks)}
        for chunk in chunks:
            yield self._corrupted(call, chunk, lambda name, own: target[name])

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _corrupted(self, call: Call, chunk: Replies, lie: Callable[[str, np.ndarray], Any]) -> Replies:
        liars = [i for i, client in enumerate(chunk.clients) if client in self.attackers]
        if not liars:
            return chunk
        changed = {}
        for name in _fields([chunk]):
            rows = np.array(getattr(chunk.reply, name))
            before = self._before(call, name)
            rows[liars] = before + lie(name, rows[liars] - before)
            changed[name] = rows
        return dataclasses.replace(chunk, reply=chunk.reply._replace(**changed))

    def _target(self, call: Call, name: str, chunks: Sequence[Replies]) -> Any:
        """The contribution of each attacker to a field. If no client of the cohort is honest, all are used."""
        rows = np.concatenate([np.asarray(getattr(chunk.reply, name)) for chunk in chunks if chunk.clients])
        honest = np.asarray([c not in self.attackers for chunk in chunks for c in chunk.clients])
        own = (rows[honest] if honest.any() else rows) - self._before(call, name)
        if self._kind == "ipm":
            return self._factor * own.mean(0)
        scale = hidden_scale(len(rows), int((~honest).sum())) if self._scale is None else self._scale
        return own.mean(0) - np.float32(scale) * own.std(0)

    def _before(self, call: Call, name: str) -> Any:
        """The vector to which a contribution to a field is added."""
        given = call.before if self._of == "update" else {}
        return np.asarray(given.get(name, np.float32(0)))


class FlippedLabels:
    """Clients of which the attackers have the label C-1-l wherever the data have l."""

    def __init__(self, clients: Clients, attackers: frozenset[int], classes: int) -> None:
        self.count, self.capacity, self.test_rows = clients.count, clients.capacity, test_rows(clients)
        self.attackers, self._clients, self._classes = attackers, clients, classes

    def size(self, client: int) -> ClientSize:
        return self._clients.size(client)

    def load(self, client: int) -> ClientData:
        data = self._clients.load(client)
        if client not in self.attackers:
            return data
        lower, upper = (Part(p.inputs, self._classes - 1 - p.targets) for p in (data.lower, data.upper))
        return ClientData(lower, upper, data.test)


def attackers(clients: int, share: float, seed: int) -> frozenset[int]:
    """The clients that attack: a share of all clients, drawn at (seed, "attackers")."""
    chosen = rng.generator(seed, "attackers").choice(clients, round(share * clients), replace=False)
    return frozenset(int(c) for c in chosen)


def hidden_scale(clients: int, liars: int) -> float:
    """ALIE's s for m liars among n clients.

    The liars and the honest clients that are further off than μ - s σ together form a majority:
    s = Φ^{-1}((n - m - k) / (n - m)),  k = floor(n/2 + 1) - m,  limited to [0, 3].
    """
    honest, helpers = clients - liars, clients // 2 + 1 - liars
    share = (honest - helpers) / honest if honest else 1.0
    return min(max(NormalDist().inv_cdf(min(max(share, 0.5), 0.9986)), 0.0), 3.0)


def _fields(chunks: Sequence[Replies]) -> list[str]:
    reply = next((chunk.reply for chunk in chunks if chunk.clients), None)
    return [] if reply is None else present(reply)
