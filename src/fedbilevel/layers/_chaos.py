"""Injected faults: an engine around another one, whose clients vanish, are late, or send invalid replies.

The fault of a reply is drawn at (seed, "chaos", the call's address, attempt, client), so a run with faults can be
repeated and resumed like any other. The federation is told of each fault, and books it beside those it noticed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, final

import jax
import numpy as np
from pydantic import Field

from .. import rng
from ..data import Clients
from ..engines import Broken, Call, Capabilities, Engine, Fault, Reason, Replies
from ..errors import SettingsError
from ..problem import BilevelProblem
from ..reading import Unreadable, read_toml
from ..rng import Address, Kind
from ..settings import about, from_mapping, settings

Share = Annotated[float, Field(ge=0, le=1)]


@settings
class ChaosSettings:
    """How often replies are faulty, as shares of all replies. A reply has at most one fault."""

    drop: Annotated[Share, about("no answer at all")] = 0.0
    late: Annotated[Share, about("an answer after the deadline")] = 0.0
    twice: Annotated[Share, about("the same answer two times")] = 0.0
    nan: Annotated[Share, about("a vector with a NaN")] = 0.0
    infinity: Annotated[Share, about("a vector with an infinity")] = 0.0
    shape: Annotated[Share, about("a vector that is one entry short")] = 0.0
    dtype: Annotated[Share, about("a vector of float64")] = 0.0
    step: Annotated[Share, about("the reply of another step")] = 0.0
    stale: Annotated[Share, about("the reply of an earlier round")] = 0.0
    enormous: Annotated[Share, about("a vector times 1e30")] = 0.0
    seed: Annotated[int, Field(ge=0), about("the seed of the faults, separate from the run's")] = 0
    lateness: Annotated[float, Field(gt=0), about("seconds that a late answer takes")] = 3600.0

    def __post_init__(self) -> None:
        total = sum(getattr(self, kind) for kind in KINDS)
        if total > 1 + 1e-9:
            raise SettingsError(f"the shares of faults add up to {total:g}; make them at most 1 together")


KINDS = ("drop", "late", "twice", "nan", "infinity", "shape", "dtype", "step", "stale", "enormous")


NOTICED = {
    "drop": "no answer",
    "late": "late",
    "twice": "answered twice",
    "nan": "not finite",
    "infinity": "not finite",
    "shape": "of another shape",
    "dtype": "of another type",
    "step": "of another step",
    "stale": "of another round",
    "enormous": "too large",
}


def load_chaos(path: str | Path) -> ChaosSettings:
    """Read the settings from a TOML file."""
    try:
        values = read_toml(Path(path))
    except Unreadable as error:
        raise SettingsError(f"--chaos {path} {error}; give a TOML file of faults, as in docs/faults.md") from None
    return from_mapping(ChaosSettings, values, "chaos")


class Other(NamedTuple):
    """A reply that no step returns."""

    other: Any


@final
class Chaos:
    """An engine that injects faults into replies, as often as the settings say."""

    def __init__(self, engine: Engine, settings: ChaosSettings) -> None:
        self._engine, self._settings = engine, settings
        self.capabilities: Capabilities = dataclasses.replace(engine.capabilities, link_faults=self.broken)
        self._edges = np.cumsum([getattr(settings, kind) for kind in KINDS])

    @property
    def problem(self) -> BilevelProblem:
        """The problem of the engine."""
        return self._engine.problem

    @property
    def clients(self) -> Clients:
        """The clients of the engine."""
        return self._engine.clients

    def replies(self, call: Call) -> Iterator[Replies]:
        """The engine's replies: first those without a fault together, then each faulty reply separately.

        Measurements and local work of clients get no faults.
        """
        if call.kind is not Kind.ROUND:
            yield from self._engine.replies(call)
            return
        for replies in self._engine.replies(call):
            faults = {client: self.fault(call, client) for client in replies.clients}
            if not any(faults.values()):
                yield replies
                continue
            rows = jax.tree.map(np.asarray, replies.reply)
            well = [i for i, client in enumerate(replies.clients) if not faults[client]]
            yield dataclasses.replace(
                replies,
                clients=tuple(replies.clients[i] for i in well),
                reply=jax.tree.map(lambda a, well=well: a[well], rows),
            )
            for i, client in enumerate(replies.clients):
                kind = faults[client]
                if kind is not None:
                    own = jax.tree.map(operator.itemgetter([i]), rows)
                    yield from self._faulty(call, client, own, kind)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def broken(self, name: str, address: Address, weights: np.ndarray) -> dict[tuple[int, int], Broken]:
        """The faulty messages between neighbours, by (receiver, sender)."""
        found = {}
        for to, sender in zip(*np.nonzero(weights), strict=True):
            kind = None if to == sender else self._drawn(address, name, int(to), int(sender))
            if kind is not None:
                found[int(to), int(sender)] = Broken(kind, NOTICED[kind], lost=kind != "twice")
        return found

    def fault(self, call: Call, client: int) -> str | None:
        """The fault of this client's reply, or None."""
        return self._drawn(call.address, call.attempt, client)

    def _drawn(self, address: Address, *where: int | str) -> str | None:
        # A secret root is not needed here: the faults of a private run are told apart by their own seed.
        run = address.root if isinstance(address.root, int) else 0
        place = run, address.kind.value, address.place
        chance = rng.generator(self._settings.seed, "chaos", *place, *where).random()
        chosen = int(np.searchsorted(self._edges, chance, side="right"))
        return KINDS[chosen] if chosen < len(KINDS) else None

    def _faulty(self, call: Call, client: int, reply: Any, kind: str) -> Iterator[Replies]:
        told = {client: kind}
        alone = Replies(clients=(client,), reply=reply)
        if kind == "drop":
            yield Replies(refused={client: Reason(Fault.ABSENT, "no answer")}, injected=told)
        elif kind == "late":
            yield dataclasses.replace(alone, delay=self._settings.lateness, injected=told)
        elif kind == "twice":
            yield alone
            yield dataclasses.replace(alone, injected=told)
        elif kind == "step":
            yield dataclasses.replace(alone, reply=Other(np.zeros((1, 1), np.float32)), injected=told)
        elif kind == "stale":
            yield dataclasses.replace(alone, address=call.address._replace(place=-1), injected=told)
        else:
            yield dataclasses.replace(alone, reply=_first_changed(reply, CHANGES[kind]), injected=told)


def _with(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(a: np.ndarray) -> np.ndarray:
        made = np.array(a)
        made[..., :1] = value
        return made

    return change


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nan": _with(np.nan),
    "infinity": _with(np.inf),
    "shape": lambda a: a[..., :-1] if a.ndim > 1 else a[:, None],
    "dtype": lambda a: a.astype(np.float64),
    "enormous": lambda a: np.full_like(a, 1e30),
}


def _first_changed(reply: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """The reply with its first vector changed."""
    leaves, tree = jax.tree.flatten(reply)
    return jax.tree.unflatten(tree, [change(leaves[0]), *leaves[1:]])
