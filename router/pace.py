"""Which workers are slow, learnt from how long our own prompts took to their first token. Pure.

Prompts are compared with prompts of about their own size, because a step has a cost that does not depend on the number
of its tokens. The measure of a worker is the median of its last few: one prompt that was held up says nothing. Only a
worker that is clearly slower than the quickest counts as slow, so equal workers get equal shares in spite of noise.
What was learnt is forgotten after a while without news: then a worker is tried again.

    size class:  1 | 2..3 | 4..7 | ... | 2^(k-1) .. 2^k - 1 tokens to be computed until the first token is there
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import msgspec

FORGET_S = 30.0
NUM_REMEMBERED = 5
NUM_NEEDED = 3
CLEARLY_SLOW = 2.0
FOLLOW = 0.3
"""By how much the usual time of a size follows each new prompt, of a worker whichever."""
LONGEST_RATIO = 20.0
SHORTEST_S = 1e-4

Usual = Mapping[int, float]
"""Seconds that prompts of a size class usually take."""


class Pace(msgspec.Struct, frozen=True):
    """One worker's: log of (time it took / time that is usual), of its last prompts."""

    log_ratios: tuple[float, ...] = ()
    measured_s: float = 0.0

    def ratio(self, now_s: float) -> float | None:
        """How much longer than usual it takes; None when too little is known, or too long ago."""
        if len(self.log_ratios) < NUM_NEEDED or now_s - self.measured_s > FORGET_S:
            return None
        return math.exp(statistics.median(self.log_ratios))


def size_class(num_tokens: int) -> int:
    return num_tokens.bit_length()


def learn(usual: Usual, pace: Pace, num_tokens: int, took_s: float, now_s: float) -> tuple[Usual, Pace]:
    """A prompt's first token came `took_s` after it was placed, when `num_tokens` were to be computed until then."""
    size, took_s = size_class(num_tokens), max(took_s, SHORTEST_S)
    usual_s = usual.get(size, took_s)
    bound = math.log(LONGEST_RATIO)
    log_ratio = min(bound, max(-bound, math.log(took_s / usual_s)))
    known = pace.log_ratios if now_s - pace.measured_s <= FORGET_S else ()
    newer = Pace((*known, log_ratio)[-NUM_REMEMBERED:], now_s)
    return {**usual, size: usual_s * math.exp(FOLLOW * log_ratio)}, newer


def slowness(pace: Pace, all_paces: Iterable[Pace], now_s: float) -> float:
    """How many times longer it takes than the quickest of all; 1.0 unless that is clear."""
    mine = pace.ratio(now_s)
    known = [ratio for ratio in (other.ratio(now_s) for other in all_paces) if ratio is not None]
    if mine is None or not known:
        return 1.0
    times = mine / min(known)
    return times if times >= CLEARLY_SLOW else 1.0


def expected_s(usual: Usual, pace: Pace, num_tokens: int, now_s: float) -> float | None:
    """When the first token will be there, as a time from now; None for a size that was never seen."""
    usual_s = usual.get(size_class(num_tokens))
    return None if usual_s is None else usual_s * (pace.ratio(now_s) or 1.0)
