"""One pool written to over shared memory and tcp: one table of permits, whichever way a writer comes."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from transport_parts import (
    LAYOUT,
    OPTIONS,
    SECRET,
    SHM_OPTIONS,
    Pair,
    SharedMemory,
    identity,
    num_open_files,
    num_pool_maps,
    transport_threads,
)
from transport_paths import Copies, ShmPath
from waiting import until

from kv_transport.choice import RoutedSender
from kv_transport.interface import BlocksArrived
from kv_transport.receiver import PoolReceiver
from kv_transport.shm_receiver import ShmListener
from kv_transport.shm_sender import ShmBlockSender
from kv_transport.tcp_receiver import TcpListener
from kv_transport.tcp_sender import TcpBlockSender
from pd_core.errors import ConfigError, InvalidTransition


@asynccontextmanager
async def both_pair(num_blocks: int):
    num_files = num_open_files()
    source, target = (SharedMemory(num_blocks, LAYOUT.block_bytes) for _ in range(2))
    source.fill(random.Random(7))
    copies, receiving, sending = Copies(), identity("decode"), identity("prefill")
    listeners = [
        ShmListener(target, receiving, SECRET, options=SHM_OPTIONS, copy=copies),
        TcpListener(target, receiving, SECRET, host="127.0.0.1", options=OPTIONS),
    ]
    receiver = PoolReceiver(target, listeners, grace_s=OPTIONS.grace_s)
    await receiver.start()
    senders = {
        "shm": ShmBlockSender(source, sending, SECRET, options=SHM_OPTIONS),
        "tcp": TcpBlockSender(source, sending, SECRET, options=OPTIONS),
    }
    pair = Pair(source, target, receiver, RoutedSender(senders))
    pair.senders, pair.copies, pair.listeners = senders, copies, listeners
    try:
        yield pair
    finally:
        await pair.sender.close()
        await receiver.close()
        source.close()
        target.close()
    assert receiver.reception.permits.num_permits == 0
    assert transport_threads() == []
    assert num_open_files() <= num_files
    assert num_pool_maps() == 0


async def test_shared_memory_is_taken_where_it_works_and_the_event_says_so():
    async with both_pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        assert [address.path for address in ticket.addresses] == ["shm", "tcp"]
        assert (await pair.push(ticket, [0, 1], [2, 3])).path == "shm"
        await arrivals.until(lambda a: a.verified == {0, 1})
        assert {event.path for event in arrivals.events} == {"shm"}


async def test_a_ticket_that_began_over_shared_memory_is_finished_over_tcp_when_that_breaks():
    async with both_pair(6) as pair:
        ticket, arrivals = pair.open([5, 4, 3])
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2], [0, 1, 2]))
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        (connection,) = pair.receiver.connections
        connection.cut("the test breaks it")
        receipt = await push
        assert receipt.path == "tcp"
        while missing := sorted({0, 1, 2} - arrivals.verified):
            assert (await pair.push(ticket, missing, missing)).path == "tcp"  # shm is left alone for a while
            await asyncio.sleep(0.01)
        assert pair.received(ticket) == pair.sent([0, 1, 2])
        came = {event.path: event.verified for event in arrivals.events if isinstance(event, BlocksArrived)}
        assert came["shm"] == [0]
        assert sender_reason(pair, "shm")
        assert sender_reason(pair, "tcp") is None


def sender_reason(pair, path):
    return pair.sender.paths()["boot"][path].reason


async def test_two_paths_are_never_inside_one_slot():
    async with both_pair(6) as pair:
        ticket, arrivals = pair.open([3, 4, 5])
        async with ShmPath.writer_in_mid_frame(pair, ticket, [0, 1, 2]) as go_on:
            await pair.senders["tcp"].push(ticket, [0, 1, 2], [3, 4, 5], pair.source.digests([3, 4, 5]), 5.0)
            await until(lambda: pair.num("kv_blocks_duplicate") == 3)
            pair.receiver.reception.permits.validate()
            assert arrivals.verified == set()
            await go_on()
            await arrivals.until(lambda a: a.verified == {0, 1, 2})
        assert pair.received(ticket) == pair.sent([0, 1, 2])


async def test_what_came_over_one_path_is_not_written_again_over_the_other():
    async with both_pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        await pair.push(ticket, [0, 1], [0, 1])
        await arrivals.until(lambda a: a.verified == {0, 1})
        await pair.senders["tcp"].push(ticket, [0, 1], [2, 3], pair.source.digests([2, 3]), 5.0)
        await until(lambda: pair.num("kv_blocks_duplicate") == 2)
        assert pair.received(ticket) == pair.sent([0, 1])


async def test_closing_a_ticket_closes_it_on_every_path():
    async with both_pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        with pytest.raises(InvalidTransition):
            pair.open([1, 2])
        await pair.receiver.close_ticket(ticket.ref)
        for number, sender in enumerate(pair.senders.values(), 1):
            await sender.push(ticket, [0, 1], [2, 3], pair.source.digests([2, 3]), 5.0)
            await until(lambda number=number: pair.num("kv_frames_stale") == number)
        assert not any(pair.target.buffer)
        assert arrivals.events == []


async def test_late_writers_of_either_path_never_change_a_byte_of_the_next_ticket():
    async with both_pair(64) as pair:
        slots, others = list(range(32)), list(range(32, 64))
        generator = random.Random(5)
        for _ in range(60):
            first, first_arrivals = pair.open(slots)
            digests = pair.source.digests(slots)
            late = [
                asyncio.ensure_future(sender.push(first, slots, slots, digests, 5.0))
                for sender in pair.senders.values()
            ]
            await asyncio.sleep(generator.random() * 0.004)
            await pair.receiver.close_ticket(first.ref)
            second, arrivals = pair.open(slots)
            sender = generator.choice(list(pair.senders.values()))
            others_digests = pair.source.digests(others)
            while missing := sorted(set(slots) - arrivals.verified):
                blocks = [others[index] for index in missing]
                await sender.push(second, missing, blocks, [others_digests[index] for index in missing], 5.0)
                await asyncio.sleep(0.001)
            await asyncio.gather(*late, return_exceptions=True)
            await pair.receiver.close_ticket(second.ref)
            assert pair.received(second) == pair.sent(others)
            assert first_arrivals.corrupt == arrivals.corrupt == []


async def test_a_receiver_that_cannot_listen_on_one_path_listens_on_none():
    async with both_pair(2) as pair:
        port = pair.receiver.addresses[1].port
        memory = SharedMemory(2, LAYOUT.block_bytes)
        shm = ShmListener(memory, identity("decode"), SECRET)
        tcp = TcpListener(memory, identity("decode"), SECRET, host="127.0.0.1", port=port)
        threads = transport_threads()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await PoolReceiver(memory, [shm, tcp]).start()
        assert transport_threads() == threads
        memory.close()
