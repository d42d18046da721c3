"""Reads of many blocks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kv_store.nvme_core import NvmeCore, Volume
from kv_store.nvme_index import Entry
from kv_store.nvme_jobs import BlockResult, Claim, read_block
from kv_store.nvme_threads import Lane

READS_PER_THREAD = 8
"""So many blocks of one call are given to the disk at once: another call's need not wait for all of them."""


class BlockToRead(msgspec.Struct, frozen=True):
    """`into`: writable, contiguous, format "B", as long as the block. It is touched only if the block is good."""

    name: bytes
    into: memoryview


class _Batch:
    """Blocks of one call. `has_come[i]`: block i is in its place."""

    def __init__(self, num_blocks: int) -> None:
        self.claim = Claim()
        self.has_come = [False] * num_blocks
        self.num_open = 0


async def read_blocks(core: NvmeCore, blocks: Sequence[BlockToRead], within_s: float) -> list[bool]:
    """Which of the blocks have come, after `within_s` at most; no `into` is touched after that."""
    batch = _Batch(len(blocks))
    most_open = READS_PER_THREAD * core.settings.num_threads
    try:
        async with asyncio.timeout(within_s):
            for number, block in enumerate(blocks):
                _begin(core, batch, number, block)
                if batch.num_open >= most_open:
                    await core.inbox.until(lambda: batch.num_open < most_open or not core.health.can_read)
            await core.inbox.until(lambda: batch.num_open == 0 or not core.health.can_read)
    except TimeoutError:
        pass  # what has not come is a miss
    finally:
        batch.claim.revoke()
    # Revoking may have waited for a copy whose completion is still in the inbox: its block counts as missed.
    has_come = list(batch.has_come)
    core.count("nvme_blocks_read_total", sum(has_come))
    core.count("nvme_blocks_missed_total", len(has_come) - sum(has_come))
    return has_come


def _begin(core: NvmeCore, batch: _Batch, number: int, block: BlockToRead) -> None:
    """Gives the block to a disk thread, unless it is a miss already."""
    volume = core.volume
    if volume is None or not core.health.can_read:
        return
    entry = volume.index.begin_read(block.name)
    if entry is None:
        return
    if len(block.into) != entry.header.num_bytes:
        volume.index.end_read(entry)
        raise ValueError(f"block {block.name.hex()} has {entry.header.num_bytes} bytes, its place {len(block.into)}")
    disk, claim = volume.disk, batch.claim

    def work(buffer: memoryview) -> BlockResult:
        return read_block(disk, entry.slot, entry.header, block.into, claim, buffer)

    def done(result: BlockResult) -> None:
        _end(volume, batch, entry)
        core.read_worked()
        if result is BlockResult.DONE:
            batch.has_come[number] = True
            if volume.index.find(block.name) is entry:
                volume.policy.touch(block.name, core.now_s)
        elif result is BlockResult.CORRUPT:
            core.count("nvme_blocks_corrupt_total")
            _drop(core, volume, entry)

    def failed(error: Exception) -> None:
        _end(volume, batch, entry)
        core.read_failed(error, volume)
        _drop(core, volume, entry)

    if core.put(Lane.READS, volume, work, done, failed):
        batch.num_open += 1
    else:
        volume.index.end_read(entry)


def _end(volume: Volume, batch: _Batch, entry: Entry) -> None:
    batch.num_open -= 1
    volume.index.end_read(entry)


def _drop(core: NvmeCore, volume: Volume, entry: Entry) -> None:
    if volume.index.find(entry.header.name) is entry:
        core.drop(volume, entry.header.name)
