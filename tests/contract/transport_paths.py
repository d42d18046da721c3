"""The paths under test, each as a pair of pools with a way to play a writer that stops in the middle of a frame."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kv_transport.digest import block_digest
from kv_transport.inproc import InprocBlockReceiver, InprocBlockSender, InprocNetwork
from kv_transport.inproc_faults import FaultPlan
from kv_transport.interface import BlocksArrived, ReceiverEvent, WriterStopped
from kv_transport.tcp import DATA_KIND, TcpOptions
from kv_transport.tcp_frames import encode_frame_start
from kv_transport.tcp_receiver import TcpBlockReceiver
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.layout import BlockLayout, Fingerprint
from pd_core.ticket import Ticket, TicketRef
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.wire import PeerIdentity

SECRET = b"the cluster's secret, 32 bytes.."
GRACE_S = 0.2
LAYOUT = BlockLayout("plain", num_layers=2, num_kv_heads=2, head_dim=64, dtype="uint8")
FINGERPRINT = Fingerprint("weights", "settings", "tokenizer", "numerics", LAYOUT)
# Frames of three blocks, so that a push of a few blocks is several frames.
OPTIONS = TcpOptions(
    handshake_s=1.0, max_frame_bytes=3 * LAYOUT.block_bytes, frame_silence_s=3.0, grace_s=GRACE_S, max_queued_pushes=4
)


def identity(role: str, fingerprint: Fingerprint | None = FINGERPRINT) -> PeerIdentity:
    return PeerIdentity(f"{role}-0", role, "boot", fingerprint)


class ByteMemory:
    """BlockMemory over a bytearray."""

    def __init__(self, num_blocks: int, block_bytes: int = LAYOUT.block_bytes) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._buffer = memoryview(bytearray(num_blocks * block_bytes))

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def block(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(block_id)
        return self._buffer[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def fill(self, generator: random.Random) -> None:
        self._buffer[:] = generator.randbytes(len(self._buffer))

    def digests(self, block_ids: list[int]) -> list[int]:
        return [block_digest(self.block(block_id)) for block_id in block_ids]


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

    def open(self, block_ids: list[int]) -> tuple[Ticket, Arrivals]:
        ticket, arrivals = self.ticket(block_ids), Arrivals()
        self.receiver.open_ticket(ticket, arrivals)
        return ticket, arrivals

    async def push(self, ticket: Ticket, indices: list[int], block_ids: list[int], deadline_s: float = 5.0):
        return await self.sender.push(ticket, indices, block_ids, self.source.digests(block_ids), deadline_s)

    def received(self, ticket: Ticket) -> list[bytes]:
        return [bytes(self.target.block(block_id)) for block_id in ticket.block_ids]

    def sent(self, block_ids: list[int]) -> list[bytes]:
        return [bytes(self.source.block(block_id)) for block_id in block_ids]

    def num(self, counter: str) -> int:
        return int(self.receiver.counters()[counter])


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """For what happens in other threads and has no event to wait for."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def transport_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def num_open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def connect_writer(receiver: TcpBlockReceiver, fingerprint: Fingerprint | None = FINGERPRINT) -> socket.socket:
    """A raw connection that has proved itself; what it sends then is up to the test. Blocks for the handshake."""
    address = receiver.addresses[0]
    sock = socket.create_connection((address.host, address.port), timeout=5)
    authenticate_blocking_as_client(sock, SECRET, identity("prefill", fingerprint), kind=DATA_KIND, deadline_s=5)
    return sock


@asynccontextmanager
async def tcp_pair(
    num_blocks: int,
    *,
    host: str = "127.0.0.1",
    options: TcpOptions = OPTIONS,
    sender_fingerprint: Fingerprint = FINGERPRINT,
    sender_secret: bytes = SECRET,
) -> AsyncIterator[Pair]:
    num_files = num_open_files()
    source, target = ByteMemory(num_blocks), ByteMemory(num_blocks)
    source.fill(random.Random(7))
    receiver = TcpBlockReceiver(target, identity("decode"), SECRET, host=host, options=options)
    await receiver.start()
    sender = TcpBlockSender(source, identity("prefill", sender_fingerprint), sender_secret, options=options)
    pair = Pair(source, target, receiver, sender)
    try:
        yield pair
    finally:
        await sender.close()
        await receiver.close()
    assert receiver.reception.permits.num_permits == 0
    assert transport_threads() == []
    assert num_open_files() <= num_files


