"""The steps of FedSOBA that need no step size and no measurement: Anderson mixing of its own rounds.

FedSOBA looks for a root of its directions d(s), with s = (x, y, v), and every round gives d at another point. Two
rounds give a pair: by how much s has changed, and by how much d has. With the last m pairs as the columns of S and
D, and E = diag(α, β, ρ), the next point is that of Anderson mixing ("Iterative procedures for nonlinear integral
equations", 1965):

    γ = argmin ||E^{1/2} (d - D γ)||² + λ ||γ||²        s ← s - S γ - E (d - D γ)

So the pairs solve for what they know of d, and the plain step E is left for the rest of it. Where d is affine, all
pairs are kept and λ is zero, this is GMRES: it ends after as many rounds as s has numbers, whatever E is (Walker
and Ni, "Anderson acceleration for fixed-point iterations", 2011). The columns of D have length one in the norm of
the problem above, so that λ is a share: it keeps γ small where pairs contradict each other, because d is curved
or has noise (Scieur, d'Aspremont and Bach, "Regularized nonlinear acceleration", 2016). The server knows
everything in it, and no round is spent on it.

E is found from the same pairs. The first round is followed by a trial, which moves each of x, y and v by `TRIAL`
relative to max(1, its length) along its direction. After that the rate of a block is a quantile of |Δs| / |Δd| in
the block over the last pairs, as an inverse curvature. The quantile is above the middle, because noise of d makes
the ratio smaller. A rate changes by at most `CHANGE` in a round, and is at most `MOST` times its first value,
because the ratio has no bound where d is flat. y and v have the same curvature, and so the smaller of their rates,
unless ρ is "auto" as well.

The guards are for problems that are not quadratic:
- Each block moves by at most a radius. If the residual ||E^{1/2} d||, or its part of y and v, is more than `WORSE`
  times the last one, the radii become half of the last moves. If it is at most `GOOD` times as large, they become
  at least `GROWTH` times the moves. If it is more than `FAR_WORSE` times as large, the next step begins at the
  last point again, whose direction is known, and has the new pair too.
- The radius of x becomes half of its move if the trapezoidal rule says that the upper loss has risen along it:
  Δx · (d_x before + d_x after) > 0.
- x has to descend: if Δx has no acute angle with -d_x, it is -α d_x instead, since a root of d can be a maximum.
- In feasible sets d is (s - s⁺)/E with the projected step s⁺, which is zero at a solution at their boundary, and
  the mixed point is projected.

The pairs are used if d has no noise of its own, which is the case with full batches of all clients, or if its
noise goes to zero with the moves of s, as it does with the correction by clients (`correction = "saga"`).
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..algorithms.fedsoba import FedSOBA
from ..algorithms.local import rows_of
from ..algorithms.secants import length_for
from ..algorithms.single import Rates, SingleState
from ..oracle import Directions
from ..schedules import decay_of
from ._upper import FULL, TRIAL, is_everyone

Vector = np.ndarray
Memory = MutableMapping[str, Vector]
PAIRS = 25  # the most pairs that are kept
RIDGE = 0.3  # λ
RECENT, QUANTILE = 10, 0.8  # the pairs that the rates are taken from
CHANGE, MOST = 1.5, 100.0  # how far a rate may change in a round, and beyond its first value
FIRST, GROWTH = 10.0, 2.0  # the radii after the trial and after a good step, in moves
GOOD, WORSE, FAR_WORSE = 1.2, 2.0, 4.0  # by how much the residual has changed
ANGLE = 1e-3
SHORT = 1e-5  # A move that is shorter, relative to max(1, ||s||), gives no pair.


def mixes(algorithm: Any, names: tuple[str, ...], clients: int) -> bool:
    """Whether the steps of a method are mixed: FedSOBA without any step size, on directions that allow it."""
    if not isinstance(algorithm, FedSOBA) or algorithm.steps != "constant":
        return False
    if algorithm.momentum or algorithm.upper is not None or decay_of(algorithm):
        return False
    if any(rows_of(getattr(algorithm, name, "full")) is not None for name in FULL):
        return False
    given = {"alpha", "beta", *(() if algorithm.rho is None else ("rho",))} - set(names)
    return not given and (algorithm.correction == "saga" or is_everyone(algorithm.participation, clients))


def vector_of(s: SingleState) -> Vector:
    """x, y and v as one vector."""
    return np.concatenate([np.asarray(each, np.float64) for each in (s.x, s.y, s.v)])


def blocks_of(s: SingleState) -> list[slice]:
    """Where x, y and v are in the vector."""
    ends = np.cumsum([0, s.x.size, s.y.size, s.v.size])
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def direction_of(before: SingleState, after: SingleState, rates: Rates) -> Vector:
    """d = (s - s⁺)/E of a plain step from s to s⁺. It is the mean direction where no set is in the way."""
    s, moved = vector_of(before), vector_of(after)
    return (s - moved) / spread(np.asarray(rates, np.float64), blocks_of(before))


def spread(values: Vector, blocks: list[slice]) -> Vector:
    """A value for each block, as one for each number of the vector."""
    return np.concatenate([np.full(b.stop - b.start, value) for value, b in zip(values, blocks, strict=True)])


def trial_rates(s: Vector, d: Vector, blocks: list[slice]) -> Vector:
    """The rates that move every block by `TRIAL`; one where a direction is zero."""
    sizes, lengths = np.maximum(1.0, lengths_of(s, blocks)), lengths_of(d, blocks)
    return np.where(lengths > 0, TRIAL * sizes / np.where(lengths > 0, lengths, 1.0), 1.0)


def begun(memory: Memory, s: Vector, d: Vector, moved: Vector, blocks: list[slice]) -> None:
    """Begin with the first point, its direction and the trial that follows, and with no pairs."""
    length = min(PAIRS, length_for(s.size))
    memory["s"], memory["d"] = s.astype(np.float32), d.astype(np.float32)
    memory["pairs"] = np.zeros((2, length, s.size), np.float32)
    memory["radii"] = FIRST * lengths_of(moved - s, blocks).astype(np.float32)
    memory["returned"], memory["first"] = np.zeros(1, np.float32), np.zeros(len(blocks), np.float32)


def learned(memory: Memory, s: Vector, d: Vector) -> None:
    """Add the pair of this point and the last one, unless s has hardly moved."""
    moved = s - memory["s"]
    if np.linalg.norm(moved) > SHORT * max(1.0, float(np.linalg.norm(s))):
        pair = np.stack([moved, d - memory["d"]])[:, None].astype(np.float32)
        memory["pairs"] = np.concatenate([memory["pairs"][:, 1:], pair], axis=1)


def next_rates(memory: Memory, rates: Vector, s: Vector, d: Vector, blocks: list[slice], tied: bool) -> Vector:
    """The rates of the blocks after `learned`. `tied` says whether y and v have one rate."""
    S, D = np.asarray(memory["pairs"], np.float64)
    found, trial, first = np.array(rates, np.float64), trial_rates(s, d, blocks), np.array(memory["first"])
    for k, b in enumerate(blocks):
        moved, turned = (np.linalg.norm(part[:, b], axis=1) for part in (S, D))
        ratios = (moved / np.where(turned > 0, turned, 1.0))[(moved > 0) & (turned > 0)]
        if not ratios.size:  # the block has not moved yet
            found[k] = trial[k]
            continue
        if ratios.size == 1:
            first[k] = ratios[0]
        wanted = min(float(np.quantile(ratios[-RECENT:], QUANTILE)), MOST * float(first[k]))
        found[k] = wanted if ratios.size == 1 else np.clip(wanted, rates[k] / CHANGE, rates[k] * CHANGE)
    memory["first"] = first
    if tied:
        found[1:] = found[1:].min()
    return found


def chosen(memory: Memory, rates: Vector, s: Vector, d: Vector, blocks: list[slice]) -> tuple[Vector, Vector]:
    """The point from which to go on, and its direction, after `learned`: this one, or the last one again.

    The radii follow from how the residual ||E^{1/2} d|| has changed.
    """
    before, old = (np.asarray(memory[name], np.float64) for name in "sd")
    root, (x, *_) = np.sqrt(spread(rates, blocks)), blocks
    now, then = root * d, root * old
    lower = slice(x.stop, None)
    change = max(
        float(np.linalg.norm(now[part])) / max(float(np.linalg.norm(then[part])), 1e-30)
        for part in (slice(None), lower)
    )
    moves, radii = lengths_of(s - before, blocks), np.array(memory["radii"], np.float64)
    if change > WORSE:
        radii = moves / 2
    elif change <= GOOD:
        radii = np.maximum(radii, GROWTH * moves)
    if (s - before)[x] @ (d + old)[x] > 0:
        radii[0] = moves[0] / 2
    memory["radii"] = radii.astype(np.float32)
    if change > FAR_WORSE and not memory["returned"][0]:
        memory["returned"] = np.ones(1, np.float32)
        return before, old
    memory["returned"] = np.zeros(1, np.float32)
    memory["s"], memory["d"] = s.astype(np.float32), d.astype(np.float32)
    return s, d


def mixed(memory: Memory, rates: Vector, s: Vector, d: Vector, blocks: list[slice]) -> Vector:
    """The next point, from one that `chosen` has given."""
    S, D = (np.asarray(part, np.float64).T for part in memory["pairs"])
    E = spread(rates, blocks)
    root = np.sqrt(E)
    lengths = np.linalg.norm(root[:, None] * D, axis=0)
    used = lengths > 0
    S, D = S[:, used] / lengths[used], D[:, used] / lengths[used]
    scaled = root[:, None] * D
    gamma = np.linalg.solve(scaled.T @ scaled + RIDGE * np.eye(scaled.shape[1]), scaled.T @ (root * d))
    step = -S @ gamma - E * (d - D @ gamma)
    x, along = step[blocks[0]], d[blocks[0]]
    if not x @ along < -ANGLE * np.linalg.norm(x) * np.linalg.norm(along):
        step[blocks[0]] = -rates[0] * along
    for b, radius in zip(blocks, memory["radii"], strict=True):
        length = float(np.linalg.norm(step[b]))
        if length > radius > 0:
            step[b] *= radius / length
    return s + step


def parted(s: Vector, blocks: list[slice]) -> Directions:
    """x, y and v of a vector."""
    return Directions(*(jnp.asarray(s[b], jnp.float32) for b in blocks))


def lengths_of(s: Vector, blocks: list[slice]) -> Vector:
    """The lengths of the blocks of a vector."""
    return np.asarray([np.linalg.norm(s[b]) for b in blocks])
