"""What the parts of the NVMe tier share: its settings, the disk threads, what is open, how the disk does, the counters.

All of it belongs to the event loop; threads only run the functions that are given to `put`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kv_store.nvme_eviction import EvictionOrder
from kv_store.nvme_files import DiskFiles
from kv_store.nvme_health import Health, Trouble
from kv_store.nvme_index import Entry, SlotIndex
from kv_store.nvme_opening import Opened
from kv_store.nvme_room import Quarters
from kv_store.nvme_threads import DiskThreads, Inbox, Lane
from kv_store.slot_format import SetPage

MAX_READ_ERRORS = 3
"""So many reads in a row that end with an error are no matter of single blocks any more."""
_TROUBLES = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.READ_ONLY,
    errno.EPERM: Trouble.READ_ONLY,
}
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def trouble_of(error: Exception) -> Trouble:
    """What a call's error says of the disk."""
    number = error.errno if isinstance(error, OSError) else None
    return Trouble.FAILING if number is None else _TROUBLES.get(number, Trouble.FAILING)


class NvmeSettings(msgspec.Struct, frozen=True):
    """How the tier behaves.

    quota_bytes:       for everything that lies in `folder`, whoever put it there
    num_threads:       so many calls reach the disk at once; on a machine whose cores are busy, more than the disk needs
    max_queued_blocks: so many reads, and so many writes, wait for a thread; more are refused
    growth_step_bytes: by so much a set grows at once
    sync_after_s:      what was written is made durable so long after
    stuck_after_s:     a call that takes longer takes the tier out of service until it comes back
    look_every_s:      so often it is looked whether the files still lie in the folder
    tick_s:            so often it is looked whether anything is due
    """

    folder: Path
    quota_bytes: int
    num_threads: int = 8
    max_queued_blocks: int = 1024
    growth_step_bytes: int = 16 << 20
    sync_after_s: float = 0.5
    stuck_after_s: float = 2.0
    look_every_s: float = 1.0
    tick_s: float = 0.1
    first_backoff_s: float = 1.0
    most_backoff_s: float = 30.0


COUNTER_NAMES = (
    "nvme_blocks_written_total",
    "nvme_blocks_read_total",
    "nvme_blocks_missed_total",  # asked for and not given: not there, late, corrupt, or the disk does not serve
    "nvme_blocks_refused_total",  # not kept: no room, no parent, or the disk does not serve
    "nvme_blocks_corrupt_total",  # with other bytes than their digest says, or headers that are none
    "nvme_blocks_evicted_total",
    "nvme_blocks_orphaned_total",  # found at a start without the block before them
    "nvme_sets_evicted_total",
    "nvme_io_errors_total",
    "nvme_syncs_total",
)


class Volume:
    """What is open, and what is known of it. `num_jobs` of the disk threads use its files, which are closed after that.

    num_written, num_synced: jobs that have written something, and how many of these are on the disk for certain
    writing: blocks on their way
    """

    def __init__(self, opened: Opened, policy: EvictionOrder) -> None:
        self.opened = opened
        self.disk = opened.disk
        self.index: SlotIndex = opened.rebuilt.index
        self.quarters: Quarters = opened.quarters
        self.policy = policy
        self.num_jobs = 0
        self.num_written = 0
        self.num_synced = 0
        self.dirty_since_s: float | None = None
        self.writing: set[Entry] = set()
        self.is_retired = False


