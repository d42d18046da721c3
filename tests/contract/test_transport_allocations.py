"""Nothing is allocated on the word of a peer: what a receiver takes from memory while peers announce gigabytes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hostile_parts import FIRST_REF, is_closed_soon, send
from transport_parts import LAYOUT, OPTIONS, SECRET, SHM_OPTIONS, UCX_OPTIONS, identity
from transport_paths import connect_shm_writer, connect_writer, shm_pair, tcp_pair, ucx_pair
from waiting import until

from kv_transport.doorbell_frames import encode
from kv_transport.shm_frames import Attach
from kv_transport.ucx import CONTROL_KIND
from pd_rpc.blocking import authenticate_blocking_as_client

CONTROL, DATA = struct.Struct(">4sHII"), struct.Struct(">4sHIII")
CONTROL_VERSION = 2
HUGE = 2**32 - 1
CONNECTION_BYTES = 1024 * 1024
"""The buffers of fixed size that one connection has, and what a thread and a handshake take."""
NUM_PEERS = 4
REF = msgspec.to_builtins(FIRST_REF)
UNKNOWN = {"epoch": 9}
NONCE = bytes(16)


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Puts into the list how many bytes more than before were allocated at once, and how many still are."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        yield found
        gc.collect()
        after, most = tracemalloc.get_traced_memory()
        found += [most - before, after - before]
    finally:
        tracemalloc.stop()


def control_frame(body: bytes, num_bytes: int | None = None) -> bytes:
    length = len(body) if num_bytes is None else num_bytes
    return CONTROL.pack(b"KVRP", CONTROL_VERSION, length, zlib.crc32(body)) + body


def data_frame(header: bytes, num_block_bytes: int, num_header_bytes: int | None = None) -> bytes:
    length = len(header) if num_header_bytes is None else num_header_bytes
    return DATA.pack(b"KVRB", 1, length, num_block_bytes, zlib.crc32(header)) + header


def header_of(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({"ref": REF, "indices": [0], "digests": [1]} | changes)


GREEDY_HEADER = header_of().replace(b"indices\x91\x00", b"indices\xdd\xff\xff\xff\xff")
BELL = {"type": "doorbell", "number": 1, "ref": REF, "indices": [0], "block_ids": [0], "digests": [1]}
GREEDY_BELL = msgspec.msgpack.encode(BELL).replace(b"indices\x91\x00", b"indices\xdd\xff\xff\xff\xff")

TCP_CLAIMS = {
    "blocks": data_frame(header_of(), HUGE),
    "a header": data_frame(b"", LAYOUT.block_bytes, HUGE),
    "an array": data_frame(GREEDY_HEADER, LAYOUT.block_bytes),
    "a string": data_frame(b"\x81\xdb\xff\xff\xff\xff", LAYOUT.block_bytes),
    "bytes": data_frame(b"\x81\xa1x\xc6\xff\xff\xff\xff", LAYOUT.block_bytes),
    "depth": data_frame(b"\x81\xa1x" + b"\x91" * 60_000, LAYOUT.block_bytes),
    "a long ticket": data_frame(header_of(ref=REF | {"ticket_id": "x" * 60_000}), LAYOUT.block_bytes),
    "a frame that never comes": data_frame(header_of(), LAYOUT.block_bytes),
}
SHM_CLAIMS = {
    "a body": control_frame(b"", HUGE),
    "an array": control_frame(GREEDY_BELL),
    "a string": control_frame(b"\x81\xdb\xff\xff\xff\xff"),
    "depth": control_frame(b"\x81\xa1x" + b"\x91" * 60_000),
    "a long ticket": control_frame(
        msgspec.msgpack.encode(BELL | {"ref": REF | {"ticket_id": "x" * 60_000, "epoch": 9}})
    ),
    "a frame that never comes": control_frame(b"", 60_000),
}
ATTACH = {"type": "attach", "version": 1, "block_bytes": LAYOUT.block_bytes, "address": b"", "nonce": NONCE}
GREEDY_ATTACH = msgspec.msgpack.encode(ATTACH).replace(b"address\xc4\x00", b"address\xc6\xff\xff\xff\xff")
UCX_CLAIMS = {
    "a body": control_frame(b"", HUGE),
    "an address": control_frame(GREEDY_ATTACH),
    "a long address": control_frame(msgspec.msgpack.encode(ATTACH | {"address": bytes(60_000)})),
    "blocks of a tebibyte": control_frame(msgspec.msgpack.encode(ATTACH | {"address": b"1", "block_bytes": 2**40})),
    "depth": SHM_CLAIMS["depth"],
    "a frame that never comes": SHM_CLAIMS["a frame that never comes"],
}


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Log lines that pytest keeps are no matter of the receiver's."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(found: list[int], num_at_once: int) -> None:
    most, left = found
    assert most < num_at_once * CONNECTION_BYTES
    assert left < CONNECTION_BYTES


@pytest.mark.parametrize("claim", TCP_CLAIMS)
async def test_a_writer_over_tcp_that_announces_much_gets_the_buffers_of_one_connection(claim: str) -> None:
    options = msgspec.structs.replace(OPTIONS, frame_silence_s=0.05)
    async with tcp_pair(2, options=options) as pair:
        pair.open([0, 1])
        with await asyncio.to_thread(connect_writer, pair.receiver):
            pass  # what is made once is made before
        await until(lambda: not pair.receiver.connections)
        with peak() as found:
            for _ in range(NUM_PEERS):
                with await asyncio.to_thread(connect_writer, pair.receiver) as sock:
                    await asyncio.to_thread(send, sock, TCP_CLAIMS[claim])
                    assert await asyncio.to_thread(is_closed_soon, sock)
            await until(lambda: not pair.receiver.connections)
        check(found, 2)


@pytest.mark.parametrize("claim", SHM_CLAIMS)
async def test_a_writer_over_shared_memory_that_announces_much_gets_the_buffers_of_one_connection(claim: str) -> None:
    options = msgspec.structs.replace(SHM_OPTIONS, frame_silence_s=0.05)
    async with shm_pair(2, options=options) as pair:
        pair.open([0, 1])
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source):
            pass
        await until(lambda: not pair.receiver.connections)
        with peak() as found:
            for _ in range(NUM_PEERS):
                with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
                    await asyncio.to_thread(send, sock, SHM_CLAIMS[claim])
                    assert await asyncio.to_thread(is_closed_soon, sock)
            await until(lambda: not pair.receiver.connections)
        check(found, 2)


@pytest.mark.parametrize("claim", UCX_CLAIMS)
async def test_a_writer_over_ucx_that_announces_much_gets_the_buffers_of_one_connection(claim: str) -> None:
    options = msgspec.structs.replace(UCX_OPTIONS, frame_silence_s=0.05)

    def connect(receiver: Any) -> socket.socket:
        sock = socket.create_connection((receiver.addresses[0].host, receiver.addresses[0].port), timeout=5)
        authenticate_blocking_as_client(sock, SECRET, identity("prefill"), kind=CONTROL_KIND, deadline_s=5)
        return sock

    async with ucx_pair(2, options=options) as pair:
        pair.open([0, 1])
        with await asyncio.to_thread(connect, pair.receiver):
            pass
        await until(lambda: not pair.receiver.connections)
        with peak() as found:
            for _ in range(NUM_PEERS):
                with await asyncio.to_thread(connect, pair.receiver) as sock:
                    await asyncio.to_thread(send, sock, UCX_CLAIMS[claim])
                    assert await asyncio.to_thread(is_closed_soon, sock)
            await until(lambda: not pair.receiver.connections)
        check(found, 2)


async def test_a_pool_of_a_tebibyte_that_is_not_there_is_neither_mapped_nor_read() -> None:
    async with shm_pair(2) as pair:
        claim = encode(Attach(1, 2**40 // LAYOUT.block_bytes, LAYOUT.block_bytes, bytes(16)))
        with peak() as found:
            for _ in range(NUM_PEERS):
                with await asyncio.to_thread(connect_shm_writer, pair.receiver, None) as sock:
                    before = _mapped_bytes()
                    socket.send_fds(sock, [claim], [pair.source.fd])
                    assert await asyncio.to_thread(is_closed_soon, sock)
                    assert _mapped_bytes() - before < 2**30
        check(found, 2)


@pytest.mark.parametrize("path", ["tcp", "shm"])
async def test_peers_that_have_proved_nothing_get_less_still(path: str) -> None:
    """They are many, and they may announce what they like: a hello of 4 GiB, or one that never ends."""
    pairs: dict[str, Any] = {"tcp": tcp_pair, "shm": shm_pair}
    async with pairs[path](2) as pair:
        address = pair.receiver.addresses[0]
        where: Any = (address.host, address.port) if path == "tcp" else "\0" + address.host.removeprefix("@")
        family = socket.AF_INET if path == "tcp" else socket.AF_UNIX
        with peak() as found, contextlib.ExitStack() as stack:
            socks = [stack.enter_context(socket.socket(family)) for _ in range(NUM_PEERS)]
            for number, sock in enumerate(socks):
                await asyncio.to_thread(sock.connect, where)
                claim = control_frame(b"", HUGE) if number % 2 else control_frame(b"\x94" + bytes(50_000), 65_000)
                await asyncio.to_thread(send, sock, claim)
            for sock in socks:
                assert await asyncio.to_thread(is_closed_soon, sock)
            await until(lambda: not pair.receiver.connections)
        check(found, NUM_PEERS)


def _mapped_bytes() -> int:
    with open(f"/proc/{os.getpid()}/statm") as statm:  # noqa: PTH123 - no file of a disk
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
