"""Peers that say or send anything but what they should on the path "ucx". None of it may touch memory that was not
given for it, stop the receiver, or stay for long."""

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
from transport_parts import LAYOUT, UCX_OPTIONS, transport_threads
from transport_paths import ucx_pair
from ucx_writer import NONCE, UcxWriter
from waiting import until

from kv_transport.doorbell_frames import encode
from kv_transport.interface import WriterStopped
from kv_transport.ucx_frames import Attach, Doorbell
from pd_rpc.frames import WIRE_VERSION

FAST = msgspec.structs.replace(UCX_OPTIONS, handshake_s=1.0, frame_silence_s=0.3, max_connections=3)
HEADER = struct.Struct(">4sHII")


def frame(body: bytes, *, magic=b"KVRP", version=WIRE_VERSION, num_bytes=None, crc=None) -> bytes:
    length = len(body) if num_bytes is None else num_bytes
    return HEADER.pack(magic, version, length, zlib.crc32(body) if crc is None else crc) + body


def bell(first_tag: int, indices=(0,), digests=(1,), **changes) -> bytes:
    body = {"type": "doorbell", "number": 1, "ref": msgspec.to_builtins(FIRST_REF), "first_tag": first_tag}
    return msgspec.msgpack.encode(body | {"indices": list(indices), "digests": list(digests)} | changes)


WRONG_BYTES = {
    "garbage": lambda tag: random.Random(1).randbytes(4096),
    "http": lambda tag: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "magic of tcp frames": lambda tag: frame(bell(tag), magic=b"KVRB"),
    "later version": lambda tag: frame(bell(tag), version=WIRE_VERSION + 1),
    "body of 4 GiB": lambda tag: frame(b"", num_bytes=2**32 - 1),
    "body just too long": lambda tag: frame(b"", num_bytes=64 * 1024 + 1),
    "damaged body": lambda tag: frame(bell(tag), crc=zlib.crc32(bell(tag)) ^ 1),
    "no body": lambda tag: frame(b""),
    "array that claims 4 billion": lambda tag: frame(b"\xdd\xff\xff\xff\xff"),
    "more indices than allowed": lambda tag: frame(bell(tag, range(1025), range(1025))),
    "more blocks than a frame may have": lambda tag: frame(bell(tag, range(4), range(4))),
    "nested 60000 deep": lambda tag: frame(b"\x81\xa1x" + b"\x91" * 60_000),
    "type of nothing": lambda tag: frame(bell(tag, type="bell")),
    "a word of the receiver": lambda tag: frame(msgspec.msgpack.encode({"type": "taken", "number": 1})),
    "attached twice": lambda tag: encode(Attach(1, LAYOUT.block_bytes, b"x", NONCE)),
    "huge index": lambda tag: frame(bell(tag, [2**64 - 1])),
    "negative index": lambda tag: frame(bell(tag, [-1])),
    "index beyond the range": lambda tag: frame(bell(tag, [2])),
    "place named twice": lambda tag: frame(bell(tag, [0, 0], [1, 1])),
    "fewer digests than blocks": lambda tag: frame(bell(tag, [0, 1], [1])),
    "no digests under a ticket that needs them": lambda tag: frame(bell(tag, [0, 1], [])),
    "doorbell without blocks": lambda tag: frame(bell(tag, [], [])),
    "number out of turn": lambda tag: frame(bell(tag, number=2)),
    "tag that was there before": lambda tag: frame(bell(tag - 1)),
    "tag that leaves some out": lambda tag: frame(bell(tag + 1)),
    "tag of 64 bits": lambda tag: frame(bell(2**64 - 1)),
    "negative tag": lambda tag: frame(bell(-1)),
    "no ticket": lambda tag: frame(bell(tag, ref=None)),
    "ticket of another boot": lambda tag: frame(bell(tag, ref=msgspec.to_builtins(FIRST_REF) | {"incarnation": "x"})),
}


