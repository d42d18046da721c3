"""KV over tcp under TLS: the same blocks, and nobody writes or listens who should not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from tls_authority import DAY, Authority, unchecked
from transport_parts import LAYOUT, OPTIONS, SECRET, identity
from transport_paths import tcp_pair
from waiting import until

from kv_transport.stripes import LEAST_PART_BYTES
from kv_transport.tcp import DATA_KIND
from kv_transport.tcp_frames import encode_frame_start
from pd_core.errors import DeadlineExceeded, TransferError
from pd_core.ticket import TransportAddress
from pd_rpc import tls_session
from pd_rpc.auth import Side
from pd_rpc.blocking import authenticate_blocking_as_client, authenticate_blocking_as_server
from pd_rpc.tls import Tls, load_tls
from pd_rpc.tls_socket import TlsSocket

PART = LEAST_PART_BYTES // LAYOUT.block_bytes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    loaded = load_tls(authority.issue())
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return unchecked(Authority(tmp_path_factory.mktemp("strange"), "strange").issue())


async def push_all(pair, number):
    places = list(range(number))
    ticket, arrivals = pair.open(places)
    await pair.push(ticket, places, places[::-1])
    await arrivals.until(lambda a: len(a.verified) == number)
    assert pair.received(ticket) == pair.sent(places[::-1])
    await pair.receiver.close_ticket(ticket.ref)


@pytest.mark.parametrize("connections", [1, 4])
async def test_blocks_arrive_as_they_were_over_any_number_of_connections(tls, connections):
    async with tcp_pair(4 * PART, connections=connections, receiver_tls=tls, sender_tls=tls) as pair:
        for _ in range(3):
            await push_all(pair, 4 * PART)
            await push_all(pair, 1)
        assert len(pair.receiver.connections) == connections
        assert pair.num("kv_blocks_corrupt") == 0


async def test_duplicates_and_stale_frames_are_read_past(tls):
    async with tcp_pair(8, receiver_tls=tls, sender_tls=tls) as pair:
        stale, _ = pair.open([0, 1, 2])
        await pair.receiver.close_ticket(stale.ref)
        await pair.push(stale, [0, 1, 2], [3, 4, 5])
        ticket, arrivals = pair.open([0, 1, 2])
        for _ in range(2):
            await pair.push(ticket, [0, 1, 2], [3, 4, 5])
        await arrivals.until(lambda a: len(a.verified) == 3)
        await until(lambda: pair.num("kv_blocks_duplicate") == 3)
        assert pair.num("kv_frames_stale") == 1
        assert len(pair.receiver.connections) == 1


async def refusal_of(pair):
    ticket, arrivals = pair.open([0])
    began_s = time.monotonic()
    with pytest.raises(TransferError) as caught:
        await pair.push(ticket, [0], [1])
    assert time.monotonic() - began_s < OPTIONS.handshake_s
    assert caught.value.message.startswith(f"127.0.0.1:{ticket.addresses[0].port}: ")
    await until(lambda: pair.num("kv_connections_refused") >= 1)
    assert arrivals.events == []
    return caught.value.message


async def test_a_sender_and_a_receiver_of_which_one_has_no_tls_tell_each_other(tls, caplog):
    async with tcp_pair(2, receiver_tls=tls) as pair:
        assert "speaks TLS" in await refusal_of(pair)
        await until(lambda: "it does not speak TLS" in caplog.text)
    async with tcp_pair(2, sender_tls=tls) as pair:
        assert "does not speak TLS" in await refusal_of(pair)


async def test_a_certificate_of_another_authority_is_refused_by_name(tls, strange, caplog):
    async with tcp_pair(2, receiver_tls=tls, sender_tls=strange) as pair:
        assert "its certificate is not accepted" in await refusal_of(pair)
        await until(lambda: "it does not accept our certificate: unknown ca" in caplog.text)


async def test_a_sender_that_only_the_receiver_does_not_accept_hears_why(tls, authority, tmp_path):
    other = Authority(tmp_path, "other")
    half = unchecked(msgspec.structs.replace(other.issue(), authority=str(authority.path)))
    async with tcp_pair(2, receiver_tls=tls, sender_tls=half) as pair:
        assert "it does not accept our certificate: unknown ca" in await refusal_of(pair)


async def test_an_expired_certificate_is_refused_by_name_on_either_side(tls, authority):
    old = unchecked(authority.issue(left=-DAY))
    async with tcp_pair(2, receiver_tls=tls, sender_tls=old) as pair:
        assert "certificate expired" in await refusal_of(pair)
    async with tcp_pair(2, receiver_tls=old, sender_tls=tls) as pair:
        assert "certificate has expired" in await refusal_of(pair)


async def test_the_clusters_secret_is_asked_for_under_tls_too(tls):
    secret = b"another secret of 32 bytes ....."
    async with tcp_pair(2, receiver_tls=tls, sender_tls=tls, sender_secret=secret) as pair:
        assert "secret" in await refusal_of(pair)


async def test_a_mute_listener_is_an_error_within_the_handshake_deadline_and_delays_nobody(tls):
    async with tcp_pair(2, receiver_tls=tls, sender_tls=tls) as pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = TransportAddress("tcp", *listener.getsockname())
            mute = msgspec.structs.replace(pair.ticket([0]), addresses=[address])
            began_s = time.monotonic()
            stuck = asyncio.ensure_future(pair.push(mute, [0], [1]))
            await push_all(pair, 2)
            assert not stuck.done()
            with pytest.raises(TransferError, match=f"127.0.0.1:{address.port}: no TLS handshake within"):
                await stuck
            assert time.monotonic() - began_s < 2.0


async def test_mute_and_senseless_writers_are_dropped_in_time_and_delay_nobody(tls):
    options = msgspec.structs.replace(OPTIONS, handshake_s=0.4)
    async with tcp_pair(2, options=options, receiver_tls=tls, sender_tls=tls) as pair:
        address = pair.receiver.addresses[0]
        with contextlib.ExitStack() as stack:
            for hello in (b"", b"\x16\x03\x01", b"\x16" * 500, b"KVRP", b"GET / HTTP/1.1\r\n\r\n"):
                stranger = stack.enter_context(socket.create_connection((address.host, address.port)))
                stranger.send(hello)
            await push_all(pair, 2)
            await until(lambda: pair.num("kv_connections_refused") == 5, within_s=2.0)
            assert len(pair.receiver.connections) == 1


async def test_a_connection_that_has_carried_enough_is_replaced(tls, monkeypatch):
    monkeypatch.setattr(tls_session, "MAX_BYTES", 6 * LAYOUT.block_bytes)
    async with tcp_pair(4, receiver_tls=tls, sender_tls=tls) as pair:
        await push_all(pair, 4)
        (first,) = pair.receiver.connections
        await push_all(pair, 4)
        await until(lambda: pair.receiver.connections == [])
        await push_all(pair, 4)
        assert first not in pair.receiver.connections


class Tap:
    """Carries one connection to `address`, bytes of the writer through `alter`."""

    def __init__(self, alter: Callable[[bytes], bytes]) -> None:
        self._alter = alter

    @contextlib.asynccontextmanager
    async def before(self, address: TransportAddress) -> AsyncIterator[TransportAddress]:
        async def pump(reader, writer, alter):
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(alter(data))
                    await writer.drain()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        carrying: list[asyncio.Future] = []

        async def carry(reader, writer):
            carrying.append(asyncio.current_task())
            there = await asyncio.open_connection(address.host, address.port)
            await asyncio.gather(pump(reader, there[1], self._alter), pump(there[0], writer, bytes))

        async with await asyncio.start_server(carry, "127.0.0.1", 0) as server:
            yield TransportAddress("tcp", *server.sockets[0].getsockname())
        await asyncio.wait(carrying)


async def test_a_bit_that_flips_on_the_way_ends_the_connection_and_no_block_of_it_counts(tls):
    """Not the digests find it here: they are made to agree with whatever comes."""
    generator = random.Random(5)
    seen = {"num_bytes": 0}

    def flip(data: bytes) -> bytes:
        begin, seen["num_bytes"] = seen["num_bytes"], seen["num_bytes"] + len(data)
        place = 20_000 - begin  # in the middle of the blocks
        if not 0 <= place < len(data):
            return data
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        return bytes(changed)

    async with tcp_pair(8, receiver_tls=tls, sender_tls=tls) as pair:
        ticket, arrivals = pair.open(list(range(8)))
        async with Tap(flip).before(ticket.addresses[0]) as address:
            altered = msgspec.structs.replace(ticket, addresses=[address])
            with contextlib.suppress(TransferError):  # it may have sent everything by then
                await pair.push(altered, list(range(8)), list(range(8)))
            await arrivals.until(lambda a: a.num_stopped == 1)
        assert pair.num("kv_blocks_corrupt") == 0
        assert len(arrivals.verified) < 8
        for index in arrivals.verified:
            assert pair.target.block(index) == pair.source.block(index)
        await pair.receiver.close_ticket(ticket.ref)
        await push_all(pair, 8)


async def test_no_block_can_be_read_on_the_network(tls):
    seen = bytearray()

    def listen(data: bytes) -> bytes:
        seen.extend(data)
        return data

    async with tcp_pair(4, receiver_tls=tls, sender_tls=tls) as pair:
        ticket, arrivals = pair.open([0, 1])
        async with Tap(listen).before(ticket.addresses[0]) as address:
            await pair.push(msgspec.structs.replace(ticket, addresses=[address]), [0, 1], [2, 3])
            await arrivals.until(lambda a: len(a.verified) == 2)
            assert len(seen) > 2 * LAYOUT.block_bytes
            assert bytes(pair.source.block(2))[:16] not in seen
            assert b"KVR" not in seen
            await pair.sender.close()


async def test_when_the_cancellation_returns_no_thread_is_inside_our_blocks(tls):
    def accept(listener):
        sock, _ = listener.accept()
        stream = TlsSocket(sock, tls.session(Side.SERVER))
        stream.shake_hands(5.0)
        authenticate_blocking_as_server(stream, SECRET, identity("decode"), kind=DATA_KIND, deadline_s=5)
        return sock

    small = msgspec.structs.replace(OPTIONS, socket_buffer_bytes=64 * 1024)
    async with tcp_pair(200, options=small, sender_tls=tls) as pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepting = asyncio.ensure_future(asyncio.to_thread(accept, listener))
            blocks = list(range(200))
            views: list[memoryview] = []
            block_of = pair.source.block
            pair.source.block = lambda block_id: views.append(block_of(block_id)) or views[-1]
            address = TransportAddress("tcp", *listener.getsockname())
            ticket = msgspec.structs.replace(pair.ticket(blocks), addresses=[address])
            with pytest.raises(DeadlineExceeded):
                await pair.sender.push(ticket, blocks, blocks, [0] * 200, 0.5)
            for view in views:
                view.release()  # raises while a thread reads it
            (await accepting).close()


async def test_a_writer_that_stops_in_mid_frame_is_cut_off_and_can_never_write_again(tls):
    async with tcp_pair(4, receiver_tls=tls) as pair:
        ticket, arrivals = pair.open([0, 1])
        address = pair.receiver.addresses[0]

        def connect():
            sock = socket.create_connection((address.host, address.port), timeout=5)
            stream = TlsSocket(sock, tls.session(Side.CLIENT))
            stream.shake_hands(5.0)
            authenticate_blocking_as_client(stream, SECRET, identity("prefill"), kind=DATA_KIND, deadline_s=5)
            return sock, stream

        sock, stream = await asyncio.to_thread(connect)
        digests = pair.source.digests([2, 3])
        frame = encode_frame_start(ticket.ref, [0, 1], digests, LAYOUT.block_bytes) + b"".join(pair.sent([2, 3]))
        await asyncio.to_thread(stream.sendall, frame[: len(frame) - LAYOUT.block_bytes // 2])
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        began_s = time.monotonic()
        await pair.receiver.close_ticket(ticket.ref)
        assert time.monotonic() - began_s < OPTIONS.grace_s + 0.5
        pair.target.buffer[:] = bytes(len(pair.target.buffer))
        with contextlib.suppress(OSError):
            await asyncio.to_thread(stream.sendall, frame[len(frame) - LAYOUT.block_bytes // 2 :])
        await until(lambda: not pair.receiver.connections)
        assert not any(pair.target.buffer)
        assert arrivals.verified == set()
        sock.close()
