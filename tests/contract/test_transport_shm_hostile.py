"""Peers that say or show anything but what they should on the shared-memory socket. None of it may touch memory, stop
the receiver, or stay for long."""

import asyncio
import contextlib
import os
import random
import socket
import struct
import time
import zlib

import msgspec
import pytest
from hostile_parts import FIRST_REF, is_closed_soon, send
from transport_parts import LAYOUT, SHM_OPTIONS, num_open_files, transport_threads
from transport_paths import connect_shm_writer, shm_pair
from waiting import until

from kv_transport.doorbell_frames import encode
from kv_transport.shm import socket_name
from kv_transport.shm_frames import Attach, Doorbell
from pd_rpc.frames import WIRE_VERSION

FAST = msgspec.structs.replace(SHM_OPTIONS, handshake_s=0.2, frame_silence_s=0.2, max_connections=3)
HEADER = struct.Struct(">4sHII")


def frame(body: bytes, *, magic=b"KVRP", version=WIRE_VERSION, num_bytes=None, crc=None) -> bytes:
    length = len(body) if num_bytes is None else num_bytes
    return HEADER.pack(magic, version, length, zlib.crc32(body) if crc is None else crc) + body


def doorbell_body(indices=(0,), block_ids=(0,), digests=(1,), **changes) -> bytes:
    body = {"type": "doorbell", "number": 1, "ref": msgspec.to_builtins(FIRST_REF)}
    lists = {"indices": list(indices), "block_ids": list(block_ids), "digests": list(digests)}
    return msgspec.msgpack.encode(body | lists | changes)


GOOD = doorbell_body()
WRONG_BYTES = {
    "garbage": random.Random(1).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "magic of tcp frames": frame(GOOD, magic=b"KVRB"),
    "later version": frame(GOOD, version=WIRE_VERSION + 1),
    "body of 4 GiB": frame(b"", num_bytes=2**32 - 1),
    "body just too long": frame(b"", num_bytes=64 * 1024 + 1),
    "damaged body": frame(GOOD, crc=zlib.crc32(GOOD) ^ 1),
    "no body": frame(b""),
    "array that claims 4 billion": frame(b"\xdd\xff\xff\xff\xff"),
    "indices that claim 4 billion": frame(GOOD.replace(b"indices\x91\x00", b"indices\xdd\xff\xff\xff\xff")),
    "more indices than allowed": frame(doorbell_body(range(1025), range(1025), range(1025))),
    "nested 60000 deep": frame(b"\x81\xa1x" + b"\x91" * 60_000),
    "string that claims 4 GiB": frame(b"\x81\xdb\xff\xff\xff\xff"),
    "type of nothing": frame(doorbell_body(type="bell")),
    "a word of the receiver": frame(msgspec.msgpack.encode({"type": "taken", "number": 1})),
    "attached twice": encode(Attach(1, 2, LAYOUT.block_bytes, bytes(16))),
    "indices of another type": frame(doorbell_body(["0"])),
    "huge index": frame(doorbell_body([2**64 - 1])),
    "negative index": frame(doorbell_body([-1])),
    "index beyond the range": frame(doorbell_body([2])),
    "place named twice": frame(doorbell_body([0, 0], [0, 1], [1, 1])),
    "block beyond the writer's pool": frame(doorbell_body([0], [2])),
    "negative block": frame(doorbell_body([0], [-1])),
    "huge block": frame(doorbell_body([0], [2**64 - 1])),
    "fewer blocks than indices": frame(doorbell_body([0, 1], [0], [1, 1])),
    "fewer digests than blocks": frame(doorbell_body([0, 1], [0, 1], [1])),
    "doorbell without blocks": frame(doorbell_body([], [], [])),
    "no ticket": frame(doorbell_body(ref=None)),
}


@pytest.mark.parametrize("kind", WRONG_BYTES)
async def test_bytes_that_the_wire_format_does_not_allow_close_the_connection_and_touch_nothing(kind, caplog):
    async with shm_pair(2, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            await asyncio.to_thread(send, sock, WRONG_BYTES[kind] + bytes(100))
            assert await asyncio.to_thread(is_closed_soon, sock)
        await until(lambda: not pair.receiver.connections)
        assert not any(pair.target.buffer)
        assert arrivals.verified == set()
        assert arrivals.corrupt == []
        assert f"KV connection from process {os.getpid()} closed: " in caplog.text
        assert "failed" not in caplog.text
        await pair.push(ticket, [0, 1], [0, 1])  # everybody else is served
        await arrivals.until(lambda a: a.verified == {0, 1})


async def test_fields_that_a_later_version_added_to_a_doorbell_are_ignored():
    async with shm_pair(2, options=FAST) as pair:
        _, arrivals = pair.open([0, 1])
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            sock.sendall(frame(doorbell_body(digests=pair.source.digests([0]), later=[{"a": 1}])))
            await arrivals.until(lambda a: a.verified == {0})


async def test_many_doorbells_in_one_piece_and_one_in_many_pieces_are_the_same():
    async with shm_pair(3, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1, 2])
        digests = pair.source.digests([0, 1, 2])
        bells = [encode(Doorbell(place + 1, ticket.ref, [place], [place], [digests[place]])) for place in range(3)]
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            sock.sendall(bells[0] + bells[1] + bells[2][:7])
            await asyncio.sleep(0.05)
            sock.sendall(bells[2][7:])
            await arrivals.until(lambda a: a.verified == {0, 1, 2})


