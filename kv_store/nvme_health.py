"""What the disk can do at the moment, and when what it could not is tried again.

Each trouble stops some kinds of work at once and for everybody, so that nobody waits for what is known to fail. Only
the keeper tries again, after a back-off that doubles: callers never find out by waiting.
"""

from __future__ import annotations

import enum

import msgspec


class Trouble(enum.Enum):
    """Worst first."""

    CLOSED = "closed"  # not open: not started, locked by another, gone
    STUCK = "stuck"  # a call has not come back
    FAILING = "failing"  # calls end with errors
    READ_ONLY = "read-only"
    FULL = "full"  # no room to grow


class TierState(enum.Enum):
    OK = "ok"
    DEGRADED = "degraded"
    OFF = "off"


_STOPS_READS = frozenset({Trouble.CLOSED, Trouble.STUCK, Trouble.FAILING})
_STOPS_WRITES = _STOPS_READS | {Trouble.READ_ONLY}
_STOPS_GROWTH = _STOPS_WRITES | {Trouble.FULL}


class Standing(msgspec.Struct, frozen=True):
    """A trouble that stands. `num_tries`: how often in a row it was found."""

    reason: str
    since_s: float
    retry_at_s: float
    num_tries: int


class Health:
    """Troubles by kind. Times are of one monotonic clock."""

    def __init__(self, first_backoff_s: float, most_backoff_s: float) -> None:
        self._first_s = first_backoff_s
        self._most_s = most_backoff_s
        self._standing: dict[Trouble, Standing] = {}

    @property
    def state(self) -> TierState:
        if Trouble.CLOSED in self._standing:
            return TierState.OFF
        return TierState.DEGRADED if self._standing else TierState.OK

    @property
    def reason(self) -> str | None:
        """Of the worst trouble, in words; None while all is well."""
        return next((self._standing[trouble].reason for trouble in Trouble if trouble in self._standing), None)

    @property
    def can_read(self) -> bool:
        return not _STOPS_READS & self._standing.keys()

    @property
    def can_write(self) -> bool:
        return not _STOPS_WRITES & self._standing.keys()

    @property
    def can_grow(self) -> bool:
        return not _STOPS_GROWTH & self._standing.keys()

    def opens(self, reason: str, now_s: float) -> None:
        """CLOSED, but only until the first try has ended."""
        self._standing[Trouble.CLOSED] = Standing(reason, now_s, now_s + self._first_s, 0)

    def found(self, trouble: Trouble, reason: str, now_s: float) -> bool:
        """The trouble showed, for the first time or again. True when it is news."""
        before = self._standing.get(trouble)
        if before is not None and before.num_tries and now_s < before.retry_at_s:
            return False  # work that was under way when it showed
        num_tries = 1 if before is None else before.num_tries + 1
        since_s = now_s if before is None else before.since_s
        backoff_s = min(self._most_s, self._first_s * 2 ** min(num_tries - 1, 32))
        self._standing[trouble] = Standing(reason, since_s, now_s + backoff_s, num_tries)
        return before is None or before.reason != reason

    def over(self, trouble: Trouble) -> bool:
        """The trouble is no more. True when it stood."""
        return self._standing.pop(trouble, None) is not None

    def has(self, trouble: Trouble) -> bool:
        return trouble in self._standing

    def due(self, now_s: float) -> list[Trouble]:
        """What is to be tried again now, worst first."""
        return [
            trouble for trouble in Trouble if trouble in self._standing and self._standing[trouble].retry_at_s <= now_s
        ]
