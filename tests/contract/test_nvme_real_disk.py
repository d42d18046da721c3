"""The NVMe tier on a file system of its own of 64 MiB that is really full, read-only, or unmounted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_parts import SOON_S, chain, fingerprint, opened, read_back, settings, taken_bytes, until, written

from kv_store.nvme_tier import NvmeSettings, NvmeTier, Outcome, TierState

MIB = 1 << 20
DISK_BYTES = 64 * MIB
BLOCK_BYTES = 368_640
SEQUENCE_BLOCKS = 8
MODEL = fingerprint(block_bytes=BLOCK_BYTES)


class SmallDisk:
    """A loop device with ext4 on it."""

    def __init__(self, folder: Path) -> None:
        self.mount_point = folder / "disk"
        self.mount_point.mkdir()
        self._image = folder / "image"
        with self._image.open("wb") as image:
            image.truncate(DISK_BYTES)
        call("mkfs.ext4", "-q", "-F", str(self._image))
        self._device = call("losetup", "--find", "--show", str(self._image))

    def mount(self) -> None:
        call("mount", self._device, str(self.mount_point))

    def remount(self, option: str) -> None:
        call("mount", "-o", f"remount,{option}", str(self.mount_point))

    def unmount(self, *how: str) -> None:
        call("umount", *how, str(self.mount_point))

    def end(self) -> None:
        if self.mount_point.is_mount():
            self.unmount("--lazy")
        call("losetup", "--detach", self._device)


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() or not all(map(shutil.which, ("mkfs.ext4", "losetup", "mount"))):
        pytest.skip("mounting a loop device takes root, mkfs.ext4 and losetup")
    try:
        small = SmallDisk(tmp_path)
    except OSError as error:
        pytest.skip(f"no loop device here: {error}")
    try:
        small.mount()
        yield small
    finally:
        small.end()


def on(disk: SmallDisk, quota_bytes: int) -> NvmeSettings:
    return settings(disk.mount_point / "store", quota_bytes=quota_bytes, growth_step_bytes=8 * MIB)


def fill(disk: SmallDisk, num_bytes: int) -> Path:
    """Somebody else's file of that size."""
    path = disk.mount_point / "somebody"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return path


def fill_up(disk: SmallDisk) -> Path:
    """Somebody else's file, as large as the disk lets it become."""
    path = disk.mount_point / "somebody"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(64 * 1024)):
            pass
    return path


async def test_known_fault_25_within_the_quota_200_mib_come_and_go_on_a_disk_of_64(disk: SmallDisk) -> None:
    quota_bytes = 48 * MIB
    async with opened(on(disk, quota_bytes), model=MODEL) as tier:
        for sequence in range(200 * MIB // (SEQUENCE_BLOCKS * BLOCK_BYTES)):
            await written(tier, chain(sequence, SEQUENCE_BLOCKS, BLOCK_BYTES))
            assert tier.stats().state is TierState.OK
        assert await tier.flush(SOON_S)
        assert taken_bytes(disk.mount_point / "store") <= quota_bytes
        assert await read_back(tier, chain(sequence, SEQUENCE_BLOCKS, BLOCK_BYTES)) == [True] * SEQUENCE_BLOCKS


async def test_known_fault_25_a_quota_larger_than_the_disk_ends_in_evictions_and_says_so(disk: SmallDisk) -> None:
    async with opened(on(disk, 100 * MIB), model=MODEL) as tier:
        for sequence in range(200 * MIB // (SEQUENCE_BLOCKS * BLOCK_BYTES)):
            await written(tier, chain(sequence, SEQUENCE_BLOCKS, BLOCK_BYTES))
        stats = tier.stats()
        assert (stats.state, stats.counters["nvme_blocks_evicted_total"] > 0) == (TierState.DEGRADED, True)
        assert stats.reason is not None and "No space left on device" in stats.reason
        assert await tier.flush(SOON_S)
        assert await read_back(tier, chain(sequence, SEQUENCE_BLOCKS, BLOCK_BYTES)) == [True] * SEQUENCE_BLOCKS


async def test_known_fault_25_it_grows_when_somebody_else_makes_room(disk: SmallDisk) -> None:
    others = fill(disk, 30 * MIB)
    async with opened(on(disk, 40 * MIB), model=MODEL) as tier:
        for sequence in range(10):
            await written(tier, chain(sequence, SEQUENCE_BLOCKS, BLOCK_BYTES))
        num_slots = tier.stats().num_slots
        assert tier.stats().state is TierState.DEGRADED
        others.unlink()
        await until(lambda: tier.stats().state is TierState.OK)
        for sequence in range(20, 30):
            await written(tier, chain(sequence, SEQUENCE_BLOCKS, BLOCK_BYTES))
        assert tier.stats().state is TierState.OK
        assert tier.stats().num_slots > num_slots * 3 // 2


async def test_a_disk_that_is_full_to_the_last_byte_keeps_nothing_and_harms_nobody(disk: SmallDisk) -> None:
    async with opened(on(disk, 40 * MIB), model=MODEL) as tier:
        others = fill_up(disk)
        outcomes = await tier.write(chain(1, 3, BLOCK_BYTES), SOON_S)
        assert outcomes == [Outcome.NO_ROOM, Outcome.NO_PARENT, Outcome.NO_PARENT]
        others.unlink()
        await until(lambda: tier.stats().state is TierState.OK)
        await written(tier, chain(1, 3, BLOCK_BYTES))


async def test_a_disk_that_turns_read_only_under_it_is_still_read(disk: SmallDisk) -> None:
    """As ext4 does after an error."""
    async with opened(on(disk, 40 * MIB), model=MODEL) as tier:
        await written(tier, chain(1, 8, BLOCK_BYTES))
        assert await tier.flush(SOON_S)
        disk.remount("abort")
        assert Outcome.WRITTEN not in await tier.write(chain(2, 2, BLOCK_BYTES), SOON_S)
        assert tier.stats().state is not TierState.OK
        await until(lambda: tier.stats().state is TierState.DEGRADED)
        assert await read_back(tier, chain(1, 8, BLOCK_BYTES)) == [True] * 8


async def test_a_start_on_a_read_only_disk_is_off_and_comes_on_when_it_can_be_written(disk: SmallDisk) -> None:
    disk.remount("ro")
    tier = NvmeTier(on(disk, 40 * MIB), MODEL, dict)  # type: ignore[arg-type] - no policy is made while nothing opens
    assert await tier.start(SOON_S) is TierState.OFF
    assert "Read-only file system" in (tier.stats().reason or "")
    assert await tier.write(chain(1, 1, BLOCK_BYTES), SOON_S) == [Outcome.NOT_SERVED]
    disk.remount("rw")
    await until(lambda: tier.stats().state is TierState.OK)
    await tier.close(SOON_S)


async def test_a_disk_that_is_unmounted_is_off_until_it_is_back_and_nothing_lands_below_it(disk: SmallDisk) -> None:
    async with opened(on(disk, 40 * MIB), model=MODEL) as tier:
        await written(tier, chain(1, 8, BLOCK_BYTES))
        assert await tier.flush(SOON_S)
        disk.unmount("--lazy")
        await until(lambda: "another file system" in (tier.stats().reason or ""))
        assert await tier.write(chain(2, 1, BLOCK_BYTES), SOON_S) == [Outcome.NOT_SERVED]
        assert os.listdir(disk.mount_point) == []  # noqa: PTH208
        disk.mount()
        await until(lambda: tier.stats().state is TierState.OK)
        assert await read_back(tier, chain(1, 8, BLOCK_BYTES)) == [True] * 8
