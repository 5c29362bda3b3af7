"""Multi-Krum: the mean of the replies that lie closest to many others (Blanchard et al. 2017)."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field

from ..settings import Count, about, settings
from ._rules import Median, differences, weighted_mean, whole

COLUMNS = 2**16  # Products are in double precision, of so many columns at a time.


@settings
class MultiKrum:
    """The mean of the replies whose neighbours are nearest.

    Of n replies f may be lies. The score of a reply is the sum of its n - f - 2 smallest squared distances to
    other replies. The m replies with the smallest scores are averaged, and those whose score equals the largest of
    these too, so that the order does not matter. A liar is kept only if its score is at most that of an honest
    reply.

    Each field is scored separately. The literature scores a client's whole update. But the channels of a bilevel
    method differ in scale by orders of magnitude: the score of a whole reply would be that of its largest channel,
    and a liar could send anything in the others. So a client may be kept in one field and not in another.

    Replies are counted, whatever they weigh; the mean of those that are kept is by weight.
    """

    liars: Annotated[
        Count | Annotated[float, Field(gt=0, lt=0.5)], about("f: a number of replies, or a share, rounded up")
    ] = 0.2
    keep: Annotated[Count | None, about("m, the replies to average, at most n - f; default: n - f")] = None

    @property
    def fewest(self) -> int:
        """The smallest n such that n ≥ 2f + 3, for it and for every larger number of replies.

        With a share s, f = ceil(s n). An odd n is enough if n (1 - 2s) ≥ 3, and an even one if n (1 - 2s) ≥ 4. The
        number before the first even one that is enough is odd and enough too, because 1 / (1 - 2s) > 1.
        """
        if isinstance(self.liars, int):
            return 2 * self.liars + 3
        return 2 * math.ceil(2 / (1 - 2 * self.liars) - 1e-9) - 1

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        count = len(rows)
        if count == 1:
            return rows[0]
        liars = self.liars if isinstance(self.liars, int) else whole(self.liars, count)
        near = np.sort(_squared_distances(rows, weights), axis=1)[:, : max(1, count - liars - 2)]
        scores = near.sum(axis=1)
        most = max(1, count - liars)
        last = np.sort(scores)[min(self.keep or most, most) - 1]
        kept = scores <= last * (1 + 1e-9)
        return weighted_mean(rows[kept], weights[kept])


def _squared_distances(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """||r_i - r_j||² for i ≠ j, in double precision; infinity for i = j.

    They come from products of the differences to the median, so that what the replies have in common cancels
    before it is squared.
    """
    apart = differences(rows, Median()(rows, weights))
    products = np.zeros((len(rows), len(rows)))
    for start in range(0, apart.shape[1], COLUMNS):
        part = apart[:, start : start + COLUMNS].astype(np.float64)
        products += part @ part.T
    squares = np.diag(products)
    made = np.maximum(squares[:, None] + squares[None] - 2 * products, 0.0)
    np.fill_diagonal(made, np.inf)
    return made
