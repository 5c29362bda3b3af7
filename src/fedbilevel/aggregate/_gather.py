"""The replies of a round, kept until a rule aggregates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax.numpy as jnp
import numpy as np

from ..engines import Call, Reason, Replies
from ..rng import Address
from ..steps import present
from ._mean import Accumulator, Mean, not_finite
from ._rule import START, Place, Rule, placed, quorum, remembers
from ._rules import WeightedMean, differences

Gather = Callable[[Call], Accumulator]


@dataclass(frozen=True)
class GatherBy:
    """Makes the accumulators of a rule that is given all rows of a round; `fewest` is that of the rule."""

    rule: Rule

    @property
    def fewest(self) -> int:
        return quorum(self.rule)

    def __call__(self, call: Call) -> Accumulator:
        return Rows(self.rule, call.before, call.address)


@runtime_checkable
class Remembering(Protocol):
    """An accumulator whose rule may remember."""

    def recall(self, last: dict[str, np.ndarray]) -> None:
        """Use what is remembered of the last round of the same step, and replace it by the value of this one."""


def remembering(gathered: Accumulator) -> TypeGuard[Remembering]:
    """Whether the rule of an accumulator may remember."""
    return _is_remembering(type(gathered))


@lru_cache
def _is_remembering(kind: type) -> bool:
    return issubclass(kind, Remembering)


def gather_by(rule: Rule | None) -> Gather:
    """Return the maker of each round's accumulator: a running sum for the mean, all rows for any other rule."""
    return (lambda call: Mean()) if rule is None or isinstance(rule, WeightedMean) else GatherBy(rule)


def rule_of(gather: Gather) -> Rule | None:
    """The rule of a maker of `gather_by`; None for the mean."""
    return gather.rule if isinstance(gather, GatherBy) else None


class Rows:
    """The valid replies of a round, which are all kept until a rule aggregates them, in the order of the clients.

    `before` holds the vectors of which some fields are the next value. For these fields, the rule is given the
    differences to the vectors, and remembers a difference.
    """

    def __init__(self, rule: Rule, before: Mapping[str, Any], address: Address = START) -> None:
        self._rule, self._before, self._address = rule, before, address
        self._clients: list[int] = []
        self._rows: dict[str, list[np.ndarray]] = {}
        self._weights: list[np.ndarray] = []
        self._empty: Any = None
        self._last: dict[str, np.ndarray] = {}
        self.count = 0

    def recall(self, last: dict[str, np.ndarray]) -> None:
        """Use what is remembered of the last round of the same step, and replace it by the value of this one."""
        self._last = last

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Keep stacked replies; return the clients whose reply is not used because a vector is not finite."""
        rejected = not_finite(replies)
        valid = np.asarray([client not in rejected for client in replies.clients], bool)
        for name in present(replies.reply):
            self._rows.setdefault(name, []).append(np.asarray(getattr(replies.reply, name))[valid])
        self._clients += [client for client in replies.clients if client not in rejected]
        self._weights.append(weights[valid])
        self._empty = replies.reply._replace(**dict.fromkeys(replies.reply._fields))
        self.count += int(valid.sum())
        return rejected

    @cached_property
    def value(self) -> Any:
        """The result of the round. What it is made of becomes the memory, so it is computed once."""
        # Replies arrive in any order, and the result must not depend on it to the last bit.
        own = self._clients
        order = slice(None) if own == sorted(own) else np.argsort(own, kind="stable")
        weights = np.concatenate(self._weights).astype(np.float64)[order]
        results = {name: self._together(name, order, weights) for name in self._rows}
        if remembers(self._rule):
            self._last.clear()
            self._last.update({name: result for name, (result, _) in results.items()})
        return self._empty._replace(**{name: self._whole(name, *result) for name, result in results.items()})

    def _together(
        self, name: str, order: slice | np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        """What the rule makes of a field, and the shape of the field."""
        stacked = np.concatenate(self._rows[name])[order]
        rows = stacked.reshape(len(stacked), -1)
        if name in self._before:
            rows = differences(rows, np.asarray(self._before[name]))
        last = self._last.get(name)
        known = last is not None and last.shape == rows.shape[1:]
        rule = placed(self._rule, Place(self._address, last if known else None))
        return np.asarray(rule(rows, weights), np.float32), stacked.shape[1:]

    def _whole(self, name: str, result: np.ndarray, shape: tuple[int, ...]) -> Any:
        if name not in self._before:
            return jnp.asarray(result.reshape(shape))
        return jnp.asarray(np.asarray(self._before[name]) + result, jnp.float32)
