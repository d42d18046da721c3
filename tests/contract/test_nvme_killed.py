"""kill -9 of a process that writes into the NVMe tier, at random moments, then a start on what it left.

What a dead process has written is in the kernel's hands, so nothing that it said was written may be missing: a bound
that is stricter than the second which a power cut may cost.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvme_killed_writer import SEQUENCE_BLOCKS
from nvme_parts import chain, content, opened, read_back, settings, sound, until

from kv_store.nvme_tier import BlockToRead, NvmeTier

AMPLE_SLOTS = 100_000
SCARCE_SLOTS = 60
SEQUENCES_A_ROUND = 1_000_000


def written_until_killed(folder: Path, first_sequence: int, num_slots: int, after_s: float) -> list[str]:
    """What the writer said before it was killed, `after_s` after it had begun."""
    program = Path(__file__).parents[1] / "nvme_killed_writer.py"
    command = [sys.executable, str(program), str(folder), str(first_sequence), str(num_slots)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "ready\n"
        time.sleep(after_s)
    finally:
        writer.kill()
        said = writer.stdout.read().splitlines(keepends=True)
        writer.stdout.close()
        assert writer.wait() == -9
    return [line.strip() for line in said if line.endswith("\n")]


async def check(folder: Path, num_slots: int, said: list[str]) -> None:
    """Every block that is found has its bytes, no slot is lost, and with ample room nothing is missing."""
    async with opened(settings(folder, num_slots)) as tier:
        await until(lambda: tier.stats().num_wiping == 0)
        stats = tier.stats()
        assert stats.num_blocks + stats.num_free == stats.num_slots
        await check_bytes(tier)
        assert stats.counters["nvme_blocks_corrupt_total"] == 0
        if num_slots == AMPLE_SLOTS:
            for line in said:
                what, sequence = line.split()
                if what == "written":
                    assert await read_back(tier, chain(int(sequence), SEQUENCE_BLOCKS)) == [True] * SEQUENCE_BLOCKS
        sound(tier)


async def check_bytes(tier: NvmeTier) -> None:
    headers = tier.blocks()
    places = {header.name: bytearray(header.num_bytes) for header in headers}
    wanted = [BlockToRead(name, memoryview(place)) for name, place in places.items()]
    assert all(await tier.read(wanted, 60.0))
    for name, place in places.items():
        assert bytes(place) == content(name)


async def rounds(folder: Path, num_rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    num_written = 0
    for number in range(num_rounds):
        num_slots = SCARCE_SLOTS if number % 2 else AMPLE_SLOTS
        store = folder / str(num_slots)
        said = written_until_killed(store, number * SEQUENCES_A_ROUND, num_slots, chance.uniform(0.0, 0.4))
        num_written += len(said)
        await check(store, num_slots, said)
    assert num_written > num_rounds  # they were killed at work


async def test_a_writer_that_is_killed_at_random_moments_leaves_no_wrong_byte_and_no_lost_slot(tmp_path: Path) -> None:
    await rounds(tmp_path, num_rounds=5, seed=1)


@pytest.mark.slow
async def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    try:
        await rounds(tmp_path, num_rounds=50, seed=seed)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
