"""Checks that the parts of a run fit together."""

from __future__ import annotations

from ..aggregate import AGGREGATORS, quorum, traced_rule
from ..algorithms import ALGORITHMS, Algorithm, Checked, MovesOwn, Sampling, lower_kinds
from ..errors import SettingsError
from ..feasible import regions_of
from ..federation import cohort_size, needed
from ..layers import AttackSettings
from ..names import users_code
from ..own import own_part
from ..privacy import Privacy
from ..problem import BilevelProblem, lower_kind
from ..schedules import check_schedule
from ..settings import is_settings, named
from ..stepsizes import Moves, automatic_settings, marks_of, step_sizes
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
    if getattr(algorithm, "lower_solver", None) == "skip":
        _check_skipping(federation, privacy)
    if not algorithm.needs_server:
        _check_without_server(federation, attack, privacy)
    for name in automatic_settings(algorithm) if privacy.mode is not None else ():
        raise SettingsError(
            f"algorithm.{name} = 'auto' is wrong with privacy.mode = {privacy.mode!r}: the measurement that finds "
            "it would release more than the accountant expects; give a number (fedbilevel diagnose on public data "
            "recommends one)"
        )
    used = {each.setting for each in step_sizes(algorithm)}
    for name in automatic_settings(algorithm):
        if any(isinstance(mark, Moves) for mark in marks_of(algorithm, name)) and name not in used:
            raise SettingsError(
                f"algorithm.{name} = 'auto' is wrong: this method does not use it, because of another setting (an "
                "optimiser has its own learning_rate, and estimator = 'cg' needs no lam); leave it out"
            )
    check_schedule(algorithm)
    evaluate.check(privacy)
    stop.check()


def check_problem(algorithm: Algorithm, problem: BilevelProblem) -> None:
    """Raise if the method does not solve problems of this kind."""
    check_lower(algorithm, problem)
    check_feasible(algorithm, problem)
    check_own(algorithm, problem)
    if getattr(problem, "server", None) is not None and not algorithm.needs_server:
        raise SettingsError(
            f"algorithm.name = {_name(algorithm)!r} is wrong: the upper rows of this problem are at the server, "
            "and it has none; use another method, or give the upper rows to clients"
        )


def check_lower(algorithm: Algorithm, problem: BilevelProblem) -> None:
    """Raise if the method does not solve problems with this kind of lower level."""
    kind, solved = lower_kind(problem), lower_kinds(algorithm)
    if kind in solved:
        return
    others = [name for name, cls in ALGORITHMS.items() if kind in lower_kinds(cls)]
    meaning = {
        "local": "every client of this problem has its own lower solution (lower_is = 'local')",
        "global": "the clients of this problem share one lower solution (lower_is = 'global')",
    }
    raise SettingsError(
        f"algorithm.name = {_name(algorithm)!r} is wrong: {meaning[kind]}, and this method solves problems with a "
        f"{' or '.join(solved)} lower level; use {', '.join(others)} (a method of your own says which "
        "it solves by lower_kinds)"
    )


def check_feasible(algorithm: Algorithm, problem: BilevelProblem) -> None:
    """Raise if the problem has feasible sets that the method would leave."""
    given = regions_of(problem)._asdict().items()
    bound = " and ".join(f"feasible_{name}" for name, each in given if each.project is not None)
    if bound and not getattr(algorithm, "projects", False):
        raise SettingsError(
            f"{type(algorithm).__name__} would not keep {bound}, because it does not project; use fbo-aggitd, "
            "fednest, lfednest or naive-itd (a method of your own that projects says so by projects = True)"
        )


def check_own(algorithm: Algorithm, problem: BilevelProblem) -> None:
    """Raise if the clients of a problem have own variables, and the method does not move them, or the reverse."""
    if own_part(problem) is None:
        if isinstance(algorithm, MovesOwn) and algorithm.own_step is not None:
            raise SettingsError(
                f"algorithm.own_step = {algorithm.own_step} is wrong: the clients of this problem have no own "
                "variables; remove it, or give them some: Problem(..., own=...)"
            )
    elif not isinstance(algorithm, MovesOwn):
        raise SettingsError(
            f"algorithm.name = {_name(algorithm)!r} is wrong: the clients of this problem have own variables, and "
            "it does not move them; use fbo-aggitd or fednest, or put the variables into x"
        )
    elif algorithm.own_step is None and "alpha" in automatic_settings(algorithm):
        raise SettingsError(
            "algorithm.own_step is missing: alpha is found for the x that clients share, and their own variables "
            "would be moved by it; give own_step a number"
        )


def check_fusible(
    algorithm: Algorithm,
    problem: BilevelProblem,
    federation: FederationSettings,
    attack: AttackSettings,
    privacy: Privacy,
    *,
    chaotic: bool,
) -> None:
    """Raise if a setting needs the host in every round, where the rounds are inside of a program."""
    if own_part(problem) is not None:
        raise SettingsError(
            "federation.engine = 'fused' is wrong: the clients of this problem have own variables, which they "
            "keep between rounds; use the engine 'simulation'"
        )
    for name in automatic_settings(algorithm):
        raise SettingsError(
            f"algorithm.{name} = 'auto' is wrong with federation.engine = 'fused': it changes from one iteration "
            "to the next; use the engine 'simulation', or give a number"
        )
    rule = None if traced_rule(federation.rule) else federation.rule
    for field, value in {
        "federation.aggregator": rule and named(AGGREGATORS, rule)["name"],
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


def _name(algorithm: Algorithm) -> str:
    """The name of a method in a spec, or that of its class."""
    settled = is_settings(type(algorithm))
    return str(named(ALGORITHMS, algorithm)["name"]) if settled else type(algorithm).__name__


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


def _check_skipping(federation: FederationSettings, privacy: Privacy) -> None:
    """Raise if the mean of a round is not the mean of the replies, which the corrections of clients rely on."""
    rule = federation.rule and named(AGGREGATORS, federation.rule)["name"]
    for field, value in {"federation.aggregator": rule, "privacy.mode": privacy.mode}.items():
        if value is not None:
            raise SettingsError(
                f"algorithm.lower_solver = 'skip' is wrong with {field} = {value!r}: the corrections that clients "
                "keep sum to zero only for the plain mean; use 'svrg'"
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
