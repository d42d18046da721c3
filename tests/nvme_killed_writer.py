"""Writes into an NVMe tier as fast as it can until it is killed, and says on standard output what it has done.

python nvme_killed_writer.py FOLDER FIRST_SEQUENCE NUM_SLOTS
ready          the tier serves
written N      all blocks of sequence N can be read
flushed N      and those of all sequences before are on the disk
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from nvme_parts import SOON_S, LeafLru, chain, fingerprint, settings

from kv_store.nvme_tier import NvmeTier, Outcome, TierState

SEQUENCE_BLOCKS = 7


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def main(folder: Path, first_sequence: int, num_slots: int) -> None:
    tier = NvmeTier(settings(folder, num_slots), fingerprint(), LeafLru)
    if await tier.start(SOON_S) is not TierState.OK:
        raise SystemExit(f"the tier does not serve: {tier.stats().reason}")
    say("ready")
    sequence = first_sequence

    async def write() -> None:
        nonlocal sequence
        while True:
            mine, sequence = sequence, sequence + 1
            if await tier.write(chain(mine, SEQUENCE_BLOCKS), SOON_S) == [Outcome.WRITTEN] * SEQUENCE_BLOCKS:
                say(f"written {mine}")

    async def flush() -> None:
        while True:
            before = sequence
            if await tier.flush(SOON_S):
                say(f"flushed {before}")
            await asyncio.sleep(0.05)

    await asyncio.gather(write(), write(), write(), flush())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
