"""A real federation on NVIDIA FLARE: sites with data of their own, a server, and who submits the run.

The extra `fedbilevel[flare]`; only `app` and `submit` import FLARE, and only when they are used.
"""

from .local import LocalFederation, simulated_sites
from .sitefile import LoadedSite, load_site

__all__ = ["LoadedSite", "LocalFederation", "load_site", "simulated_sites"]
