"""The settings of differential privacy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..errors import SettingsError
from ..settings import Positive, about, settings


@settings
class Privacy:
    """Differential privacy of clients' uploads. Without a mode there is no privacy."""

    mode: Annotated[
        Literal["central", "local"] | None,
        about("central: noise on the sum, by the server; local: on replies, by clients; default: no privacy"),
    ] = None
    clip: Annotated[
        Positive | dict[str, Positive],
        about("bound C on the norm of a contribution: a number, or one for each field of a reply"),
    ] = 1.0
    noise: Annotated[Positive, about("noise multiplier σ: the noise has deviation σ C")] = 1.0
    delta: Annotated[Annotated[float, Field(gt=0, lt=1)], about("δ, at which epsilon is given")] = 1e-5

    def check(self, weighting: str, aggregator: object | None) -> None:
        """Raise if the noise does not fit the weighting or the aggregator (None is the mean)."""
        if self.mode is not None and weighting != "uniform":
            raise SettingsError(
                f"weighting = {weighting!r} is wrong with privacy: the noise is for equal weights; use 'uniform'"
            )
        if self.mode == "central" and aggregator is not None:
            raise SettingsError(
                "aggregator is wrong with privacy.mode = 'central': its noise is for the mean; remove it, "
                "or use 'local'"
            )

    def bound(self, field: str) -> float:
        """C for a field of a reply."""
        if not isinstance(self.clip, dict):
            return self.clip
        if field not in self.clip:
            raise SettingsError(
                f"privacy.clip = {self.clip!r} is wrong: clients upload {field} too; give a bound for it"
            )
        return self.clip[field]
