"""Settings that are "auto": found before the first outer iteration, and kept right while x moves.

    find      measures the start by rounds of the federation and replaces every "auto" by a number
    follow    the next upper step size, from the hypergradients that the method has computed anyway; no rounds
    track     one round: two Hessian products that follow the largest eigenvector; if L_g has grown, smaller steps

What these need of the past is in a memory of arrays, which is saved and restored with the state of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..algorithms.fedf2sa import PenaltyState
from ..algorithms.local import LowerWork, ServerState, State
from ..algorithms.secants import length_for, with_pair
from ..algorithms.single import SingleState
from ..feasible import regions_of
from ..federation import Federation
from ..schedules import scheduled
from ..steps import Sample
from ..stepsizes import Moves, Terms, automatic_settings, marks_of, value_of, with_values
from ._lanczos import Measured, Spectrum, lanczos
from ._mixing import (
    begun,
    blocks_of,
    chosen,
    direction_of,
    learned,
    mixed,
    mixes,
    next_rates,
    parted,
    trial_rates,
    vector_of,
)
from ._newton import improved, learn, steps_by_pairs
from ._steps import Point, lanczos_products
from ._truth import SOLVED, Truth, gradients, hypergradient_at, newton
from ._upper import (
    NOTED,
    Trials,
    adapted,
    first_step,
    fixed_step,
    followed,
    is_exact,
    pace_of,
    try_along,
    upper_length,
)
from ._values import (
    Advice,
    Curvatures,
    advise,
    along_the_mean,
    by_rounds,
    is_lower_length,
    keeps_pairs,
    measure_clients,
    moves_of,
    pair_settings,
    rounded,
    setting_that,
    solves,
)

PRODUCTS, TOLERANCE = 20, 1e-3
NEWTON = 3  # the most Newton steps on the lower problem before the first iteration
SELDOM = 10  # the most iterations between two looks at L_g
STEADY = 0.03  # a change of L_g that is smaller, relative to it, is none
ENOUGH = 2 * PRODUCTS  # With fewer rounds left, the curvature is not looked at any more.
NOISE = 1e-4  # A residual that is smaller, relative to the eigenvalue, is the rounding of float32.
SLACK = 1.1  # how far a step size may be beyond its value before it is made smaller
DESCENTS, SHRINKS = 3, 4  # the trial of several local steps: lower rounds, and how often β is divided by 4


class Change(NamedTuple):
    """A setting that was changed because the curvature had changed."""

    iteration: int
    setting: str
    before: float
    after: float


@dataclass
class Automatics:
    """The automatic settings of a run: their values, and what they need of the past.

    names      the settings that are "auto"
    values     their present values; empty before they are found
    why        the reasons, by setting
    cost       how many rounds were spent to find them
    changes    the changes since
    arrays     vectors of the past
    """

    names: tuple[str, ...]
    values: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    cost: int = 0
    changes: list[Change] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, algorithm: Any) -> Automatics:
        """The automatic settings of a method, none of them found yet."""
        return cls(automatic_settings(algorithm))

    @property
    def waiting(self) -> bool:
        """Whether there are settings without a value."""
        return bool(self.names) and not self.values

    def in_words(self) -> str:
        """The values in one line."""
        told = ", ".join(f"{name} = {value:.3g}" for name, value in self.values.items())
        return f"{told} ({self.cost} rounds)"

    def to_mapping(self) -> dict[str, Any]:
        """Everything but the arrays as JSON values; `restore` is the inverse."""
        return {
            "values": dict(self.values),
            "why": dict(self.why),
            "rounds": self.cost,
            "changes": [list(change) for change in self.changes],
        }

    def restore(self, saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from what was saved."""
        self.values, self.why = dict(saved["values"]), dict(saved["why"])
        self.cost, self.changes = saved["rounds"], [Change(*each) for each in saved["changes"]]
        self.arrays = dict(arrays)

    # Before the first iteration ---------------------------------------------------------------------------

    def find(self, fed: Federation, algorithm: Any, state: Any, seed: int) -> tuple[Any, Any]:
        """Replace every "auto" by a number. Returns the method and the state to begin with.

        If the upper step size is automatic, the y of that state is the one that the measurement has come to. Where
        the step size then follows secants, its x is that of the trial: the hypergradient at the start is known, so
        the first iteration gives a secant already. Steps that are mixed begin with one round of the method itself.
        """
        if mixes(algorithm, self.names, fed.engine.clients.count):
            return self._begin_mixing(fed, algorithm, state)
        before, asked = fed.ledger.rounds, by_rounds(algorithm, fed)
        point = Point(asked[0], state.x, state.y, by_rounds=asked[1])
        how: dict[str, Any] = dict(tolerance=TOLERANCE, most=PRODUCTS, seed=seed)
        alpha = setting_that(algorithm, Moves.UPPER)
        free = regions_of(fed.engine.problem).y.project is None  # Newton steps know no feasible set
        kept = [self._kept(fed, algorithm, name) for name in pair_settings(algorithm) if name in self.names]
        algorithm = with_values(algorithm, {each.setting: each.recommended for each in kept})
        settles = (
            free and isinstance(state, State | ServerState | SingleState | PenaltyState) and alpha in self.names
        )
        at = gradients(point)
        began = float(np.linalg.norm(np.asarray(at.q, np.float64)))
        if settles:
            point, at = newton(point, at, steps=NEWTON, **how)
        truth = hypergradient_at(point, at, **how)
        if isinstance(state, SingleState | PenaltyState):  # y follows x there, so trials are taken at y*(x)
            truth = replace(truth, solved=settles and truth.lower <= SOLVED * began)
        found = measure_clients(point, algorithm, truth.measured.spectrum, seed)
        clients = fed.engine.clients.count
        made = kept + advise(algorithm, found, clients, self.names)
        known = with_values(algorithm, {each.setting: each.recommended for each in made})
        beta = setting_that(algorithm, Moves.LOWER)
        if beta in self.names and isinstance(algorithm, LowerWork) and not along_the_mean(algorithm):
            lower = {each.setting: _tried(point, known, each) for each in made if each.setting == beta}
            ratios = [lower[each.setting].recommended / each.recommended for each in made if each.setting in lower]
            self.arrays["trial"] = np.asarray(ratios, np.float32)
            made = [lower.get(each.setting, each) for each in made]
        tried = None
        if alpha is not None and alpha in self.names:
            tried = None if is_exact(algorithm, clients) else try_along(point, truth, **how)
            made.append(_upper(point, truth, known, alpha, tried))
        self.values = {each.setting: _number(each) for each in made}
        self.why = {each.setting: each.why for each in made}
        self._remember(truth.measured, found, 0)
        self.cost = fed.ledger.rounds - before
        resolved = with_values(algorithm, self.values)
        if not settles:
            return resolved, state
        if not isinstance(state, State | ServerState):
            assert tried is not None  # α is automatic, and no single-loop method is exact
            return resolved, followed(resolved, state._replace(x=jnp.asarray(tried.best.x)), tried.truth)
        x = state.x
        if alpha is not None and is_exact(algorithm, clients):
            first, h = dict[str, np.ndarray](), np.asarray(truth.h, np.float64)
            adapted(first, self.values[alpha], np.asarray(x), h, upper_length(algorithm))
            self.arrays |= {f"alpha.{name}": array for name, array in first.items()}
            moved = np.asarray(x, np.float64) - self.values[alpha] * upper_length(algorithm) * h
            x = regions_of(fed.engine.problem).x.nearest(jnp.asarray(moved, jnp.float32))
        return resolved, _begun(_at(state, x, point.y), truth)

    def _begin_mixing(self, fed: Federation, algorithm: Any, state: SingleState) -> tuple[Any, Any]:
        """Do one round of the method, and move along its directions by a trial."""
        before = fed.ledger.rounds
        plain = with_values(algorithm, dict.fromkeys(self.names, 1.0))
        after, blocks, s = plain.step(fed, state), blocks_of(state), vector_of(state)
        d = direction_of(state, after, plain.rates)
        rates, own = trial_rates(s, d, blocks), dict[str, np.ndarray]()
        self._set_rates(rates, "rho" not in self.names)
        self.why = dict.fromkeys(self.names, "a trial; then from the pairs of the method's own rounds")
        self.cost = fed.ledger.rounds - before
        resolved = with_values(algorithm, self.values)
        E = np.asarray(resolved.rates, np.float64)
        moved = s - np.concatenate([e * d[b] for e, b in zip(E, blocks, strict=True)])
        begun(own, s, d, moved, blocks)
        self.arrays |= {f"mix.{name}": array for name, array in own.items()}
        return resolved, resolved.land(fed, after, parted(moved, blocks))

    def _set_rates(self, rates: np.ndarray, tied: bool) -> None:
        """Take the rates of x, y and v as the values of the settings."""
        found = dict(zip(("alpha", "beta", "rho"), map(float, rates), strict=True))
        if tied:
            found["beta"] = min(found["beta"], found.pop("rho"))
        self.values = found

    def _mix(self, fed: Federation, algorithm: Any, before: SingleState, after: SingleState) -> tuple[Any, Any]:
        """The method with its next rates, and the state at the mixed point."""
        own = {name.removeprefix("mix."): a for name, a in self.arrays.items() if name.startswith("mix.")}
        s, d, blocks = vector_of(before), direction_of(before, after, algorithm.rates), blocks_of(before)
        if not np.all(np.isfinite(d)):
            return algorithm, after
        learned(own, s, d)
        tied = "rho" not in self.names
        rates = next_rates(own, np.asarray(algorithm.rates, np.float64), s, d, blocks, tied)
        moved = parted(mixed(own, rates, *chosen(own, rates, s, d, blocks), blocks), blocks)
        self.arrays |= {f"mix.{name}": array for name, array in own.items()}
        self._set_rates(rates, tied)
        resolved = with_values(algorithm, self.values)
        return resolved, resolved.land(fed, after, moved)

    def _kept(self, fed: Federation, algorithm: Any, name: str) -> Advice:
        """How many pairs the server is to keep: some if there is no noise in them, and y is not bound."""
        problem, present = fed.engine.problem, getattr(algorithm, name)
        if not solves(algorithm) or not is_exact(algorithm, fed.engine.clients.count):
            return Advice(name, present, 0, "only conjugate gradients on full batches of all clients give pairs")
        if regions_of(problem).y.project is not None:
            return Advice(name, present, 0, "quasi-Newton steps know no feasible set of y")
        return Advice(name, present, length_for(problem.size_y), "as many as help, for a y of this size")

    def _remember(self, measured: Measured, found: Curvatures, iteration: int) -> None:
        """The largest eigenvector and L_g, for `track`, and when they are looked at next."""
        v = measured.ends.top()
        w = np.asarray(measured.solving.top() if measured.solving.products else v)
        w = w - v * (v @ w)
        size = np.linalg.norm(w)
        self.arrays |= {
            "v": v.astype(np.float32),
            "w": (w / size if size > 1e-6 else np.zeros_like(w)).astype(np.float32),
            "L": np.asarray([found.mean.safe_L], np.float32),
            "mu": np.asarray([found.mean.mu], np.float32),
            "clock": np.asarray([iteration + 1, 1, max(10, 2 * iteration), found.mean.safe_L], np.float32),
        }

    # While the run goes on ----------------------------------------------------------------------------------

    def follow(self, fed: Federation, algorithm: Any, before: Any, after: Any, iteration: int) -> tuple[Any, Any]:
        """The method with the upper step size of its next iteration, and the state after this one.

        A schedule multiplies that step size, which follows the curvature without it.

        If the server has pairs of both levels, the x of that state is the one of a quasi-Newton step.
        """
        if mixes(algorithm, self.names, fed.engine.clients.count):
            return self._mix(fed, algorithm, before, after)
        alpha = setting_that(algorithm, Moves.UPPER)
        if alpha not in self.names or not is_exact(algorithm, fed.engine.clients.count):
            return algorithm, after
        value, length = getattr(algorithm, alpha), upper_length(algorithm)
        h = fed.noted.get(NOTED)
        if h is None:  # a method without a common hypergradient moves x along the mean of the clients' own
            moved = np.asarray(before.x, np.float64) - np.asarray(after.x, np.float64)
            h = jnp.asarray(moved / (value_of(scheduled(algorithm, iteration), alpha) * length))
        own = {name.removeprefix("alpha."): a for name, a in self.arrays.items() if name.startswith("alpha.")}
        x, newton = np.asarray(before.x), steps_by_pairs(algorithm, fed.engine.problem) and "x" in own
        if newton:
            learn(own, value, x, np.asarray(h))
        self.values[alpha] = adapted(own, value, x, np.asarray(h), length)
        if newton:
            moved = improved(own, self.values[alpha], x, np.asarray(h), regions_of(fed.engine.problem).x)
            after = after._replace(x=jnp.asarray(moved))
        self.arrays |= {f"alpha.{name}": array for name, array in own.items()}
        return with_values(algorithm, {alpha: self.values[alpha]}), after

    def moving(self, algorithm: Any, clients: int) -> dict[str, float]:
        """The values that change from one iteration to the next."""
        if self.values and mixes(algorithm, self.names, clients):
            return dict(self.values)
        alpha = setting_that(algorithm, Moves.UPPER) if self.values else None
        moves = alpha is not None and alpha in self.names and is_exact(algorithm, clients)
        return {alpha: self.values[alpha]} if moves and alpha is not None else {}

    def track(self, fed: Federation, algorithm: Any, state: Any, iteration: int, left: int | None) -> Any:
        """The method with the steps that the curvature at this state allows. `left` rounds are left, if limited.

        As long as the curvature changes, each iteration is followed by a round that looks at it; if it does not,
        the next look is after twice as many iterations, at most `SELDOM`. At iterations 10, 20, 40, ... it is
        measured again, with mu; if the length of a series is automatic, also when L_g has doubled.
        """
        if mixes(algorithm, self.names, fed.engine.clients.count):
            return algorithm  # the pairs of its own rounds show the curvature
        steps = [name for name in self.names if moves_of(algorithm, name) in (Moves.LOWER, Moves.PRODUCT)]
        look, pause, again, measured = (float(each) for each in self.arrays["clock"])
        if keeps_pairs(algorithm) or isinstance(state, SingleState | PenaltyState):
            again = math.inf  # mu does not matter to their lower steps
        enough = left is None or left > ENOUGH
        if not (steps and algorithm.needs_server and enough and iteration >= min(look, again)):
            return algorithm
        cohort, rounds = by_rounds(algorithm, fed)
        point = Point(cohort, state.x, state.y, by_rounds=rounds)
        if iteration >= again:
            return self._measured_again(point, algorithm, iteration)
        now, last = float(self.arrays["L"][0]), self._tracked(point)
        series = any(isinstance(m, Terms) for n in self.names for m in marks_of(algorithm, n))
        if series and not solves(algorithm) and not last <= 2 * measured:
            return self._measured_again(point, algorithm, iteration)
        pause = min(2 * pause, SELDOM) if abs(last / now - 1) < STEADY else 1
        self.arrays["clock"] = np.asarray([iteration + pause, pause, again, measured], np.float32)
        if not last > SLACK * now:
            return algorithm
        self.arrays["L"] = np.asarray([last], np.float32)
        values = {name: rounded(getattr(algorithm, name) * now / last) for name in steps}
        spectrum = Spectrum.between(float(self.arrays["mu"][0]), last)
        lengths = [name for name in self.names if name not in steps and is_lower_length(algorithm, name)]
        made = advise(with_values(algorithm, values), Curvatures(spectrum), fed.engine.clients.count, lengths)
        return self._changed(algorithm, values | {each.setting: _number(each) for each in made}, iteration)

    def _measured_again(self, point: Point, algorithm: Any, iteration: int) -> Any:
        """The method with the values for the curvature at this point; the upper step size is left to `follow`."""
        at = gradients(point)
        run = lanczos(point, np.asarray(at.r), most=PRODUCTS, tolerance=TOLERANCE, seed=iteration)
        found = measure_clients(point, algorithm, run.spectrum, iteration)
        clients, alpha = point.fed.engine.clients.count, setting_that(algorithm, Moves.UPPER)
        made = advise(algorithm, found, clients, [name for name in self.names if name != alpha])
        values = {each.setting: _number(each) for each in made}
        for name in values.keys() & self.values.keys():
            if any(isinstance(m, Terms) for m in marks_of(algorithm, name)) and not solves(algorithm):
                values[name] = max(values[name], self.values[name])  # near the end ∇_y f is small and says little
        beta = setting_that(algorithm, Moves.LOWER)
        if beta in values and "trial" in self.arrays:
            values[beta] = rounded(values[beta] * float(self.arrays["trial"][0]))
        self.why |= {each.setting: each.why for each in made}
        grown = found.mean.safe_L > 2 * float(self.arrays["clock"][3])
        self._remember(run, found, iteration)
        if grown and "alpha.theta" in self.arrays:  # the last secants were those of a y that was not followed
            self.arrays["alpha.theta"] = np.asarray([np.inf], np.float32)
        return self._changed(algorithm, values, iteration)

    def _changed(self, algorithm: Any, values: Mapping[str, float], iteration: int) -> Any:
        """The method with other values, each of which is recorded if it differs."""
        for name, value in values.items():
            if value != getattr(algorithm, name):
                self.changes.append(Change(iteration, name, getattr(algorithm, name), value))
        self.values |= values
        return with_values(algorithm, values)

    def _tracked(self, point: Point) -> float:
        """The largest eigenvalue of ∇²_y g in the plane of the last vectors, with the size of its residual.

        One round is one step of LOBPCG without a preconditioner: the plane of the last eigenvector and of its
        residual gives the next ones.
        """
        v, w = (self.arrays[name].astype(np.float64) for name in "vw")
        sent = {name: jnp.asarray(a, jnp.float32) for name, a in zip("ab", (v, w), strict=True)}
        products = point.ask(lanczos_products, **sent, u=Sample("lower"))
        plane, images = np.stack([v, w]), np.asarray(products, np.float64)
        used = 2 if np.any(w) else 1
        plane, images = plane[:used], images[:used]
        values, s = np.linalg.eigh((plane @ images.T + images @ plane.T) / 2)
        top, image = s[:, -1] @ plane, s[:, -1] @ images
        top = top / np.linalg.norm(top)
        left = image - top * (top @ image)
        size = float(np.linalg.norm(left))
        self.arrays["v"] = top.astype(np.float32)
        rest = left / size if size > NOISE * abs(values[-1]) else np.zeros_like(left)
        self.arrays["w"] = rest.astype(np.float32)
        return float(values[-1]) + min(size, 0.5 * abs(float(values[-1])))


