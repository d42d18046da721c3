"""Pushes over several connections at once: what belongs together ends together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from transport_parts import LAYOUT, OPTIONS, SECRET, SharedMemory, identity, transport_threads
from transport_paths import tcp_pair
from waiting import until

from kv_transport import channel
from kv_transport.paths import make_sender
from kv_transport.sockets import num_unacknowledged
from kv_transport.stripes import COUNTS, LEAST_PART_BYTES, MEASURED_BYTES, NUM_SAMPLES
from kv_transport.tcp import DATA_KIND
from pd_core.config import TransferConfig
from pd_core.errors import DeadlineExceeded, TransferError
from pd_core.ticket import TransportAddress
from pd_rpc.blocking import authenticate_blocking_as_server

PART = LEAST_PART_BYTES // LAYOUT.block_bytes
"""Blocks of the smallest part."""
SMALL_BUFFERS = msgspec.structs.replace(OPTIONS, socket_buffer_bytes=64 * 1024)


async def push_all(pair, number):
    """Blocks of the source, in an order of their own, into a fresh ticket; they have arrived right."""
    places = list(range(number))
    ticket, arrivals = pair.open(places)
    blocks = places[::-1]
    await pair.push(ticket, places, blocks)
    await arrivals.until(lambda a: len(a.verified) == number)
    assert pair.received(ticket) == pair.sent(blocks)
    await pair.receiver.close_ticket(ticket.ref)


async def test_a_large_push_is_divided_among_its_connections():
    async with tcp_pair(4 * PART, connections=4) as pair:
        await push_all(pair, 4 * PART)
        assert len(pair.receiver.connections) == 4
        assert pair.num("kv_blocks_duplicate") == 0


@pytest.mark.parametrize(("num_blocks", "expected"), [(1, 1), (2 * PART - 1, 1), (2 * PART, 2), (3 * PART, 3)])
async def test_no_part_is_smaller_than_pays(num_blocks, expected):
    async with tcp_pair(3 * PART, connections=4) as pair:
        await push_all(pair, num_blocks)
        assert len(pair.receiver.connections) == expected


@pytest.mark.parametrize(("setting", "settled"), [(3, 3), (1, 1), (None, None)])
async def test_the_config_fixes_how_many_or_leaves_it_to_measurement(setting, settled):
    with contextlib.closing(SharedMemory(1, LAYOUT.block_bytes)) as memory:
        sender = make_sender(memory, identity("prefill"), SECRET, TransferConfig(path="tcp", tcp_connections=setting))
        assert sender._senders["tcp"]._make_plan().settled == settled
        await sender.close()


async def test_pushes_that_share_their_connections_all_arrive():
    async with tcp_pair(4 * PART, connections=4) as pair:
        places = list(range(4 * PART))
        ticket, arrivals = pair.open(places)
        await asyncio.gather(
            *(pair.push(ticket, places[first::4], places[first::4]) for first in range(4)),
            pair.push(ticket, places, places),
        )
        await arrivals.until(lambda a: len(a.verified) == len(places))
        assert pair.received(ticket) == pair.sent(places)
        assert arrivals.corrupt == []


async def test_how_many_are_best_is_found_out_by_the_pushes_themselves():
    num_blocks = MEASURED_BYTES // LAYOUT.block_bytes
    async with tcp_pair(num_blocks) as pair:
        for _ in range(len(COUNTS) * (NUM_SAMPLES + 1)):
            await push_all(pair, num_blocks)
        (group,) = pair.sender._groups.values()
        assert group._plan.settled in COUNTS
        assert len(pair.receiver.connections) == max(COUNTS)


async def test_what_only_our_kernel_has_taken_is_not_counted_as_delivered(monkeypatch):
    """Each channel asks before and after it writes; 1000 bytes more are waiting each time."""
    waiting = itertools.count(0, 1000)
    monkeypatch.setattr(channel, "num_unacknowledged", lambda sock: next(waiting))
    async with tcp_pair(4 * PART, connections=1) as pair:
        await push_all(pair, 4 * PART)
        (group,) = pair.sender._groups.values()
        learned = []
        group._plan.sent = lambda *sent: learned.append(sent)
        await push_all(pair, 4 * PART)
    [(count, num_bytes, num_delivered_bytes, _, _)] = learned
    assert (count, num_bytes, num_delivered_bytes) == (1, 4 * LEAST_PART_BYTES, 4 * LEAST_PART_BYTES - 1000)


def test_bytes_that_the_other_side_has_not_taken_are_counted_as_waiting():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        with socket.create_connection(listener.getsockname()) as sender, listener.accept()[0] as receiver:
            assert num_unacknowledged(sender) == 0
            sender.setblocking(False)
            num_sent = sender.send(bytes(1 << 20))
            assert 0 < num_unacknowledged(sender) <= num_sent
            while num_sent:
                num_sent -= len(receiver.recv(1 << 20))
            ends_s = time.monotonic() + 5.0
            while num_unacknowledged(sender):
                assert time.monotonic() < ends_s


async def test_a_connection_that_broke_is_made_anew_and_the_others_stay():
    async with tcp_pair(4 * PART, connections=4) as pair:
        await push_all(pair, 4 * PART)
        broken, *others = pair.receiver.connections
        broken.cut("the test breaks it")
        await until(lambda: len(pair.receiver.connections) == 3)
        await push_all(pair, 4 * PART)
        assert len(pair.receiver.connections) == 4
        assert set(others) < set(pair.receiver.connections)


async def test_idle_connections_end_and_come_again():
    options = msgspec.structs.replace(OPTIONS, sender_idle_s=0.05)
    async with tcp_pair(4 * PART, connections=4, options=options) as pair:
        for _ in range(2):
            await push_all(pair, 4 * PART)
            await until(lambda: not any(name.startswith(("kv-send", "kv-receive")) for name in transport_threads()))


async def test_connections_that_the_receiver_has_no_room_for_cost_the_push_nothing():
    options = msgspec.structs.replace(OPTIONS, max_connections=2)
    async with tcp_pair(4 * PART, connections=4, options=options) as pair:
        for _ in range(3):
            await push_all(pair, 4 * PART)
        assert 1 <= len(pair.receiver.connections) <= 2
        assert pair.num("kv_blocks_duplicate") == 0


async def test_a_mute_receiver_is_given_up_after_one_handshake_however_many_connections_there_were_to_be():
    async with tcp_pair(4 * PART, connections=4) as pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            places = list(range(4 * PART))
            address = TransportAddress("tcp", *listener.getsockname())
            mute = msgspec.structs.replace(pair.ticket(places), addresses=[address])
            began_s = time.monotonic()
            late = f"127.0.0.1:{address.port}: no handshake within {OPTIONS.handshake_s:g} s"
            with pytest.raises(TransferError, match=late):
                await pair.push(mute, places, places, deadline_s=30.0)
            assert time.monotonic() - began_s < OPTIONS.handshake_s + 0.9


class OddReceiver:
    """Proves itself on every connection and then does with it what the test likes, by its number."""

    def __init__(self, pair, num_blocks: int, treat: Callable[[int, socket.socket], None]) -> None:
        self.views: list[memoryview] = []
        self.socks: list[socket.socket] = []
        self._pair = pair
        self._treat = treat
        self._blocks = list(range(num_blocks))
        block_of = pair.source.block
        pair.source.block = lambda block_id: self.views.append(block_of(block_id)) or self.views[-1]

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self.socks.append(sock)
            authenticate_blocking_as_server(sock, SECRET, identity("decode"), kind=DATA_KIND, deadline_s=5)
            self._treat(len(self.socks) - 1, sock)

    def push(self, address: TransportAddress, deadline_s: float = 60.0) -> asyncio.Future:
        ticket = msgspec.structs.replace(self._pair.ticket(self._blocks), addresses=[address])
        digests = [0] * len(self._blocks)
        return asyncio.ensure_future(self._pair.sender.push(ticket, self._blocks, self._blocks, digests, deadline_s))

    async def until_stuck(self, num_connections: int) -> None:
        """Every connection is there, and no thread has taken another block for a while."""
        num_views = -1
        while len(self.socks) < num_connections or len(self.views) != num_views:
            num_views = len(self.views)
            await asyncio.sleep(0.1)

    def release_all(self) -> None:
        """Raises BufferError while a system call reads one of our blocks."""
        for view in self.views:
            view.release()


@contextlib.asynccontextmanager
async def odd_receiver(
    treat: Callable[[int, socket.socket], None] = lambda number, sock: None,
) -> AsyncIterator[tuple[OddReceiver, TransportAddress]]:
    num_blocks = 16 * PART
    async with tcp_pair(num_blocks, connections=4, options=SMALL_BUFFERS) as pair:
        odd = OddReceiver(pair, num_blocks, treat)
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.ensure_future(asyncio.to_thread(odd.serve, listener))
        try:
            yield odd, TransportAddress("tcp", *listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            await serving
            for sock in odd.socks:
                sock.close()


async def test_when_the_cancellation_returns_no_thread_of_any_connection_is_inside_our_blocks():
    async with odd_receiver() as (odd, address):
        push = odd.push(address)
        await odd.until_stuck(4)
        with pytest.raises(BufferError):
            odd.release_all()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        odd.release_all()


async def test_the_deadline_of_a_push_holds_for_all_its_connections():
    async with odd_receiver() as (odd, address):
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await odd.push(address, deadline_s=0.5)
        assert time.monotonic() - began_s < 1.5
        odd.release_all()


async def test_one_part_that_fails_fails_the_push_at_once_and_nothing_reads_our_blocks_then():
    def treat(number: int, sock: socket.socket) -> None:
        if number == 2:
            sock.shutdown(socket.SHUT_RDWR)

    async with odd_receiver(treat) as (odd, address):
        began_s = time.monotonic()
        with pytest.raises(TransferError, match=f"127.0.0.1:{address.port}: the KV connection broke"):
            await odd.push(address)
        assert time.monotonic() - began_s < 5.0  # the other three would be stuck for a minute
        odd.release_all()


async def test_cancelling_again_and_again_does_not_let_it_return_early():
    async with odd_receiver() as (odd, address):
        push = odd.push(address)
        await odd.until_stuck(4)
        while not push.done():
            push.cancel()
            await asyncio.sleep(0)
        odd.release_all()
