"""Two real endpoints, hundreds of random rounds: whatever happens, a block that counts as there is right."""

import asyncio
import contextlib
import random

import pytest
from transport_paths import inproc_pair, shm_pair, tcp_pair

from kv_transport.inproc_faults import FaultPlan
from pd_core.errors import DeadlineExceeded, TransferError

NUM_BLOCKS = 48
SOCKET_PAIRS = {"tcp": tcp_pair, "shm": shm_pair}
"""UCX takes longer to connect than the connections live here; it is in test_transport_chaos."""
ALL_FAULTS = {
    "delay": 0.2,
    "stall": 0.1,
    "cut": 0.05,
    "corrupt": 0.1,
    "duplicate": 0.2,
    "reorder": 0.2,
    "truncate": 0.05,
}


class Round:
    """One transfer with everything that may happen to it, drawn from the round's own generator."""

    def __init__(self, pair, slots: list[int], generator: random.Random) -> None:
        self.pair = pair
        self.random = generator
        self.ticket, self.arrivals = pair.open(slots)
        self.blocks = [generator.randrange(NUM_BLOCKS) for _ in slots]
        self.is_given_up = generator.random() < 0.3

    async def run(self) -> str:
        """Returns how it ended: "complete" or "given up"."""
        pushing = asyncio.ensure_future(self.push_until_complete())
        if self.is_given_up:
            await asyncio.sleep(self.random.random() * 0.01)
            pushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pushing
        is_complete = self.missing() == []
        await self.pair.receiver.close_ticket(self.ticket.ref)
        for index in self.arrivals.verified:
            got = self.pair.target.block(self.ticket.block_ids[index])
            assert got == self.pair.source.block(self.blocks[index]), f"block {index} of {self.ticket.ref}"
        return "complete" if is_complete else "given up"

    async def push_until_complete(self) -> None:
        while missing := self.missing():
            self.random.shuffle(missing)
            chunk = missing[: self.random.randint(1, len(missing))]
            digests = self.pair.source.digests([self.blocks[index] for index in chunk])
            if self.random.random() < 0.1:
                digests[0] ^= 1 << self.random.randrange(64)
            with contextlib.suppress(TransferError, DeadlineExceeded):
                deadline_s = self.random.choice([0.0005, 5.0, 5.0, 5.0])
                await self.pair.sender.push(
                    self.ticket, chunk, [self.blocks[index] for index in chunk], digests, deadline_s
                )
            await asyncio.sleep(0.001)

    def missing(self) -> list[int]:
        return [index for index in range(self.ticket.num_blocks) if index not in self.arrivals.verified]


async def disturb(pair, generator: random.Random) -> None:
    """Cuts connections at random moments, for ever."""
    while True:
        await asyncio.sleep(generator.random() * 0.02)
        for connection in list(pair.receiver.connections):
            connection.cut("the test breaks it")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("path", [*SOCKET_PAIRS, "inproc"])
async def test_whatever_happens_every_verified_block_equals_its_source_and_no_permit_is_left(path, seed):
    generator = random.Random(seed)
    if path in SOCKET_PAIRS:
        opening = SOCKET_PAIRS[path](NUM_BLOCKS)
    else:
        faults = FaultPlan(random.Random(seed), **ALL_FAULTS, delay_s=0.003, stall_s=0.002)
        opening = inproc_pair(NUM_BLOCKS, faults=faults)
    ends: list[str] = []
    async with opening as pair, asyncio.TaskGroup() as tasks:
        free = list(range(NUM_BLOCKS))

        async def lane(lane_seed: int) -> None:
            for number in range(50):
                lane_random = random.Random(f"{lane_seed}/{number}")
                slots = [free.pop() for _ in range(lane_random.randint(1, NUM_BLOCKS // 4))]
                ends.append(await Round(pair, slots, lane_random).run())
                free.extend(slots)
                random.Random(number).shuffle(free)

        disturbing = tasks.create_task(disturb(pair, generator)) if path in SOCKET_PAIRS else None
        lanes = [tasks.create_task(lane(seed * 100 + number)) for number in range(4)]
        await asyncio.gather(*lanes)
        if disturbing:
            disturbing.cancel()
        assert pair.receiver.reception.permits.num_permits == 0
        pair.receiver.reception.permits.validate()
    assert len(ends) == 200
    assert ends.count("complete") > 100
    assert ends.count("given up") > 5
