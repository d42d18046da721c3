"""Writes of many blocks at once: room for each, then the disk."""

from __future__ import annotations

import asyncio
import enum
import errno
from collections.abc import Sequence

import msgspec

from kv_store.nvme_core import NvmeCore, Volume
from kv_store.nvme_health import Trouble
from kv_store.nvme_index import Entry, Fate, SlotState
from kv_store.nvme_jobs import BlockResult, Claim, write_block
from kv_store.nvme_room import EvictBlock, EvictSet, Grow, NoRoom, Room, RoomStep, UseFreeSlot, growth_step, next_step
from kv_store.nvme_threads import Lane
from kv_store.slot_format import MAX_POSITION, SlotHeader

WRITES_PER_THREAD = 4
"""So many blocks of all calls together are given to the disk at once; the others' callers wait."""


class BlockToWrite(msgspec.Struct, frozen=True):
    """A full block, after its parent in the same call or an earlier one.

    name, parent: prefix hashes; of the first block (position 0) the parent is the tenant's root
    digest:       xxh3-64 of `block`, made by whoever made the block
    block:        contiguous, format "B"; read only until the call returns
    """

    name: bytes
    parent: bytes
    position: int
    digest: int
    block: memoryview


class Outcome(enum.Enum):
    """What became of a block that was to be written."""

    WRITTEN = "written"  # it can be read; `flush` makes it durable, or half a second does
    ALREADY_THERE = "already there"  # or on its way by another call
    NO_PARENT = "no parent"  # the block before it is not there
    NO_ROOM = "no room"
    NOT_SERVED = "not served"  # the disk has a trouble, or its queue is full
    CORRUPT = "corrupt"  # the bytes that were handed in are not those of their digest
    LATE = "late"  # not yet written when the call's time was over


class _Batch:
    def __init__(self, blocks: Sequence[BlockToWrite]) -> None:
        self.blocks = blocks
        self.claim = Claim()
        self.outcomes: list[Outcome | None] = [None] * len(blocks)
        self.no_space: list[int] = []  # numbers of blocks that the disk had no room for

    @property
    def is_over(self) -> bool:
        return None not in self.outcomes


