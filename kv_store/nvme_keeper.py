"""What has to be done for the tier though nobody asks for it: syncs, wipes, a look at the folder, and another try of
what failed. It looks at the clock every tick and never waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kv_store.nvme_core import NvmeCore, Volume, trouble_of
from kv_store.nvme_eviction import EvictionOrder
from kv_store.nvme_folder import set_name
from kv_store.nvme_health import Trouble
from kv_store.nvme_index import Entry
from kv_store.nvme_jobs import wipe_slot
from kv_store.nvme_opening import Opened, open_folder
from kv_store.nvme_room import Quarters
from kv_store.nvme_threads import Lane
from kv_store.nvme_writer import Writer
from pd_core.errors import Unavailable

MOST_WIPES = 16
"""So many slots are given to the disk to be wiped at once."""
LOOKS_BETWEEN_MEASURES = 10
"""Each look finds out whether our files are there; one in so many also measures all others."""
_log = logging.getLogger(__name__)


class Keeper:
    """See the module."""

    def __init__(self, core: NvmeCore, writer: Writer, make_policy: Callable[[], EvictionOrder]) -> None:
        self._core = core
        self._writer = writer
        self._make_policy = make_policy
        self._device: int | None = None
        self.is_opening = False
        self._is_looking = False
        self._is_probing = False
        self._is_closed = False
        self._syncing: Volume | None = None
        self._looked_s = core.now_s
        self._num_wipes = 0
        self._num_looks = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                self.tick()
            except Exception:  # a fault of ours must not end what keeps the tier going
                _log.exception("the NVMe tier's keeper failed")
            await asyncio.sleep(self._core.settings.tick_s)

    def close(self) -> None:
        """Nothing is opened any more."""
        self._is_closed = True

    def tick(self) -> None:
        """Begins what is due now."""
        core = self._core
        self._find_stuck()
        volume = core.volume
        if volume is not None and core.health.can_write:
            since_s = volume.dirty_since_s
            if since_s is not None and core.now_s - since_s >= core.settings.sync_after_s:
                self.sync(volume)
            self.wipe(volume)
        if volume is not None and core.now_s - self._looked_s >= core.settings.look_every_s:
            self._look(volume)
        for trouble in core.health.due(core.now_s):
            self._retry(trouble)

    def open(self) -> None:
        """Begins to open the folder; the trouble CLOSED ends with it."""
        core = self._core
        if self.is_opening or self._is_closed:
            return
        settings, files, page, device = core.settings, core.files, core.page, self._device

        def work(_: memoryview) -> tuple[Opened, EvictionOrder]:
            opened = open_folder(files, settings.folder, page, settings.quota_bytes, device)
            policy = self._make_policy()
            for header in opened.rebuilt.live:
                policy.add(header.name, header.parent, header.position, core.now_s)
            return opened, policy

        self.is_opening = core.put(Lane.OTHERS, None, work, self._opened, self._open_failed)

    @property
    def is_syncing(self) -> bool:
        return self._syncing is not None

    def sync(self, volume: Volume) -> None:
        """Begins to make durable what has been written, unless a sync is under way already."""
        core = self._core
        if self._syncing is not None or volume.num_written == volume.num_synced:
            return
        num_written, volume.dirty_since_s = volume.num_written, None

        def done(_: None) -> None:
            self._syncing = None
            volume.num_synced = num_written
            core.count("nvme_syncs_total")

        def failed(error: Exception) -> None:
            self._syncing = None
            volume.dirty_since_s = core.now_s
            core.failed(error, "sync", volume)

        if core.put(Lane.OTHERS, volume, lambda _: volume.disk.sync(), done, failed):
            self._syncing = volume
        else:
            volume.dirty_since_s = core.now_s

    def wipe(self, volume: Volume) -> None:
        """Begins to wipe what waits for it."""
        for entry in volume.index.begin_wipe(MOST_WIPES - self._num_wipes):
            self._wipe_one(volume, entry)

    def _wipe_one(self, volume: Volume, entry: Entry) -> None:
        core = self._core

        def done(_: None) -> None:
            self._num_wipes -= 1
            core.has_written(volume)
            volume.index.wiped(entry)
            if core.volume is volume and core.health.can_write:
                self.wipe(volume)

        def failed(error: Exception) -> None:
            self._num_wipes -= 1
            volume.index.wipe_failed(entry)
            core.failed(error, "wipe", volume)

        def work(buffer: memoryview) -> None:
            wipe_slot(volume.disk, entry.slot, entry.erases_body, buffer)

        self._num_wipes += 1
        if not core.put(Lane.OTHERS, volume, work, done, failed):
            self._num_wipes -= 1
            volume.index.wipe_failed(entry)

    def _opened(self, result: tuple[Opened, EvictionOrder]) -> None:
        core = self._core
        self.is_opening = False
        core.num_open += 1
        opened, policy = result
        if self._is_closed:
            core.close_opened(opened)
            return
        rebuilt = opened.rebuilt
        core.count("nvme_blocks_corrupt_total", rebuilt.num_corrupt)
        core.count("nvme_blocks_orphaned_total", rebuilt.num_orphans)
        core.count("nvme_sets_evicted_total", opened.num_evicted_sets)
        core.volume = Volume(opened, policy)
        self._device = opened.device
        self._looked_s = core.now_s
        for trouble in Trouble:
            core.over(trouble)
        core.inbox.wake()
        _log.info("NVMe tier in %s: %d blocks, %s I/O", core.settings.folder, len(rebuilt.live), opened.disk.mode)
        self.wipe(core.volume)

    def _open_failed(self, error: Exception) -> None:
        self.is_opening = False
        if not isinstance(error, (OSError, Unavailable)):
            _log.error("the NVMe tier could not be opened", exc_info=error)
        self._core.report(Trouble.CLOSED, str(error))

    def _find_stuck(self) -> None:
        core = self._core
        longest_s = 0.0 if self.is_opening else core.threads.longest_s()  # an index takes its time, and nobody waits
        if longest_s > core.settings.stuck_after_s:
            core.report(Trouble.STUCK, f"a call has not come back for more than {core.settings.stuck_after_s:g} s")

    def _look(self, volume: Volume) -> None:
        """Whether the files we use are those that others would find."""
        core = self._core
        if self._is_looking:
            return
        self._looked_s = core.now_s
        opened = volume.opened

        self._num_looks += 1
        looks_around = self._num_looks % LOOKS_BETWEEN_MEASURES == 0

        def work(_: memoryview) -> tuple[bool, Quarters | None]:
            is_there = opened.disk.is_still_there() and opened.folder.is_still_ours()
            return is_there, opened.folder.look_around(set_name(core.page)) if is_there and looks_around else None

        def done(seen: tuple[bool, Quarters | None]) -> None:
            self._is_looking = False
            is_there, quarters = seen
            volume.quarters = quarters if quarters is not None else volume.quarters
            if not is_there and core.volume is volume:
                core.retire(f"what was in {core.settings.folder} is gone")

        def failed(error: Exception) -> None:
            self._is_looking = False
            core.failed(error, "look", volume)

        self._is_looking = core.put(Lane.OTHERS, volume, work, done, failed)

    def _retry(self, trouble: Trouble) -> None:
        core, volume = self._core, self._core.volume
        if trouble is Trouble.CLOSED:
            self.open()
        elif volume is None:
            if trouble is not Trouble.STUCK or not core.threads.longest_s():
                core.over(trouble)  # what is not open has no other trouble
        elif trouble is Trouble.FULL:
            if core.health.can_write:
                self._writer.grow_again(volume)
        else:
            self._probe(volume)

    def _probe(self, volume: Volume) -> None:
        """Whether the disk reads and writes again, in good time."""
        core = self._core
        if self._is_probing or core.threads.longest_s() > core.settings.stuck_after_s:
            return
        began_s = core.now_s

        def done(_: None) -> None:
            self._is_probing = False
            if core.now_s - began_s <= core.settings.stuck_after_s:
                for trouble in (Trouble.STUCK, Trouble.FAILING, Trouble.READ_ONLY):
                    core.over(trouble)
                core.inbox.wake()

        def failed(error: Exception) -> None:
            self._is_probing = False
            if core.volume is not volume:
                return
            trouble = trouble_of(error)
            if core.now_s - began_s <= core.settings.stuck_after_s:
                core.over(Trouble.STUCK)
            if trouble is Trouble.FAILING and core.health.has(Trouble.FAILING):
                core.retire(f"the disk still fails: {error}")  # a new disk may lie there by now, which wants new files
                return
            core.over(Trouble.FAILING)
            core.failed(error, "try", volume)

        self._is_probing = core.put(Lane.OTHERS, volume, volume.disk.probe, done, failed)
