"""KV blocks on NVMe, for one fingerprint: written once by name, read back with their digest, bounded, crash-safe.

    tier = NvmeTier(settings, fingerprint, make_policy)
    await tier.start(within_s=5.0)
    await tier.write([BlockToWrite(...)], within_s=1.0)
    await tier.read([BlockToRead(...)], within_s=1.0)

Every call returns within its time, and none raises because of the disk: what a disk does not do is a miss, or an
outcome that says so, and `stats().state` says why. The event loop never waits for the disk. A caller's memory is not
touched after its call has returned, also not by a call to the disk that comes back later.

Belongs to the event loop it was made in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kv_store.nvme_core import NvmeCore, NvmeSettings, Volume
from kv_store.nvme_eviction import EvictionOrder
from kv_store.nvme_files import DiskFiles, RealFiles
from kv_store.nvme_health import TierState
from kv_store.nvme_keeper import Keeper
from kv_store.nvme_reader import BlockToRead, read_blocks
from kv_store.nvme_set import IoMode
from kv_store.nvme_writer import BlockToWrite, Outcome, Writer
from kv_store.slot_format import SlotHeader, set_bytes, set_page
from pd_core.layout import Fingerprint

__all__ = ["BlockToRead", "BlockToWrite", "NvmeSettings", "NvmeStats", "NvmeTier", "Outcome", "TierState"]


class NvmeStats(msgspec.Struct, frozen=True):
    """The tier for metrics and for a person.

    reason:      why the state is not "ok"
    io_mode:     "direct" past the page cache, or "buffered"; None while nothing is open
    used_bytes:  of the quota: our set with its free slots, and `other_bytes` of other sets and of strangers' files
    num_writing: slots whose block is on its way; num_wiping: slots that are being made empty
    """

    state: TierState
    reason: str | None
    io_mode: IoMode | None
    num_blocks: int
    num_slots: int
    num_free: int
    num_writing: int
    num_wiping: int
    used_bytes: int
    other_bytes: int
    quota_bytes: int
    num_queued: int
    counters: dict[str, int]


class NvmeTier:
    """See the module."""

    def __init__(
        self,
        settings: NvmeSettings,
        fingerprint: Fingerprint,
        make_policy: Callable[[], EvictionOrder],
        files: DiskFiles | None = None,
    ) -> None:
        """make_policy: called each time the folder is opened, in a disk thread; what it makes belongs to the tier"""
        self._core = NvmeCore(settings, set_page(fingerprint), files if files is not None else RealFiles())
        self._writer = Writer(self._core)
        self._keeper = Keeper(self._core, self._writer, make_policy)
        self._keeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self, within_s: float) -> TierState:
        """Opens the folder and makes the index, and goes on trying when that takes longer or fails."""
        core = self._core
        core.health.opens(f"{core.settings.folder} is being opened", core.now_s)
        core.threads.start(core.loop)
        self._keeper.open()
        self._keeping = core.loop.create_task(self._keeper.run(), name="nvme-keeper")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await core.inbox.until(lambda: not self._keeper.is_opening)
        return core.health.state

    async def close(self, within_s: float) -> bool:
        """Makes durable what was written, and ends. False when the disk did not let that be done in time: what was
        written in the last second may be lost, and files and threads that the disk holds end when it lets go."""
        core = self._core
        ends_s = core.now_s + within_s
        is_durable = await self.flush(within_s / 2)
        self._keeper.close()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        core.health.opens("closed", core.now_s)
        core.let_go()
        self._ending = core.loop.create_task(self._end(), name="nvme-end")
        try:
            async with asyncio.timeout_at(ends_s):
                await asyncio.shield(self._ending)
        except TimeoutError:
            return False
        return is_durable

    def holds(self, name: bytes) -> bool:
        """Whether the block can be read."""
        return self._core.volume is not None and self._core.volume.index.find(name) is not None

    def num_held(self, names: Iterable[bytes]) -> int:
        """How many blocks can be read of a sequence with these names, from its first on."""
        num_blocks = 0
        for name in names:
            if not self.holds(name):
                break
            num_blocks += 1
        return num_blocks

    def blocks(self) -> list[SlotHeader]:
        """All blocks that can be read."""
        return list(self._core.volume.index.live()) if self._core.volume is not None else []

    async def read(self, blocks: Sequence[BlockToRead], within_s: float) -> list[bool]:
        """Which of the blocks are in their places now, whole and compared with their digests; the others are misses.
        Raises ValueError for a place of the wrong size."""
        return await read_blocks(self._core, blocks, within_s)

    async def write(self, blocks: Sequence[BlockToWrite], within_s: float) -> list[Outcome]:
        """What became of each block. Raises ValueError for a block that no set of this fingerprint can hold."""
        return await self._writer.write(blocks, within_s)

    async def flush(self, within_s: float) -> bool:
        """True when all that was written before is on the disk for certain; False when that could not be had."""
        core, volume = self._core, self._core.volume
        if volume is None:
            return False
        before = set(volume.writing)
        try:
            async with asyncio.timeout(within_s):
                await core.inbox.until(lambda: not before & volume.writing or not self._serves(volume))
                return await self._sync_up_to(volume, volume.num_written)
        except TimeoutError:
            return False

    async def remove(self, names: Iterable[bytes], within_s: float) -> bool:
        """Blocks go, with all that continue them: at once for every reader; True when their bytes on the disk are
        overwritten too, for certain. What a disk did not do in time is done later."""
        core, volume = self._core, self._core.volume
        if volume is None:
            return False
        for name in names:
            for gone in core.drop(volume, name):
                volume.policy.forget(gone)
        going = volume.index.going()
        try:
            async with asyncio.timeout(within_s):
                self._keeper.wipe(volume)
                await core.inbox.until(
                    lambda: all(volume.index.has_gone(entry) for entry in going) or not self._serves(volume)
                )
                return await self._sync_up_to(volume, volume.num_written) and all(map(volume.index.has_gone, going))
        except TimeoutError:
            return False

    def stats(self) -> NvmeStats:
        core, volume = self._core, self._core.volume
        if volume is None:
            return NvmeStats(
                core.health.state, core.health.reason, None, 0, 0, 0, 0, 0, 0, 0,
                core.settings.quota_bytes, core.threads.num_queued, dict(core.counters),
            )  # fmt: skip
        counts = volume.index.counts()
        other_bytes = volume.quarters.num_bytes
        return NvmeStats(
            state=core.health.state,
            reason=core.health.reason,
            io_mode=volume.disk.mode,
            num_blocks=counts.live,
            num_slots=counts.total,
            num_free=counts.free,
            num_writing=counts.writing,
            num_wiping=counts.wiping,
            used_bytes=set_bytes(counts.total, core.page.slot_bytes) + other_bytes,
            other_bytes=other_bytes,
            quota_bytes=core.settings.quota_bytes,
            num_queued=core.threads.num_queued,
            counters=dict(core.counters),
        )

    async def _end(self) -> None:
        """Returns when all files are closed and all threads have ended, whenever the disk lets them."""
        core = self._core
        await core.inbox.until(lambda: core.num_open == 0 and not self._keeper.is_opening)
        core.threads.close()
        await core.threads.join()

    def _serves(self, volume: Volume) -> bool:
        return self._core.volume is volume and self._core.health.can_write

    async def _sync_up_to(self, volume: Volume, num_written: int) -> bool:
        """True when so many of the writes are on the disk."""
        while volume.num_synced < num_written and self._serves(volume):
            self._keeper.sync(volume)
            if not self._keeper.is_syncing:
                return False  # the queue before the disk is full
            await self._core.inbox.until(lambda: not self._keeper.is_syncing or not self._serves(volume))
        return volume.num_synced >= num_written