class Writer:
    """See the module."""

    def __init__(self, core: NvmeCore) -> None:
        self._core = core
        self._most_in_flight = WRITES_PER_THREAD * core.settings.num_threads
        self._room_work: Volume | None = None  # the volume that a thread is making room in
        self._has_evicted_set = False  # because the disk was full, and has not grown since

    async def write(self, blocks: Sequence[BlockToWrite], within_s: float) -> list[Outcome]:
        """One outcome for each block, after `within_s` at most; no `block` is read after that."""
        core = self._core
        batch = _Batch(blocks)
        for block in blocks:
            if not 0 < len(block.block) <= core.page.block_bytes or not 0 <= block.position <= MAX_POSITION:
                raise ValueError(
                    f"block {block.position} of {len(block.block)} bytes in a set of {core.page.block_bytes}"
                )
        try:
            async with asyncio.timeout(within_s):
                for number in range(len(blocks)):
                    await self._admit(batch, number)
                await self._settled(batch)
                for number in batch.no_space:
                    batch.outcomes[number] = None
                    await self._admit(batch, number)
                await self._settled(batch)
        except TimeoutError:
            pass  # what has no outcome is late
        finally:
            batch.claim.revoke()
        outcomes = [outcome or Outcome.LATE for outcome in batch.outcomes]
        kept = sum(outcome in (Outcome.WRITTEN, Outcome.ALREADY_THERE) for outcome in outcomes)
        core.count("nvme_blocks_refused_total", len(outcomes) - kept)
        return outcomes

    def step(self, volume: Volume) -> RoomStep:
        """How to come to a slot for one block now."""
        return next_step(self._room(volume))

    def grow_again(self, volume: Volume) -> None:
        """Tries whether the disk has room for more of us now; ends the trouble FULL if so."""
        room = msgspec.structs.replace(self._room(volume), can_grow=True)
        step = growth_step(room)
        if step is None:
            self._core.over(Trouble.FULL)  # the quota does not want more than there is
        elif self._room_work is None:
            self._make_room(volume, step)

    async def _settled(self, batch: _Batch) -> None:
        """Returns when all blocks have an outcome, or will not get one any time soon."""
        core = self._core
        await core.inbox.until(lambda: batch.is_over or not core.health.can_write)

    async def _admit(self, batch: _Batch, number: int) -> None:
        """Gives the block an outcome, or a disk thread that will."""
        core, block = self._core, batch.blocks[number]
        while True:
            volume = core.volume
            if volume is None or not core.health.can_write:
                batch.outcomes[number] = Outcome.NOT_SERVED
                return
            match volume.index.fate(block.name, block.parent, block.position):
                case Fate.KNOWN:
                    batch.outcomes[number] = Outcome.ALREADY_THERE
                    if volume.index.find(block.name) is not None:
                        volume.policy.touch(block.name, core.now_s)
                    return
                case Fate.NO_PARENT:
                    batch.outcomes[number] = Outcome.NO_PARENT
                    return
            if len(volume.writing) >= self._most_in_flight:
                await self._fewer_in_flight(volume)
                continue
            match self.step(volume):
                case UseFreeSlot():
                    self._begin(volume, batch, number, volume.index.take_slot(_header(block)), replaces=False)
                    return
                case EvictBlock():
                    self._begin_instead(volume, batch, number)
                    return
                case NoRoom():
                    batch.outcomes[number] = Outcome.NO_ROOM
                    return
                case (Grow() | EvictSet()) as step:
                    if self._room_work is None:
                        self._make_room(volume, step)
                    await core.inbox.until(lambda: self._room_work is None)

    async def _fewer_in_flight(self, volume: Volume) -> None:
        """Returns when another block may go to the disk, or no more of this volume will."""
        core, most = self._core, self._most_in_flight
        await core.inbox.until(
            lambda: len(volume.writing) < most or not core.health.can_write or core.volume is not volume
        )

    def _room(self, volume: Volume) -> Room:
        core, index = self._core, volume.index
        return Room(
            num_slots=index.num_slots,
            num_free=index.num_free,
            slot_bytes=core.page.slot_bytes,
            quota_bytes=core.settings.quota_bytes,
            quarters=volume.quarters,
            can_grow=core.health.can_grow,
            step_slots=max(1, core.settings.growth_step_bytes // core.page.slot_bytes),
        )

    def _make_room(self, volume: Volume, step: Grow | EvictSet) -> None:
        """Has a thread do it; `_room_work` is None again when it has."""
        core = self._core
        num_slots = volume.index.num_slots
        disk, folder = volume.disk, volume.opened.folder

        def work(_: memoryview) -> None:
            if isinstance(step, Grow):
                disk.grow(num_slots, step.num_slots)
            else:
                folder.remove_set(step.name)

        def done(_: None) -> None:
            self._room_work = None
            if isinstance(step, Grow):
                volume.index.grow(step.num_slots)
                self._has_evicted_set = False
                core.over(Trouble.FULL)
            else:
                volume.quarters = volume.quarters.without(step.name)
                core.count("nvme_sets_evicted_total")

        def failed(error: Exception) -> None:
            self._room_work = None
            oldest = volume.quarters.oldest
            if not isinstance(step, Grow):
                core.failed(error, f"evict {step.name}", volume)
            elif is_no_space(error) and step.num_slots - num_slots > 1:
                self._make_room(volume, Grow(num_slots + (step.num_slots - num_slots) // 2))
            elif is_no_space(error) and oldest is not None and not self._has_evicted_set:
                self._has_evicted_set = True
                self._make_room(volume, EvictSet(oldest.name))
            else:
                self._has_evicted_set = False
                core.failed(error, "grow", volume)

        if volume is core.volume and core.put(Lane.OTHERS, volume, work, done, failed):
            self._room_work = volume
        elif volume is core.volume:
            core.report(Trouble.FAILING, "the queue before the disk is full")

    def _begin_instead(self, volume: Volume, batch: _Batch, number: int) -> None:
        """Writes the block into the slot of another, if there is one to go."""
        header = _header(batch.blocks[number])
        victim = self._victim(volume, header)
        if victim is None:
            batch.outcomes[number] = Outcome.NO_ROOM
            return
        volume.policy.remove(victim)
        entry = volume.index.replace(victim, header)
        self._core.count("nvme_blocks_evicted_total")
        self._begin(volume, batch, number, entry, replaces=True)

    def _victim(self, volume: Volume, header: SlotHeader) -> bytes | None:
        is_evictable = volume.index.is_evictable
        for num_asked in (1, 2 + volume.index.num_busy):
            for name in volume.policy.victims(num_asked):
                if is_evictable(name, header):
                    return name
        return None

    def _begin(self, volume: Volume, batch: _Batch, number: int, entry: Entry, replaces: bool) -> None:
        core = self._core
        disk, set_id, claim, block = volume.disk, core.page.set_id, batch.claim, batch.blocks[number].block

        def work(buffer: memoryview) -> BlockResult:
            return write_block(disk, entry.slot, entry.header, set_id, replaces, block, claim, buffer)

        def done(result: BlockResult) -> None:
            volume.writing.discard(entry)
            if result is BlockResult.DONE:
                core.has_written(volume)
                core.count("nvme_blocks_written_total")
                for header in volume.index.written(entry):
                    volume.policy.add(header.name, header.parent, header.position, core.now_s)
                is_gone = entry.state is SlotState.WIPING  # the block before it failed, or somebody removed it
                batch.outcomes[number] = Outcome.NO_PARENT if is_gone else Outcome.WRITTEN
                return
            volume.index.failed(entry)
            if result is BlockResult.CORRUPT:
                core.count("nvme_blocks_corrupt_total")
                batch.outcomes[number] = Outcome.CORRUPT

        def failed(error: Exception) -> None:
            volume.writing.discard(entry)
            volume.index.failed(entry)
            core.failed(error, "write", volume)
            if is_no_space(error) and number not in batch.no_space:
                batch.no_space.append(number)
            batch.outcomes[number] = Outcome.NOT_SERVED

        if core.put(Lane.OTHERS, volume, work, done, failed):
            volume.writing.add(entry)
        else:
            volume.index.failed(entry)
            batch.outcomes[number] = Outcome.NOT_SERVED


def is_no_space(error: Exception) -> bool:
    """Whether the disk, or somebody's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _header(block: BlockToWrite) -> SlotHeader:
    return SlotHeader(block.name, block.parent, block.position, block.digest, len(block.block), 0)
