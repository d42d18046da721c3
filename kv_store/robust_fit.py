"""A time as a sum of few non-negative terms, fitted to the last measurements. Pure.

    time = terms[0] * features[0] + terms[1] * features[1] + ...          every term >= 0

What is fitted is log(measured / fitted), with Huber's weights, so it follows most of the measurements: a stall that
took ten times as long pulls as hard as one that took a fifth longer. Measurements end after a while, for disks and
neighbours change. What is believed at first are a few made-up ones, which never end but count the less the more is
measured: they decide while there is nothing better, and what the others leave open (all of one size).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 128
"""Measurements that count: the last ones."""
FORGET_S = 600.0
FEW = 16
LATE = 8
"""New measurements that may wait for the next fit, once there are FEW."""
MOST_ROUNDS = 60
SETTLED = 1e-3
CLOSE = 0.2
"""Deviation up to which squares are summed: noise. What is farther off pulls no harder for being farther."""
FARTHEST = 1.0
"""How far one round goes at most."""
RIDGE = 1e-12
HALVED_BY = 4
"""Measurements that halve what the first beliefs count."""
SHORTEST_S = 1e-9

Vector = npt.NDArray[np.float64]


class RobustFit:
    """first: what is believed before anything is measured, as (features, seconds); at least one for each term."""

    def __init__(self, first: Sequence[tuple[Sequence[float], float]]) -> None:
        self._first = [(tuple(map(float, features)), max(took_s, SHORTEST_S)) for features, took_s in first]
        self._measured: deque[tuple[float, tuple[float, ...], float]] = deque(maxlen=WINDOW)
        self._num_news = 0
        self._terms = _fit(self._first, np.ones(len(self._first)))

    @property
    def num_measured(self) -> int:
        return len(self._measured)

    def measure(self, features: Sequence[float], took_s: float, now_s: float) -> None:
        """Something with these features, >= 0, took so long. What took no time, or no finite one, says nothing."""
        if not 0.0 < took_s < math.inf:
            return
        self._measured.append((now_s, tuple(map(float, features)), took_s))
        self._num_news += 1

    def terms(self, now_s: float) -> list[float]:
        """Seconds per feature, as fitted to what was measured within FORGET_S. A refit takes about a millisecond."""
        while self._measured and self._measured[0][0] < now_s - FORGET_S:
            self._measured.popleft()
            self._num_news = LATE
        if self._num_news >= (LATE if len(self._measured) > FEW else 1):
            self._terms = self._refit()
            self._num_news = 0
        return list(self._terms)

    def _refit(self) -> list[float]:
        measured = [(features, took_s) for _, features, took_s in self._measured]
        counts = np.ones(len(self._first) + len(measured))
        counts[: len(self._first)] = HALVED_BY / (HALVED_BY + len(measured))
        return _fit([*self._first, *measured], counts)


def _fit(rows: Sequence[tuple[tuple[float, ...], float]], counts: Vector) -> list[float]:
    """`counts`: how much each row does."""
    features = np.array([row[0] for row in rows])
    took_s = np.array([row[1] for row in rows])
    scale = features.max(axis=0)  # terms differ by many powers of ten
    scale[scale == 0.0] = 1.0
    features = features / scale
    fitted = took_s
    terms = np.zeros(features.shape[1])
    for _ in range(MOST_ROUNDS):
        # Around what is fitted so far, log(measured / fitted) is a straight line in the terms.
        off = np.clip(np.log(took_s / fitted), -FARTHEST, FARTHEST)
        weights = counts / np.maximum(np.abs(off), CLOSE)
        terms = _least_squares(features / fitted[:, None], 1.0 + off, weights)
        before, fitted = fitted, np.maximum(features @ terms, SHORTEST_S)
        if np.abs(np.log(fitted / before)).max() < SETTLED:
            break
    return [float(term) for term in terms / scale]


def _least_squares(features: Vector, target: Vector, weights: Vector) -> Vector:
    """The non-negative terms with the least weighted sum of squares: the best of all choices of which are not 0."""
    num_terms = features.shape[1]
    normal = features.T @ (features * weights[:, None])
    normal[np.diag_indices(num_terms)] *= 1.0 + RIDGE  # solvable, whatever was measured
    normal[np.diag_indices(num_terms)] += RIDGE
    right = features.T @ (target * weights)
    best, least = np.zeros(num_terms), 0.0  # the sum of squares, less that of all terms 0
    for size in range(num_terms, 0, -1):
        for kept in map(list, itertools.combinations(range(num_terms), size)):
            terms = np.zeros(num_terms)
            terms[kept] = np.linalg.solve(normal[np.ix_(kept, kept)], right[kept])
            loss = float(terms @ normal @ terms - 2 * right @ terms)
            if loss < least and (terms >= 0.0).all():
                best, least = terms, loss
        if size == num_terms and least < 0.0:
            break  # none had to be 0
    return best
