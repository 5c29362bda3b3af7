"""Outer iterations as one program: a method is traced once, and its rounds are inside."""

from ._blocks import Blocks, Done, blocks_of
from ._many import Arrived, Lane, ManyBlocks, Track, traceable

__all__ = ["Arrived", "Blocks", "Done", "Lane", "ManyBlocks", "Track", "blocks_of", "traceable"]
