"""Client steps, their replies, the samples that they use, and the local loops that they are made of."""

from ._loops import sgd, svrg, walk
from ._replies import XY, YY, Form, Next, Own, ReplyField, Role, Scalar, W, X, Y, present
from ._samples import (
    Chance,
    Chances,
    Descriptor,
    Draw,
    Epochs,
    PartName,
    PerClient,
    Sample,
    Samples,
    Stream,
    draw,
    place_of,
)
from ._step import Step, Use, client_step, find_step

__all__ = [
    "XY",
    "YY",
    "Chance",
    "Chances",
    "Descriptor",
    "Draw",
    "Epochs",
    "Form",
    "Next",
    "Own",
    "PartName",
    "PerClient",
    "ReplyField",
    "Role",
    "Sample",
    "Samples",
    "Scalar",
    "Step",
    "Stream",
    "Use",
    "W",
    "X",
    "Y",
    "client_step",
    "draw",
    "find_step",
    "place_of",
    "present",
    "sgd",
    "svrg",
    "walk",
]
