"""A limit on the replies that FLARE receives for a job.

FLARE receives a reply as a stream of pieces, and gives up a stream that is larger than its limit, or says that it
will be. The limit is read once, from the settings of the server's process, and is four gibibytes if nothing is
set. The server of a run knows better: before each request it knows how large a reply can be.
"""

from __future__ import annotations

from typing import Any

from nvflare.fuel.f3.cellnet.defs import CellChannel

ROOM = 2**24  # bytes for FLARE's envelope, and for the replies to FLARE's own requests in the same process


def bound_replies(cell: Any, largest: int) -> bool:
    """Let this process receive no reply that is larger than `largest` bytes and FLARE's own needs.

    FLARE has no call for this, so the receiver of replies is found where FLARE keeps it. The result says whether
    it was found; if it was not, the limit that FLARE has read stays in force.
    """
    receiver = getattr(cell, "byte_receiver", None)
    callback = receiver.registry.find(CellChannel.RETURN_ONLY, "*") if receiver is not None else None
    handler = getattr(getattr(callback, "cb", None), "__self__", None)
    if not hasattr(handler, "max_blob_size"):
        return False
    handler.max_blob_size = largest + ROOM  # type: ignore[union-attr]
    return True
