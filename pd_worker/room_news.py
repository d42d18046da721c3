"""Tells whoever watches a worker that there is room again, when somebody was refused for want of it."""

from __future__ import annotations

import asyncio
import contextlib

SHORTEST_GAP_S = 0.02
"""Two statuses of one watcher are at least so far apart, however often room comes free."""


class RoomNews:
    """Belongs to one event loop.

    `news.freed()` wakes watchers only after `news.refused()`: who was not refused does not wait for room.
    """

    def __init__(self) -> None:
        self._has_refused = False
        self._next = asyncio.Event()

    def refused(self) -> None:
        """A request found no room, and may be waiting for some."""
        self._has_refused = True

    def freed(self) -> None:
        """Blocks or places came free."""
        if self._has_refused:
            self._has_refused = False
            came, self._next = self._next, asyncio.Event()
            came.set()

    def mark(self) -> asyncio.Event:
        """To be taken before one looks at the worker: set by the first news after that."""
        return self._next

    async def wait(self, mark: asyncio.Event, interval_s: float) -> None:
        """Returns after `interval_s`, or with the news after `mark`, but then not before SHORTEST_GAP_S."""
        gap_s = min(interval_s, SHORTEST_GAP_S)
        await asyncio.sleep(gap_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s - gap_s):
                await mark.wait()
