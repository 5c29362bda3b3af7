"""Rules that aggregate replies when some clients lie. Each field of a reply is aggregated separately.

Let r_1, ..., r_n be the replies of a field, w_i the weights, W = Σ_i w_i, and clip(v, τ) = v min(1, τ / ||v||):

    median             the weighted median, coordinate by coordinate
    trimmed-mean       the mean without a share of the replies at each end, coordinate by coordinate
    geometric-median   argmin_v Σ_i w_i ||r_i - v||, by Weiszfeld's iteration, smoothed
    centred-clipping   v ← v + 1/W Σ_i w_i clip(r_i - v, τ), a few times from the median or the last result
    norm-bound         1/W Σ_i w_i clip(r_i, τ)

References: Yin et al. 2018 (median, trimmed mean), Pillutla et al. 2022 (geometric median), Karimireddy et al.
2021 (centred clipping), Sun et al. 2019 (norm bound). Multi-Krum and bucketing have files of their own.

A weight of three counts as three replies, except where a rule counts replies in order to cut some. There a reply
is one reply, whatever it weighs, because a liar may claim any weight.

The default radius τ of centred clipping is the weighted median of the distances to the median, because the
channels of a bilevel method differ in scale by orders of magnitude.

The rules run on the host with NumPy: XLA's sort takes ten times as long on a CPU (0.29 s against 0.03 s for
twenty replies of 157,000 numbers). Those with a function `traced` also run within a program of many rounds, where
the host is not asked.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ..settings import Count, Positive, about, settings
from . import _traced
from ._rule import Place, Rule
from ._traced import TracedRule

LARGEST = np.finfo(np.float32).max
MAJORITY = 3  # the smallest number of replies in which a single liar is in the minority


@settings
class WeightedMean:
    """The weighted mean, which is not robust."""

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return weighted_mean(rows, weights)


@settings
class Median:
    """The weighted median, coordinate by coordinate; the midpoint of two values that halve the weight."""

    fewest: ClassVar[int] = MAJORITY

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        values, own = _sorted(rows, weights)
        total = np.cumsum(own, axis=0)
        low, high = (
            np.argmax(reached, axis=0)[None] for reached in (2 * total >= total[-1], 2 * total > total[-1])
        )
        half = np.float32(0.5)
        return (half * _pick(values, low) + half * _pick(values, high))[0]

    @property
    def traced(self) -> TracedRule:
        """The median within a program."""
        return _traced.median


@settings
class TrimmedMean:
    """The mean without the largest and the smallest replies, coordinate by coordinate.

    It cuts ceil(share n) of n replies at each end. Where that would leave nothing, it keeps the one or two replies
    in the middle, so it becomes the median. In both cases the lies of floor(share n) liars are cut, or lie between
    honest values. Replies are counted, whatever they weigh; the mean of those that are kept is by weight.
    """

    share: Annotated[
        Annotated[float, Field(ge=0, lt=0.5)], about("share of the replies to cut at each end, rounded up")
    ] = 0.25

    @property
    def fewest(self) -> int:
        """Three, of which one is cut at each end. A share of zero makes it the mean, which cuts nothing."""
        return MAJORITY if self.share > 0 else 1

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        values, own = _sorted(rows, weights)
        cut = self._cut(len(rows))
        kept = slice(cut, len(rows) - cut)
        return np.sum((own[kept] / own[kept].sum(axis=0)).astype(np.float32) * values[kept], axis=0)

    @property
    def traced(self) -> TracedRule:
        """The trimmed mean within a program."""
        return lambda rows, weights: _traced.trimmed_mean(rows, weights, self._cut(len(rows)))

    def _cut(self, count: int) -> int:
        """How many of so many replies are cut at each end."""
        return min(whole(self.share, count), (count - 1) // 2)


@settings
class GeometricMedian:
    """argmin_v Σ_i w_i ||r_i - v||: Weiszfeld's iteration from the median.

        v ← Σ_i a_i r_i / Σ_i a_i,    a_i = w_i / max(||r_i - v||, ν)

    until v moves by less than `tolerance` of the median distance D of the replies to the first v; ν = 1e-6 D.
    """

    fewest: ClassVar[int] = MAJORITY

    tolerance: Annotated[Positive, about("share of the median distance; a smaller move ends the loop")] = 1e-4
    iterations: Annotated[Count, about("the largest number of iterations")] = 100

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        v = Median()(rows, weights)
        apart = _norms(differences(rows, v))
        scale = _middle(apart, weights)
        if scale == 0:  # more than half of the weight is at v, which is then the geometric median
            return v
        for _ in range(self.iterations):
            new = weighted_mean(rows, weights / np.maximum(apart, 1e-6 * scale))
            moved = _norms((new - v)[None])[0]
            v = new
            if moved <= self.tolerance * scale:
                break
            apart = _norms(differences(rows, v))
        return v


@settings
class CentredClipping:
    """v ← v + 1/W Σ_i w_i clip(r_i - v, τ), from the median of the round or from the result of the last round.

    A last result that is further from the median than v can move in a round is not used, since it says nothing
    about this round: a cohort in which liars had the majority may have put it anywhere.
    """

    fewest: ClassVar[int] = MAJORITY

    radius: Annotated[Positive | None, about("τ; default: the median distance to the median")] = None
    iterations: Annotated[Count, about("how many times v is moved")] = 3
    start: Annotated[
        Literal["median", "last"], about("where v starts: the median of the round, or the last result")
    ] = "median"

    @property
    def remembers(self) -> bool:
        """Whether it goes on from its last result."""
        return self.start == "last"

    def at(self, place: Place) -> Rule:
        """The rule at a place in the run: it starts from what it returned last, if it remembers that."""
        return partial(self._clip, last=place.last if self.remembers else None)

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return self._clip(rows, weights, last=None)

    @property
    def traced(self) -> TracedRule | None:
        """The clipped mean within a program; None if it remembers."""
        if self.remembers:
            return None
        return partial(_traced.centred_clipping, radius=self.radius, iterations=self.iterations)

    def _clip(self, rows: np.ndarray, weights: np.ndarray, last: np.ndarray | None) -> np.ndarray:
        median = Median()(rows, weights)
        radius = _middle(_norms(differences(rows, median)), weights) if self.radius is None else self.radius
        v = median
        if last is not None and _norms(differences(last[None], median))[0] <= self.iterations * radius:
            v = last
        for _ in range(self.iterations):
            apart = differences(rows, v)
            v = v + _clipped_mean(apart, _norms(apart), radius, weights)
        return v


@settings
class NormBound:
    """1/W Σ_i w_i clip(r_i, τ)

    A radius that is given bounds the result for any number of replies. But of two replies, one that is turned
    round cancels the other, so three are needed for a result in the direction of the honest ones.
    """

    fewest: ClassVar[int] = MAJORITY

    radius: Annotated[Positive | None, about("τ; default: the median norm")] = None

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        norms = _norms(rows)
        return _clipped_mean(rows, norms, _middle(norms, weights) if self.radius is None else self.radius, weights)

    @property
    def traced(self) -> TracedRule:
        """The bounded mean within a program."""
        return partial(_traced.norm_bound, radius=self.radius)


def _sorted(rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort each coordinate, and the weights with it. Equal weights need only one column."""
    if np.all(weights == weights[0]):
        return np.sort(rows, axis=0), weights[:, None]
    order = np.argsort(rows, axis=0, kind="stable")
    return np.take_along_axis(rows, order, axis=0), weights[order]


