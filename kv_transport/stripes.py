"""Over how many connections a push goes. Pure: times come in.

A second connection to one receiver helps where one does not fill the link: a core that cannot copy fast enough, a
window too small for the distance. Elsewhere it costs a little. Which it is can only be measured, on pushes that have to
be made anyway:

    trial: 1, 2, 4, 1, 2, 4 ... --enough of each--> settled on the best
      ^------- the time has come, or the rate has fallen ---'
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Protocol

MIB = 1024 * 1024
LEAST_PART_BYTES = MIB // 2
"""A push is divided only as far as each part has so much; a small one goes over one connection."""
MEASURED_BYTES = 4 * MIB
"""Smaller pushes say little about the link."""
COUNTS = (1, 2, 4)
NUM_SAMPLES = 5
"""Of each count, after a first one for which connections were made."""
MARGIN = 1.2
"""More connections have to be so much faster than fewer."""
MAX_TRIAL_PUSHES = 60
"""A count that was not measured often enough by then is left out: pushes have too few blocks for it."""
TRIAL_EVERY_S = 300.0
LONGEST_EVERY_S = 3600.0
"""A result that comes again is doubted half as often."""
FALLEN = 0.6
"""A median rate below so much of the trial's is doubted at once."""
NUM_RECENT = 8
LEAST_BETWEEN_S = 10.0


class StripePlan(Protocol):
    """For one destination."""

    @property
    def settled(self) -> int | None:
        """How many connections large pushes take for now; None while that is being found out."""
        ...

    def choose(self, num_blocks: int, num_bytes: int, now_s: float) -> int:
        """How many connections this push takes; at least 1, at most its blocks."""
        ...

    def sent(self, count: int, num_bytes: int, num_delivered_bytes: int, seconds: float, now_s: float) -> None:
        """A push of `num_bytes` went over `count` connections, and so many of its bytes had reached the other side
        within `seconds`."""
        ...

    def refused(self, count: int, now_s: float) -> None:
        """Some of so many connections could not be had."""
        ...


class FixedStripes:
    """As the config says."""

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def settled(self) -> int:
        return self._count

    def choose(self, num_blocks: int, num_bytes: int, now_s: float) -> int:
        return _most(self._count, num_blocks, num_bytes)

    def sent(self, count: int, num_bytes: int, num_delivered_bytes: int, seconds: float, now_s: float) -> None:
        """Nothing is learned."""

    def refused(self, count: int, now_s: float) -> None:
        """Nothing is learned."""


class MeasuredStripes:
    """As is measured fastest."""

    def __init__(self, counts: Sequence[int] = COUNTS) -> None:
        self._counts = list(counts)
        self._best = self._counts[0]
        self._trial: _Trial | None = _Trial(self._counts)
        self._rate: float | None = None
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._every_s = TRIAL_EVERY_S
        self._tried_s = float("-inf")

    @property
    def settled(self) -> int | None:
        return self._best if self._trial is None else None

    def choose(self, num_blocks: int, num_bytes: int, now_s: float) -> int:
        if num_bytes < MEASURED_BYTES:
            return _most(self._best, num_blocks, num_bytes)
        if self._trial is None and self._is_in_doubt(now_s):
            self._trial = _Trial(self._counts)
        wanted = self._best if self._trial is None else self._trial.next_count()
        return _most(wanted, num_blocks, num_bytes)

    def sent(self, count: int, num_bytes: int, num_delivered_bytes: int, seconds: float, now_s: float) -> None:
        if num_bytes < MEASURED_BYTES or seconds <= 0:
            return
        rate = max(num_delivered_bytes, 0) / seconds
        if self._trial is None:
            if count == self._best:
                self._recent.append(rate)
            return
        self._trial.sent(count, rate)
        if self._trial.is_over:
            self._settle(self._trial, now_s)

    def refused(self, count: int, now_s: float) -> None:
        """One connection is all that is sure to be had for now."""
        if count == self._counts[0]:
            return
        if self._trial is not None:
            self._trial.leave_out(count)
            if self._trial.is_over:
                self._settle(self._trial, now_s)
        elif count >= self._best:
            self._be_settled(self._counts[0], None, now_s)

    def _is_in_doubt(self, now_s: float) -> bool:
        waited_s = now_s - self._tried_s
        if waited_s < LEAST_BETWEEN_S:
            return False
        has_fallen = (
            self._rate is not None
            and len(self._recent) == NUM_RECENT
            and statistics.median(self._recent) < FALLEN * self._rate
        )
        return has_fallen or waited_s >= self._every_s

    def _settle(self, trial: _Trial, now_s: float) -> None:
        rates = trial.rates()
        best = self._counts[0]
        for count, rate in rates.items():
            if rate > MARGIN * rates.get(best, 0.0):
                best = count
        self._every_s = min(2 * self._every_s, LONGEST_EVERY_S) if best == self._best else TRIAL_EVERY_S
        self._be_settled(best, rates.get(best), now_s)

    def _be_settled(self, best: int, rate: float | None, now_s: float) -> None:
        self._best, self._rate, self._trial, self._tried_s = best, rate, None, now_s
        self._recent.clear()


class _Trial:
    """Rates of each count, taken in turn so that a link that changes changes for all."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._rates: dict[int, list[float]] = {count: [] for count in counts}
        self._given = dict.fromkeys(counts, 0)
        self._num_pushes = 0

    @property
    def is_over(self) -> bool:
        enough = all(len(rates) > NUM_SAMPLES for rates in self._rates.values())
        return enough or self._num_pushes >= MAX_TRIAL_PUSHES

    def next_count(self) -> int:
        """The one that was measured least; of several, the one that is not about to be."""
        count = min(self._rates, key=lambda count: (len(self._rates[count]), self._given[count], count))
        self._given[count] += 1
        return count

    def sent(self, count: int, rate: float) -> None:
        self._num_pushes += 1
        if count in self._rates:
            self._rates[count].append(rate)

    def leave_out(self, least: int) -> None:
        """This count and all above."""
        self._rates = {count: rates for count, rates in self._rates.items() if count < least}

    def rates(self) -> dict[int, float]:
        """Medians, by count; the first of each was for making connections."""
        return {count: statistics.median(rates[1:]) for count, rates in self._rates.items() if len(rates) > NUM_SAMPLES}


def _most(count: int, num_blocks: int, num_bytes: int) -> int:
    return max(1, min(count, num_blocks, num_bytes // LEAST_PART_BYTES))


def divide(num_blocks: int, count: int) -> list[slice]:
    """`count` parts of neighbours, as equal as can be; none is empty where there are blocks enough."""
    edges = [num_blocks * part // count for part in range(count + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(edges)]
