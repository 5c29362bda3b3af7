"""The door of a site: only the server of the job gets through, and only in one session.

FLARE lets every participant of a job call the functions of a site, and the caller that it reports can be forged:
the headers that authenticate the server's messages reach every site, and a site that repeats them can use the
server's name. So every request also has a seal, a keyed digest of its bytes. Each site of a job has a key of its
own, which comes with its part of the job and which only the submitter of the run and the server know as well.

A process at a site serves one job, and a job has one session. A second hello is answered only if it repeats the
first one bit for bit, as a request does that was sent twice.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from collections.abc import Callable
from typing import Any

from ..engines.flare import Malformed, pack, unpack

SERVER = "server"  # the name that FLARE gives to the server in every job
NOTED = 100  # the number of refusals that a process notes, so that nobody can fill a disk by asking in vain

logger = logging.getLogger(__name__)


def seal(key: str, request: bytes) -> str:
    """The seal of a request to the site that has this key."""
    return hmac.digest(key.encode(), request, hashlib.sha256).hex()


class Door:
    """Lets the server's requests through to a site.

    answer  answers a request; it is given the request and the name of the caller
    key     the key of this site in this job
    note    is told of every refusal, with the caller and the reason, up to a number of them
    """

    def __init__(
        self, answer: Callable[[Any, str], bytes], key: str, note: Callable[[str, str], None] | None = None
    ) -> None:
        self._answer, self._key, self._note = answer, key, note
        self._lock = threading.Lock()  # FLARE calls from several threads
        self._noted = 0
        self._hello: bytes | None = None
        self._welcome = b""

    def ask(self, caller: str, request: Any, sealed: Any) -> bytes:
        """The reply to a request. A refusal is also a reply, with its reason."""
        if caller != SERVER:
            return self._refuse(caller, f"this site answers the server of the job only, not {caller}")
        if not isinstance(request, bytes) or not isinstance(sealed, str) or not self._is_sealed(request, sealed):
            return self._refuse(caller, "the request has no valid seal; only the server of the job can make one")
        if not _is_hello(request):
            return self._answer(request, caller)
        with self._lock:
            if self._hello is None:
                reply = self._answer(request, caller)
                if unpack(reply).header.get("kind") == "welcome":
                    self._hello, self._welcome = request, reply
                return reply
            if request == self._hello:
                return self._welcome
            return self._refuse(caller, "the session of this job has begun, and a job has no other one")

    def _is_sealed(self, request: bytes, sealed: str) -> bool:
        return hmac.compare_digest(seal(self._key, request).encode(), sealed.encode())

    def _refuse(self, caller: str, reason: str) -> bytes:
        self._noted += 1
        if self._noted <= NOTED:
            if self._noted == NOTED:
                reason = f"{reason}; {NOTED} requests were refused, further refusals are not noted"
            logger.warning("a request of %s is refused: %s", caller, reason)
            if self._note is not None:
                self._note(caller, reason)
        return pack({"kind": "error", "round": 0, "reason": reason}, {})


def _is_hello(request: bytes) -> bool:
    """Whether this begins a session. Bytes that are no message are left to the site, which says what is wrong."""
    try:
        return unpack(request).header.get("kind") == "hello"
    except Malformed:
        return False
