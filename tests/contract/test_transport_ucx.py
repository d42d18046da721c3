"""What only UCX can do wrong: peers stopped or killed while it has their blocks half-way, memory that it keeps."""

import asyncio
import contextlib
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from transport_parts import UCX_OPTIONS, ByteMemory, num_open_files, sized_identity, transport_threads
from transport_paths import ucx_pair
from ucx_writer import UcxWriter
from waiting import until

from kv_transport.ucx_library import load_ucx
from kv_transport.ucx_receiver import UcxBlockReceiver
from kv_transport.ucx_sender import UcxBlockSender
from kv_transport.ucx_settings import ucx_settings
from kv_transport.ucx_side import UcxSide, Woken
from pd_core.errors import ConfigError, DeadlineExceeded, InvalidTransition, ProtocolError, TransferError
from pd_core.ticket import Ticket, TransportAddress

PROCESS = Path(__file__).with_name("transport_ucx_process.py")
MIB = 1024 * 1024
NUM_LARGE = 24
LARGE_FRAMES = msgspec.structs.replace(UCX_OPTIONS, max_frame_bytes=NUM_LARGE * MIB)


async def test_a_stopped_sender_process_delays_nothing_and_can_never_change_a_byte():
    async with ucx_pair(NUM_LARGE, options=LARGE_FRAMES, block_bytes=MIB) as pair:
        for _ in range(2):
            ticket, arrivals = pair.open(list(range(NUM_LARGE)))
            async with process("write", msgspec.json.encode(ticket).decode(), str(MIB)) as writer:
                await arrivals.until(lambda a: len(a.corrupt) >= NUM_LARGE, within_s=30)
                os.kill(writer.pid, signal.SIGSTOP)
                started_s = time.monotonic()
                await pair.receiver.close_ticket(ticket.ref)
                assert time.monotonic() - started_s < UCX_OPTIONS.grace_s + 1.5
                num_events = len(arrivals.events)
                pair.target.buffer[:] = bytes(len(pair.target.buffer))
                os.kill(writer.pid, signal.SIGCONT)
                await asyncio.sleep(0.1)
                assert not any(pair.target.buffer)
                assert len(arrivals.events) == num_events
            await until(lambda: not pair.receiver.connections)


async def test_a_sender_process_that_is_killed_in_mid_frame_leaves_nothing_and_others_are_served():
    async with ucx_pair(NUM_LARGE, options=LARGE_FRAMES, block_bytes=MIB) as pair:
        every = list(range(NUM_LARGE))
        await pair.receiver.close_ticket(pair.open([0])[0].ref)
        await pair.push(pair.late_ticket([0]), [0], [0])
        (ours,) = pair.receiver.connections
        num_files = num_open_files()
        for _ in range(2):
            ticket, arrivals = pair.open(every)
            async with process("write", msgspec.json.encode(ticket).decode(), str(MIB)) as writer:
                await arrivals.until(lambda a: len(a.corrupt) >= NUM_LARGE, within_s=30)
                os.kill(writer.pid, signal.SIGKILL)
                await writer.wait()
            await until(lambda: pair.receiver.connections == [ours])
            await until(lambda: sum(name.startswith("kv-receive") for name in transport_threads()) == 1)
            assert num_open_files() <= num_files
            assert arrivals.verified == set()
            await pair.push(ticket, every, every)
            await arrivals.until(lambda a: len(a.verified) == NUM_LARGE)
            assert pair.received(ticket) == pair.sent(every)
            await pair.receiver.close_ticket(ticket.ref)


