"""A push's deadline begins with its turn on the wire: who waits behind others is not late, who is stuck is."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
from transport_parts import ByteMemory

from kv_transport.channel_sender import ChannelSender
from kv_transport.interface import PushReceipt
from kv_transport.path_options import PathOptions
from kv_transport.push_job import PushJob
from kv_transport.turn import within_turn
from pd_core.errors import DeadlineExceeded
from pd_core.ticket import Ticket, TicketRef, TransportAddress

NUM_BLOCKS = 8
STUCK = 7
"""A push of this block does not end until its connection is shut down."""
TICKET = Ticket(
    TicketRef("t", "boot", 1, 0), "r", 0, list(range(NUM_BLOCKS)), 3.0, "h", 1, [TransportAddress("slow", "h", 1)]
)


class SlowWire:
    """Every push takes so long."""

    address = "h:1"

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._theirs: socket.socket | None = None

    def connect(self, adopt: Callable[[socket.socket], None]) -> None:
        ours, self._theirs = socket.socketpair()  # theirs stays open and silent
        adopt(ours)

    def disconnect(self) -> None:
        if self._theirs is not None:
            self._theirs.close()

    def write(self, sock: socket.socket, job: PushJob) -> None:
        if STUCK in job.block_ids:
            assert sock.recv(1) == b""
            raise ConnectionError("cut")
        time.sleep(self._takes_s)


@contextlib.asynccontextmanager
async def slow_sender(takes_s: float) -> AsyncIterator[Callable[..., asyncio.Future[PushReceipt]]]:
    """Starts a push of one block."""
    memory = ByteMemory(NUM_BLOCKS)
    memory.fill(random.Random(1))
    sender = ChannelSender(memory, "slow", lambda _: SlowWire(takes_s), PathOptions())
    try:
        yield lambda block_id, deadline_s: asyncio.ensure_future(
            sender.push(TICKET, [block_id], [block_id], [0], deadline_s)
        )
    finally:
        await sender.close()


async def test_pushes_that_wait_behind_others_for_longer_than_their_deadline_are_not_late() -> None:
    async with slow_sender(0.1) as push:
        began_s = time.monotonic()
        receipts = await asyncio.gather(*(push(block_id, 0.4) for block_id in range(7)))
        assert time.monotonic() - began_s >= 0.7
        assert all(receipt.seconds < 0.4 for receipt in receipts)


async def test_one_that_is_stuck_is_late_after_its_own_deadline_and_those_behind_it_have_theirs() -> None:
    async with slow_sender(0.1) as push:
        began_s = time.monotonic()
        first, stuck, last = push(0, 0.4), push(STUCK, 0.4), push(1, 0.4)
        await first
        with pytest.raises(DeadlineExceeded, match=r"1 blocks were not sent within 0\.4 s"):
            await stuck
        assert 0.45 < time.monotonic() - began_s < 1.5
        await last


async def test_a_push_that_leaves_the_queue_takes_nobody_elses_time() -> None:
    async with slow_sender(0.3) as push:
        first, left, last = push(0, 1.0), push(1, 1.0), push(2, 0.45)
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await asyncio.gather(first, last)  # its turn comes with the end of the first, not of the one that left


async def test_a_turn_begins_when_all_ahead_are_done_and_ends_what_takes_longer() -> None:
    loop = asyncio.get_running_loop()
    ahead = [loop.create_future(), loop.create_future()]
    loop.call_later(0.05, ahead[0].set_result, None)
    loop.call_later(0.15, ahead[1].set_result, None)
    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with within_turn(ahead, 0.1):
            await asyncio.sleep(60.0)
    assert 0.24 < loop.time() - began_s < 5.0
    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with within_turn(ahead, 0.01):
            await asyncio.sleep(60.0)
    assert loop.time() - began_s < 5.0


async def test_a_turn_that_never_comes_can_be_cancelled_and_one_that_is_over_is_never_late() -> None:
    loop = asyncio.get_running_loop()
    never, later = loop.create_future(), loop.create_future()

    async def wait() -> None:
        async with within_turn([never], 0.01):
            await asyncio.sleep(60.0)

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with within_turn([later], 0.0):
        pass
    later.set_result(None)  # changes nothing any more
    await asyncio.sleep(0)
