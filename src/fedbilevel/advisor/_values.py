"""The values of step sizes and lengths that follow from the curvature of the lower problem, each with its reason.

lam, gamma   The series p_n = λ Σ_{k<n} (I - λH)^k r converges fastest for λ near 2/(mu + L_g), and not at all
             beyond 2/L_g. λ = 1/L_g costs at most twice the terms, is what the theory asks for, and stays good if
             x moves L_g by a factor of up to two.
beta         1/L, half of the limit. L is L_g if an outer iteration moves y along the mean gradient q alone, as one
             local step with the SVRG correction does. Several local steps go along a client's own loss, on its own
             minibatches, so L is then the largest curvature that a client has on the rows of a local step.
N, T         The fewest terms whose bias is at most `BIAS` for ∇_y f at the point, which Lanczos has measured
             already. It is far fewer than the worst case (1 - λ mu)^n asks for, if ∇_y f is not the worst vector.
             An iteration costs more with every term, so there are at most `MOST_TERMS`, and the reason then says
             what bias is left.
N of lower   The fewest lower rounds after which the slowest direction has lost half of its error. The next outer
rounds       iteration goes on from there, so more is not needed.
momentum_y   The heavy-ball method with the step β is fastest with (1 - sqrt(β mu))². It is at most 0.9, which
             needs about ten lower rounds to take effect.
beta and rho of a single loop are 1/L in the same way: L is L_g with one step in a round, and else the largest
curvature of a client.
alpha        is not a function of the lower curvature, see `_upper.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from .. import rng
from ..algorithms.local import LowerWork, once, rows_of
from ..algorithms.single import ThreeVariables
from ..federation import Federation
from ..steps import Samples
from ..stepsizes import (
    Alone,
    Automatic,
    Limited,
    LowerRounds,
    MayBeAutomatic,
    Momentum,
    Moves,
    Pairs,
    Terms,
    marks_of,
    step_sizes,
    with_values,
)
from ._lanczos import Spectrum
from ._steps import POWER, Point, client_curvature

BIAS = 0.05
KEPT = 0.5  # the share of the slowest error of y that is left after an outer iteration
MOST_TERMS, MOST_ROUNDS, MOST_MOMENTUM = 30, 10, 0.9
DRAWS = 4  # minibatches on which a client measures its curvature


class Advice(NamedTuple):
    """A value for a setting: the present one, the recommended one, and why."""

    setting: str
    present: float
    recommended: float
    why: str


class Curvatures(NamedTuple):
    """The curvature of the mean lower loss, and the largest of a client: on full batches, and on a local step's.

    None stands for what the method does not need.
    """

    mean: Spectrum
    client: float | None = None
    local: float | None = None


def chosen_settings(algorithm: Any) -> tuple[str, ...]:
    """The settings of a method that can be found automatically."""
    if not is_dataclass(algorithm):
        return ()
    idle = idle_settings(algorithm)
    names = (each.name for each in fields(algorithm) if each.name not in idle)
    return tuple(name for name in names if any(isinstance(m, MayBeAutomatic) for m in marks_of(algorithm, name)))


def idle_settings(algorithm: Any) -> set[str]:
    """The step sizes that a method declares and does not use, such as λ with conjugate gradients."""
    used = {each.setting for each in step_sizes(algorithm)}
    return {each.name for each in fields(algorithm) if moves_of(algorithm, each.name) and each.name not in used}


def moves_of(algorithm: Any, setting: str) -> Moves | None:
    """What a setting moves, if it is a step size."""
    return next((mark for mark in marks_of(algorithm, setting) if isinstance(mark, Moves)), None)


def setting_that(algorithm: Any, moves: Moves) -> str | None:
    """The setting that can be found automatically and is the step size of this recursion."""
    return next((name for name in chosen_settings(algorithm) if moves_of(algorithm, name) is moves), None)


def along_the_mean(algorithm: Any) -> bool:
    """Whether a lower round moves y along the mean gradient alone, whatever the clients' own losses are."""
    if not isinstance(algorithm, LowerWork):
        return False
    if keeps_pairs(algorithm):
        return True
    full = rows_of(algorithm.batch_zeta_local) is None
    one = algorithm.lower_steps == 1 or (algorithm.lower_steps is None and full and algorithm.lower_epochs == 1)
    return one and (full or algorithm.lower_solver == "svrg")


