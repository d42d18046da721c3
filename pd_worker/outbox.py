"""Messages of one request on their way to the router.

The worker's loop puts them in and never waits; the stream's handler takes them out as fast as the router reads.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from pd_core.errors import DeadlineExceeded, KvrelayError

MAX_ITEMS = 1024
"""A router that lets so many messages of one request wait has stopped reading it."""


async def let_messages_out() -> None:
    """Returns when the readers of outboxes have sent what was put in before, unless the router reads too slowly.

    For loops that keep the engine busy: where it shares a core with the event loop, messages that have not left when
    its next step begins wait until the kernel takes the core from it, which is milliseconds.
    """
    await asyncio.sleep(0)  # the readers take their messages
    await asyncio.sleep(0)  # their connections write them


class Outbox:
    """A bounded queue with an end. One reader: `async for item in outbox`.

    What was put in before the end is given first; then iteration ends, or raises the error of the end.
    """

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max_items = max_items
        self._items: deque[msgspec.Struct] = deque()
        self._reader: asyncio.Future[None] | None = None  # a bare future: one wakes for every token of every stream
        self._is_over = False
        self._error: KvrelayError | None = None

    @property
    def is_over(self) -> bool:
        return self._is_over

    def try_put(self, item: msgspec.Struct) -> KvrelayError | None:
        """Puts it in; DeadlineExceeded, and nothing was put in, when the reader is too far behind."""
        if len(self._items) >= self._max_items:
            return DeadlineExceeded(f"{len(self._items)} messages of this request wait and nobody reads them")
        self._items.append(item)
        self._wake()
        return None

    def end(self, error: KvrelayError | None) -> None:
        """Nothing comes after this. The first end counts."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._wake()

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> msgspec.Struct:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
