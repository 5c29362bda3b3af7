"""The live page of a run, served on this machine only."""

from ._server import Watch

__all__ = ["Watch"]
