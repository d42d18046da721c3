"""Blocks, a policy and a disk that breaks, for tests of the NVMe tier."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kv_store.nvme_eviction import EvictionOrder
from kv_store.nvme_files import DiskFiles, RealFiles
from kv_store.nvme_tier import BlockToRead, BlockToWrite, NvmeSettings, NvmeTier, Outcome, TierState
from kv_transport.digest import block_digest
from pd_core.layout import BlockLayout, Fingerprint

BLOCK_BYTES = 4000
SLOT_BYTES = 4096
ROOM_BYTES = 6 * 4096  # page, folders
"""What a folder takes beside its slots, about."""
SOON_S = 10.0
QUICK = {
    "sync_after_s": 0.05,
    "look_every_s": 0.05,
    "tick_s": 0.01,
    "first_backoff_s": 0.05,
    "most_backoff_s": 0.2,
    "growth_step_bytes": 8 * SLOT_BYTES,
}


def fingerprint(weights: str = "w", block_bytes: int = BLOCK_BYTES) -> Fingerprint:
    """A model whose blocks have so many bytes, a multiple of 32."""
    return Fingerprint(weights, "s", "t", "n", BlockLayout("test", 1, 1, block_bytes // 32, "uint8"))


def name_of(sequence: int, position: int) -> bytes:
    """Stands for a prefix hash; position -1 is the root."""
    return hashlib.blake2b(f"{sequence}/{position}".encode(), digest_size=16).digest()


def content(name: bytes, num_bytes: int = BLOCK_BYTES) -> bytes:
    """The one right content of a block: made from its name, so that no other block has it."""
    return hashlib.shake_128(name).digest(num_bytes)


def block(sequence: int, position: int, num_bytes: int = BLOCK_BYTES) -> BlockToWrite:
    name = name_of(sequence, position)
    body = memoryview(content(name, num_bytes))
    return BlockToWrite(name, name_of(sequence, position - 1), position, block_digest(body), body)


def chain(sequence: int, num_blocks: int, num_bytes: int = BLOCK_BYTES) -> list[BlockToWrite]:
    return [block(sequence, position, num_bytes) for position in range(num_blocks)]


async def read_back(tier: NvmeTier, blocks: Sequence[BlockToWrite], within_s: float = SOON_S) -> list[bool]:
    """Which blocks came; each of them with the right bytes, and nothing was written into the others' places."""
    places = [bytearray(b"\xee" * len(block.block)) for block in blocks]
    came = await tier.read(
        [BlockToRead(block.name, memoryview(place)) for block, place in zip(blocks, places, strict=True)], within_s
    )
    for block, place, has_come in zip(blocks, places, came, strict=True):
        assert bytes(place) == (bytes(block.block) if has_come else b"\xee" * len(place))
    return came


async def written(tier: NvmeTier, blocks: Sequence[BlockToWrite]) -> None:
    """Writes the blocks; all of them are there then."""
    assert await tier.write(blocks, SOON_S) == [Outcome.WRITTEN] * len(blocks)


class LeafLru:
    """Evicts the block without children that was used longest ago."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}  # in the order of use
        self._num_children: dict[bytes, int] = {}

    def add(self, name: bytes, parent: bytes, position: int, now_s: float) -> None:
        assert name not in self._parents
        assert position == 0 or parent in self._parents
        self._parents[name] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def touch(self, name: bytes, now_s: float) -> None:
        self._parents[name] = self._parents.pop(name)

    def remove(self, name: bytes) -> None:
        assert not self._num_children.get(name), "a child would be left without its parent"
        self._num_children[self._parents.pop(name)] -= 1

    def forget(self, name: bytes) -> None:
        assert name not in self._parents

    def victims(self, num_blocks: int) -> list[bytes]:
        leaves = (name for name in self._parents if not self._num_children.get(name))
        return [name for name, _ in zip(leaves, range(num_blocks), strict=False)]


Fault = Callable[[str], None]


class BreakableFiles:
    """The real disk, with something in between. `fault` is called before every call, with its name.

    It may raise OSError, or sleep: all of it happens in disk threads.
    """

    def __init__(self) -> None:
        self.fault: Fault = lambda call: None
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self._real = RealFiles()

    def __getattr__(self, call: str) -> Callable[..., object]:
        real = getattr(self._real, call)

        def through(*args: object) -> object:
            self.calls.append(call)
            self.threads.add(threading.get_ident())
            self.fault(call)
            return real(*args)

        return through


def raising(error_number: int, *calls: str) -> Fault:
    """These calls end with the error."""

    def fault(call: str) -> None:
        if call in calls:
            raise OSError(error_number, f"made up for {call}")

    return fault


def sleeping(duration_s: float, *calls: str) -> Fault:
    """These calls take so long."""

    def fault(call: str) -> None:
        if call in calls:
            time.sleep(duration_s)

    return fault


def settings(folder: Path, num_slots: int = 64, **changes: object) -> NvmeSettings:
    """Quick ones, with a quota for about so many slots."""
    quota_bytes = ROOM_BYTES + num_slots * (SLOT_BYTES + 128)
    made = NvmeSettings(folder=folder, quota_bytes=quota_bytes, **QUICK)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, **changes)


@contextlib.asynccontextmanager
async def opened(
    with_settings: NvmeSettings,
    files: DiskFiles | None = None,
    model: Fingerprint | None = None,
    make_policy: Callable[[], EvictionOrder] = LeafLru,
) -> AsyncIterator[NvmeTier]:
    """A tier that serves. At the end its index is sound, and it is closed."""
    tier = NvmeTier(with_settings, model if model is not None else fingerprint(), make_policy, files)
    assert await tier.start(SOON_S) is TierState.OK, tier.stats()
    try:
        yield tier
        sound(tier)
    finally:
        await tier.close(SOON_S)


def sound(tier: NvmeTier) -> None:
    """Every slot is in one state, and no child is without its parent."""
    volume = tier._core.volume
    if volume is not None:
        volume.index.validate()


def set_folder(folder: Path) -> Path:
    """The one set in the folder."""
    (found,) = folder.glob("v*-*")
    return found


@contextlib.contextmanager
def changed(path: Path) -> Iterator[bytearray]:
    """A file's bytes, to be changed behind the tier's back."""
    data = bytearray(path.read_bytes())
    yield data
    path.write_bytes(data)


async def until(is_so: Callable[[], bool], within_s: float = SOON_S) -> None:
    """Fails with TimeoutError when it is not so in time."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.01)


def taken_bytes(folder: Path) -> int:
    """What the folder takes of the disk, as du counts."""
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))