class NvmeCore:
    """See the module. `num_open`: volumes whose files are open, also those that were given up."""

    def __init__(self, settings: NvmeSettings, page: SetPage, files: DiskFiles) -> None:
        self.settings = settings
        self.page = page
        self.files = files
        self.loop = asyncio.get_running_loop()
        self.inbox = Inbox(self.loop)
        self.threads = DiskThreads(settings.num_threads, settings.max_queued_blocks, page.slot_bytes)
        self.health = Health(settings.first_backoff_s, settings.most_backoff_s)
        self.counters = dict.fromkeys(COUNTER_NAMES, 0)
        self.volume: Volume | None = None
        self.num_open = 0
        self._num_read_errors = 0

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount

    def put(
        self,
        lane: Lane,
        volume: Volume | None,
        work: Callable[[memoryview], _T],
        done: Callable[[_T], None],
        failed: Callable[[Exception], None],
    ) -> bool:
        """Has a disk thread do `work`; `done` or `failed` follows in the loop, however late. False: neither will."""

        def end(call: Callable[[], None]) -> None:
            if volume is not None:
                volume.num_jobs -= 1
            try:
                call()
            finally:
                self._close_if_unused(volume)

        def job(buffer: memoryview) -> Callable[[], None]:
            try:
                result = work(buffer)
            except Exception as error:
                failure = error  # the name `error` ends with its block
                return lambda: self.inbox.put(lambda: end(lambda: failed(failure)))
            return lambda: self.inbox.put(lambda: end(lambda: done(result)))

        if not self.threads.put(lane, job):
            return False
        if volume is not None:
            volume.num_jobs += 1
        return True

    def retire(self, reason: str) -> None:
        """What is open is given up, because it cannot be used any more. It is tried to open it anew."""
        self.report(Trouble.CLOSED, reason)
        self.let_go()

    def let_go(self) -> None:
        """Nothing is open any more; files are closed when no job uses them."""
        volume, self.volume = self.volume, None
        if volume is not None:
            volume.is_retired = True
            self._close_if_unused(volume)

    def report(self, trouble: Trouble, reason: str) -> None:
        """A trouble showed."""
        if self.health.found(trouble, reason, self.now_s):
            _log.warning("NVMe tier in %s: %s: %s", self.settings.folder, trouble.value, reason)
        self.inbox.wake()

    def over(self, trouble: Trouble) -> None:
        """A trouble is no more."""
        if self.health.over(trouble):
            _log.warning("NVMe tier in %s: no longer %s", self.settings.folder, trouble.value)

    def failed(self, error: Exception, what: str, volume: Volume | None) -> None:
        """A call that is no read of a block ended with an error. Of a volume that was given up nobody wants to know."""
        self.count("nvme_io_errors_total")
        if volume is not self.volume:
            return
        if not isinstance(error, OSError):
            _log.error("NVMe tier in %s: %s failed", self.settings.folder, what, exc_info=error)
        self.report(trouble_of(error), f"{what}: {error}")

    def read_failed(self, error: Exception, volume: Volume) -> None:
        """A read of a block ended with an error."""
        self._num_read_errors += 1
        if self._num_read_errors >= MAX_READ_ERRORS or not isinstance(error, OSError):
            self.failed(error, "read", volume)
        else:
            self.count("nvme_io_errors_total")

    def read_worked(self) -> None:
        self._num_read_errors = 0

    def has_written(self, volume: Volume) -> None:
        """A job has written something that is not durable yet."""
        volume.num_written += 1
        if volume.dirty_since_s is None:
            volume.dirty_since_s = self.now_s

    def drop(self, volume: Volume, name: bytes) -> list[bytes]:
        """The block goes, and all that continue it; returns those that could be read."""
        dropped = volume.index.drop(name)
        for gone in dropped:
            volume.policy.remove(gone)
        return dropped

    def _close_if_unused(self, volume: Volume | None) -> None:
        if volume is None or not volume.is_retired or volume.num_jobs:
            return
        opened = volume.opened
        volume.is_retired = False
        if not self.close_opened(opened):
            volume.is_retired = True
            self.loop.call_later(self.settings.tick_s, self._close_if_unused, volume)

    def close_opened(self, opened: Opened) -> bool:
        """Closes files that nobody uses; False when the queue has no place for that now."""

        def done(_: None) -> None:
            self.num_open -= 1

        def failed(error: Exception) -> None:
            self.num_open -= 1
            _log.error("NVMe tier in %s: its files could not be closed", self.settings.folder, exc_info=error)

        return self.put(Lane.OTHERS, None, lambda _: opened.close(), done, failed)
