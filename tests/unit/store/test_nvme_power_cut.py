"""The power goes: of what no sync has covered any part may be on the disk, sector by sector, in any order."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from pathlib import Path

from nvme_parts import SLOT_BYTES, SOON_S, BreakableFiles, block, chain, name_of, opened, read_back, settings, until

SECTOR_BYTES = 512


class DiskWithCache(BreakableFiles):
    """Knows of each file what is on the disk for certain, and which writes may or may not be.

    Sizes and names are taken as durable: the file system's journal sees to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._durable: dict[Path, bytearray] = {}
        self._cached: dict[Path, list[tuple[int, bytes]]] = {}

    def open(self, path: Path, flags: int) -> int:
        fd = self._real.open(path, flags)
        with self._lock:
            self._paths[fd] = path
            self._durable.setdefault(path, bytearray(path.read_bytes()))
            self._cached.setdefault(path, [])
        return fd

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        copied = bytes(data)
        with self._lock:
            self._cached[self._paths[fd]].append((offset, copied))
        self._real.write(fd, copied if len(copied) % SLOT_BYTES else data, offset)

    def sync(self, fd: int) -> None:
        with self._lock:
            path = self._paths[fd]
            covered = len(self._cached[path])
        self._real.sync(fd)
        with self._lock:
            for offset, data in self._cached[path][:covered]:
                put(self._durable[path], offset, data)
            del self._cached[path][:covered]

    def cut(self, folder: Path, into: Path, chance: random.Random) -> None:
        """A copy of the folder as a power cut at this moment may leave it."""
        with self._lock:
            shutil.copytree(folder, into)
            for path, durable in self._durable.items():
                if not path.exists():
                    continue
                left = bytearray(durable)
                for offset, data in self._cached[path]:
                    for begin in range(0, len(data), SECTOR_BYTES):
                        if chance.random() < 0.5:
                            put(left, offset + begin, data[begin : begin + SECTOR_BYTES])
                size = path.stat().st_size
                (into / path.relative_to(folder)).write_bytes(left[:size].ljust(size, b"\0"))


def put(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


class DiskOfTheDying(BreakableFiles):
    """Keeps a copy of the folder as it is when a process dies in the middle of a write: what it wrote is there."""

    def __init__(self, folder: Path, copies: Path) -> None:
        super().__init__()
        self._folder = folder
        self._copies = copies
        self._lock = threading.Lock()
        self.num_copies = 0

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        half = len(data) // 2 // SECTOR_BYTES * SECTOR_BYTES
        with self._lock:
            if half:
                self._real.write(fd, memoryview(data)[:half], offset)
            if self._folder.exists():
                shutil.copytree(self._folder, self._copies / str(self.num_copies))
                self.num_copies += 1
            self._real.write(fd, memoryview(data)[half:], offset + half)


async def test_a_process_that_dies_in_any_write_leaves_nothing_corrupt(tmp_path: Path) -> None:
    store, copies = tmp_path / "store", tmp_path / "copies"
    disk = DiskOfTheDying(store, copies)
    async with opened(settings(store, num_slots=12, sync_after_s=60.0), disk) as tier:
        for sequence in range(6):
            await tier.write(chain(sequence, 4), SOON_S)
        assert await tier.remove([name_of(5, 1)], SOON_S)
    assert disk.num_copies > 6 * 4 * 2
    for number in range(disk.num_copies):
        async with opened(settings(copies / str(number), num_slots=12)) as tier:
            for sequence in range(6):
                await read_back(tier, chain(sequence, 4))
            assert tier.stats().counters["nvme_blocks_corrupt_total"] == 0, number


async def test_after_a_power_cut_what_was_flushed_is_there_and_nothing_is_wrong(tmp_path: Path) -> None:
    chance = random.Random(3)
    store = tmp_path / "store"
    disk = DiskWithCache()
    async with opened(settings(store, num_slots=400, sync_after_s=60.0), disk) as tier:
        flushed: list[int] = []
        for sequence in range(12):
            await tier.write(chain(sequence, 6), SOON_S)
            if chance.random() < 0.4:
                assert await tier.flush(SOON_S)
                flushed = list(range(sequence + 1))
            await check_after_a_cut(disk, store, tmp_path / f"cut-{sequence}", chance, flushed)


async def check_after_a_cut(
    disk: DiskWithCache, store: Path, copy: Path, chance: random.Random, flushed: list[int]
) -> None:
    disk.cut(store, copy, chance)
    async with opened(settings(copy, num_slots=400)) as tier:
        for sequence in range(20):
            came = await read_back(tier, chain(sequence, 6))  # compares every byte that comes
            assert all(came) or sequence not in flushed
        await until(lambda: tier.stats().num_wiping == 0)
        assert tier.stats().num_free + tier.stats().num_blocks == tier.stats().num_slots


async def test_a_power_cut_while_slots_are_reused_gives_misses_and_no_wrong_byte(tmp_path: Path) -> None:
    chance = random.Random(4)
    store = tmp_path / "store"
    disk = DiskWithCache()
    async with opened(settings(store, num_slots=20, sync_after_s=60.0), disk) as tier:
        for sequence in range(20):
            writing = asyncio.create_task(tier.write(chain(sequence, 6), SOON_S))
            await asyncio.sleep(chance.uniform(0, 0.004))  # cuts fall between the steps of a write too
            await check_after_a_cut(disk, store, tmp_path / f"cut-{sequence}", chance, [])
            await writing


async def test_a_removed_block_does_not_come_back_after_a_power_cut(tmp_path: Path) -> None:
    chance = random.Random(5)
    store = tmp_path / "store"
    disk = DiskWithCache()
    async with opened(settings(store, sync_after_s=60.0), disk) as tier:
        await tier.write(chain(1, 6), SOON_S)
        assert await tier.flush(SOON_S)
        assert await tier.remove([name_of(1, 3)], SOON_S)
        disk.cut(store, tmp_path / "cut", chance)
        on_disk = all_bytes(tmp_path / "cut")
        assert bytes(block(1, 2).block) in on_disk
        assert bytes(block(1, 4).block) not in on_disk and bytes(block(1, 3).block) not in on_disk


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
