"""The one thread that has a device copy blocks beside the engine's steps.

put --> queue --> thread: start all that is queued, then wait for the oldest --> done, or failed
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from pd_core.device_copies import RunningCopy
from pd_core.errors import EngineError

_log = logging.getLogger(__name__)


class CopyJob(msgspec.Struct, frozen=True):
    """start: begins the copy; done, failed: one of them is called once, by the copier's thread.

    What `failed` is told of is in an unknown state: the device may still be reading and writing. A `done` that raises
    counts as a failure too.
    """

    start: Callable[[], RunningCopy]
    done: Callable[[], None]
    failed: Callable[[EngineError], None]


class Copier:
    """Copies start, and are done, in the order in which they were put. After one has failed, all do."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._running: deque[tuple[CopyJob, RunningCopy]] = deque()
        self._failure: EngineError | None = None
        self._is_closed = False
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="kv-copier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: CopyJob) -> None:
        """From any thread."""
        self._jobs.put(job)

    def close(self, within_s: float) -> None:
        """Returns when all copies have ended, and the thread with them. Raises EngineError when that takes longer."""
        if not self._thread.is_alive():
            return
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise EngineError(f"the device is still copying blocks after {within_s:g} s")

    def _run(self) -> None:
        while self._start_queued():
            if self._running:
                self._end_oldest()
        while self._running:
            self._end_oldest()

    def _start_queued(self) -> bool:
        """Waits for a job if there is nothing else to do; False after the last."""
        is_idle = not self._running
        while is_idle or not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                return False
            self._start(job)
            is_idle = False
        return True

    def _start(self, job: CopyJob) -> None:
        if self._failure is not None:
            job.failed(self._failure)
            return
        try:
            self._running.append((job, job.start()))
        except Exception as error:
            job.failed(self._fail(error))

    def _end_oldest(self) -> None:
        job, copy = self._running.popleft()
        if self._failure is not None:
            job.failed(self._failure)
            return
        try:
            copy.wait()
            job.done()
        except Exception as error:
            job.failed(self._fail(error))

    def _fail(self, error: Exception) -> EngineError:
        _log.error("the device failed to copy blocks", exc_info=error)
        self._failure = EngineError(f"the device failed to copy blocks: {error}")
        return self._failure
