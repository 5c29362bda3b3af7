"""Outer iterations as one program: a method is traced once, and its rounds are inside."""

from ._blocks import Blocks, Done, blocks_of

__all__ = ["Blocks", "Done", "blocks_of"]
