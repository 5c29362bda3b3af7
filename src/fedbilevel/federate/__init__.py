"""A real federation on NVIDIA FLARE: sites with their own data, a server, and an admin who submits the run.

It needs the extra `fedbilevel[flare]`. Only `app` and `submit` import FLARE, and they are imported only when
they are used.
"""

from .loopback import LoopbackFederation, simulated_sites
from .sitefile import LoadedSite, load_site

__all__ = ["LoadedSite", "LoopbackFederation", "load_site", "simulated_sites"]
