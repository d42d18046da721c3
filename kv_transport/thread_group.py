"""Threads that belong to one event loop's object and end before it does."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from pd_core.errors import TransferError

_log = logging.getLogger(__name__)


class ThreadGroup:
    """Starts threads and waits for all of them at the end.

    They are daemons, so that a process that dies without `join` is not kept alive by a peer's silence.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._left = asyncio.Event()

    def start(self, name: str, target: Callable[[], None]) -> None:
        """From any thread. `target` handles its own errors; one that gets out is a fault of ours and is logged."""
        thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    async def join(self, within_s: float) -> None:
        """Returns when every thread has ended. Raises TransferError naming those that have not within `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while self._names():
                    self._left.clear()
                    if self._names():
                        await self._left.wait()
        except TimeoutError as error:
            raise TransferError(f"threads did not end within {within_s:g} s: {', '.join(self._names())}") from error

    def _names(self) -> list[str]:
        with self._lock:
            return [thread.name for thread in self._threads]

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception:
            _log.exception("thread %s failed", threading.current_thread().name)
        finally:
            try:
                self._loop.call_soon_threadsafe(self._reap, threading.current_thread())
            except RuntimeError:
                _log.warning("the event loop was closed before thread %s ended", threading.current_thread().name)

    def _reap(self, thread: threading.Thread) -> None:
        thread.join()  # it has nothing left to do but to return
        with self._lock:
            self._threads.discard(thread)
        self._left.set()