async def test_a_receiver_process_that_is_killed_in_mid_frame_fails_the_push_at_once():
    async with (
        ucx_pair(NUM_LARGE, options=LARGE_FRAMES, block_bytes=MIB) as pair,
        process("receive", str(NUM_LARGE), str(MIB)) as receiver,
    ):
        ticket = await ticket_of(receiver)
        await pair.push(ticket, [0], [0])
        push = asyncio.ensure_future(push_for_ever(pair, ticket))
        await asyncio.sleep(0.1)
        os.kill(receiver.pid, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(TransferError, match=str(ticket.addresses[0].port)):
            await push
        assert time.monotonic() - started_s < 2.0
        await receiver.wait()


async def test_a_receiver_process_that_is_stopped_costs_a_push_its_deadline_and_reads_no_block_later_on(caplog):
    async with process("receive", str(NUM_LARGE), str(MIB)) as receiver:
        ticket = await ticket_of(receiver)
        memory = ByteMemory(NUM_LARGE, MIB)
        memory.fill(random.Random(3))
        identity = sized_identity("prefill", MIB)
        sender = UcxBlockSender(memory, identity, b"the cluster's secret, 32 bytes..", host="127.0.0.1")
        every = list(range(NUM_LARGE))
        wrong = [1] * NUM_LARGE
        await sender.push(ticket, every, every, wrong, 10.0)
        stopping = asyncio.get_running_loop().call_later(0.02, os.kill, receiver.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            while True:
                await sender.push(ticket, every, every, wrong, 0.5)
        assert time.monotonic() - started_s < 5.0
        stopping.cancel()
        os.kill(receiver.pid, signal.SIGCONT)
        await sender.push(ticket, every, every, wrong, 10.0)  # over a new connection
        await sender.close()
        assert "UCX does not let go" not in caplog.text


async def test_connections_that_come_and_go_in_mid_frame_leave_neither_files_nor_memory():
    async with ucx_pair(4) as pair:
        ticket, arrivals = pair.open([0, 1, 2, 3])
        digests = pair.source.digests([0, 1, 2, 3])

        def come_and_go() -> None:
            writer = UcxWriter(pair.receiver).attach()
            writer.ring(ticket.ref, [digest ^ 1 for digest in digests[:3]], 3)
            writer.close()

        for _ in range(5):
            await asyncio.to_thread(come_and_go)
        await until(lambda: not pair.receiver.connections)
        num_files, rss_bytes = num_open_files(), psutil.Process().memory_info().rss
        for _ in range(40):
            await asyncio.to_thread(come_and_go)
        await until(lambda: not pair.receiver.connections)
        assert num_open_files() <= num_files
        # A worker that is kept has more than a MiB.
        assert psutil.Process().memory_info().rss - rss_bytes < 20 * MIB
        assert len([event for event in arrivals.events if hasattr(event, "reason")]) == 45


async def test_a_connection_that_the_sender_ends_because_it_is_idle_takes_its_part_of_ucx_along():
    async with ucx_pair(2, options=msgspec.structs.replace(UCX_OPTIONS, sender_idle_s=0.05)) as pair:
        ticket, _ = pair.open([0])
        num_files = num_open_files()
        for _ in range(3):
            await pair.push(ticket, [0], [0])
            await until(lambda: not any(name.startswith(("kv-send", "kv-receive")) for name in transport_threads()))
        assert num_open_files() <= num_files


async def test_blocks_that_ucx_does_not_let_go_of_stay_in_quarantine_and_it_is_said(monkeypatch, caplog):
    async with ucx_pair(3, options=msgspec.structs.replace(UCX_OPTIONS, leave_s=0.2)) as pair:
        ticket, arrivals = pair.open([0, 1])
        begun = []
        begin_frame = pair.receiver.reception.begin_frame
        monkeypatch.setattr(
            pair.receiver.reception,
            "begin_frame",
            lambda *arguments: begun.append(begin_frame(*arguments)) or begun[-1],
        )
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        await asyncio.to_thread(writer.ring, ticket.ref, pair.source.digests([0, 1]), 2)
        with monkeypatch.context() as stubborn:
            stubborn.setattr(UcxSide, "settle", lambda self, requests: False)
            with pytest.raises(TransferError, match="still inside the blocks"):
                await pair.receiver.close_ticket(ticket.ref)
            await until(lambda: not pair.receiver.connections)
        with pytest.raises(InvalidTransition):
            pair.open([1])
        assert "they stay in quarantine" in caplog.text
        assert arrivals.events == []
        pair.receiver.reception.leave_frame(begun[0], [], [])  # so that the pair can be closed
        await pair.receiver.close_ticket(ticket.ref)
        begun.clear()
        caplog.clear()
        await asyncio.to_thread(writer.close)


async def test_a_late_doorbell_costs_no_bytes_and_leaves_nothing_waiting_in_ucx():
    async with ucx_pair(3) as pair:
        ticket, _ = pair.open([0, 1])
        await pair.receiver.close_ticket(ticket.ref)
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        assert writer.ring(ticket.ref, pair.source.digests([0, 1]), 2).wanted == []
        assert pair.num("kv_frames_stale") == 1
        after, arrivals = pair.open([0, 1])  # the connection is still good
        first_tag = writer.next_tag
        ready = await asyncio.to_thread(writer.ring, after.ref, pair.source.digests([0, 1]), 2)
        assert ready.wanted == [0, 1]
        for place in (0, 1):
            writer.send(bytes(pair.source.block(place)), first_tag + place)
        await asyncio.to_thread(writer.let_ucx_work)
        await arrivals.until(lambda a: a.verified == {0, 1})
        await asyncio.to_thread(writer.close)


async def test_only_wanted_blocks_are_asked_for():
    async with ucx_pair(4) as pair:
        ticket, arrivals = pair.open([0, 1, 2])
        await pair.push(ticket, [1], [3])
        await arrivals.until(lambda a: a.verified == {1})
        writer = await asyncio.to_thread(lambda: UcxWriter(pair.receiver).attach())
        assert (await asyncio.to_thread(writer.ring, ticket.ref, pair.source.digests([0, 1, 2]), 3)).wanted == [0, 2]
        await asyncio.to_thread(writer.close)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_all_ports_are_at_the_configured_address_also_those_of_ucx(host):
    before = listening()
    async with ucx_pair(2, host=host) as pair:
        ticket, arrivals = pair.open([0, 1])
        await pair.push(ticket, [0, 1], [1, 0])
        await arrivals.until(lambda a: a.verified == {0, 1})
        assert pair.received(ticket) == pair.sent([1, 0])
        ours = listening() - before
        assert len(ours) == 3  # the control connections' and one of UCX on either side
        assert {ip for ip, _ in ours} == {host}


async def test_a_host_that_is_none_of_ours_is_a_config_error_naming_the_setting():
    memory = ByteMemory(1)
    for make in (UcxBlockReceiver, UcxBlockSender):
        with pytest.raises(ConfigError, match=r"transfer\.host 192\.0\.2\.1"):
            make(memory, sized_identity("decode", memory.block_bytes), b"secret", host="192.0.2.1")


async def test_a_receiver_has_no_address_before_its_start():
    memory = ByteMemory(1)
    receiver = UcxBlockReceiver(memory, sized_identity("decode", memory.block_bytes), b"s" * 32, host="127.0.0.1")
    with pytest.raises(InvalidTransition):
        _ = receiver.addresses


async def test_a_sender_with_another_secret_is_refused_and_counted():
    async with ucx_pair(2, sender_secret=b"another secret of 32 bytes .....") as pair:
        ticket, arrivals = pair.open([0])
        with pytest.raises(TransferError, match="secret"):
            await pair.push(ticket, [0], [1])
        await until(lambda: pair.num("kv_connections_refused") == 1)
        assert arrivals.events == []


async def test_a_listener_that_stays_silent_is_an_error_within_the_handshake_deadline_naming_it():
    quick = msgspec.structs.replace(UCX_OPTIONS, handshake_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with ucx_pair(2, options=quick) as pair:
            ticket = msgspec.structs.replace(pair.ticket([0]), addresses=[TransportAddress("ucx", "127.0.0.1", port)])
            started_s = time.monotonic()
            with pytest.raises(TransferError, match=f"127.0.0.1:{port}"):
                await pair.push(ticket, [0], [1])
            assert 0.2 < time.monotonic() - started_s < 2.0


def test_a_side_settles_receives_that_nothing_ever_comes_for_and_closes_twice():
    side, other = UcxSide(load_ucx(), ucx_settings("127.0.0.1")), UcxSide(load_ucx(), ucx_settings("127.0.0.1"))
    with contextlib.ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        side.connect(other.address, ours)
        other.connect(side.address, theirs)
        memory = bytearray(b"\xff" * 100)
        requests = [side.receive(memoryview(memory), tag) for tag in (7, 8)]
        assert side.wait(lambda: False, select.POLLRDHUP, 0.05) is Woken.SILENCE
        assert not side.drain(requests, 0.01)
        assert side.settle(requests)
        assert memory == b"\xff" * 100
        theirs.close()
        requests.clear()
    side.close()
    side.close()
    other.close()


def test_bytes_that_are_no_address_are_a_protocol_error():
    side = UcxSide(load_ucx(), ucx_settings("127.0.0.1"))
    with contextlib.ExitStack() as stack:
        ours, _ = map(stack.enter_context, socket.socketpair())
        with pytest.raises(ProtocolError, match="UCX cannot connect"):
            side.connect(side.address[:20], ours)
    side.close()


def test_settings_that_ucx_does_not_have_are_an_error_and_no_crash():
    with pytest.raises(TransferError, match="UCX cannot be started"):
        UcxSide(load_ucx(), ucx_settings("127.0.0.1") | {"TLS": "no_such_transport"})


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process can be reached."""
    return {tuple(one.laddr) for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


async def push_for_ever(pair, ticket: Ticket) -> None:
    every = list(range(NUM_LARGE))
    while True:
        await pair.sender.push(ticket, every[1:], every[1:], [1] * (NUM_LARGE - 1), 10.0)


async def ticket_of(receiver: asyncio.subprocess.Process) -> Ticket:
    assert receiver.stdout is not None
    return msgspec.json.decode(await asyncio.wait_for(receiver.stdout.readline(), 20), type=Ticket)


@asynccontextmanager
async def process(*arguments: str):
    started = await asyncio.create_subprocess_exec(
        sys.executable, str(PROCESS), *arguments, stdout=asyncio.subprocess.PIPE, cwd=PROCESS.parent
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()