@asynccontextmanager
async def inproc_pair(
    num_blocks: int, *, faults: FaultPlan | None = None, sender_fingerprint: Fingerprint = FINGERPRINT
) -> AsyncIterator[Pair]:
    network = InprocNetwork()
    source, target = ByteMemory(num_blocks), ByteMemory(num_blocks)
    source.fill(random.Random(7))
    receiver = InprocBlockReceiver(network, target, FINGERPRINT, grace_s=GRACE_S)
    await receiver.start()
    sender = InprocBlockSender(network, source, sender_fingerprint, faults=faults)
    pair = Pair(source, target, receiver, sender)
    tasks = len(asyncio.all_tasks())
    try:
        yield pair
    finally:
        await sender.close()
        await receiver.close()
    assert receiver.reception.permits.num_permits == 0
    assert len(asyncio.all_tasks()) == tasks


class TcpPath:
    """How the contract tests make pairs over tcp, and writers that stop half-way."""

    name = "tcp"
    pair = staticmethod(tcp_pair)
    rough_pair = staticmethod(tcp_pair)

    @staticmethod
    @asynccontextmanager
    async def writer_in_mid_frame(pair: Pair, ticket: Ticket, block_ids: list[int]) -> AsyncIterator[Callable]:
        """A writer that has sent half a frame of all `block_ids`; what is given sends the rest, if it still can."""
        sock = await asyncio.to_thread(connect_writer, pair.receiver)
        digests = pair.source.digests(block_ids)
        start = encode_frame_start(ticket.ref, range(len(block_ids)), digests, LAYOUT.block_bytes)
        frame = start + b"".join(pair.sent(block_ids))
        half = len(start) + (len(frame) - len(start)) // 2
        sock.sendall(frame[:half])
        await _until_inside(pair, ticket)

        async def send_rest() -> None:
            try:
                await asyncio.to_thread(sock.sendall, frame[half:])
            except OSError:
                return  # it was cut off: what the tests are about

        try:
            yield send_rest
        finally:
            sock.close()


class InprocPath:
    """The same over inproc."""

    name = "inproc"
    pair = staticmethod(inproc_pair)

    @staticmethod
    def rough_pair(num_blocks: int):
        """Frames are slow, doubled and out of order."""
        often = {"delay": 0.2, "stall": 0.2, "duplicate": 0.2, "reorder": 0.2}
        faults = FaultPlan(random.Random(11), **often, delay_s=0.002, stall_s=0.001)
        return inproc_pair(num_blocks, faults=faults)

    @staticmethod
    @asynccontextmanager
    async def writer_in_mid_frame(pair: Pair, ticket: Ticket, block_ids: list[int]) -> AsyncIterator[Callable]:
        slow = FaultPlan(random.Random(1), stall=1.0, stall_s=30.0)
        sender = InprocBlockSender(pair.receiver._network, pair.source, FINGERPRINT, faults=slow)
        digests = pair.source.digests(block_ids)
        push = asyncio.ensure_future(sender.push(ticket, range(len(block_ids)), block_ids, digests, 60.0))
        await _until_inside(pair, ticket)

        async def send_rest() -> None:
            await asyncio.sleep(0.01)

        try:
            yield send_rest
        finally:
            push.cancel()
            await asyncio.gather(push, return_exceptions=True)
            await sender.close()


PATHS = {"tcp": TcpPath, "inproc": InprocPath}


def changed(fingerprint: Fingerprint, **fields: object) -> Fingerprint:
    return msgspec.structs.replace(fingerprint, **fields)


async def _until_inside(pair: Pair, ticket: Ticket) -> None:
    await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
