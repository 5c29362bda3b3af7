"""Ray itself, which is an extra, with the environment that it reads when it is imported."""

from __future__ import annotations

import os

from ...errors import SettingsError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

try:
    import ray
except ImportError:
    raise SettingsError("engine ray needs an extra: pip install 'fedbilevel[ray]'") from None

__all__ = ["ray"]