@pytest.mark.parametrize("num_bytes", [1, 13, 14, 40])
async def test_a_doorbell_that_stops_in_the_middle_or_drips_is_given_up_after_the_silence_limit(num_bytes):
    async with shm_pair(2, options=FAST) as pair:
        pair.open([0, 1])
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            started_s = time.monotonic()
            sock.sendall(frame(GOOD)[:num_bytes])
            assert await asyncio.to_thread(is_closed_soon, sock)
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            with contextlib.suppress(OSError):
                for byte in frame(GOOD):
                    sock.send(bytes([byte]))
                    await asyncio.sleep(0.03)
            assert await asyncio.to_thread(is_closed_soon, sock)
            assert time.monotonic() - started_s < 2.0


async def test_a_peer_that_never_reads_what_it_is_told_is_given_up():
    async with shm_pair(2, options=FAST) as pair:
        pair.open([0, 1])
        late = pair.late_ticket([0]).ref
        bells = memoryview(b"".join(encode(Doorbell(number, late, [0], [0], [1])) for number in range(1, 100_000)))
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            sock.setblocking(False)
            while pair.receiver.connections and bells:
                try:
                    bells = bells[sock.send(bells[:65536]) :]
                except BlockingIOError:
                    pass  # what it is told goes into the same kernel: both directions fill up
                except OSError:
                    break
                await asyncio.sleep(0.001)
            await until(lambda: not pair.receiver.connections)
            assert bells


async def test_peers_that_prove_nothing_are_closed_after_the_deadline_and_make_room():
    async with shm_pair(2, options=FAST) as pair:
        name = socket_name(pair.receiver.addresses[0].host)
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).connect(name)
            await until(lambda: pair.num("kv_connections_refused") >= 3)
            assert len(pair.receiver.connections) == FAST.max_connections
            assert sum(name.startswith("kv-receive") for name in transport_threads()) == FAST.max_connections
            await until(lambda: pair.num("kv_connections_refused") == 6)
            ticket, arrivals = pair.open([0, 1])
            await pair.push(ticket, [0, 1], [0, 1])
            await arrivals.until(lambda a: a.verified == {0, 1})


async def test_an_unproven_peer_can_neither_ring_nor_leave_files_behind():
    async with shm_pair(2, options=FAST) as pair:
        pair.open([0, 1])
        num_files = await num_files_at_rest(pair)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(socket_name(pair.receiver.addresses[0].host))
            attach = Attach(1, 2, LAYOUT.block_bytes, pair.source.nonce)
            socket.send_fds(sock, [encode(attach) + frame(GOOD)], [pair.source.fd] * 100)
            assert await asyncio.to_thread(is_closed_soon, sock)
        await until(lambda: pair.num("kv_connections_refused") == 2)
        await until(lambda: not pair.receiver.connections)
        assert num_open_files() == num_files
        assert not any(pair.target.buffer)


async def test_a_file_that_is_no_pool_is_refused_with_the_reason(caplog):
    async with shm_pair(2, options=FAST) as pair:
        num_files = await num_files_at_rest(pair)
        with socket.socket() as other:
            said = await refusal(pair, encode(Attach(1, 2, LAYOUT.block_bytes, bytes(16))), [other.fileno()])
        assert "no memfd" in said
        await until(lambda: not pair.receiver.connections)
        assert f"refused: {said}" in caplog.text
        assert num_open_files() == num_files


@pytest.mark.parametrize(
    ("change", "num_files_sent", "reason"),
    [
        ({"nonce": bytes(16)}, 1, "label"),
        ({"num_blocks": 3}, 1, "were announced"),
        ({"num_blocks": 2**40}, 1, "were announced"),
        ({"num_blocks": 0}, 1, "cannot be read"),
        ({"num_blocks": -2}, 1, "cannot be read"),
        ({"block_bytes": 2 * LAYOUT.block_bytes, "num_blocks": 1}, 1, "ours have"),
        ({"version": 2}, 1, "wire version"),
        ({}, 0, "one file"),
        ({}, 2, "one file"),
        ({}, 50, "one file"),
    ],
)
async def test_an_attach_that_does_not_fit_is_refused_with_the_reason(change, num_files_sent, reason, caplog):
    async with shm_pair(2, options=FAST) as pair:
        num_files = await num_files_at_rest(pair)
        attach = Attach(1, pair.source.num_blocks, LAYOUT.block_bytes, pair.source.nonce)
        wrong = encode(msgspec.structs.replace(attach, **change))
        assert reason in await refusal(pair, wrong, [pair.source.fd] * num_files_sent)
        assert reason in caplog.text
        await until(lambda: not pair.receiver.connections)
        assert num_open_files() == num_files


async def test_a_doorbell_before_the_pool_is_shown_is_refused():
    async with shm_pair(2, options=FAST) as pair:
        assert "attach" in await refusal(pair, frame(GOOD), [pair.source.fd])


async def test_files_that_come_with_later_messages_are_not_kept():
    async with shm_pair(2, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            num_files = num_open_files()
            bell = encode(Doorbell(1, ticket.ref, [0], [0], pair.source.digests([0])))
            socket.send_fds(sock, [bell], [pair.source.fd] * 20)
            await arrivals.until(lambda a: a.verified == {0})
            assert num_open_files() == num_files


async def num_files_at_rest(pair) -> int:
    """When the receiver has served a first peer, and so has opened all that it needs itself."""
    assert await refusal(pair, b"nonsense", [])
    await until(lambda: not pair.receiver.connections)
    return num_open_files()


async def refusal(pair, attach: bytes, fds: list[int]) -> str:
    """What the receiver says to a peer that proves itself and then sends this; it must hang up."""
    with await asyncio.to_thread(connect_shm_writer, pair.receiver, None) as sock:
        socket.send_fds(sock, [attach], fds)
        said = await asyncio.to_thread(read_all, sock)
    return str(msgspec.msgpack.decode(said[HEADER.size :])["reason"])


def read_all(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            said += piece
    return said
