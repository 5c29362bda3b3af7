"""Checks that the parts of a run fit together."""

from __future__ import annotations

from ..aggregate import AGGREGATORS
from ..algorithms import Algorithm, Checked
from ..errors import SettingsError
from ..layers import AttackSettings
from ..names import users_code
from ..privacy import Privacy
from ..settings import named
from ._sections import FederationSettings, StopSettings


def check_parts(
    algorithm: Algorithm,
    clients: int,
    federation: FederationSettings,
    attack: AttackSettings,
    privacy: Privacy,
    stop: StopSettings,
) -> None:
    """Raise a `SettingsError` that names the field if the parts of a run do not fit together."""
    if isinstance(algorithm, Checked):
        try:
            with users_code("check raises "):
                algorithm.check(clients)
        except SettingsError as error:
            raise SettingsError(f"algorithm.{error}") from None
    if federation.min_replies > clients:
        raise SettingsError(
            f"federation.min_replies = {federation.min_replies} is wrong: there are {clients} clients"
        )
    try:
        privacy.check(federation.weighting, federation.rule)
        federation.policies(privacy)
    except SettingsError as error:
        raise SettingsError(f"federation.{error}") from None
    if not algorithm.needs_server:
        _check_without_server(federation, attack, privacy)
    stop.check()


def _check_without_server(federation: FederationSettings, attack: AttackSettings, privacy: Privacy) -> None:
    """Raise if a setting needs a server: clients that mix with their neighbours have none."""
    for field, value in {
        "federation.aggregator": federation.rule and named(AGGREGATORS, federation.rule)["name"],
        "attack.kind": None if attack.kind == "label-flip" else attack.kind,
        "privacy.mode": privacy.mode,
    }.items():
        if value is not None:
            raise SettingsError(
                f"{field} = {value!r} is wrong: the algorithm has no server; remove it, or use fbo-aggitd"
            )
