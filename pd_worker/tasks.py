"""Background tasks that are never lost: none is collected while it runs, no failure goes unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def finish_regardless(future: asyncio.Future[T]) -> T:
    """The future's result; when we are cancelled, CancelledError, but only after the future is done.

    For work that another thread does with our memory: nobody may reuse the memory before it has ended.
    """
    was_cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        future.exception()  # seen, so that it is not reported as lost
        raise asyncio.CancelledError
    return future.result()


class BackgroundTasks:
    """Tasks with one owner, who closes them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs it; an error that it does not handle is logged as a fault of ours."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancels what still runs and waits for its end."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task %s failed", task.get_name(), exc_info=error)
