"""When cached blocks are used again, learnt from when they were; and what keeping one is worth. Pure.

A block that was used has an age from then on, and is of a kind: used once, twice, three times, more often. For each
kind the share that returned in each span of ages is counted. From it follows what one may expect of a block of age a:

                                  times that it is used within the span
    worth(a) = the most, over  --------------------------------------------     blocks used per second of room
               spans from a on    seconds of room that it takes until then,
                                  or until the span is over

Whoever has room for some blocks and keeps those that are worth most has the most hits (the index of Gittins). It is
what LRU approximates where the chance of a return falls with age. Here it rises first: people read and think before
they answer. So a small store does better to keep those who are about to return than those who have just left.

    spans:   0 .. 1 s, then each 1.41 times as long as all before it; the last has no end
    ageing:  counts lose half their weight in HALF_LIFE_S
"""

from __future__ import annotations

import bisect
import itertools

NUM_KINDS = 4
FIRST_SPAN_S = 1.0
SPAN_GROWTH = 2.0**0.5
NUM_SPANS = 36
"""The last begins after a day and a half."""
HALF_LIFE_S = 3600.0
FEWEST_NEWS = 64
MOST_NEWS = 1024
"""Uses after which the worths are made anew; fewer while little is known."""

_STARTS_S = [0.0, *(FIRST_SPAN_S * SPAN_GROWTH**power for power in range(NUM_SPANS - 1))]
_ENDS_S = [*_STARTS_S[1:], _STARTS_S[-1] * SPAN_GROWTH]


def kind_of(num_uses: int) -> int:
    """0 .. NUM_KINDS - 1; num_uses >= 1."""
    return min(num_uses, NUM_KINDS) - 1


def span_of(age_s: float) -> int:
    """Number of the span that an age lies in; clocks that go back a little give 0."""
    return max(0, bisect.bisect_right(_STARTS_S, age_s) - 1)


def span_end_s(span: int) -> float | None:
    """The age at which the next span begins; None for the last."""
    return _ENDS_S[span] if span < NUM_SPANS - 1 else None


class ReturnTimes:
    """What was counted, and the worths that follow from it. Bounded: NUM_KINDS x NUM_SPANS numbers."""

    def __init__(self) -> None:
        self._uses = [0.0] * NUM_KINDS
        self._returns = [[0.0] * NUM_SPANS for _ in range(NUM_KINDS)]
        self._new_uses = [0] * NUM_KINDS
        self._new_returns = [[0] * NUM_SPANS for _ in range(NUM_KINDS)]
        """Since the worths were made; they do not fade yet."""
        self._worths = [[0.0] * NUM_SPANS for _ in range(NUM_KINDS)]
        self._num_uses = 0
        self._learnt_s: float | None = None

    def used(self, num_uses: int) -> None:
        """A block was used for the `num_uses`th time: its age is 0."""
        self._new_uses[kind_of(num_uses)] += 1
        self._num_uses += 1

    def returned(self, num_uses: int, age_s: float) -> None:
        """A block that had been used `num_uses` times before, the last time `age_s` ago, is used again."""
        self._new_returns[kind_of(num_uses)][span_of(age_s)] += 1

    def worth(self, kind: int, span: int) -> float:
        """Uses to be expected per second of room; 0 where nothing of the kind ever returned at that age or later."""
        return self._worths[kind][span]

    def learn(self, now_s: float) -> bool:
        """Makes the worths anew if there is enough news. Whether it did."""
        if sum(self._new_uses) < min(MOST_NEWS, max(FEWEST_NEWS, self._num_uses // 16)):
            return False
        since_s = 0.0 if self._learnt_s is None else max(0.0, now_s - self._learnt_s)
        keep = 0.5 ** (since_s / HALF_LIFE_S)
        self._learnt_s = now_s
        for kind in range(NUM_KINDS):
            self._uses[kind] = self._uses[kind] * keep + self._new_uses[kind]
            both = zip(self._returns[kind], self._new_returns[kind], strict=True)
            self._returns[kind] = [old * keep + new for old, new in both]
            self._worths[kind] = _worths(self._uses[kind], self._returns[kind])
            self._new_uses[kind] = 0
            self._new_returns[kind] = [0] * NUM_SPANS
        return True


def _worths(uses: float, returns: list[float]) -> list[float]:
    """The worth at the start of each span, of blocks of one kind."""
    num_left = max(0.0, uses - sum(returns))
    rooms_s = [0.0] * NUM_SPANS
    for span in reversed(range(NUM_SPANS)):
        # Those that stay take the whole span, those that return in it half, on the average.
        rooms_s[span] = (num_left + returns[span] / 2) * (_ENDS_S[span] - _STARTS_S[span])
        num_left += returns[span]
    worths: list[float] = []
    for span in range(NUM_SPANS):
        totals = zip(itertools.accumulate(returns[span:]), itertools.accumulate(rooms_s[span:]), strict=True)
        worths.append(max((num / room_s for num, room_s in totals if num), default=0.0))
    return worths
