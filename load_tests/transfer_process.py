"""The program that receives KV for the transfer bench: `python -m load_tests.transfer_process CORES`.

It is a decode worker's receiving side and nothing else. For every `Offer` it reads it opens a ticket and says so; when
all blocks have come and their digests are right it says when that was. It ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from kv_transport.interface import BlocksArrived, ReceiverEvent
from kv_transport.receiver import PathListener, PoolReceiver
from kv_transport.shm_receiver import ShmListener
from kv_transport.tcp_receiver import TcpListener
from load_tests.transfer_messages import LAYOUT, Arrived, Begin, Offer, Opened, Started, identity_of
from pd_core.errors import TransferError
from pd_core.ticket import Ticket, TicketRef
from pd_worker.memory import PoolMemory

LEASE_S = 60.0
HOST = "127.0.0.1"


class TransferTarget:
    """A pool with a receiver over every path."""

    def __init__(self, begin: Begin) -> None:
        self._memory = PoolMemory(begin.num_blocks, LAYOUT.block_bytes)
        identity = identity_of("decode", begin.incarnation)
        self._incarnation = begin.incarnation
        secret = begin.secret.encode()
        listeners: list[PathListener] = [
            ShmListener(self._memory, identity, secret),
            TcpListener(self._memory, identity, secret, host=HOST),
        ]
        self._receiver = PoolReceiver(self._memory, listeners)
        self._epoch = 0

    async def start(self) -> Started:
        await self._receiver.start()
        self._memory.buffer[:] = bytes(len(self._memory.buffer))  # pages are there before anything is measured
        return Started([address.path for address in self._receiver.addresses])

    async def receive(self, offer: Offer, say: Callable[[msgspec.Struct], None]) -> Arrived:
        """Raises TransferError when a block came wrong or its writer left."""
        ticket = self._ticket(offer)
        missing = set(range(offer.num_blocks))
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def on_event(event: ReceiverEvent) -> None:
            if done.done():
                return  # it has failed already
            if not isinstance(event, BlocksArrived) or event.corrupt:
                done.set_exception(TransferError(f"a transfer of the bench failed: {event}"))
                return
            missing.difference_update(event.verified)
            if not missing:
                done.set_result(time.monotonic())

        self._receiver.open_ticket(ticket, on_event)
        say(Opened(ticket))
        arrived = Arrived(await done)
        await self._receiver.close_ticket(ticket.ref)
        return arrived

    async def close(self) -> None:
        await self._receiver.close()
        self._memory.close()

    def _ticket(self, offer: Offer) -> Ticket:
        self._epoch += 1
        return Ticket(
            ref=TicketRef(secrets.token_hex(8), self._incarnation, self._epoch, 1),
            request_id=f"bench-{self._epoch}",
            first_block=0,
            block_ids=list(range(offer.num_blocks)),
            lease_s=LEASE_S,
            control_host=HOST,
            control_port=0,
            addresses=[address for address in self._receiver.addresses if address.path == offer.path],
        )


async def serve(lines: BinaryIO, output: BinaryIO) -> None:
    """The first line is a Begin, all others are Offers."""

    def say(message: msgspec.Struct) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    target = TransferTarget(msgspec.json.decode(await asyncio.to_thread(lines.readline), type=Begin))
    try:
        say(await target.start())
        while line := await asyncio.to_thread(lines.readline):
            say(await target.receive(msgspec.json.decode(line, type=Offer), say))
    finally:
        await target.close()


def main() -> None:
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    asyncio.run(serve(sys.stdin.buffer, sys.stdout.buffer))


if __name__ == "__main__":
    main()
