"""Client steps, their replies, the samples that they use, and the local loops that they are made of."""

from ._ahead import Moving, Rows, draw_ahead, moving_part, still_part, whole
from ._loops import sgd, svrg, walk
from ._replies import XY, YY, Form, Next, Own, ReplyField, Role, Scalar, X, Y, present
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
    "Moving",
    "Next",
    "Own",
    "PartName",
    "PerClient",
    "ReplyField",
    "Role",
    "Rows",
    "Sample",
    "Samples",
    "Scalar",
    "Step",
    "Stream",
    "Use",
    "X",
    "Y",
    "client_step",
    "draw",
    "draw_ahead",
    "find_step",
    "moving_part",
    "place_of",
    "present",
    "sgd",
    "still_part",
    "svrg",
    "walk",
    "whole",
]