@pytest.mark.parametrize("kind", WRONG_BYTES)
async def test_bytes_that_the_wire_format_does_not_allow_close_the_connection_and_touch_nothing(kind, caplog):
    async with ucx_pair(2, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        await asyncio.to_thread(send, writer.sock, WRONG_BYTES[kind](writer.next_tag) + bytes(100))
        assert await asyncio.to_thread(is_closed_soon, writer.sock)
        await until(lambda: not pair.receiver.connections)
        await asyncio.to_thread(writer.close)
        assert not any(pair.target.buffer)
        assert arrivals.verified == set()
        assert arrivals.corrupt == []
        assert "KV connection from 127.0.0.1:" in caplog.text
        assert " closed: " in caplog.text
        assert "failed" not in caplog.text
        await pair.push(ticket, [0, 1], [0, 1])  # everybody else is served
        await arrivals.until(lambda a: a.verified == {0, 1})


async def test_a_block_under_a_tag_that_nobody_gave_touches_nothing_and_the_frame_is_given_up():
    async with ucx_pair(3, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        first_tag = writer.next_tag
        await asyncio.to_thread(writer.ring, ticket.ref, pair.source.digests([0, 1]), 2)
        for tag in (first_tag - 1, first_tag + 2, 0, 2**64 - 1):
            writer.send(bytes(pair.source.block(0)), tag)
        await asyncio.to_thread(writer.let_ucx_work, 0.1)
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert "silent for 0.3 s" in arrivals.events[-1].reason
        await until(lambda: not pair.receiver.connections)
        await asyncio.to_thread(writer.close)
        assert not any(pair.target.buffer)
        assert arrivals.verified == set()


async def test_a_block_longer_than_its_slot_fails_the_frame_and_reaches_no_other_slot():
    async with ucx_pair(4, options=FAST) as pair:
        ticket, arrivals = pair.open([1, 2])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        first_tag = writer.next_tag
        await asyncio.to_thread(writer.ring, ticket.ref, pair.source.digests([0, 1]), 2)
        writer.send(b"\xff" * (2 * LAYOUT.block_bytes), first_tag)
        await asyncio.to_thread(writer.let_ucx_work, 0.2)
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert "truncated" in arrivals.events[-1].reason.lower()
        await until(lambda: not pair.receiver.connections)
        await asyncio.to_thread(writer.close)
        assert not any(pair.target.block(0))
        assert not any(pair.target.block(2))
        assert not any(pair.target.block(3))
        assert arrivals.verified == set()


@pytest.mark.parametrize("num_bytes", [0, 1, LAYOUT.block_bytes // 2, LAYOUT.block_bytes - 16])
async def test_a_block_shorter_than_its_slot_is_found_without_a_digest(num_bytes):
    async with ucx_pair(4, options=FAST) as pair:
        ticket, arrivals = pair.open([1, 2], with_digests=False)
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        first_tag = writer.next_tag
        await asyncio.to_thread(writer.ring, ticket.ref, [], 2)
        writer.send(bytes(num_bytes), first_tag)
        await asyncio.to_thread(writer.let_ucx_work, 0.2)
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert "came short" in arrivals.events[-1].reason
        await asyncio.to_thread(writer.close)
        assert arrivals.verified == set()


async def test_a_block_shorter_than_its_slot_is_corrupt_where_there_is_a_digest():
    async with ucx_pair(4, options=FAST) as pair:
        ticket, arrivals = pair.open([1])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        first_tag = writer.next_tag
        await asyncio.to_thread(writer.ring, ticket.ref, pair.source.digests([0]), 1)
        writer.send(bytes(pair.source.block(0)[:-1]), first_tag)
        await asyncio.to_thread(writer.let_ucx_work)
        await arrivals.until(lambda a: a.corrupt == [0])
        await asyncio.to_thread(writer.close)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "wire version of ucx"),
        ({"block_bytes": 2 * LAYOUT.block_bytes}, "ours have"),
        ({"address": random.Random(2).randbytes(64)}, "UCX address is of version"),
        ({"address": b""}, "cannot be read"),
        ({"address": bytes(40_000)}, "cannot be read"),
        ({"nonce": bytes(15)}, "cannot be read"),
        ({"nonce": bytes(17)}, "cannot be read"),
    ],
)
async def test_an_attach_that_does_not_fit_is_refused_with_the_reason(change, reason, caplog):
    async with ucx_pair(2, options=FAST) as pair:
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver))
        attach = Attach(1, LAYOUT.block_bytes, writer.side.address, NONCE)
        writer.sock.sendall(encode(msgspec.structs.replace(attach, **change)))
        said = await asyncio.to_thread(read_all, writer.sock)
        assert reason in str(msgspec.msgpack.decode(said[HEADER.size :])["reason"])
        await until(lambda: not pair.receiver.connections)
        assert reason in caplog.text
        assert pair.num("kv_connections_refused") == 1
        await asyncio.to_thread(writer.close)


