"""The constants that Assumptions 1-4 of the paper assume, from which all the others are derived."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from ..errors import SettingsError
from ._declare import Entry

ROUNDING = 1 + 1e-9  # A limit is widened by this factor, so that λ = 1 / L_g computed in floats is accepted.


class Assumed(Protocol):
    """The constants of Assumptions 1-4. `problems.quadratic.Constants` is one such object."""

    @property
    def mu(self) -> float: ...
    @property
    def L_g(self) -> float: ...
    @property
    def L_f(self) -> float: ...
    @property
    def M(self) -> float: ...
    @property
    def rho(self) -> float: ...
    @property
    def sigma_f(self) -> float: ...
    @property
    def sigma_g(self) -> float: ...


class Given(NamedTuple):
    """The constants of Assumptions 1-4, written down by hand. The deviations are σ, not σ²."""

    mu: float
    L_g: float
    L_f: float
    M: float
    rho: float = 0.0
    sigma_f: float = 0.0
    sigma_g: float = 0.0


def assumed_entries(given: Assumed) -> list[Entry]:
    """List the assumed constants with their values, each with the assumption that introduces it."""
    return [
        Entry("μ", given.mu, "given", "Assumption 1"),
        Entry("L_g", given.L_g, "given", "Assumption 2"),
        Entry("L_f", given.L_f, "given", "Assumption 2"),
        Entry("M", given.M, "given", "Assumption 2"),
        Entry("ρ", given.rho, "given", "Assumption 3"),
        Entry("σ_f", given.sigma_f, "given", "Assumption 4"),
        Entry("σ_g", given.sigma_g, "given", "Assumption 4"),
    ]


def check_assumed(given: Assumed) -> None:
    """Raise `SettingsError` for numbers that cannot be the constants of any problem."""
    if not 0 < given.mu <= given.L_g * ROUNDING:
        raise SettingsError(f"mu = {given.mu:.4g} is wrong: it must be above 0 and at most L_g = {given.L_g:.4g}")
    others = {
        "L_f": given.L_f,
        "M": given.M,
        "rho": given.rho,
        "sigma_f": given.sigma_f,
        "sigma_g": given.sigma_g,
    }
    for name, value in others.items():
        if not 0 <= value < math.inf or (name == "L_f" and value == 0):
            raise SettingsError(f"{name} = {value} is wrong: give a finite number that is not negative")
