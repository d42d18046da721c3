"""The threads that wait for the disk, so that nobody else does: a bounded number, with a bounded queue before them."""

from __future__ import annotations

import asyncio
import enum
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable

from kv_transport.thread_group import ThreadGroup
from pd_core.errors import TransferError

Job = Callable[[memoryview], Callable[[], None]]
"""Gets the thread's own buffer, on page boundaries, for as long as it runs. What it returns is called when its time has
been taken. Neither raises."""

JOIN_S = 60.0
"""So often it is said that the disk still holds threads at the end."""
_log = logging.getLogger(__name__)


class Lane(enum.Enum):
    """Reads go first, since somebody waits for them. All else leaves one thread to them, where there are several."""

    READS = "reads"
    OTHERS = "others"


class DiskThreads:
    """Runs jobs. One that never comes back takes its thread with it, nothing else."""

    def __init__(self, num_threads: int, max_queued: int, buffer_bytes: int) -> None:
        """max_queued: jobs of each lane that wait for a thread"""
        self._max_queued = max_queued
        self._buffer_bytes = buffer_bytes
        self._most_others = max(1, num_threads - 1)
        self._num_threads = num_threads
        self._work = threading.Condition()
        self._queues: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._num_others = 0
        self._began_s: dict[int, float] = {}
        self._is_closed = False
        self._group: ThreadGroup | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._group = ThreadGroup(loop)
        for number in range(self._num_threads):
            self._group.start(f"kv-nvme-{number}", self._run)

    def put(self, lane: Lane, job: Job) -> bool:
        """False when the lane's queue is full, or all is closed: the job will not run."""
        with self._work:
            queue = self._queues[lane]
            if self._is_closed or len(queue) >= self._max_queued:
                return False
            queue.append(job)
            self._work.notify()
        return True

    @property
    def num_queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def longest_s(self) -> float:
        """For how long the oldest of the jobs that run has been running; 0 when none does."""
        began_s = min(self._began_s.copy().values(), default=None)
        return 0.0 if began_s is None else time.monotonic() - began_s

    def close(self) -> None:
        """Takes no more jobs; the threads end after those that are queued."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()

    async def join(self) -> None:
        """Returns when all threads have ended, whenever the disk gives the last one back."""
        while self._group is not None:
            try:
                await self._group.join(JOIN_S)
            except TransferError as error:
                _log.warning("the disk holds its threads: %s", error)
            else:
                return

    def _run(self) -> None:
        me = threading.get_ident()
        buffer = memoryview(mmap.mmap(-1, self._buffer_bytes))
        while (taken := self._take()) is not None:
            lane, job = taken
            self._began_s[me] = time.monotonic()
            try:
                tell = job(buffer)
            finally:
                del self._began_s[me]
                self._give_back(lane)
            tell()
            del job, taken, tell

    def _take(self) -> tuple[Lane, Job] | None:
        """Waits for a job; None at the end."""
        with self._work:
            while True:
                if self._queues[Lane.READS]:
                    return Lane.READS, self._queues[Lane.READS].popleft()
                if self._queues[Lane.OTHERS] and self._num_others < self._most_others:
                    self._num_others += 1
                    return Lane.OTHERS, self._queues[Lane.OTHERS].popleft()
                if self._is_closed and not self._queues[Lane.OTHERS]:
                    return None
                self._work.wait()

    def _give_back(self, lane: Lane) -> None:
        if lane is Lane.OTHERS:
            with self._work:
                self._num_others -= 1
                # Also at the end: a thread that waits only because of the limit.
                self._work.notify_all() if self._is_closed else self._work.notify()


class Inbox:
    """Brings what threads have done into an event loop: one wake-up for all that came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_woken = False
        self._news = loop.create_future()

    def put(self, call: Callable[[], None]) -> None:
        """From any thread: `call` runs in the loop, in the order of the puts."""
        with self._lock:
            self._calls.append(call)
            if self._is_woken:
                return
            self._is_woken = True
        self._loop.call_soon_threadsafe(self._drain)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns when `is_so()`; it is asked again after whatever comes in. Bound it with a timeout."""
        while not is_so():
            await asyncio.shield(self._news)

    def wake(self) -> None:
        """What those wait for in `until` may have changed."""
        news, self._news = self._news, self._loop.create_future()
        news.set_result(None)

    def _drain(self) -> None:
        with self._lock:
            self._is_woken = False
            calls, self._calls = self._calls, deque()
        for call in calls:
            try:
                call()
            except Exception:  # a fault of ours must not take with it what others wait for
                _log.exception("the end of a disk job failed")
        self.wake()
