"""Requests that wait for a turn: first come, first served, and never more than a bound.

Pure: time comes in. One that is refused is told when to come back, from the rate at which requests really leave.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

from pd_core.errors import Overloaded

T = TypeVar("T")

RATE_WINDOW_S = 30.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class WaitingLine(Generic[T]):
    """A FIFO of at most `max_waiting` newcomers. One that gives its turn back goes to the front, bound or not.

    timeout_s: how long one may wait
    """

    def __init__(self, max_waiting: int, timeout_s: float, now_s: float) -> None:
        self.timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._line: deque[tuple[T, float]] = deque()
        self._left_s: deque[float] = deque(maxlen=1024)
        self._since_s = now_s

    def __len__(self) -> int:
        return len(self._line)

    @property
    def head(self) -> T | None:
        """Whose turn it is next."""
        return self._line[0][0] if self._line else None

    def check_room(self, now_s: float) -> None:
        """Raises Overloaded when no newcomer may wait."""
        if len(self._line) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._line)} requests wait already, at most {self._max_waiting} may",
                retry_after_s=self.retry_after_s(now_s),
            )

    def join(self, item: T, now_s: float) -> None:
        """Takes the last place. Raises Overloaded when the line is full."""
        self.check_room(now_s)
        self._line.append((item, now_s))

    def give_back(self, item: T, since_s: float) -> None:
        """Takes the first place again; it waits since `since_s`."""
        self._line.appendleft((item, since_s))

    def take_turn(self, now_s: float) -> T:
        """The head leaves the line to be served. Raises IndexError when nobody waits."""
        item, _ = self._line.popleft()
        self._left_s.append(now_s)
        return item

    def served_at_once(self, now_s: float) -> None:
        """Somebody got a turn without waiting; it counts for the rate."""
        self._left_s.append(now_s)

    def leave(self, item: T) -> None:
        """Gives up waiting; nothing happens to one that is not in the line."""
        for place, (other, _) in enumerate(self._line):
            if other is item:
                del self._line[place]
                return

    def expired(self, now_s: float) -> list[T]:
        """Those that have waited too long; they stay in the line until they leave."""
        return [item for item, since_s in self._line if now_s - since_s >= self.timeout_s]

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
