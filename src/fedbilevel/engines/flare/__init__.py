"""The engine of a real federation: its messages, the site's side and the server's side.

Nothing here imports NVIDIA FLARE, which only carries the bytes; `fedbilevel.federate` gives it this engine.
"""

from ._audit import Audit, Verdict, verify_audit
from ._policy import SitePolicy
from .server import Flare, RemoteClients, Transport
from .site import Site
from .wire import Malformed, Message, pack, unpack

__all__ = [
    "Audit",
    "Flare",
    "Malformed",
    "Message",
    "RemoteClients",
    "Site",
    "SitePolicy",
    "Transport",
    "Verdict",
    "pack",
    "unpack",
    "verify_audit",
]
