"""Local privacy of simulated clients: an engine whose clients add noise to their replies before sending them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..engines import Call, Engine, Replies
from ..privacy import Privacy, noisy
from ..rng import Kind


class NoisyReplies:
    """An engine with local privacy: clients clip their contributions and add noise before sending them.

    Probes get no noise, because a private run has no probes.
    """

    def __init__(self, engine: Engine, privacy: Privacy) -> None:
        self.problem, self.clients = engine.problem, engine.clients
        self.capabilities = dataclasses.replace(engine.capabilities, adds_noise=True)
        self._engine, self._privacy = engine, privacy

    def replies(self, call: Call) -> Iterator[Replies]:
        for chunk in self._engine.replies(call):
            made = noisy(chunk, call, self._privacy) if call.kind is Kind.ROUND else None
            yield chunk if made is None else made

    def close(self) -> None:
        self._engine.close()