def measure_clients(point: Point, algorithm: Any, spectrum: Spectrum, seed: int) -> Curvatures:
    """The curvatures that a method's step sizes need, with at most two rounds beyond the Lanczos runs."""
    client = local = None
    marks = [m for name in chosen_settings(algorithm) for m in marks_of(algorithm, name)]
    if any(isinstance(m, Alone) for m in marks):
        client = _largest(point, spectrum, None, seed)
    if isinstance(algorithm, LowerWork) and not along_the_mean(algorithm):
        local = _largest(point, spectrum, rows_of(algorithm.batch_zeta_local), seed)
    if isinstance(algorithm, ThreeVariables) and not once(getattr(algorithm, "tau", 1)):
        local = _largest(point, spectrum, rows_of(algorithm.batch_zeta), seed)
    return Curvatures(spectrum, client, local)


def _largest(point: Point, spectrum: Spectrum, rows: int | None, seed: int) -> float:
    """The largest curvature of a client, from the mean of the sixteenth powers, and never below that of the mean.

    One large number among m has the mean power L^16 / m, and m equal ones have L^16. The root of the sum is
    exact for the first and too large by m^(1/16) for the second, so it is a safe value for both.
    """
    v = rng.generator(seed, "client curvature").normal(size=point.y.size)
    u = Samples("lower", rows, 1 if rows is None else DRAWS)
    scale = max(spectrum.safe_L, 1e-30)
    asked = len(point.fed.clients)
    powers = float(point.ask(client_curvature, v=jnp.asarray(v, jnp.float32), L=scale, u=u).mean)
    return max(scale * (asked * powers) ** (1 / POWER), scale) if math.isfinite(powers) else scale


def curvature_for(algorithm: Any, setting: str, found: Curvatures) -> tuple[float, str]:
    """The curvature that limits a step size, and its name."""
    own = any(isinstance(mark, Alone) for mark in marks_of(algorithm, setting))
    if own and found.client is not None:
        return found.client, "the largest L_g of a client"
    followed = (Moves.LOWER, Moves.PRODUCT) if isinstance(algorithm, ThreeVariables) else (Moves.LOWER,)
    if moves_of(algorithm, setting) in followed and found.local is not None:
        return found.local, "the largest curvature of a client on the rows of a local step"
    return found.mean.safe_L, "L_g"


def best_step(algorithm: Any, setting: str, L: float, clients: int) -> float:
    """The step size for a curvature: half of the limit of the lower steps, the limit itself of a product."""
    moves = moves_of(algorithm, setting)
    assert moves is not None
    limit = algorithm.limit(moves, clients) if isinstance(algorithm, Limited) else moves.value
    return float((limit or 1.0) / (2 if moves is Moves.LOWER else 1) / max(L, 1e-30))


def advise(
    algorithm: Any, found: Curvatures, clients: int, settings: Iterable[str], bias: float = BIAS
) -> list[Advice]:
    """The values of these settings that follow from the curvatures."""
    made: list[Advice] = []
    settings = list(settings)
    for name in settings:  # the step sizes first, because the lengths depend on them
        if moves_of(algorithm, name) in (Moves.LOWER, Moves.PRODUCT):
            L, which = curvature_for(algorithm, name, found)
            value = rounded(best_step(algorithm, name, L, clients))
            made.append(
                Advice(name, getattr(algorithm, name), value, f"{value * L:.2g} over {which}, which is {L:.3g}")
            )
    known = with_values(algorithm, {a.setting: a.recommended for a in made})
    for name in settings:
        if any(isinstance(mark, Momentum) for mark in marks_of(algorithm, name)):
            made.append(_momentum(known, name, found.mean))
            known = with_values(known, {name: made[-1].recommended})
    for name in settings:
        for mark in marks_of(algorithm, name):
            if isinstance(mark, Terms) and not solves(algorithm):
                made.append(_terms(known, name, mark.more, found.mean, bias))
            elif isinstance(mark, Terms | LowerRounds):
                made.append(_lower_rounds(known, name, found.mean))
    return made


def is_lower_length(algorithm: Any, setting: str) -> bool:
    """Whether a setting depends on the condition of the lower problem and not on ∇_y f."""
    marks = marks_of(algorithm, setting)
    return any(
        isinstance(m, LowerRounds | Momentum) or (isinstance(m, Terms) and solves(algorithm)) for m in marks
    )


