"""Checks that the parts of a run fit together."""

from __future__ import annotations

from ..aggregate import AGGREGATORS, quorum
from ..algorithms import Algorithm, Checked, Sampling
from ..errors import SettingsError
from ..federation import cohort_size, needed
from ..layers import AttackSettings
from ..names import users_code
from ..privacy import Privacy
from ..settings import named
from ._sections import EvaluateSettings, FederationSettings, StopSettings


def check_parts(
    algorithm: Algorithm,
    clients: int,
    federation: FederationSettings,
    attack: AttackSettings,
    privacy: Privacy,
    evaluate: EvaluateSettings,
    stop: StopSettings,
) -> None:
    """Raise a `SettingsError` that names the field if the parts of a run do not fit together."""
    try:
        if isinstance(algorithm, Sampling):
            cohort_size(algorithm.participation, clients)
        if isinstance(algorithm, Checked):
            with users_code("check raises "):
                algorithm.check(clients)
    except SettingsError as error:
        raise SettingsError(f"algorithm.{error}") from None
    if isinstance(federation.min_replies, int) and federation.min_replies > clients:
        raise SettingsError(
            f"federation.min_replies = {federation.min_replies} is wrong: there are {clients} clients"
        )
    _check_quorum(algorithm, clients, federation)
    try:
        privacy.check(federation.weighting, federation.rule)
        federation.policies(privacy)
    except SettingsError as error:
        raise SettingsError(f"federation.{error}") from None
    if federation.weighting == "samples" and federation.rule is not None:
        rule = named(AGGREGATORS, federation.rule)["name"]
        raise SettingsError(
            f"federation.weighting = 'samples' is wrong with federation.aggregator = {rule!r}: a client says "
            "itself how many samples it has, so one that lies outweighs the others; use 'uniform', or the mean"
        )
    if not algorithm.needs_server:
        _check_without_server(federation, attack, privacy)
    evaluate.check(privacy)
    stop.check()


def check_fusible(
    federation: FederationSettings, attack: AttackSettings, privacy: Privacy, *, chaotic: bool
) -> None:
    """Raise if a setting needs the host in every round, where the rounds are inside of a program."""
    rule = federation.rule and named(AGGREGATORS, federation.rule)["name"]
    for field, value in {
        "federation.aggregator": rule,
        "federation.deadline": federation.deadline,
        "federation.oversample": federation.oversample or None,
        "attack.kind": None if attack.kind == "label-flip" else attack.kind,
        "privacy.mode": privacy.mode,
        "chaos": "on" if chaotic else None,
    }.items():
        if value is not None:
            raise SettingsError(
                f"{field} = {value!r} is wrong with federation.engine = 'fused': it needs every reply by itself, "
                "and there the rounds are inside of a program; use the engine 'simulation'"
            )


def _check_quorum(algorithm: Algorithm, clients: int, federation: FederationSettings) -> None:
    """Raise if the rounds of a run could have too few replies for their rule."""
    rule = federation.rule
    least = quorum(rule)
    if rule is None or least == 1:
        return
    name, given = named(AGGREGATORS, rule)["name"], federation.min_replies
    why = f"{name} needs {least} replies to tolerate a liar"
    if clients < least:
        raise SettingsError(
            f"federation.aggregator = {name!r} is wrong: there are {clients} clients, and {why}; "
            "use the mean, or more clients"
        )
    asked = clients
    if isinstance(algorithm, Sampling):
        asked = cohort_size(algorithm.participation, clients)
        if asked < least:
            raise SettingsError(
                f"algorithm.participation = {algorithm.participation} is wrong: a cohort has {asked} clients, and "
                f"{why}; ask at least {least} clients, or use the mean"
            )
    if given is not None and needed(given, asked) < least:
        raise SettingsError(
            f"federation.min_replies = {given} is wrong: {why}; use at least {least}, or leave it out"
        )


def _check_without_server(federation: FederationSettings, attack: AttackSettings, privacy: Privacy) -> None:
    """Raise if a setting needs a server: clients that mix with their neighbours have none."""
    for field, value in {
        "federation.cohort": None if federation.cohort == "iteration" else federation.cohort,
        "federation.aggregator": federation.rule and named(AGGREGATORS, federation.rule)["name"],
        "attack.kind": None if attack.kind == "label-flip" else attack.kind,
        "privacy.mode": privacy.mode,
    }.items():
        if value is not None:
            raise SettingsError(
                f"{field} = {value!r} is wrong: the algorithm has no server; remove it, or use fbo-aggitd"
            )
