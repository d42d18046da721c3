"""The paths under test, each as a pair of pools with a way to play a writer that stops in the middle of a frame."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
from transport_parts import (
    FINGERPRINT,
    GRACE_S,
    LAYOUT,
    OPTIONS,
    SECRET,
    SHM_OPTIONS,
    UCX_OPTIONS,
    ByteMemory,
    Pair,
    SharedMemory,
    identity,
    num_open_files,
    num_pool_maps,
    sized_identity,
    transport_threads,
)
from ucx_writer import UcxWriter
from waiting import until

from kv_transport.doorbell_frames import encode
from kv_transport.inproc import InprocBlockReceiver, InprocBlockSender, InprocNetwork
from kv_transport.inproc_faults import FaultPlan
from kv_transport.shm import DATA_KIND as SHM_KIND
from kv_transport.shm import ShmOptions, socket_name
from kv_transport.shm_frames import Attach, Doorbell
from kv_transport.shm_pool import copy_block
from kv_transport.shm_receiver import ShmBlockReceiver
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.tcp import DATA_KIND, TcpOptions
from kv_transport.tcp_frames import encode_frame_start
from kv_transport.tcp_receiver import TcpBlockReceiver
from kv_transport.tcp_sender import TcpBlockSender
from kv_transport.ucx import UcxOptions
from kv_transport.ucx_receiver import UcxBlockReceiver
from kv_transport.ucx_sender import UcxBlockSender
from pd_core.errors import TransferError
from pd_core.layout import Fingerprint
from pd_core.ticket import Ticket
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.tls import Tls


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
    connections: int | None = None,
    receiver_tls: Tls | None = None,
    sender_tls: Tls | None = None,
) -> AsyncIterator[Pair]:
    num_files = num_open_files()
    source, target = ByteMemory(num_blocks), ByteMemory(num_blocks)
    source.fill(random.Random(7))
    receiver = TcpBlockReceiver(target, identity("decode"), SECRET, host=host, options=options, tls=receiver_tls)
    await receiver.start()
    prefill = identity("prefill", sender_fingerprint)
    sender = TcpBlockSender(source, prefill, sender_secret, connections=connections, options=options, tls=sender_tls)
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


class Copies:
    """Copies blocks as the shm receiver does, but stops half-way through one of a ticket's frame where a test wants.

    stall: the ticket's slots, the second of which is copied half and then waits for `go_on`, or for its writer's end
    """

    def __init__(self) -> None:
        self._stalled: tuple[Pair, Ticket] | None = None
        self._go_on = threading.Event()

    def __call__(self, source: memoryview, into: memoryview) -> None:
        if self._stalled is None or not self._is_second(*self._stalled, into):
            copy_block(source, into)
            return
        pair, ticket = self._stalled
        half = len(into) // 2
        copy_block(source[:half], into[:half])
        (writer,) = pair.receiver.reception.permits.writers_inside(ticket.ref)
        while not self._go_on.wait(0.001):
            if writer._cut_reason is not None:
                return
        copy_block(source[half:], into[half:])

    def stall(self, pair: Pair, ticket: Ticket) -> None:
        self._go_on.clear()
        self._stalled = pair, ticket

    def go_on(self) -> None:
        self._stalled = None
        self._go_on.set()

    @staticmethod
    def _is_second(pair: Pair, ticket: Ticket, into: memoryview) -> bool:
        place = pair.target.block(ticket.block_ids[1])
        return address_of(place) == address_of(into)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def connect_shm_writer(
    receiver: ShmBlockReceiver, memory: SharedMemory | None, fingerprint: Fingerprint | None = FINGERPRINT
) -> socket.socket:
    """The same over shared memory; with a pool, it has been attached. Blocks for the handshake."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(socket_name(receiver.addresses[0].host))
    authenticate_blocking_as_client(sock, SECRET, identity("prefill", fingerprint), kind=SHM_KIND, deadline_s=5)
    if memory is not None:
        attach = Attach(1, memory.num_blocks, memory.block_bytes, memory.nonce)
        socket.send_fds(sock, [encode(attach)], [memory.fd])
        assert b"attached" in sock.recv(1000)
    return sock


@asynccontextmanager
async def shm_pair(
    num_blocks: int,
    *,
    options: ShmOptions = SHM_OPTIONS,
    sender_fingerprint: Fingerprint = FINGERPRINT,
    sender_secret: bytes = SECRET,
) -> AsyncIterator[Pair]:
    num_files = num_open_files()
    source = SharedMemory(num_blocks, LAYOUT.block_bytes)
    target = SharedMemory(num_blocks, LAYOUT.block_bytes)
    source.fill(random.Random(7))
    copies = Copies()
    receiver = ShmBlockReceiver(target, identity("decode"), SECRET, options=options, copy=copies)
    await receiver.start()
    sender = ShmBlockSender(source, identity("prefill", sender_fingerprint), sender_secret, options=options)
    pair = Pair(source, target, receiver, sender)
    pair.copies = copies
    try:
        yield pair
    finally:
        await sender.close()
        await receiver.close()
        source.close()
        target.close()
    assert receiver.reception.permits.num_permits == 0
    assert transport_threads() == []
    assert num_open_files() <= num_files
    assert num_pool_maps() == 0


