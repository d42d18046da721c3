"""Blocks of a request that is over, which somebody still writes or reads: nobody gets them before that has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from waiting import until
from worker_rig import (
    CHUNK_TOKENS,
    HANDOFF_PATHS,
    Rig,
    Times,
    check_stream,
    failure_of,
    make_request,
    small_config,
    workers,
)

from kv_transport.permits import OpenFrame
from pd_core.config import DecodeConfig
from pd_core.errors import Overloaded
from pd_core.layout import BLOCK_TOKENS
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
        self._frame: OpenFrame = self._reception.begin_frame(ticket.ref, [0, 1], [0, 0], self)

    def cut(self, reason: str) -> None:
        """It is inside a system call, and does not hear it."""
        self.num_cuts += 1

    def write(self, byte: int) -> None:
        for slot in self._slots:
            slot[:] = bytes([byte]) * len(slot)

    def leave(self) -> None:
        self._reception.end_frame(self._frame, 0)


@pytest.mark.parametrize("path", HANDOFF_PATHS)
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
        await until(lambda: writer.num_cuts > 0, 2.0)

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


class DeafSender:
    """Sends what it is given, and then does not come back before it is cancelled: a path whose last word is lost."""

    def __init__(self, rig: Rig) -> None:
        self.num_stuck = 0
        self._sender = rig.prefill._path.sender

    async def push(self, *args: Any) -> None:
        await self._sender.push(*args)
        self.num_stuck += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_stuck -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)


@pytest.mark.parametrize("is_decode_lost", [False, True])
async def test_a_push_that_hangs_after_the_commit_is_ended_when_the_request_is(is_decode_lost: bool) -> None:
    config = small_config()
    config = msgspec.structs.replace(config, transfer=msgspec.structs.replace(config.transfer, push_timeout_s=60.0))
    async with workers("inproc", config, times=Times(decode_step_s=0.02)) as rig:
        sender = rig.prefill._path.sender = DeafSender(rig)
        run = rig.run(make_request("r", CHUNK_TOKENS, 400))
        tokens = asyncio.ensure_future(run.tokens())
        await until(lambda: run.committed is not None)
        await until(lambda: len(run.made) > 3)
        assert sender.num_stuck == 1
        assert (await rig.ledgers())[0].held == CHUNK_TOKENS // BLOCK_TOKENS, "something may still read them"
        if is_decode_lost:
            for client in rig.prefill._path.control._clients.values():
                await client.close()
            await until(lambda: sender.num_stuck == 0, 2.0)
        tokens.cancel()
        await asyncio.gather(tokens, return_exceptions=True)
        await rig.wait_idle()
        assert sender.num_stuck == 0
        assert rig.prefill.shell.counters.values()["handoffs_committed_total"] == 1
        assert rig.prefill.shell.counters.values()["handoffs_aborted_total"] == 0
