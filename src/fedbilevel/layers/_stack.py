"""The order of the layers around an engine.

    chaos ( attack ( noise ( engine ) ) )

Honest clients clip and add noise before they send anything. Attackers replace their replies after that, so they
obey no bound. Faults of the network come last and affect honest clients and attackers alike, so that no other
layer hides a fault.
"""

from __future__ import annotations

from ..engines import Engine
from ..privacy import Privacy, Secret
from ._attack import AttackSettings
from ._chaos import Chaos, ChaosSettings
from ._noise import NoisyReplies


def stacked(
    engine: Engine,
    *,
    privacy: Privacy | None = None,
    secret: Secret | None = None,
    attack: AttackSettings | None = None,
    chaos: ChaosSettings | None = None,
    seed: int = 0,
) -> Engine:
    """The engine with the requested layers, in their order. Noise is drawn from `secret` (default: a new one)."""
    if privacy is not None and privacy.mode == "local" and not engine.capabilities.adds_noise:
        engine = NoisyReplies(engine, privacy, secret or Secret())
    if attack is not None:
        engine = attack.wrap(engine, seed)
    if chaos is not None:
        engine = Chaos(engine, chaos)
    return engine
