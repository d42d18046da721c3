"""What only shared memory can do wrong: peers stopped or killed in mid-copy, blocks that change under the reader."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from transport_parts import (
    LAYOUT,
    SECRET,
    SHM_OPTIONS,
    ByteMemory,
    SharedMemory,
    identity,
    num_open_files,
    num_pool_maps,
    transport_threads,
)
from transport_paths import shm_pair
from waiting import until

from kv_transport.digest import BlockDigests, block_digest
from kv_transport.shm import socket_name
from kv_transport.shm_receiver import ShmBlockReceiver
from kv_transport.shm_sender import ShmBlockSender
from pd_core.errors import ConfigError, DeadlineExceeded, InvalidTransition, TransferError
from pd_core.ticket import Ticket, TransportAddress

PROCESS = Path(__file__).with_name("transport_shm_process.py")
QUICK = msgspec.structs.replace(SHM_OPTIONS, withdraw_s=0.05)


async def test_a_cancelled_push_returns_soon_and_what_is_read_after_it_never_counts_as_there():
    async with shm_pair(4, options=QUICK) as pair:
        ticket, arrivals = pair.open([3, 1, 2])
        before = pair.sent([0, 1, 2])
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2], [0, 1, 2]))
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        push.cancel()
        started_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert time.monotonic() - started_s < QUICK.withdraw_s + 0.5
        pair.source.fill(random.Random(8))  # the blocks are another request's now
        pair.copies.go_on()
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert arrivals.verified <= {0}
        assert all(pair.received(ticket)[index] == before[index] for index in arrivals.verified)
        assert pair.received(ticket)[1] not in (before[1], *pair.sent([1]))  # half of each
        await pair.push(ticket, [0, 1, 2], [0, 1, 2])
        await arrivals.until(lambda a: a.verified == {0, 1, 2})


async def test_a_cancelled_push_waits_for_a_copy_that_is_nearly_done_and_keeps_its_connection():
    async with shm_pair(4) as pair:
        ticket, arrivals = pair.open([3, 1, 2])
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2], [0, 1, 2]))
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        (connection,) = pair.receiver.connections
        push.cancel()
        await asyncio.sleep(0.01)
        assert not push.done()
        pair.copies.go_on()
        with pytest.raises(asyncio.CancelledError):
            await push
        await arrivals.until(lambda a: a.verified == {0, 1, 2})
        await pair.push(pair.late_ticket([0]), [0], [0])
        assert pair.receiver.connections == [connection]


async def test_a_cancelled_push_returns_only_when_no_thread_makes_a_digest_of_its_blocks(monkeypatch):
    is_inside, may_end = threading.Event(), threading.Event()

    def slow_digest(block):
        is_inside.set()
        may_end.wait(5.0)
        return block_digest(block)

    monkeypatch.setattr("kv_transport.digest.block_digest", slow_digest)
    async with shm_pair(4, options=QUICK) as pair:
        ticket, arrivals = pair.open([3, 1])
        digests = BlockDigests([memoryview(b"one"), memoryview(b"two")], [0, 1])
        push = asyncio.ensure_future(pair.sender.push(ticket, [0, 1], [0, 1], digests, 5.0))
        await until(is_inside.is_set)
        push.cancel()
        await asyncio.sleep(2 * QUICK.withdraw_s)
        assert not push.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert arrivals.verified == set()


async def test_the_deadline_of_a_push_counts_while_the_copy_takes_long():
    async with shm_pair(4, options=QUICK) as pair:
        ticket, _ = pair.open([3, 1, 2])
        pair.copies.stall(pair, ticket)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=ticket.addresses[0].host):
            await pair.push(ticket, [0, 1, 2], [0, 1, 2], deadline_s=0.1)
        assert time.monotonic() - started_s < 0.1 + QUICK.withdraw_s + 0.5
        pair.copies.go_on()


async def test_a_block_that_changes_while_it_is_copied_is_corrupt():
    async with shm_pair(4) as pair:
        ticket, arrivals = pair.open([3, 1, 2])
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2], [0, 1, 2]))
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        await until(lambda: any(pair.target.block(1)))
        pair.source.block(1)[-1] ^= 1
        pair.copies.go_on()
        await push
        await arrivals.until(lambda a: a.corrupt == [1])
        assert arrivals.verified == {0, 2}


async def test_a_frame_is_left_between_two_blocks_when_its_ticket_is_closed_for_too_long():
    async with shm_pair(4, options=QUICK) as pair:
        ticket, arrivals = pair.open([3, 1, 2])
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2], [0, 1, 2]))
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        await pair.receiver.close_ticket(ticket.ref)
        with pytest.raises(TransferError, match=r"closed by the receiver|broke"):
            await push
        assert not any(pair.target.block(2))
        assert arrivals.events == []


async def test_a_stopped_sender_process_delays_nothing_and_can_never_change_a_byte():
    async with shm_pair(64) as pair:
        for _ in range(3):
            ticket, arrivals = pair.open(list(range(64)))
            async with process("write", msgspec.json.encode(ticket).decode()) as writer:
                await arrivals.until(lambda a: len(a.corrupt) >= 64, within_s=20)
                os.kill(writer.pid, signal.SIGSTOP)
                started_s = time.monotonic()
                await pair.receiver.close_ticket(ticket.ref)
                assert time.monotonic() - started_s < SHM_OPTIONS.grace_s + 0.5
                num_events = len(arrivals.events)
                pair.target.buffer[:] = bytes(len(pair.target.buffer))
                os.kill(writer.pid, signal.SIGCONT)
                await asyncio.sleep(0.05)
                assert not any(pair.target.buffer)
                assert len(arrivals.events) == num_events


async def test_a_sender_process_that_is_killed_in_mid_copy_leaves_nothing_of_its_pool():
    async with shm_pair(64) as pair:
        await pair.receiver.close_ticket(pair.open([0])[0].ref)
        await pair.push(pair.late_ticket([0]), [0], [0])
        (ours,) = pair.receiver.connections
        num_files, num_maps = num_open_files(), num_pool_maps()
        for _ in range(3):
            ticket, arrivals = pair.open(list(range(64)))
            async with process("write", msgspec.json.encode(ticket).decode()) as writer:
                await arrivals.until(lambda a: len(a.corrupt) >= 64, within_s=20)
                assert num_pool_maps() == num_maps + 1
                pair.copies.stall(pair, ticket)
                await until(lambda: any(pair.target.buffer))
                os.kill(writer.pid, signal.SIGKILL)
                await writer.wait()
            pair.copies.go_on()
            await until(lambda: pair.receiver.connections == [ours])
            await until(lambda: sum(name.startswith("kv-receive") for name in transport_threads()) == 1)
            assert (num_open_files(), num_pool_maps()) == (num_files, num_maps)
            assert arrivals.verified == set()
            await pair.push(ticket, list(range(64)), list(range(64)))  # others, and the same ticket, are served
            await arrivals.until(lambda a: len(a.verified) == 64)
            await pair.receiver.close_ticket(ticket.ref)


async def test_a_receiver_that_is_killed_in_mid_copy_fails_the_push_at_once():
    async with shm_pair(64) as pair, process("receive", "64", "0.2") as receiver:
        ticket = await ticket_of(receiver)
        push = asyncio.ensure_future(pair.push(ticket, list(range(64)), list(range(64)), deadline_s=30.0))
        await asyncio.sleep(0.2)
        assert not push.done()
        os.kill(receiver.pid, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(TransferError, match=ticket.addresses[0].host):
            await push
        assert time.monotonic() - started_s < 1.0
        await receiver.wait()
        with pytest.raises(TransferError, match="on another host, or gone"):
            await pair.push(ticket, [0], [0])


async def test_a_receiver_that_is_stopped_costs_a_push_its_deadline_and_no_thread():
    async with shm_pair(64, options=QUICK) as pair, process("receive", "64", "0.01") as receiver:
        ticket = await ticket_of(receiver)
        await pair.push(ticket, [0], [0])
        os.kill(receiver.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await pair.push(ticket, list(range(1, 64)), list(range(1, 64)), deadline_s=0.3)
        with pytest.raises(DeadlineExceeded):
            await pair.push(ticket, [1], [1], deadline_s=0.3)  # it cannot even prove itself
        assert time.monotonic() - started_s < 2.0
        os.kill(receiver.pid, signal.SIGCONT)
        await asyncio.wait_for(pair.push(ticket, [1], [1], deadline_s=10.0), 10.0)


async def test_a_receiver_that_does_not_answer_is_given_up():
    options = msgspec.structs.replace(QUICK, unacknowledged_s=0.2)
    async with shm_pair(4, options=options) as pair:
        ticket, _ = pair.open([3, 1, 2])
        pair.copies.stall(pair, ticket)
        with pytest.raises(TransferError, match=r"silent for 0\.2 s"):
            await pair.push(ticket, [0, 1, 2], [0, 1, 2])
        pair.copies.go_on()


async def test_a_mute_listener_is_an_error_within_the_handshake_deadline_naming_its_socket():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_name("@kvrelay-mute"))
        listener.listen()
        async with shm_pair(2) as pair:
            ticket = msgspec.structs.replace(pair.ticket([0]), addresses=[TransportAddress("shm", "@kvrelay-mute", 0)])
            started_s = time.monotonic()
            with pytest.raises(TransferError, match="@kvrelay-mute"):
                await pair.push(ticket, [0], [1])
            assert 0.9 < time.monotonic() - started_s < 2.0


async def test_a_receiver_on_another_host_is_an_error_at_once_and_says_so():
    async with shm_pair(2) as pair:
        elsewhere = TransportAddress("shm", "@kvrelay-of-another-host", 0)
        ticket = msgspec.structs.replace(pair.ticket([0]), addresses=[elsewhere])
        with pytest.raises(TransferError, match=r"@kvrelay-of-another-host: .* on another host, or gone"):
            await pair.push(ticket, [0], [1])


async def test_a_sender_with_another_secret_is_refused_and_counted():
    async with shm_pair(2, sender_secret=b"another secret of 32 bytes .....") as pair:
        ticket, arrivals = pair.open([0])
        with pytest.raises(TransferError, match="secret"):
            await pair.push(ticket, [0], [1])
        await until(lambda: pair.num("kv_connections_refused") == 1)
        assert arrivals.events == []


async def test_idle_connections_end_on_either_side_and_are_made_anew():
    for changes in ({"sender_idle_s": 0.05}, {"receiver_idle_s": 0.05, "frame_silence_s": 0.02}):
        async with shm_pair(4, options=msgspec.structs.replace(SHM_OPTIONS, **changes)) as pair:
            for _ in range(2):
                ticket, arrivals = pair.open([0])
                await pair.push(ticket, [0], [1])
                await arrivals.until(lambda a: a.verified == {0})
                await pair.receiver.close_ticket(ticket.ref)
                await until(lambda: not pair.receiver.connections)
                await until(lambda: num_pool_maps() == 2)


async def test_more_pushes_than_the_queue_holds_wait_their_turn_over_one_connection():
    async with shm_pair(40) as pair:
        ticket, arrivals = pair.open(list(range(40)))
        await asyncio.gather(*(pair.push(ticket, [index], [index]) for index in range(40)))
        await arrivals.until(lambda a: len(a.verified) == 40)
        assert len(pair.receiver.connections) == 1
        assert pair.received(ticket) == pair.sent(list(range(40)))


async def test_receivers_have_names_that_nobody_can_guess_and_none_before_they_listen():
    receivers = [ShmBlockReceiver(ByteMemory(1), identity("decode"), SECRET) for _ in range(2)]
    with pytest.raises(InvalidTransition):
        _ = receivers[0].addresses
    for receiver in receivers:
        await receiver.start()
    hosts = {receiver.addresses[0].host for receiver in receivers}
    assert len(hosts) == 2
    assert all(len(host.removeprefix("@kvrelay-")) == 32 for host in hosts)
    for receiver in receivers:
        await receiver.close()


def test_a_pool_that_is_not_what_its_fingerprint_says_is_refused():
    memory = SharedMemory(1, 100)
    with pytest.raises(ConfigError, match=f"{LAYOUT.block_bytes}"):
        ShmBlockSender(memory, identity("prefill"), SECRET)
    memory.close()
    with pytest.raises(ConfigError, match="fingerprint"):
        ShmBlockReceiver(ByteMemory(1), identity("decode", None), SECRET)


@asynccontextmanager
async def process(*arguments):
    """See transport_shm_process; killed at the end, if it still lives."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, PROCESS, *arguments),
        stdout=asyncio.subprocess.PIPE if arguments[0] == "receive" else None,
        env={"PYTHONPATH": os.pathsep.join([str(PROCESS.parent), str(PROCESS.parents[2])])},
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def ticket_of(receiver) -> Ticket:
    line = await asyncio.wait_for(receiver.stdout.readline(), 20.0)
    return msgspec.json.decode(line, type=Ticket)