@asynccontextmanager
async def ucx_pair(
    num_blocks: int,
    *,
    options: UcxOptions = UCX_OPTIONS,
    sender_fingerprint: Fingerprint | None = None,
    sender_secret: bytes = SECRET,
    block_bytes: int = LAYOUT.block_bytes,
    host: str = "127.0.0.1",
) -> AsyncIterator[Pair]:
    source, target = ByteMemory(num_blocks, block_bytes), ByteMemory(num_blocks, block_bytes)
    source.fill(random.Random(7))
    num_files = num_open_files()
    ours, theirs = sized_identity("decode", block_bytes), sized_identity("prefill", block_bytes)
    if sender_fingerprint is not None:
        theirs = identity("prefill", sender_fingerprint)
    receiver = UcxBlockReceiver(target, ours, SECRET, host=host, options=options)
    await receiver.start()
    sender = UcxBlockSender(source, theirs, sender_secret, host=host, options=options)
    pair = Pair(source, target, receiver, sender)
    try:
        yield pair
    finally:
        await sender.close()
        await receiver.close()
    assert receiver.reception.permits.num_permits == 0
    assert transport_threads() == []
    assert num_open_files() <= num_files


class TcpPath:
    """How the contract tests make pairs over tcp, and writers that stop half-way."""

    name = "tcp"
    whole_in_mid_frame = frozenset({0})
    pair = staticmethod(tcp_pair)
    rough_pair = staticmethod(tcp_pair)

    @staticmethod
    @asynccontextmanager
    async def writer_in_mid_frame(pair: Pair, ticket: Ticket, block_ids: list[int]) -> AsyncIterator[Callable]:
        """A writer that has sent half a frame of all `block_ids`; what is given sends the rest, if it still can."""
        sock = await asyncio.to_thread(connect_writer, pair.receiver)
        digests = pair.digests_for(ticket, block_ids)
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
    whole_in_mid_frame = frozenset({0})
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
        digests = pair.digests_for(ticket, block_ids)
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


class ShmPath:
    """The same over shared memory, where what stops half-way is the receiver's own copy."""

    name = "shm"
    whole_in_mid_frame = frozenset({0, 1})  # our own copy of a block ends also when the writer is gone
    pair = staticmethod(shm_pair)
    rough_pair = staticmethod(shm_pair)

    @staticmethod
    @asynccontextmanager
    async def writer_in_mid_frame(pair: Pair, ticket: Ticket, block_ids: list[int]) -> AsyncIterator[Callable]:
        """One block and a half have been copied; what is given lets the copy go on, if it still can."""
        sock = await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source)
        pair.copies.stall(pair, ticket)
        digests = pair.digests_for(ticket, block_ids)
        sock.sendall(encode(Doorbell(1, ticket.ref, list(range(len(block_ids))), block_ids, digests)))
        await _until_inside(pair, ticket)

        async def send_rest() -> None:
            pair.copies.go_on()

        try:
            yield send_rest
        finally:
            sock.close()
            pair.copies.go_on()


class UcxPath:
    """The same over UCX, where a block is sent whole or not at all."""

    name = "ucx"
    whole_in_mid_frame = frozenset({0})
    pair = staticmethod(ucx_pair)
    rough_pair = staticmethod(ucx_pair)

    @staticmethod
    @asynccontextmanager
    async def writer_in_mid_frame(pair: Pair, ticket: Ticket, block_ids: list[int]) -> AsyncIterator[Callable]:
        """The first block has been sent; what is given sends the others, if it still can."""
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        first_tag = writer.next_tag
        digests = pair.digests_for(ticket, block_ids)
        ready = await asyncio.to_thread(writer.ring, ticket.ref, digests, len(block_ids))
        assert ready.wanted == list(range(len(block_ids)))
        writer.send(bytes(pair.source.block(block_ids[0])), first_tag)
        await asyncio.to_thread(writer.let_ucx_work)

        async def send_rest() -> None:
            for place, block_id in enumerate(block_ids[1:], 1):
                try:
                    writer.send(bytes(pair.source.block(block_id)), first_tag + place)
                except TransferError:
                    break  # it was cut off: what the tests are about
            await asyncio.to_thread(writer.rest)

        try:
            yield send_rest
        finally:
            await asyncio.to_thread(writer.close)


PATHS = {"tcp": TcpPath, "shm": ShmPath, "ucx": UcxPath, "inproc": InprocPath}


async def _until_inside(pair: Pair, ticket: Ticket) -> None:
    await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