@pytest.mark.parametrize("seed", range(6))
async def test_an_address_that_begins_as_ours_and_goes_on_as_nonsense_is_refused(seed):
    async with ucx_pair(2, options=FAST) as pair:
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver))
        ours, rough = writer.side.address, random.Random(seed)
        wrong = [ours[:1] + rough.randbytes(60), ours[:11] + rough.randbytes(40), ours[: rough.randrange(1, len(ours))]]
        attach = Attach(1, LAYOUT.block_bytes, wrong[seed % 3], NONCE)
        writer.sock.sendall(encode(attach))
        assert await asyncio.to_thread(is_closed_soon, writer.sock)
        await asyncio.to_thread(writer.close)
        ticket, arrivals = pair.open([0])
        await pair.push(ticket, [0], [0])
        await arrivals.until(lambda a: a.verified == {0})


@pytest.mark.parametrize("greeting", [None, b"sixteen others .", b"short"])
async def test_a_peer_whose_ucx_does_not_bring_the_greeting_is_refused(greeting):
    async with ucx_pair(2, options=FAST) as pair:
        pair.open([0, 1])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver))
        welcome = await asyncio.to_thread(writer.ask_for_welcome)
        writer.connect(welcome)
        if greeting is not None:
            writer.send(greeting, welcome.first_tag)
            await asyncio.to_thread(writer.let_ucx_work)
        assert await asyncio.to_thread(is_closed_soon, writer.sock)
        await until(lambda: pair.num("kv_connections_refused") == 1)
        await asyncio.to_thread(writer.close)


@pytest.mark.parametrize("num_bytes", [1, 13, 14, 40])
async def test_a_doorbell_that_stops_in_the_middle_or_drips_is_given_up_after_the_silence_limit(num_bytes):
    async with ucx_pair(2, options=FAST) as pair:
        pair.open([0, 1])
        for is_dripping in (False, True):
            writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
            rung = encode(Doorbell(1, FIRST_REF, [0, 1], [1, 1], writer.next_tag))
            started_s = time.monotonic()
            if is_dripping:
                with contextlib.suppress(OSError):
                    for byte in rung:
                        writer.sock.send(bytes([byte]))
                        await asyncio.sleep(0.03)
            else:
                writer.sock.sendall(rung[:num_bytes])
            assert await asyncio.to_thread(is_closed_soon, writer.sock)
            assert time.monotonic() - started_s < 6.0
            await asyncio.to_thread(writer.close)


async def test_fields_that_a_later_version_added_to_a_doorbell_are_ignored():
    async with ucx_pair(2, options=FAST) as pair:
        _, arrivals = pair.open([0, 1])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        tag = writer.next_tag
        writer.sock.sendall(frame(bell(tag, digests=pair.source.digests([0]), later=[{"a": 1}])))
        await asyncio.to_thread(writer.answer)
        writer.send(bytes(pair.source.block(0)), tag)
        await asyncio.to_thread(writer.let_ucx_work)
        await arrivals.until(lambda a: a.verified == {0})
        await asyncio.to_thread(writer.close)


async def test_peers_that_prove_nothing_are_closed_after_the_deadline_and_make_room():
    async with ucx_pair(2, options=FAST) as pair:
        address = pair.receiver.addresses[0]
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(socket.create_connection((address.host, address.port)))
            await until(lambda: pair.num("kv_connections_refused") >= 3)
            assert sum(name.startswith("kv-receive") for name in transport_threads()) <= FAST.max_connections
            await until(lambda: pair.num("kv_connections_refused") == 6)
            ticket, arrivals = pair.open([0, 1])
            await pair.push(ticket, [0, 1], [0, 1])
            await arrivals.until(lambda a: a.verified == {0, 1})


async def test_a_writer_that_goes_away_is_told_of_with_its_reason():
    async with ucx_pair(3, options=FAST) as pair:
        ticket, arrivals = pair.open([0, 1])
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        await asyncio.to_thread(writer.ring, ticket.ref, pair.source.digests([0, 1]), 2)
        await asyncio.to_thread(writer.close)
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert isinstance(arrivals.events[-1], WriterStopped)
        # Whichever end is seen first: that of the control connection, or that of UCX's own.
        assert any(said in arrivals.events[-1].reason for said in ("the writer has gone away", "UCX has lost the peer"))


def read_all(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            said += piece
    return said
