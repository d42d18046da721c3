"""The tier on a disk that works: what is written is read, once, within the quota, also by the next process."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from nvme_parts import (
    BLOCK_BYTES,
    SLOT_BYTES,
    SOON_S,
    BreakableFiles,
    LeafLru,
    block,
    chain,
    content,
    fingerprint,
    name_of,
    opened,
    read_back,
    set_folder,
    settings,
    sleeping,
    sound,
    taken_bytes,
    until,
    written,
)

from kv_store.nvme_eviction import EvictionOrder
from kv_store.nvme_tier import BlockToRead, NvmeTier, Outcome, TierState
from kv_store.policy import HitDensityPolicy, LruPolicy
from kv_store.slot_format import SlotHeader, pack_header, pack_set_page, set_page
from kv_transport.digest import block_digest


def process_that_locks(path: Path) -> subprocess.Popen[bytes]:
    """It has the lock when this returns, until its standard input ends."""
    program = (
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX); os.write(fd, str(os.getpid()).encode())\n"
        "print('locked', flush=True); sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    return process


def num_sets(folder: Path) -> int:
    return len(list(folder.glob("v1-*")))


async def test_what_was_written_is_read_with_the_same_bytes(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)) as tier:
        blocks = chain(1, 20)
        await written(tier, blocks)
        assert await read_back(tier, blocks) == [True] * 20
        assert await read_back(tier, [block(2, 0)]) == [False]
        assert tier.num_held([b.name for b in blocks] + [name_of(1, 20)]) == 20
        counters = tier.stats().counters
        assert (counters["nvme_blocks_read_total"], counters["nvme_blocks_missed_total"]) == (20, 1)


async def test_what_was_flushed_is_there_after_a_restart(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)) as tier:
        await written(tier, chain(1, 20))
        assert await tier.flush(SOON_S)
        assert tier.stats().counters["nvme_syncs_total"] >= 1
    async with opened(settings(tmp_path)) as tier:
        assert {header.name for header in tier.blocks()} == {b.name for b in chain(1, 20)}
        assert await read_back(tier, chain(1, 20)) == [True] * 20
        await written(tier, [block(1, 20)])  # goes on where it was


async def test_a_block_is_written_once_however_many_share_it(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path), files) as tier:
        await asyncio.gather(*(tier.write(chain(1, 5), SOON_S) for _ in range(4)))
        assert await tier.write(chain(1, 5), SOON_S) == [Outcome.ALREADY_THERE] * 5
        assert tier.stats().counters["nvme_blocks_written_total"] == 5
        assert tier.stats().num_blocks == 5


async def test_a_block_without_the_one_before_it_is_not_kept(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)) as tier:
        assert await tier.write([block(1, 1)], SOON_S) == [Outcome.NO_PARENT]
        twice_first = msgspec.structs.replace(block(1, 2), parent=name_of(1, 0))
        assert await tier.write([block(1, 0), twice_first], SOON_S) == [Outcome.WRITTEN, Outcome.NO_PARENT]


async def test_bytes_that_are_not_those_of_their_digest_are_not_kept(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)) as tier:
        wrong = msgspec.structs.replace(block(1, 0), digest=1)
        outcomes = await tier.write([wrong, block(1, 1)], SOON_S)
        assert outcomes == [Outcome.CORRUPT, Outcome.NO_PARENT]
        assert tier.blocks() == []


async def test_a_place_of_the_wrong_size_is_refused_and_untouched(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)) as tier:
        await written(tier, chain(1, 1))
        place = bytearray(BLOCK_BYTES + 1)
        with pytest.raises(ValueError, match="its place 4001"):
            await tier.read([BlockToRead(name_of(1, 0), memoryview(place))], SOON_S)
        assert place == bytes(BLOCK_BYTES + 1)
        with pytest.raises(ValueError, match="4128 bytes in a set of 4000"):
            await tier.write([block(2, 0, 4128)], SOON_S)


@pytest.mark.parametrize("make_policy", [LeafLru, LruPolicy, HitDensityPolicy])
async def test_a_full_store_evicts_leaves_and_never_leaves_an_orphan(
    tmp_path: Path, make_policy: Callable[[], EvictionOrder]
) -> None:
    async with opened(settings(tmp_path, num_slots=20), make_policy=make_policy) as tier:
        num_slots = 20
        for sequence in range(12):
            await written(tier, chain(sequence, 5))
            sound(tier)
            there = {header.name for header in tier.blocks()}
            assert all(header.position == 0 or header.parent in there for header in tier.blocks())
        assert num_slots - 2 <= tier.stats().num_slots <= num_slots + 2
        assert tier.stats().counters["nvme_blocks_evicted_total"] >= 60 - tier.stats().num_slots
        assert await read_back(tier, chain(11, 5)) == [True] * 5
        assert tier.stats().used_bytes <= tier.stats().quota_bytes


async def test_a_sequence_longer_than_the_store_keeps_its_front(tmp_path: Path) -> None:
    async with opened(settings(tmp_path, num_slots=10)) as tier:
        outcomes = await tier.write(chain(1, 30), SOON_S)
        num_kept = tier.stats().num_slots
        assert outcomes[:num_kept] == [Outcome.WRITTEN] * num_kept
        assert set(outcomes[num_kept:]) <= {Outcome.NO_ROOM, Outcome.NO_PARENT}
        assert await read_back(tier, chain(1, 30)) == [True] * num_kept + [False] * (30 - num_kept)


async def test_the_quota_holds_for_all_that_lies_in_the_folder(tmp_path: Path) -> None:
    with_settings = settings(tmp_path, num_slots=30)
    async with opened(with_settings) as tier:
        for sequence in range(10):
            await written(tier, chain(sequence, 5))
        assert await tier.flush(SOON_S)
        assert taken_bytes(tmp_path) <= with_settings.quota_bytes


async def test_a_quota_too_small_for_one_block_is_no_room(tmp_path: Path) -> None:
    async with opened(settings(tmp_path, quota_bytes=SLOT_BYTES)) as tier:
        assert await tier.write([block(1, 0)], SOON_S) == [Outcome.NO_ROOM]


async def test_a_smaller_quota_at_the_next_start_is_kept(tmp_path: Path) -> None:
    async with opened(settings(tmp_path, num_slots=60)) as tier:
        for sequence in range(10):
            await written(tier, chain(sequence, 5))
    smaller = settings(tmp_path, num_slots=20)
    async with opened(smaller) as tier:
        assert 0 < tier.stats().num_blocks <= tier.stats().num_slots <= 22
        assert taken_bytes(tmp_path) <= smaller.quota_bytes
        kept = {header.name for header in tier.blocks()}
        for sequence in range(10):
            assert await read_back(tier, chain(sequence, 5)) == [b.name in kept for b in chain(sequence, 5)]


async def test_other_models_sets_are_left_alone_until_the_quota_needs_them_oldest_first(tmp_path: Path) -> None:
    for model in ("a", "b"):
        async with opened(settings(tmp_path, num_slots=40), model=fingerprint(model)) as tier:
            await written(tier, chain(1, 8))
        await asyncio.sleep(0.02)  # of two sets one was used before the other
    async with opened(settings(tmp_path, num_slots=40), model=fingerprint("a")) as tier:
        assert await read_back(tier, chain(1, 8)) == [True] * 8
    await asyncio.sleep(0.02)  # so "b" is the one that was used longest ago
    async with opened(settings(tmp_path, num_slots=47), model=fingerprint("c")) as tier:
        assert tier.blocks() == []
        await written(tier, chain(1, 8))
        assert num_sets(tmp_path) == 3
        await written(tier, chain(2, 16))  # 24 of them, and twice 8 with their folders: that is just within the quota
        assert num_sets(tmp_path) == 3
        await written(tier, chain(3, 8))
        assert tier.stats().counters["nvme_sets_evicted_total"] == 1
        assert not (tmp_path / f"v1-{set_page(fingerprint('b')).set_id.hex()}").exists()
        assert taken_bytes(tmp_path) <= tier.stats().quota_bytes
    async with opened(settings(tmp_path, num_slots=60), model=fingerprint("a")) as tier:
        assert await read_back(tier, chain(1, 8)) == [True] * 8  # back to the old model: hits


async def test_files_of_strangers_count_and_stay(tmp_path: Path) -> None:
    stranger = tmp_path / "holiday.jpg"
    stranger.write_bytes(bytes(20 * SLOT_BYTES))
    of_the_future = tmp_path / f"v9-{'0' * 32}"
    of_the_future.mkdir()
    (of_the_future / "anything").write_bytes(bytes(10 * SLOT_BYTES))
    async with opened(settings(tmp_path, num_slots=40)) as tier:
        assert tier.stats().other_bytes >= 30 * SLOT_BYTES
        for sequence in range(10):
            await written(tier, chain(sequence, 5))
        assert stranger.stat().st_size == 20 * SLOT_BYTES
        assert not of_the_future.exists()  # a set of another version goes when the quota needs it
        assert taken_bytes(tmp_path) <= tier.stats().quota_bytes


async def test_removed_blocks_are_gone_from_the_disk_with_all_that_continue_them(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)) as tier:
        await written(tier, chain(1, 6) + chain(2, 6))
        assert await tier.remove([name_of(1, 2)], SOON_S)
        assert await read_back(tier, chain(1, 6)) == [True] * 2 + [False] * 4
        assert await read_back(tier, chain(2, 6)) == [True] * 6
        on_disk = b"".join(path.read_bytes() for path in sorted(set_folder(tmp_path).iterdir()))
        for b in chain(1, 6):
            assert (bytes(b.block) in on_disk) == (b.name in on_disk) == (b.position < 2)
        await written(tier, chain(1, 6)[2:])  # and can come back


async def test_folders_and_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    async with opened(settings(folder)) as tier:
        await written(tier, chain(1, 3))
        for path in (folder, *folder.rglob("*")):
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path


async def test_the_second_process_on_a_folder_says_so_and_takes_over_when_the_first_ends(tmp_path: Path) -> None:
    first = process_that_locks(tmp_path / "lock")
    assert first.stdin is not None and first.stdout is not None
    tier = NvmeTier(settings(tmp_path), fingerprint(), LeafLru)
    try:
        assert await tier.start(SOON_S) is TierState.OFF
        assert tier.stats().reason == f"{tmp_path} is in use by process {first.pid}"
        assert await tier.write([block(1, 0)], SOON_S) == [Outcome.NOT_SERVED]
        assert await read_back(tier, [block(1, 0)]) == [False]
        first.stdin.close()
        await until(lambda: tier.stats().state is TierState.OK)
        await written(tier, [block(1, 0)])
    finally:
        first.stdin.close()
        first.kill()
        first.wait()
        first.stdout.close()
        await tier.close(SOON_S)


async def test_two_tiers_of_one_process_cannot_share_a_folder_either(tmp_path: Path) -> None:
    async with opened(settings(tmp_path)):
        second = NvmeTier(settings(tmp_path), fingerprint("other"), LeafLru)
        assert await second.start(SOON_S) is TierState.OFF
        await second.close(SOON_S)


async def test_where_there_is_no_direct_io_the_tier_says_so_and_works(tmp_path: Path) -> None:
    class NoDirect(BreakableFiles):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return self._real.open(path, flags)

    async with opened(settings(tmp_path), NoDirect()) as tier:
        assert tier.stats().io_mode == "buffered"
        await written(tier, chain(1, 9))
        assert await read_back(tier, chain(1, 9)) == [True] * 9
    async with opened(settings(tmp_path)) as tier:
        assert await read_back(tier, chain(1, 9)) == [True] * 9


async def test_reads_while_writing_get_the_right_bytes_or_a_miss(tmp_path: Path) -> None:
    async with opened(settings(tmp_path, num_slots=24)) as tier:

        async def write_all() -> None:
            for sequence in range(40):
                await tier.write(chain(sequence, 5), SOON_S)

        writing = asyncio.create_task(write_all())
        num_hits = 0
        while not writing.done():
            for sequence in range(40):
                num_hits += sum(await read_back(tier, chain(sequence, 5)))
                await asyncio.sleep(0)  # where all are misses nobody else would have a turn
        await writing
        assert num_hits > 0
        assert tier.stats().counters["nvme_blocks_corrupt_total"] == 0


async def test_what_was_written_is_made_durable_within_a_second_without_being_asked(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path, sync_after_s=0.2), files) as tier:
        await written(tier, chain(1, 3))
        num_before = files.calls.count("sync")
        await until(lambda: files.calls.count("sync") >= num_before + 2, 1.0)  # bodies, headers


async def test_a_flush_waits_for_writes_that_are_under_way(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path, sync_after_s=60.0), files) as tier:
        await written(tier, chain(1, 1))
        assert await tier.flush(SOON_S)
        files.fault = sleeping(0.1, "write")
        files.calls.clear()
        writing = asyncio.create_task(tier.write(chain(2, 1), SOON_S))
        await asyncio.sleep(0.02)
        assert await tier.flush(SOON_S)
        calls = [call for call in files.calls if call in ("write", "sync")]
        assert calls == ["write", "write", "sync", "sync"]
        await writing


async def test_no_call_reaches_the_disk_in_the_loops_thread(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path, num_slots=10), files) as tier:
        for sequence in range(5):
            await written(tier, chain(sequence, 5))
        await read_back(tier, chain(4, 5))
        await tier.remove([name_of(4, 0)], SOON_S)
        await tier.flush(SOON_S)
    assert threading.get_ident() not in files.threads
    assert {"open", "read", "write", "sync", "allocate", "lock", "close", "remove"} <= set(files.calls)


async def test_ten_gib_are_indexed_within_a_second(tmp_path: Path) -> None:
    model = fingerprint(block_bytes=368_640)
    page = set_page(model)
    num_slots = (10 << 30) // page.slot_bytes
    folder = tmp_path / f"v1-{page.set_id.hex()}"
    folder.mkdir()
    digest = block_digest(memoryview(content(b"same", 368_640)))
    headers = bytearray(pack_set_page(page))
    for slot in range(num_slots):
        sequence, position = divmod(slot, 250)
        header = SlotHeader(
            name_of(sequence, position), name_of(sequence, position - 1), position, digest, 368_640, slot + 1
        )
        headers += pack_header(header, slot, page.set_id)
    (folder / "headers").write_bytes(headers)
    with (folder / "bodies").open("wb") as bodies:
        bodies.truncate(num_slots * page.slot_bytes)  # sparse
    with_settings = settings(tmp_path, quota_bytes=11 << 30)
    tier = NvmeTier(with_settings, model, LeafLru)
    began_s = time.process_time()
    assert await tier.start(30.0) is TierState.OK
    took_s = time.process_time() - began_s  # other processes' turns do not count
    assert tier.stats().num_blocks == num_slots
    assert took_s <= 1.0
    await tier.close(SOON_S)
