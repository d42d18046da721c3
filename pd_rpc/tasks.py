"""Background tasks that are never lost: none is collected while it runs, no failure goes unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
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
    """Tasks with one owner, who closes them.

    on_failure: told of an error that a task did not handle, after it was logged: a fault of ours, and whatever the
                task did for others is not done any more
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs it until it ends or the owner closes."""
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
            if self._on_failure is not None:
                self._on_failure(error)
