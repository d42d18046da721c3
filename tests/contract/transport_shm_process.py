"""One side of the path "shm" in a process of its own, to be stopped or killed. Told what to do by its arguments.

write TICKET     pushes all blocks of the ticket over and over, none with the right digest
receive N COPY_S receives into N blocks under one ticket over them all, each copy taking so long; prints the ticket
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import msgspec
from transport_parts import LAYOUT, SECRET, SharedMemory, identity

from kv_transport.shm_pool import copy_block
from kv_transport.shm_receiver import ShmBlockReceiver
from kv_transport.shm_sender import ShmBlockSender
from pd_core.errors import TransferError
from pd_core.ticket import Ticket, TicketRef


async def write(ticket: Ticket) -> None:
    memory = SharedMemory(ticket.num_blocks, LAYOUT.block_bytes)
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    places = list(range(ticket.num_blocks))
    wrong = [digest ^ 1 for digest in memory.digests(places)]  # so that the slots are written again and again
    sender = ShmBlockSender(memory, identity("prefill"), SECRET)
    with contextlib.suppress(TransferError):
        while True:
            await sender.push(ticket, places, places, wrong, 60.0)


async def receive(num_blocks: int, copy_s: float) -> None:
    def copy_slowly(source: memoryview, into: memoryview) -> None:
        time.sleep(copy_s)
        copy_block(source, into)

    memory = SharedMemory(num_blocks, LAYOUT.block_bytes)
    receiver = ShmBlockReceiver(memory, identity("decode"), SECRET, copy=copy_slowly)
    await receiver.start()
    ref = TicketRef("ticket-1", "boot", 1, 0)
    ticket = Ticket(ref, "request-1", 0, list(range(num_blocks)), 3.0, "127.0.0.1", 1, receiver.addresses)
    receiver.open_ticket(ticket, lambda _: None)
    sys.stdout.write(msgspec.json.encode(ticket).decode() + "\n")
    sys.stdout.flush()
    await asyncio.sleep(60.0)


match sys.argv[1:]:
    case ["write", ticket_json]:
        asyncio.run(write(msgspec.json.decode(ticket_json, type=Ticket)))
    case ["receive", num_blocks, copy_s]:
        asyncio.run(receive(int(num_blocks), float(copy_s)))
