"""Peers that send anything but what they should. None of it may touch memory, stop the receiver, or stay for long."""

import asyncio
import contextlib
import random
import socket
import struct
import time
import zlib

import msgspec
import pytest
from hostile_parts import FIRST_REF, is_closed_soon, send
from transport_parts import LAYOUT, OPTIONS, transport_threads
from transport_paths import connect_writer, tcp_pair
from waiting import until

from kv_transport.tcp_frames import MAGIC, MAX_HEADER_BYTES, WIRE_VERSION, encode_frame_start

BLOCK = bytes(range(256)) * (LAYOUT.block_bytes // 256)
FAST = msgspec.structs.replace(OPTIONS, handshake_s=0.2, frame_silence_s=0.2, max_connections=3)
PREFIX = struct.Struct(">4sHIII")


def prefix(header: bytes, num_payload_bytes: int, *, magic=MAGIC, version=WIRE_VERSION, num_header_bytes=None) -> bytes:
    length = len(header) if num_header_bytes is None else num_header_bytes
    return PREFIX.pack(magic, version, length, num_payload_bytes, zlib.crc32(header)) + header


def header_bytes(indices=(0,), digests=(1,), **changes) -> bytes:
    body = {"ref": msgspec.to_builtins(FIRST_REF), "indices": list(indices), "digests": list(digests)}
    return msgspec.msgpack.encode(body | changes)


GOOD = header_bytes()
SIZE = LAYOUT.block_bytes
WRONG_BYTES = {
    "garbage": random.Random(1).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "magic of control connections": prefix(GOOD, SIZE, magic=b"KVRP"),
    "later version": prefix(GOOD, SIZE, version=WIRE_VERSION + 1),
    "header of 4 GiB": prefix(b"", SIZE, num_header_bytes=2**32 - 1),
    "header just too long": prefix(b"", SIZE, num_header_bytes=MAX_HEADER_BYTES + 1),
    "payload of 4 GiB": prefix(GOOD, 2**32 - 1),
    "payload just too long": prefix(GOOD, FAST.max_frame_bytes + SIZE),
    "payload not of whole blocks": prefix(GOOD, SIZE - 1),
    "payload of more blocks than indices": prefix(GOOD, 2 * SIZE),
    "damaged header": prefix(GOOD, SIZE)[:-1] + bytes([GOOD[-1] ^ 1]),
    "no header": prefix(b"", SIZE),
    "array that claims 4 billion": prefix(b"\xdd\xff\xff\xff\xff", SIZE),
    "indices that claim 4 billion": prefix(GOOD.replace(b"indices\x91\x00", b"indices\xdd\xff\xff\xff\xff"), SIZE),
    "nested 60000 deep": prefix(b"\x81\xa1x" + b"\x91" * 60_000, SIZE),
    "string that claims 4 GiB": prefix(b"\x81\xdb\xff\xff\xff\xff", SIZE),
    "indices of another type": prefix(header_bytes(["0"]), SIZE),
    "huge index": prefix(header_bytes([2**64 - 1]), SIZE),
    "negative index": prefix(header_bytes([-1]), SIZE),
    "index beyond the range": prefix(header_bytes([2]), SIZE),
    "block named twice": prefix(header_bytes([0, 0], [1, 1]), 2 * SIZE),
    "fewer digests than blocks": prefix(header_bytes([0, 1], [1]), 2 * SIZE),
    "frame without blocks": prefix(header_bytes([], []), 0),
    "no ticket": prefix(header_bytes(ref=None), SIZE),
    "two headers": prefix(GOOD + GOOD, SIZE),
}


@pytest.mark.parametrize("kind", WRONG_BYTES)
async def test_bytes_that_the_wire_format_does_not_allow_close_the_connection_and_touch_nothing(kind, caplog):
    async with tcp_pair(2, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        with await asyncio.to_thread(connect_writer, pair.receiver) as sock:
            await asyncio.to_thread(send, sock, WRONG_BYTES[kind] + 3 * BLOCK)
            assert await asyncio.to_thread(is_closed_soon, sock)
        await until(lambda: not pair.receiver.connections)
        assert not any(pair.target.buffer)
        assert arrivals.verified == set()
        assert arrivals.corrupt == []
        assert "KV connection from 127.0.0.1" in caplog.text
        assert "failed" not in caplog.text
        await pair.push(ticket, [0, 1], [0, 1])  # everybody else is served
        await arrivals.until(lambda a: a.verified == {0, 1})


async def test_fields_that_a_later_version_added_to_the_header_are_ignored():
    async with tcp_pair(2, options=FAST) as pair:
        _, arrivals = pair.open([0, 1])
        with await asyncio.to_thread(connect_writer, pair.receiver) as sock:
            digests = pair.source.digests([0])
            sock.sendall(prefix(header_bytes(digests=digests, later=[{"a": 1}]), LAYOUT.block_bytes))
            sock.sendall(pair.source.block(0))
            await arrivals.until(lambda a: a.verified == {0})


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.3, 0.999])
async def test_a_frame_that_stops_in_the_middle_is_given_up_after_the_silence_limit(part):
    async with tcp_pair(2, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        frame = encode_frame_start(ticket.ref, [0, 1], [1, 2], LAYOUT.block_bytes) + 2 * BLOCK
        with await asyncio.to_thread(connect_writer, pair.receiver) as sock:
            sock.sendall(frame[: max(int(len(frame) * part), 1)])
            started_s = time.monotonic()
            assert await asyncio.to_thread(is_closed_soon, sock)
            assert time.monotonic() - started_s < 3 * FAST.frame_silence_s
        await pair.receiver.close_ticket(ticket.ref)
        assert arrivals.verified == set()


async def test_a_header_that_drips_in_is_given_up_too():
    async with tcp_pair(2, options=FAST) as pair:
        ticket, _ = pair.open([0, 1])
        frame = encode_frame_start(ticket.ref, [0], [1], LAYOUT.block_bytes)
        with await asyncio.to_thread(connect_writer, pair.receiver) as sock:
            started_s = time.monotonic()
            with contextlib.suppress(OSError):
                for byte in frame:
                    sock.send(bytes([byte]))
                    await asyncio.sleep(0.03)
            assert await asyncio.to_thread(is_closed_soon, sock)
            assert time.monotonic() - started_s < 1.0


async def test_peers_that_prove_nothing_are_closed_after_the_deadline_and_make_room():
    async with tcp_pair(2, options=FAST) as pair:
        address = pair.receiver.addresses[0]
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                sock = stack.enter_context(socket.create_connection((address.host, address.port)))
                assert sock is not None
            await until(lambda: pair.num("kv_connections_refused") >= 3)
            assert len(pair.receiver.connections) == FAST.max_connections
            assert sum(name.startswith("kv-receive") for name in transport_threads()) == FAST.max_connections
            await until(lambda: pair.num("kv_connections_refused") == 6)
            ticket, arrivals = pair.open([0, 1])
            await pair.push(ticket, [0, 1], [0, 1])
            await arrivals.until(lambda a: a.verified == {0, 1})


@pytest.mark.parametrize(
    "first", [b"\0" * 100_000, random.Random(64).randbytes(64), MAGIC, b"KVRP\0\1\xff\xff\xff\xff\0\0\0\0"]
)
async def test_an_unproven_peer_cannot_send_frames(first):
    async with tcp_pair(2, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        address = pair.receiver.addresses[0]
        frame = encode_frame_start(ticket.ref, [0, 1], [1, 2], LAYOUT.block_bytes) + 2 * BLOCK
        with socket.create_connection((address.host, address.port)) as sock:
            await asyncio.to_thread(send, sock, first + frame)
            assert await asyncio.to_thread(is_closed_soon, sock)
        await until(lambda: pair.num("kv_connections_refused") == 1)
        assert not any(pair.target.buffer)
        assert arrivals.events == []


async def test_stale_frames_of_every_size_are_drained_and_the_connection_goes_on():
    async with tcp_pair(4, options=OPTIONS) as pair:
        stale = pair.ticket([0, 1, 2])
        ticket, arrivals = pair.open([0, 1, 2])
        with await asyncio.to_thread(connect_writer, pair.receiver) as sock:
            for num_blocks in (1, 2, 3):
                indices = range(num_blocks)
                sock.sendall(encode_frame_start(stale.ref, indices, [1] * num_blocks, LAYOUT.block_bytes))
                sock.sendall(BLOCK * num_blocks)
            sock.sendall(encode_frame_start(ticket.ref, [0], pair.source.digests([2]), LAYOUT.block_bytes))
            sock.sendall(pair.source.block(2))
            await arrivals.until(lambda a: a.verified == {0})
        assert pair.num("kv_frames_stale") == 3
        assert not any(pair.target.block(1)) and not any(pair.target.block(2))
