"""Layers around an engine: honest noise, attacks, faults on purpose, and a site's own noise."""

from .attack import Attack, AttackSettings, FlippedLabels
from .chaos import Chaos, ChaosSettings, load_chaos
from .noise import NoisyReplies
from .ownnoise import OwnNoise, SitePrivacy
from .stack import stacked

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
