"""Layers around an engine: the noise of local privacy, attacks, injected faults, and a site's own noise."""

from ._attack import Attack, AttackSettings, FlippedLabels
from ._chaos import Chaos, ChaosSettings, load_chaos
from ._noise import NoisyReplies
from ._ownnoise import OwnNoise, SitePrivacy
from ._stack import stacked

__all__ = [
    "Attack",
    "AttackSettings",
    "Chaos",
    "ChaosSettings",
    "FlippedLabels",
    "NoisyReplies",
    "OwnNoise",
    "SitePrivacy",
    "load_chaos",
    "stacked",
]
