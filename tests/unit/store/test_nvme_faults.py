"""The tier on a disk that does not work: serving goes on, the state says why, and it comes back by itself."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from pathlib import Path

import pytest
from nvme_parts import (
    BLOCK_BYTES,
    SOON_S,
    BreakableFiles,
    Fault,
    LeafLru,
    block,
    chain,
    fingerprint,
    name_of,
    opened,
    raising,
    read_back,
    set_folder,
    settings,
    sleeping,
    sound,
    until,
    written,
)

from kv_store.nvme_tier import BlockToRead, BlockToWrite, NvmeTier, Outcome, TierState

STUCK_S = 10.0
"""So long does a call to a stuck disk take, unless the test lets it go."""
LOOP_GAP_S = 2.0
"""The loop is never away for so long while the disk is. On a busy machine much less is a matter of time slices."""


def is_ok(tier: NvmeTier) -> bool:
    return tier.stats().state is TierState.OK


async def test_a_full_disk_evicts_and_goes_on_and_grows_again_when_there_is_room(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path, num_slots=64), files) as tier:
        await written(tier, chain(1, 8))
        files.fault = raising(errno.ENOSPC, "allocate")
        await written(tier, chain(2, 4))
        stats = tier.stats()
        assert (stats.state, stats.num_slots) == (TierState.DEGRADED, 8)
        assert stats.reason is not None and stats.reason.startswith("grow: [Errno 28]")
        assert stats.counters["nvme_blocks_evicted_total"] == 4
        assert await read_back(tier, chain(2, 4)) == [True] * 4
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))
        assert tier.stats().num_slots > 8
        await written(tier, chain(3, 8))


async def test_a_disk_that_was_never_anything_but_full_keeps_nothing_and_recovers(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path), files) as tier:
        files.fault = raising(errno.ENOSPC, "allocate")
        assert await tier.write(chain(1, 3), SOON_S) == [Outcome.NO_ROOM, Outcome.NO_PARENT, Outcome.NO_PARENT]
        assert tier.stats().state is TierState.DEGRADED
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))
        await written(tier, chain(1, 3))


async def test_for_a_full_disk_one_other_set_goes_and_not_all_of_them(tmp_path: Path) -> None:
    for model in ("a", "b", "c"):
        async with opened(settings(tmp_path, num_slots=100), model=fingerprint(model)) as tier:
            await written(tier, chain(1, 8))
    files = BreakableFiles()
    with_settings = settings(tmp_path, num_slots=100, first_backoff_s=60.0)
    async with opened(with_settings, files, model=fingerprint("d")) as tier:
        files.fault = raising(errno.ENOSPC, "allocate")
        assert await tier.write(chain(1, 1), SOON_S) == [Outcome.NO_ROOM]
        assert tier.stats().counters["nvme_sets_evicted_total"] == 1
        assert tier.stats().state is TierState.DEGRADED


async def test_a_full_disk_is_not_asked_again_and_again(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path, first_backoff_s=60.0), files) as tier:
        await written(tier, chain(1, 8))
        files.fault = raising(errno.ENOSPC, "allocate")
        files.calls.clear()
        for sequence in range(2, 12):
            await written(tier, chain(sequence, 4))
        assert files.calls.count("allocate") <= 4  # 8 more slots, 4, 2, 1


async def test_a_disk_that_takes_no_more_at_a_write_is_tried_once_more(tmp_path: Path) -> None:
    """As on a file system that writes elsewhere what is overwritten, so that room was only promised."""
    files = BreakableFiles()
    async with opened(settings(tmp_path, first_backoff_s=60.0), files) as tier:
        await written(tier, chain(1, 8))
        num_failures = [1]

        def once(call: str) -> None:
            if call == "write" and num_failures:
                num_failures.pop()
                raise OSError(errno.ENOSPC, "full")

        files.fault = once
        await written(tier, [block(2, 0)])
        assert tier.stats().state is TierState.DEGRADED
        files.fault = raising(errno.ENOSPC, "write")
        assert await tier.write([block(3, 0)], SOON_S) == [Outcome.NOT_SERVED]
        assert await read_back(tier, [block(2, 0)]) == [True]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
async def test_a_read_only_disk_is_still_read(tmp_path: Path, number: int) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path), files) as tier:
        await written(tier, chain(1, 4))
        await tier.flush(SOON_S)
        files.fault = raising(number, "write", "allocate", "touch")
        assert (await tier.write(chain(2, 2), SOON_S))[0] is Outcome.NOT_SERVED
        assert tier.stats().state is TierState.DEGRADED
        num_writes = files.calls.count("write")
        assert await tier.write(chain(3, 1), SOON_S) == [Outcome.NOT_SERVED]
        assert files.calls.count("write") - num_writes <= 1  # by the keeper at most, who tries again
        assert await read_back(tier, chain(1, 4)) == [True] * 4
        assert not await tier.remove([name_of(1, 3)], 0.2)
        assert await read_back(tier, chain(1, 4)) == [True] * 3 + [False]
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))
        await until(lambda: tier.stats().num_wiping == 0)  # what could not be wiped is wiped now
        await written(tier, chain(2, 2))


async def test_errors_of_all_reads_take_the_tier_out_of_service_until_the_disk_is_well(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path), files) as tier:
        await written(tier, [b for sequence in range(10) for b in chain(sequence, 2)])
        files.fault = raising(errno.EIO, "read", "write", "sync")
        for sequence in range(10):
            assert await read_back(tier, chain(sequence, 2)) == [False] * 2
        assert tier.stats().state is not TierState.OK
        num_reads = files.calls.count("read")
        assert await read_back(tier, chain(9, 2)) == [False] * 2
        assert files.calls.count("read") - num_reads <= 1
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))
        await written(tier, chain(20, 2))
        assert await read_back(tier, chain(20, 2)) == [True] * 2


async def test_one_bad_sector_costs_its_block_and_no_more(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path), files) as tier:
        await written(tier, chain(1, 1) + chain(2, 1))
        files.fault = raising(errno.EIO, "read")
        assert await read_back(tier, chain(1, 1)) == [False]
        files.fault = lambda call: None
        assert is_ok(tier)
        assert await read_back(tier, chain(1, 1) + chain(2, 1)) == [False, True]


async def test_a_failed_sync_is_no_success(tmp_path: Path) -> None:
    files = BreakableFiles()
    async with opened(settings(tmp_path, sync_after_s=60.0), files) as tier:
        await written(tier, chain(1, 2))
        files.fault = raising(errno.EIO, "sync")
        assert not await tier.flush(SOON_S)
        assert tier.stats().state is not TierState.OK
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))
        assert await tier.flush(SOON_S)


async def test_a_disk_that_takes_ten_seconds_a_read_costs_nobody_more_than_his_deadline(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    async with opened(settings(tmp_path, stuck_after_s=0.4), files) as tier:
        await written(tier, chain(1, 30))
        files.fault = blocked_by(gate, "read")
        gaps = asyncio.create_task(longest_gap_s())
        began_s = time.monotonic()
        assert await read_back(tier, chain(1, 30), within_s=0.2) == [False] * 30
        assert 0.15 < time.monotonic() - began_s < 0.2 + LOOP_GAP_S
        await until(lambda: tier.stats().state is TierState.DEGRADED)
        assert tier.stats().reason == "a call has not come back for more than 0.4 s"
        began_s = time.monotonic()
        for _ in range(20):
            assert await read_back(tier, chain(1, 30), within_s=5.0) == [False] * 30  # at once
            assert set(await tier.write(chain(2, 3), 5.0)) == {Outcome.NOT_SERVED}
        assert time.monotonic() - began_s < LOOP_GAP_S
        assert not await tier.flush(0.1)
        gaps.cancel()
        assert await gaps < LOOP_GAP_S
        gate.set()
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))
        assert await read_back(tier, chain(1, 30)) == [True] * 30


async def test_a_reader_that_waits_when_the_disk_gets_stuck_has_its_misses_before_its_deadline(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    async with opened(settings(tmp_path, stuck_after_s=0.2), files) as tier:
        await written(tier, chain(1, 3))
        files.fault = blocked_by(gate, "read")
        began_s = time.monotonic()
        assert await read_back(tier, chain(1, 3), within_s=60.0) == [False] * 3
        assert time.monotonic() - began_s < STUCK_S
        gate.set()
        files.fault = lambda call: None
        await until(lambda: is_ok(tier))


async def test_a_read_that_comes_back_late_does_not_touch_its_callers_memory(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    async with opened(settings(tmp_path, stuck_after_s=60.0), files) as tier:
        await written(tier, chain(1, 3))
        files.fault = blocked_by(gate, "read")
        places = [bytearray(BLOCK_BYTES) for _ in range(3)]
        wanted = [BlockToRead(name_of(1, position), memoryview(places[position])) for position in range(3)]
        assert await tier.read(wanted, 0.1) == [False] * 3
        gate.set()
        await until(lambda: tier._core.volume is not None and tier._core.volume.num_jobs == 0)
        assert places == [bytes(BLOCK_BYTES)] * 3
        assert tier.stats().counters["nvme_blocks_corrupt_total"] == 0


async def test_a_caller_that_is_cancelled_has_its_memory_to_itself(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    async with opened(settings(tmp_path, stuck_after_s=60.0), files) as tier:
        await written(tier, chain(1, 3))
        files.fault = blocked_by(gate, "read")
        places = [bytearray(BLOCK_BYTES) for _ in range(3)]
        wanted = [BlockToRead(name_of(1, position), memoryview(places[position])) for position in range(3)]
        files.calls.clear()
        reading = asyncio.create_task(tier.read(wanted, SOON_S))
        await until(lambda: files.calls.count("read") >= 3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        gate.set()
        await until(lambda: tier._core.volume is not None and tier._core.volume.num_jobs == 0)
        assert places == [bytes(BLOCK_BYTES)] * 3
        assert await read_back(tier, chain(1, 3)) == [True] * 3


async def test_more_than_the_queue_holds_is_missed_and_refused_at_once(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    few = settings(tmp_path, stuck_after_s=60.0, num_threads=2, max_queued_blocks=3, look_every_s=60.0)
    async with opened(few, files) as tier:
        for b in chain(1, 8):
            await written(tier, [b])
        files.calls.clear()
        files.fault = blocked_by(gate, "read")
        reading = [asyncio.create_task(read_back(tier, chain(1, 8)))]
        await until(lambda: files.calls.count("read") >= 2)  # both threads are in the disk
        reading.append(asyncio.create_task(read_back(tier, chain(1, 8))))
        await until(lambda: tier.stats().num_queued == 3)
        began_s = time.monotonic()
        assert await read_back(tier, chain(1, 8)) == [False] * 8
        assert time.monotonic() - began_s < LOOP_GAP_S
        gate.set()
        for came in await asyncio.gather(*reading):
            assert 0 < sum(came) < 8


async def test_a_write_that_is_late_does_not_read_its_callers_memory_any_more(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    async with opened(settings(tmp_path, stuck_after_s=60.0, num_threads=1), files) as tier:
        await written(tier, chain(1, 1))
        files.fault = blocked_by(gate, "write")
        mine = bytearray(block(2, 1).block)
        late = BlockToWrite(name_of(2, 1), name_of(2, 0), 1, block(2, 1).digest, memoryview(mine))
        assert await tier.write([block(2, 0), late], 0.2) == [Outcome.LATE] * 2
        mine[:] = bytes(BLOCK_BYTES)
        gate.set()
        await until(lambda: tier.stats().num_writing == 0 and tier.stats().num_wiping == 0)
        # The first was in the disk's hands already, the second had not been begun.
        assert await read_back(tier, chain(2, 2)) == [True, False]
        assert tier.stats().counters["nvme_blocks_corrupt_total"] == 0


async def test_a_stuck_start_is_off_and_comes_on_when_it_is_through(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    files.fault = blocked_by(gate, "names")
    tier = NvmeTier(settings(tmp_path), fingerprint(), LeafLru, files)
    began_s = time.monotonic()
    assert await tier.start(0.1) is TierState.OFF
    assert time.monotonic() - began_s < 0.1 + LOOP_GAP_S
    assert await read_back(tier, chain(1, 1)) == [False]
    gate.set()
    await until(lambda: is_ok(tier))
    assert await tier.close(SOON_S)


async def test_closing_on_a_stuck_disk_ends_in_time_and_says_what_is_lost(tmp_path: Path) -> None:
    files = BreakableFiles()
    gate = threading.Event()
    tier = NvmeTier(settings(tmp_path, stuck_after_s=0.2), fingerprint(), LeafLru, files)
    await tier.start(SOON_S)
    await written(tier, chain(1, 1))
    files.fault = blocked_by(gate, "write", "sync")
    began_s = time.monotonic()
    assert await tier.write(chain(2, 1), 0.1) == [Outcome.LATE]
    assert not await tier.close(0.5)
    assert time.monotonic() - began_s < 0.6 + LOOP_GAP_S
    gate.set()  # files and threads are looked for by the fixture that looks after every test


@pytest.mark.parametrize("what", ["the folder", "the set", "bodies", "headers", "lock"])
async def test_what_was_removed_behind_its_back_is_noticed_and_made_anew(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "store"
    async with opened(settings(folder)) as tier:
        await written(tier, chain(1, 5))
        before = tier._core.volume
        gone = {"the folder": folder, "the set": set_folder(folder), "lock": folder / "lock"}.get(what)
        gone = gone or set_folder(folder) / what
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        await read_back(tier, chain(1, 5))  # right bytes of files that are still open, or misses
        await until(lambda: tier._core.volume not in (None, before))
        assert await read_back(tier, chain(1, 5)) == [what == "lock"] * 5
        await tier.write(chain(1, 5), SOON_S)
        assert await read_back(tier, chain(1, 5)) == [True] * 5
    async with opened(settings(folder)) as tier:
        assert await read_back(tier, chain(1, 5)) == [True] * 5


async def test_a_folder_that_turns_up_on_another_disk_is_left_alone(tmp_path: Path) -> None:
    files = BreakableFiles()
    devices = [1]
    files.device = lambda path: devices[0]  # type: ignore[attr-defined]
    folder = tmp_path / "mount" / "store"
    async with opened(settings(folder), files) as tier:
        await written(tier, chain(1, 5))
        folder.rename(tmp_path / "elsewhere")  # as if its disk had been unmounted
        devices[0] = 2
        await until(lambda: "another file system" in (tier.stats().reason or ""))
        assert tier.stats().state is TierState.OFF
        assert not folder.exists()
        (tmp_path / "elsewhere").rename(folder)
        devices[0] = 1
        await until(lambda: is_ok(tier))
        assert await read_back(tier, chain(1, 5)) == [True] * 5


async def test_random_faults_never_give_a_wrong_byte_or_lose_a_slot(tmp_path: Path) -> None:
    files = BreakableFiles()
    faults: list[Fault] = [
        lambda call: None,
        raising(errno.ENOSPC, "allocate", "write"),
        raising(errno.EROFS, "write", "allocate", "truncate"),
        raising(errno.EIO, "write"),
        raising(errno.EIO, "read", "sync"),
        sleeping(0.4, "read", "write"),
    ]
    async with opened(settings(tmp_path, num_slots=20, stuck_after_s=0.25), files) as tier:
        for step in range(36):
            files.fault = faults[step % len(faults)]
            await asyncio.gather(
                tier.write(chain(step, 5), 0.1),
                read_back(tier, chain(step - 1, 5), 0.1),
                tier.remove([name_of(step - 2, 3)], 0.01),
            )
            sound(tier)
        files.fault = lambda call: None
        await until(lambda: is_ok(tier) and tier.stats().num_writing == 0 and tier.stats().num_wiping == 0)
        stats = tier.stats()
        assert stats.num_blocks + stats.num_free == stats.num_slots
        assert stats.counters["nvme_blocks_corrupt_total"] == 0
        await written(tier, chain(1000, 5))
        there = [b for b in (*chain(1000, 5), *(b for s in range(36) for b in chain(s, 5))) if tier.holds(b.name)]
        assert await read_back(tier, there) == [True] * len(there)


def blocked_by(gate: threading.Event, *calls: str) -> Fault:
    """These calls take STUCK_S, or until the gate opens."""

    def fault(call: str) -> None:
        if call in calls:
            gate.wait(STUCK_S)

    return fault


async def longest_gap_s() -> float:
    """The longest time for which the loop did not get to us, until cancelled."""
    longest_s = 0.0
    try:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.monotonic() - began_s)
    except asyncio.CancelledError:
        return longest_s