def solves(algorithm: Any) -> bool:
    """Whether a method solves for p by conjugate gradients, so that its lengths are those of the lower loop."""
    return getattr(algorithm, "estimator", None) == "cg"


def keeps_pairs(algorithm: Any) -> bool:
    """Whether the lower rounds of a method are quasi-Newton steps, so that only L_g matters to its settings."""
    return solves(algorithm) and any(getattr(algorithm, name) for name in pair_settings(algorithm))


def pair_settings(algorithm: Any) -> tuple[str, ...]:
    """The settings that are the number of pairs the server keeps."""
    return tuple(
        name for name in chosen_settings(algorithm) if any(isinstance(m, Pairs) for m in marks_of(algorithm, name))
    )


def _momentum(algorithm: Any, name: str, spectrum: Spectrum) -> Advice:
    """The momentum of the heavy-ball method with the step β, if y moves along the mean gradient alone."""
    step = setting_that(algorithm, Moves.LOWER)
    beta, present = 0.0 if step is None else getattr(algorithm, step), getattr(algorithm, name)
    if keeps_pairs(algorithm):
        return Advice(name, present, 0.0, "the lower rounds are quasi-Newton steps")
    if not along_the_mean(algorithm) or isinstance(beta, Automatic):
        return Advice(name, present, 0.0, "local steps on a client's own loss are not a heavy-ball method")
    best = (1 - math.sqrt(min(beta * max(spectrum.mu, 0.0), 1.0))) ** 2
    why = f"(1 - sqrt(beta mu))², with mu = {spectrum.mu:.2g}"
    if best > MOST_MOMENTUM:
        why = f"{why}, would be {best:.2g}; an outer iteration has too few lower rounds for more than this"
    return Advice(name, present, round(min(best, MOST_MOMENTUM), 2), why)


def _terms(algorithm: Any, name: str, more: int, spectrum: Spectrum, bias: float) -> Advice:
    step = setting_that(algorithm, Moves.PRODUCT)
    lam = None if step is None else getattr(algorithm, step)
    if lam is None or isinstance(lam, Automatic):
        lam = 1 / max(spectrum.safe_L, 1e-30)
    terms = spectrum.terms_for(lam, bias, MOST_TERMS + more)
    left = spectrum.bias(lam, terms)
    if left <= bias:
        why = f"a bias of {left:.2g} for ∇_y f at the point; the worst vector has {spectrum.tail(lam, terms):.2g}"
    else:
        why = f"a bias of {left:.2g} is left: more than {MOST_TERMS} terms an iteration rarely pay"
    return Advice(name, getattr(algorithm, name), max(terms - more, 1), why)


def _lower_rounds(algorithm: Any, name: str, spectrum: Spectrum) -> Advice:
    if keeps_pairs(algorithm):
        why = "the most; quasi-Newton steps end when ∇_y g is a fifth of what it was"
        return Advice(name, getattr(algorithm, name), MOST_ROUNDS, why)
    step = setting_that(algorithm, Moves.LOWER)
    beta = 0.0 if step is None else getattr(algorithm, step)
    heavy = any(isinstance(m, Momentum) for n in chosen_settings(algorithm) for m in marks_of(algorithm, n))
    rate = min(max(beta * max(spectrum.mu, 0.0), 1e-9), 0.9)
    if heavy and getattr(algorithm, "momentum_y", 0.0) != 0.0:
        rate = min(math.sqrt(rate), 0.9)
    wanted = math.ceil(math.log(KEPT) / math.log(1 - rate))
    rounds = min(max(wanted, 1), MOST_ROUNDS)
    why = "the slowest direction of y loses half of its error in an outer iteration"
    if rounds < wanted:
        why = f"{wanted:,} rounds would halve the slowest error of y; more than {MOST_ROUNDS} rarely pay"
    return Advice(name, getattr(algorithm, name), rounds, why)


def rounded(value: float) -> float:
    """Three digits, rounded down, so that a limit still holds."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit + 1e-9) * unit:.3g}")


def by_rounds(algorithm: Any, fed: Federation) -> tuple[Federation, bool]:
    """The clients that are measured, and whether by rounds: a cohort of a method with a server, or all agents."""
    if not algorithm.needs_server:
        return fed, False
    return (fed.cohort(algorithm.participation) if hasattr(algorithm, "participation") else fed), True