def whole(share: float, count: int) -> int:
    """A share of some replies as a number of replies, rounded up. 0.07 of 100 are 7, although 0.07 * 100 > 7."""
    return math.ceil(share * count - 1e-9)


def _pick(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, places, axis=0)


def _middle(norms: np.ndarray, weights: np.ndarray) -> float:
    """The weighted median of numbers."""
    return float(Median()(norms[:, None], weights)[0])


def _norms(rows: np.ndarray) -> np.ndarray:
    """||r_i||, in double precision because the square of a large float32 overflows."""
    return np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64, casting="same_kind"))


def weighted_mean(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (weights / weights.sum()).astype(np.float32) @ rows


def _clipped_mean(rows: np.ndarray, norms: np.ndarray, radius: float, weights: np.ndarray) -> np.ndarray:
    """1/W Σ_i w_i clip(r_i, τ)"""
    clip = radius / np.maximum(norms, radius) if radius > 0 else np.zeros_like(norms)
    return (weights * clip / weights.sum()).astype(np.float32) @ rows


def differences(rows: np.ndarray, v: np.ndarray) -> np.ndarray:
    """r_i - v, or the largest finite number where that overflows."""
    with np.errstate(over="ignore"):
        return np.clip(rows - v, -LARGEST, LARGEST)
