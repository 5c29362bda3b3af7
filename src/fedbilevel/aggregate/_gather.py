"""The replies of a round, kept until a rule aggregates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..engines import Call, Reason, Replies
from ..steps import present
from ._mean import Accumulator, Mean, not_finite
from ._rule import Rule, quorum
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
        return Rows(self.rule, call.before)


def gather_by(rule: Rule | None) -> Gather:
    """Return the maker of each round's accumulator: a running sum for the mean, all rows for any other rule."""
    return (lambda call: Mean()) if rule is None or isinstance(rule, WeightedMean) else GatherBy(rule)


class Rows:
    """The valid replies of a round, which are all kept until a rule aggregates them.

    `before` holds the vectors of which some fields are the next value. For these fields, the rule is given the
    differences to the vectors.
    """

    def __init__(self, rule: Rule, before: Mapping[str, Any]) -> None:
        self._rule, self._before = rule, before
        self._rows: dict[str, list[np.ndarray]] = {}
        self._weights: list[np.ndarray] = []
        self._empty: Any = None
        self.count = 0

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Keep stacked replies; return the clients whose reply is not used because a vector is not finite."""
        rejected = not_finite(replies)
        valid = np.asarray([client not in rejected for client in replies.clients], bool)
        for name in present(replies.reply):
            self._rows.setdefault(name, []).append(np.asarray(getattr(replies.reply, name))[valid])
        self._weights.append(weights[valid])
        self._empty = replies.reply._replace(**dict.fromkeys(replies.reply._fields))
        self.count += int(valid.sum())
        return rejected

    @property
    def value(self) -> Any:
        weights = np.concatenate(self._weights).astype(np.float64)
        return self._empty._replace(**{name: self._together(name, weights) for name in self._rows})

    def _together(self, name: str, weights: np.ndarray) -> Any:
        stacked = np.concatenate(self._rows[name])
        rows = stacked.reshape(len(stacked), -1)
        if name not in self._before:
            return jnp.asarray(self._rule(rows, weights).reshape(stacked.shape[1:]), jnp.float32)
        before = np.asarray(self._before[name])
        return jnp.asarray(before + self._rule(differences(rows, before), weights), jnp.float32)
