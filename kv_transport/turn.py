"""A deadline that begins when nobody is ahead any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def within_turn(ahead: Iterable[asyncio.Future[Any]], turn_s: float) -> AsyncIterator[None]:
    """Ends what is inside with TimeoutError `turn_s` after all of `ahead` are done, however long that takes."""
    loop = asyncio.get_running_loop()
    before = {future for future in ahead if not future.done()}
    waiting = set(before)
    async with asyncio.timeout(None if waiting else turn_s) as limit:

        def one_is_done(future: asyncio.Future[Any]) -> None:
            waiting.discard(future)
            if not waiting:
                limit.reschedule(loop.time() + turn_s)

        for future in before:
            future.add_done_callback(one_is_done)
        try:
            yield
        finally:
            for future in before:
                future.remove_done_callback(one_is_done)