def _at(state: State | ServerState, x: Array, y: Array) -> State | ServerState:
    """The state at another x and y. The new y is also the y before it: its momentum is zero."""
    if isinstance(state, ServerState) and state.before is not None:
        return state._replace(x=x, y=y, before=y)
    return state._replace(x=x, y=y)


def _begun(state: State | ServerState, truth: Any) -> State | ServerState:
    """The state with what the measurement of the start has found: p, and pairs of the lower problem."""
    if not isinstance(state, ServerState):
        return state
    if state.p is not None:
        state = state._replace(p=jnp.asarray(truth.p, jnp.float32))
    if state.pairs is not None:
        pairs = np.asarray(state.pairs)
        for pair in truth.measured.solving.pairs():
            pairs = with_pair(pairs, *pair)
        state = state._replace(pairs=jnp.asarray(pairs))
    return state


def _number(each: Advice) -> float:
    """The value as the setting's own kind of number: a count is a whole number."""
    return int(each.recommended) if isinstance(each.recommended, int) else float(each.recommended)


def _tried(point: Point, algorithm: LowerWork, advice: Advice) -> Advice:
    """A lower step size with which a few lower rounds make ∇_y g smaller.

    Several local steps at clients that differ may diverge together although each of them converges alone.
    """
    size, beta = _residual(point), advice.recommended
    for tried in range(SHRINKS + 1):
        method, y = with_values(algorithm, {advice.setting: beta}), point.y
        fed = point.fed
        fed.hold(x=point.x)
        for _ in range(DESCENTS):
            y = method.descend(fed, y)
        if _residual(point.moved(y=y)) <= size or tried == SHRINKS:
            break
        beta = rounded(beta / 4)
    point.moved(y=point.y)
    if beta == advice.recommended:
        return advice
    return Advice(advice.setting, advice.present, beta, f"with {advice.recommended:.3g} the lower rounds diverged")


def _residual(point: Point) -> float:
    """||∇_y g|| at a point."""
    size = float(np.linalg.norm(np.asarray(gradients(point).q, np.float64)))
    return size if math.isfinite(size) else math.inf


def _upper(point: Point, truth: Truth, algorithm: Any, setting: str, tried: Trials | None) -> Advice:
    """The first upper step size."""
    present = getattr(algorithm, setting)
    if tried is None:
        value = rounded(first_step(algorithm, np.asarray(point.x), truth.h))
        return Advice(setting, present, value, "a trial; then from secants of the hypergradient")
    pace = pace_of(algorithm, truth.measured.spectrum)
    why = f"{pace:.2g} over the curvature of f(x, y*(x)) along the hypergradient"
    return Advice(setting, present, rounded(fixed_step(point, tried, algorithm, pace)), why)
