"""A writer inside the blocks of a request that is over: nobody gets them before it has left."""

from __future__ import annotations

import asyncio

import pytest
from worker_rig import CHUNK_TOKENS, Rig, check_stream, eventually, failure_of, make_request, small_config, workers

from kv_transport.permits import OpenFrame
from pd_core.config import DecodeConfig
from pd_core.errors import Overloaded
from pd_core.ticket import Ticket

PROMPT = 3 * CHUNK_TOKENS + 5
PROMPT_BLOCKS = 7
NUM_BLOCKS = 9


class StuckWriter:
    """Comes into the first blocks of a ticket, as a path's thread does, and leaves when the test says so."""

    def __init__(self, rig: Rig, ticket: Ticket) -> None:
        self.num_cuts = 0
        self._slots = [rig.decode.shell.memory.block(block_id) for block_id in ticket.block_ids[:2]]
        self._reception = rig.decode._receiver.reception  # type: ignore[attr-defined]
        self._frame: OpenFrame = self._reception.begin_frame(ticket.ref, [0, 1], self)

    def cut(self, reason: str) -> None:
        """It is inside a system call, and does not hear it."""
        self.num_cuts += 1

    def write(self, byte: int) -> None:
        for slot in self._slots:
            slot[:] = bytes([byte]) * len(slot)

    def leave(self) -> None:
        self._reception.end_frame(self._frame, [0, 0], 0)


@pytest.mark.parametrize("path", ["tcp", "inproc"])
async def test_blocks_of_a_cancelled_request_are_nobodys_until_its_writer_has_left(path: str) -> None:
    config = small_config(decode=DecodeConfig(num_blocks=NUM_BLOCKS, max_batch=4, max_reserved=4))
    async with workers(path, config) as rig:
        run = rig.run(make_request("cancelled", PROMPT, 5))
        leg = asyncio.ensure_future(run._decode_leg())
        await run.granted.wait()
        assert run.ticket is not None
        writer = StuckWriter(rig, run.ticket)
        writer.write(1)
        leg.cancel()
        await eventually(lambda: writer.num_cuts > 0, 2.0)

        counts = (await rig.ledgers())[1]
        assert (counts.quarantined, counts.free) == (PROMPT_BLOCKS, NUM_BLOCKS - PROMPT_BLOCKS)
        assert isinstance(await failure_of(rig, make_request("needs-them", PROMPT, 5)), Overloaded)
        small = rig.run(make_request("needs-others", 20, 12))
        tokens = asyncio.ensure_future(small.tokens())
        await small.granted.wait()
        writer.write(2)
        await tokens
        check_stream(small)
        assert (await rig.ledgers())[1].quarantined == PROMPT_BLOCKS

        writer.write(3)
        writer.leave()
        await rig.wait_idle(within_s=1.0)
        assert await failure_of(rig, make_request("needs-them", PROMPT, 5), attempt=2) is None
