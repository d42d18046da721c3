"""What only sockets can do wrong: hosts, deadlines, reuse, stopped processes."""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from transport_parts import (
    LAYOUT,
    OPTIONS,
    SECRET,
    Arrivals,
    ByteMemory,
    identity,
    num_open_files,
    transport_threads,
)
from transport_paths import tcp_pair
from waiting import until

from kv_transport.tcp import DATA_KIND
from kv_transport.tcp_receiver import TcpBlockReceiver
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.errors import ConfigError, DeadlineExceeded, InvalidTransition, TransferError, Unreachable
from pd_core.ticket import TransportAddress
from pd_rpc.blocking import authenticate_blocking_as_server

WRITER = Path(__file__).with_name("transport_writer.py")


@asynccontextmanager
async def mute_listener():
    """Accepts and never says a word."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield TransportAddress("tcp", *listener.getsockname())


async def test_ipv6_works_from_end_to_end():
    async with tcp_pair(4, host="::1") as pair:
        ticket, arrivals = pair.open([0, 1])
        assert ticket.addresses[0].host == "::1"
        await pair.push(ticket, [0, 1], [2, 3])
        await arrivals.until(lambda a: len(a.verified) == 2)
        await pair.receiver.close()
        with pytest.raises(TransferError, match=rf"^\[::1\]:{ticket.addresses[0].port}: "):
            await pair.push(ticket, [0], [1])


async def test_a_mute_listener_is_an_error_within_the_handshake_deadline_naming_host_and_port():
    async with tcp_pair(2) as pair, mute_listener() as address:
        ticket = msgspec.structs.replace(pair.ticket([0]), addresses=[address])
        started_s = time.monotonic()
        with pytest.raises(TransferError, match=f"127.0.0.1:{address.port}"):
            await pair.push(ticket, [0], [1])
        assert 0.9 < time.monotonic() - started_s < 2.0


async def test_a_mute_listener_delays_nobody_else():
    async with tcp_pair(2) as pair, mute_listener() as address:
        mute = msgspec.structs.replace(pair.ticket([0]), addresses=[address])
        stuck = asyncio.ensure_future(pair.push(mute, [0], [1]))
        ticket, arrivals = pair.open([0])
        await pair.push(ticket, [0], [1])
        await arrivals.until(lambda a: a.verified == {0})
        assert not stuck.done()
        with pytest.raises(TransferError):
            await stuck


async def test_all_that_wait_for_an_unreachable_destination_hear_of_it_together():
    async with tcp_pair(2) as pair, mute_listener() as address:
        mute = msgspec.structs.replace(pair.ticket([0]), addresses=[address])
        started_s = time.monotonic()
        results = await asyncio.gather(*(pair.push(mute, [0], [1]) for _ in range(4)), return_exceptions=True)
        assert all(type(result) is Unreachable for result in results)
        assert time.monotonic() - started_s < 1.5


async def test_the_deadline_of_a_push_counts_while_it_waits_for_a_connection():
    async with tcp_pair(2) as pair, mute_listener() as address:
        ticket = msgspec.structs.replace(pair.ticket([0]), addresses=[address])
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{address.port}"):
            await pair.push(ticket, [0], [1], deadline_s=0.1)
        started_s = time.monotonic()
        await pair.sender.close()  # interrupts the handshake
        assert time.monotonic() - started_s < 0.5


async def test_the_deadline_of_a_push_counts_while_the_receiver_takes_nothing():
    async with tcp_pair(1200) as pair, stuck_receiver() as address:
        blocks = list(range(1200))
        ticket = msgspec.structs.replace(pair.ticket(blocks), addresses=[address])
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await pair.push(ticket, blocks, blocks, deadline_s=0.5)
        assert time.monotonic() - started_s < 1.0


async def test_when_the_cancellation_returns_no_thread_is_inside_our_blocks():
    async with tcp_pair(1200) as pair, stuck_receiver() as address:
        views: list[memoryview] = []
        block_of, blocks = pair.source.block, list(range(1200))
        pair.source.block = lambda block_id: views.append(block_of(block_id)) or views[-1]
        ticket = msgspec.structs.replace(pair.ticket(blocks), addresses=[address])
        push = asyncio.ensure_future(pair.sender.push(ticket, blocks, blocks, [0] * 1200, 60.0))
        while True:  # until the thread has been stuck in the same frame for a while
            num_views = len(views)
            await asyncio.sleep(0.1)
            if views and len(views) == num_views:
                break
        with pytest.raises(BufferError):
            views[-1].release()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        for view in views:
            view.release()  # raises while a system call reads it


async def test_the_next_address_is_taken_when_the_first_cannot_be_reached():
    async with tcp_pair(4) as pair:
        ticket, arrivals = pair.open([0])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            nobody = TransportAddress("tcp", *listener.getsockname())
        both = msgspec.structs.replace(ticket, addresses=[nobody, *ticket.addresses])
        await pair.push(both, [0], [1])
        await arrivals.until(lambda a: a.verified == {0})


async def test_an_error_about_several_addresses_names_them_all():
    async with tcp_pair(2) as pair:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            ports = [one.getsockname()[1], two.getsockname()[1]]
        addresses = [TransportAddress("tcp", "127.0.0.1", port) for port in ports]
        ticket = msgspec.structs.replace(pair.ticket([0]), addresses=addresses)
        with pytest.raises(TransferError, match=f"127.0.0.1:{ports[0]}.*127.0.0.1:{ports[1]}"):
            await pair.push(ticket, [0], [1])


async def test_one_connection_serves_all_pushes_and_a_broken_one_is_made_anew():
    async with tcp_pair(4) as pair:
        for _ in range(3):
            ticket, arrivals = pair.open([0])
            for _ in range(5):
                await pair.push(ticket, [0], [1])
            await arrivals.until(lambda a: a.verified == {0})
            (connection,) = pair.receiver.connections
            connection.cut("the test breaks it")
            await until(lambda: not pair.receiver.connections)
            await pair.receiver.close_ticket(ticket.ref)


async def test_a_receiver_that_came_back_under_the_same_port_is_reached_at_once():
    async with tcp_pair(4) as pair:
        ticket, arrivals = pair.open([0])
        await pair.push(ticket, [0], [1])
        await arrivals.until(lambda a: a.verified == {0})
        await pair.receiver.close()
        port = ticket.addresses[0].port
        pair.receiver = TcpBlockReceiver(
            pair.target, identity("decode"), SECRET, host="127.0.0.1", port=port, options=OPTIONS
        )
        await pair.receiver.start()
        again, arrivals = pair.open([2])
        await pair.push(again, [0], [3])
        await arrivals.until(lambda a: a.verified == {0})
        await pair.receiver.close()


async def test_an_idle_connection_is_closed_by_the_sender_and_its_thread_ends():
    options = msgspec.structs.replace(OPTIONS, sender_idle_s=0.05)
    async with tcp_pair(4, options=options) as pair:
        for _ in range(2):
            ticket, arrivals = pair.open([0])
            await pair.push(ticket, [0], [1])
            await arrivals.until(lambda a: a.verified == {0})
            await pair.receiver.close_ticket(ticket.ref)
            await until(lambda: not any(name.startswith(("kv-send", "kv-receive")) for name in transport_threads()))


async def test_an_idle_connection_is_closed_by_the_receiver_if_the_sender_keeps_it_too_long():
    options = msgspec.structs.replace(OPTIONS, receiver_idle_s=0.05, frame_silence_s=0.02)
    async with tcp_pair(4, options=options) as pair:
        for _ in range(2):
            ticket, arrivals = pair.open([0])
            await pair.push(ticket, [0], [1])
            await arrivals.until(lambda a: a.verified == {0})
            await pair.receiver.close_ticket(ticket.ref)
            await until(lambda: not pair.receiver.connections)


async def test_more_pushes_than_the_queue_holds_wait_their_turn():
    async with tcp_pair(40) as pair:
        ticket, arrivals = pair.open(list(range(40)))
        await asyncio.gather(*(pair.push(ticket, [index], [index]) for index in range(40)))
        (group,) = pair.sender._groups.values()
        assert group.room._value == OPTIONS.max_queued_pushes
        await arrivals.until(lambda a: len(a.verified) == 40)


async def test_a_cancelled_push_that_still_waits_harms_nobody():
    async with tcp_pair(40) as pair:
        ticket, arrivals = pair.open(list(range(40)))
        pushes = [asyncio.ensure_future(pair.push(ticket, [index], [index])) for index in range(40)]
        await asyncio.sleep(0)
        for push in pushes[1::2]:
            push.cancel()
        await asyncio.gather(*pushes, return_exceptions=True)
        kept = set(range(0, 40, 2))
        await arrivals.until(lambda a: kept <= a.verified)


async def test_a_sender_with_another_secret_is_refused_and_counted():
    async with tcp_pair(2, sender_secret=b"another secret of 32 bytes .....") as pair:
        ticket, arrivals = pair.open([0])
        with pytest.raises(TransferError, match="secret"):
            await pair.push(ticket, [0], [1])
        await until(lambda: pair.num("kv_connections_refused") == 1)
        assert arrivals.events == []


async def test_a_port_in_use_is_an_error_naming_it():
    async with tcp_pair(2) as pair:
        port = pair.receiver.addresses[0].port
        second = TcpBlockReceiver(pair.target, identity("decode"), SECRET, host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await second.start()
        await second.close()


async def test_a_receiver_listens_on_its_own_address_alone():
    async with tcp_pair(2, host="127.0.0.2") as pair:
        port = pair.receiver.addresses[0].port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


async def test_writers_are_told_the_advertised_host():
    receiver = TcpBlockReceiver(
        ByteMemory(1), identity("decode"), SECRET, host="127.0.0.1", advertise_host="decode-0.local"
    )
    with pytest.raises(InvalidTransition):
        _ = receiver.addresses
    await receiver.start()
    assert receiver.addresses[0].host == "decode-0.local"
    await receiver.close()


def test_a_pool_that_is_not_what_its_fingerprint_says_is_refused():
    with pytest.raises(ConfigError, match=f"{LAYOUT.block_bytes}"):
        TcpBlockSender(ByteMemory(1, block_bytes=100), identity("prefill"), SECRET)
    with pytest.raises(ConfigError, match="fingerprint"):
        TcpBlockReceiver(ByteMemory(1), identity("decode", None), SECRET, host="127.0.0.1")


async def stop_inside_a_frame(pair, ticket, pid, pause_s):
    """Most moments are inside a frame; those between two are tried again."""
    for _ in range(50):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        if not pause_s or pair.receiver.reception.permits.writers_inside(ticket.ref):
            return
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.003)
    pytest.fail("the writer was never met inside a frame")


@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["bytes still in the kernel", "all bytes taken"])
async def test_a_stopped_writer_process_delays_the_closing_by_the_grace_and_can_never_write_again(pause_s):
    options = msgspec.structs.replace(OPTIONS, max_frame_bytes=64 * LAYOUT.block_bytes)
    async with tcp_pair(64, options=options) as pair:
        for _ in range(3):
            ticket, arrivals = pair.open(list(range(64)))
            async with writer_process(ticket) as writer:
                await arrivals.until(lambda a: a.num_bytes > 0, within_s=20)
                await stop_inside_a_frame(pair, ticket, writer.pid, pause_s)
                started_s = time.monotonic()
                await pair.receiver.close_ticket(ticket.ref)
                assert time.monotonic() - started_s < OPTIONS.grace_s + 0.5
                num_events = len(arrivals.events)
                pair.target.buffer[:] = bytes(len(pair.target.buffer))
                os.kill(writer.pid, signal.SIGCONT)
                await asyncio.sleep(0.05)
                assert not any(pair.target.buffer)
                assert len(arrivals.events) == num_events


async def test_nothing_is_left_after_many_pairs_came_and_went():
    async with tcp_pair(2):
        pass
    num_files, num_threads = num_open_files(), threading.active_count()
    for _ in range(10):
        async with tcp_pair(4) as pair:
            ticket, _ = pair.open([0])
            await asyncio.gather(*(pair.push(ticket, [0], [index]) for index in range(4)))
    assert num_open_files() == num_files
    assert threading.active_count() == num_threads


async def test_the_listener_of_a_ticket_is_called_on_the_event_loop():
    async with tcp_pair(2) as pair:
        threads: list[int] = []
        ticket = pair.ticket([0])
        arrivals = Arrivals()
        pair.receiver.open_ticket(ticket, lambda event: (threads.append(threading.get_ident()), arrivals(event)))
        await pair.push(ticket, [0], [1])
        await arrivals.until(lambda a: a.verified == {0})
        assert threads == [threading.get_ident()]


@asynccontextmanager
async def writer_process(ticket):
    """A process that writes all blocks of the ticket over and over, each time with bytes that are not right."""
    address = ticket.addresses[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, WRITER, address.host, str(address.port), msgspec.json.encode(ticket)),
        env={"PYTHONPATH": os.pathsep.join([str(WRITER.parent), str(WRITER.parents[2])])},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def stuck_receiver():
    """Proves itself and then reads nothing. 1200 blocks are more than the socket buffers of both sides hold."""

    def accept(listener):
        sock, _ = listener.accept()
        authenticate_blocking_as_server(sock, SECRET, identity("decode"), kind=DATA_KIND, deadline_s=5)
        return sock

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = asyncio.ensure_future(asyncio.to_thread(accept, listener))
        yield TransportAddress("tcp", *listener.getsockname())
        (await accepting).close()
