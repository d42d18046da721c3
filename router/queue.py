"""Requests that wait for a turn, in the order in which they came, and never more than a bound.

Whose turn it is says `turns`. Pure: time comes in. One that is refused is told when to come back, from the rate at
which requests really leave.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from pd_core.errors import Overloaded
from router.policy import Demand
from router.turns import Waiter

T = TypeVar("T")

RATE_WINDOW_S = 30.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class WaitingLine(Generic[T]):
    """A line of at most `max_waiting` newcomers. One that gives its turn back has its old place again, bound or not.

    timeout_s: how long one may wait
    """

    def __init__(self, max_waiting: int, timeout_s: float, now_s: float) -> None:
        self.timeout_s = timeout_s
        self.max_waiting = max_waiting
        self._line: list[Waiter] = []  # in order of their numbers
        self._items: dict[int, T] = {}
        self._numbers: dict[T, int] = {}
        self._num_joined = 0
        self._left_s: deque[float] = deque(maxlen=1024)
        self._since_s = now_s

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[T]:
        """Those that wait, in order."""
        return iter([self._items[waiter.number] for waiter in self._line])

    @property
    def waiters(self) -> list[Waiter]:
        """Those that wait, in order, as the choice looks at them. Not to be changed."""
        return self._line

    def item(self, number: int) -> T:
        """Who has this number. Raises KeyError for nobody in the line."""
        return self._items[number]

    def check_room(self, now_s: float) -> None:
        """Raises Overloaded when no newcomer may wait."""
        if len(self._line) >= self.max_waiting:
            raise Overloaded(
                f"{len(self._line)} requests wait already, at most {self.max_waiting} may",
                retry_after_s=self.retry_after_s(now_s),
            )

    def join(self, item: T, demand: Demand, now_s: float) -> None:
        """Takes the last place. Raises Overloaded when the line is full."""
        self.check_room(now_s)
        self._insert(item, self._num_joined, demand)
        self._num_joined += 1

    def give_back(self, item: T, number: int, demand: Demand) -> None:
        """Takes the place again that it had when its turn came."""
        self._insert(item, number, demand)

    def take_turn(self, item: T, now_s: float) -> int:
        """Leaves the line to be served; its number. Raises KeyError for one that does not wait."""
        number = self._numbers[item]
        self._remove(item)
        self._left_s.append(now_s)
        return number

    def served_at_once(self, now_s: float) -> int:
        """Somebody has a turn without waiting: a number for it, and it counts for the rate."""
        self._left_s.append(now_s)
        self._num_joined += 1
        return self._num_joined - 1

    def leave(self, item: T) -> None:
        """Gives up waiting; nothing happens to one that is not in the line."""
        if item in self._numbers:
            self._remove(item)

    def expired(self, now_s: float) -> list[T]:
        """Those that have waited too long; they stay in the line until they leave."""
        return [self._items[waiter.number] for waiter in self._line if now_s - waiter.demand.since_s >= self.timeout_s]

    def retry_after_s(self, now_s: float) -> float:
        """When a newcomer would probably find room: the line's length by the rate at which it moves, 1 to 60 s."""
        while self._left_s and now_s - self._left_s[0] > RATE_WINDOW_S:
            self._left_s.popleft()
        # A line that moves slowly fills the window with silence: the estimate grows until the next one leaves.
        watched_s = min(RATE_WINDOW_S, max(now_s - self._since_s, MIN_RETRY_S))
        rate = max(len(self._left_s), 1) / watched_s
        return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil((len(self._line) + 1) / rate))))

    def timed_out(self, now_s: float) -> Overloaded:
        """What is said to one that has waited too long."""
        return Overloaded(f"no turn within {self.timeout_s:g} s", retry_after_s=self.retry_after_s(now_s))

    def _insert(self, item: T, number: int, demand: Demand) -> None:
        bisect.insort(self._line, Waiter(number, demand), key=lambda waiter: waiter.number)
        self._items[number] = item
        self._numbers[item] = number

    def _remove(self, item: T) -> None:
        number = self._numbers.pop(item)
        del self._items[number]
        del self._line[bisect.bisect_left(self._line, number, key=lambda waiter: waiter.number)]
