"""What tests of every path are made of: pools, tickets, and what came of them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from kv_transport.digest import block_digest
from kv_transport.interface import BlocksArrived, ReceiverEvent, WriterStopped
from kv_transport.shm import ShmOptions
from kv_transport.tcp import TcpOptions
from kv_transport.ucx import UcxOptions
from pd_core.layout import BlockLayout, Fingerprint
from pd_core.ticket import Ticket, TicketRef
from pd_engine.scratch import ScratchMemory
from pd_rpc.wire import PeerIdentity
from pd_worker.memory import PoolMemory

SECRET = b"the cluster's secret, 32 bytes.."
GRACE_S = 0.2
LAYOUT = BlockLayout("plain", num_layers=2, num_kv_heads=2, head_dim=64, dtype="uint8")
FINGERPRINT = Fingerprint("weights", "settings", "tokenizer", "numerics", LAYOUT)
# Frames of three blocks, so that a push of a few blocks is several frames.
OPTIONS = TcpOptions(
    handshake_s=1.0, max_frame_bytes=3 * LAYOUT.block_bytes, frame_silence_s=3.0, grace_s=GRACE_S, max_queued_pushes=4
)

SHM_OPTIONS = ShmOptions(
    handshake_s=1.0, max_frame_blocks=3, frame_silence_s=3.0, grace_s=GRACE_S, max_queued_pushes=4, withdraw_s=2.0
)

UCX_OPTIONS = UcxOptions(
    handshake_s=5.0, max_frame_bytes=3 * LAYOUT.block_bytes, frame_silence_s=3.0, grace_s=GRACE_S, max_queued_pushes=4
)


def identity(role: str, fingerprint: Fingerprint | None = FINGERPRINT) -> PeerIdentity:
    return PeerIdentity(f"{role}-0", role, "boot", fingerprint)


def sized_identity(role: str, block_bytes: int) -> PeerIdentity:
    """Of pools with blocks of so many bytes, a multiple of 32."""
    if block_bytes == LAYOUT.block_bytes:
        return identity(role)
    layout = BlockLayout("plain", num_layers=1, num_kv_heads=1, head_dim=block_bytes // 32, dtype="uint8")
    assert layout.block_bytes == block_bytes
    return identity(role, changed(FINGERPRINT, layout=layout))


class Filled:
    """What tests do with a pool of either kind."""

    def fill(self, generator: random.Random) -> None:
        self.buffer[:] = generator.randbytes(len(self.buffer))

    def digests(self, block_ids: list[int]) -> list[int]:
        return [block_digest(self.block(block_id)) for block_id in block_ids]


class SharedMemory(Filled, PoolMemory):
    """A pool that another process can be shown."""


class ByteMemory(Filled, ScratchMemory):
    """A pool of this process alone."""

    def __init__(self, num_blocks: int, block_bytes: int = LAYOUT.block_bytes) -> None:
        super().__init__(num_blocks, block_bytes)


class Arrivals:
    """Listener of a ticket: what came, and a way to wait for more."""

    def __init__(self) -> None:
        self.events: list[ReceiverEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: ReceiverEvent) -> None:
        self.events.append(event)
        self._changed.set()

    @property
    def verified(self) -> set[int]:
        return {i for event in self.events if isinstance(event, BlocksArrived) for i in event.verified}

    @property
    def corrupt(self) -> list[int]:
        return [i for event in self.events if isinstance(event, BlocksArrived) for i in event.corrupt]

    @property
    def num_bytes(self) -> int:
        return sum(event.num_bytes for event in self.events if isinstance(event, BlocksArrived))

    @property
    def num_stopped(self) -> int:
        return sum(isinstance(event, WriterStopped) for event in self.events)

    async def until(self, condition: Callable[[Arrivals], bool], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()


class Pair:
    """A source pool with a sender and a target pool with a receiver, over one path."""

    def __init__(self, source: ByteMemory, target: ByteMemory, receiver, sender) -> None:
        self.source = source
        self.target = target
        self.receiver = receiver
        self.sender = sender
        self._epochs = itertools.count(1)

    def ticket(self, block_ids: list[int]) -> Ticket:
        epoch = next(self._epochs)
        ref = TicketRef(f"ticket-{epoch}", "boot", epoch, 0)
        return Ticket(ref, f"request-{epoch}", 0, block_ids, 3.0, "127.0.0.1", 1, self.receiver.addresses)

    def open(self, block_ids: list[int], *, with_digests: bool = True) -> tuple[Ticket, Arrivals]:
        ticket, arrivals = msgspec.structs.replace(self.ticket(block_ids), with_digests=with_digests), Arrivals()
        self.receiver.open_ticket(ticket, arrivals)
        return ticket, arrivals

    def late_ticket(self, block_ids: list[int]) -> Ticket:
        """One that was over before any other was issued. Another must have been opened."""
        ticket = self.ticket(block_ids)
        return msgspec.structs.replace(ticket, ref=msgspec.structs.replace(ticket.ref, epoch=0))

    async def push(self, ticket: Ticket, indices: list[int], block_ids: list[int], deadline_s: float = 5.0):
        return await self.sender.push(ticket, indices, block_ids, self.digests_for(ticket, block_ids), deadline_s)

    def digests_for(self, ticket: Ticket, block_ids: list[int]) -> list[int]:
        return self.source.digests(block_ids) if ticket.with_digests else []

    def received(self, ticket: Ticket) -> list[bytes]:
        return [bytes(self.target.block(block_id)) for block_id in ticket.block_ids]

    def sent(self, block_ids: list[int]) -> list[bytes]:
        return [bytes(self.source.block(block_id)) for block_id in block_ids]

    def num(self, counter: str) -> int:
        return int(self.receiver.counters()[counter])


def transport_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def num_open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def num_pool_maps() -> int:
    """Pools that this process has mapped, its own and others'; not those that a test before has left as garbage."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("kvrelay-pool")


def changed(fingerprint: Fingerprint, **fields: object) -> Fingerprint:
    return msgspec.structs.replace(fingerprint, **fields)
