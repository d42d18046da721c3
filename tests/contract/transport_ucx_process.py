"""One side of the path "ucx" in a process of its own, to be stopped or killed. Told what to do by its arguments.

write TICKET           pushes all blocks of the ticket over and over, none with the right digest
receive N BLOCK_BYTES  receives into N blocks under one ticket over them all; prints the ticket
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec
from transport_parts import SECRET, ByteMemory, sized_identity

from kv_transport.ucx_receiver import UcxBlockReceiver
from kv_transport.ucx_sender import UcxBlockSender
from pd_core.errors import TransferError
from pd_core.ticket import Ticket, TicketRef


async def write(ticket: Ticket, block_bytes: int) -> None:
    memory = ByteMemory(ticket.num_blocks, block_bytes)
    memory.buffer[:] = b"\xff" * len(memory.buffer)
    places = list(range(ticket.num_blocks))
    wrong = [digest ^ 1 for digest in memory.digests(places)]  # so that the slots are written again and again
    sender = UcxBlockSender(memory, sized_identity("prefill", block_bytes), SECRET, host="127.0.0.1")
    with contextlib.suppress(TransferError):
        while True:
            await sender.push(ticket, places, places, wrong, 60.0)


async def receive(num_blocks: int, block_bytes: int) -> None:
    memory = ByteMemory(num_blocks, block_bytes)
    receiver = UcxBlockReceiver(memory, sized_identity("decode", block_bytes), SECRET, host="127.0.0.1")
    await receiver.start()
    ref = TicketRef("ticket-1", "boot", 1, 0)
    ticket = Ticket(ref, "request-1", 0, list(range(num_blocks)), 3.0, "127.0.0.1", 1, receiver.addresses)
    receiver.open_ticket(ticket, lambda _: None)
    sys.stdout.write(msgspec.json.encode(ticket).decode() + "\n")
    sys.stdout.flush()
    await asyncio.sleep(60.0)


match sys.argv[1:]:
    case ["write", ticket_json, block_bytes]:
        asyncio.run(write(msgspec.json.decode(ticket_json, type=Ticket), int(block_bytes)))
    case ["receive", num_blocks, block_bytes]:
        asyncio.run(receive(int(num_blocks), int(block_bytes)))
