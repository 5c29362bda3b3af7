"""Local privacy of simulated clients: an engine whose clients add noise to their replies before sending them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..engines import Call, Engine, Replies
from ..errors import StepError
from ..privacy import Privacy, Secret, noisy
from ..rng import Kind


class NoisyReplies:
    """An engine with local privacy: clients clip their contributions and add noise before sending them.

    The noise of all clients is drawn from one secret, because one process simulates all of them.
    """

    def __init__(self, engine: Engine, privacy: Privacy, secret: Secret) -> None:
        self.problem, self.clients = engine.problem, engine.clients
        self.capabilities = dataclasses.replace(engine.capabilities, adds_noise=True)
        self._engine, self._privacy, self._secret = engine, privacy, secret

    def replies(self, call: Call) -> Iterator[Replies]:
        if call.kind is Kind.PROBE:
            raise StepError(f"{call.step.name}: a measurement without noise is not private; there is none here")
        for chunk in self._engine.replies(call):
            made = noisy(chunk, call, self._privacy, self._secret) if call.kind is Kind.ROUND else None
            yield chunk if made is None else made

    def close(self) -> None:
        self._engine.close()
