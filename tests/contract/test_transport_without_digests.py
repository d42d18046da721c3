"""Tickets without digests: what has come whole counts, so nothing may count that was read too late."""

import asyncio
import contextlib
import random

import msgspec
import pytest
from hostile_parts import is_closed_soon
from transport_parts import LAYOUT, SHM_OPTIONS
from transport_paths import PATHS, connect_shm_writer, shm_pair
from waiting import until

from kv_transport.doorbell_frames import encode
from kv_transport.shm_frames import Doorbell
from pd_core.errors import TransferError

QUICK = msgspec.structs.replace(SHM_OPTIONS, withdraw_s=0.05)


@pytest.fixture(params=PATHS.values(), ids=PATHS.keys())
def path(request):
    return request.param


@pytest.fixture
def rung(monkeypatch):
    """Doorbells that a sender over shared memory is about to ring."""
    bells: list[Doorbell] = []

    def note(message):
        if isinstance(message, Doorbell):
            bells.append(message)
        return encode(message)

    monkeypatch.setattr("kv_transport.shm_sender.encode", note)
    return bells


async def test_blocks_arrive_as_they_were_sent_and_no_side_makes_a_digest(path, monkeypatch):
    def no_digest(_):
        raise AssertionError("nobody asked for digests")

    async with path.pair(12) as pair:
        monkeypatch.setattr("kv_transport.reception.block_digest", no_digest)
        ticket, arrivals = pair.open([11, 3, 7, 0, 5], with_digests=False)
        await pair.push(ticket, [4, 0, 1, 3], [4, 9, 0, 2])
        await pair.push(ticket, [2], [6])
        await arrivals.until(lambda a: len(a.verified) == 5)
        assert pair.received(ticket) == pair.sent([9, 0, 6, 2, 4])
        assert arrivals.num_bytes == 5 * pair.target.block_bytes


async def test_a_push_without_digests_is_refused_where_every_block_is_compared(path, caplog):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        with pytest.raises(ValueError, match="0 digests: 2 are wanted"):
            await pair.sender.push(ticket, [0, 1], [2, 3], [], 5.0)
        careless = msgspec.structs.replace(ticket, with_digests=False)
        with contextlib.suppress(TransferError):  # over a network the sender may be done before the receiver objects
            await pair.push(careless, [0, 1], [2, 3])
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert "a frame without digests, and every block is to be compared" in arrivals.events[0].reason
        await until(lambda: "a frame without digests" in caplog.text)
        assert not any(pair.target.buffer)
        while not arrivals.verified:  # over a new connection, as it should be
            with contextlib.suppress(TransferError):
                await pair.push(ticket, [0, 1], [2, 3])
                await arrivals.until(lambda a: a.verified == {0, 1})


async def test_digests_that_nobody_asked_for_are_compared_all_the_same(path):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([0, 1], with_digests=False)
        with pytest.raises(ValueError, match="2 digests: 0 are wanted"):
            await pair.sender.push(ticket, [0, 1], [2, 3], [1, 2], 5.0)
        careful = msgspec.structs.replace(ticket, with_digests=True)
        right, _ = pair.source.digests([2, 3])
        await pair.sender.push(careful, [0, 1], [2, 3], [right, right], 5.0)
        await arrivals.until(lambda a: a.corrupt == [1])
        assert arrivals.verified == {0}


async def test_of_a_writer_that_goes_away_in_mid_frame_only_what_came_whole_before_counts(path):
    async with path.pair(6) as pair:
        ticket, arrivals = pair.open([3, 4, 5], with_digests=False)
        async with path.writer_in_mid_frame(pair, ticket, [0, 1, 2]):
            pass
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert arrivals.verified <= path.whole_in_mid_frame
        assert all(pair.received(ticket)[index] == pair.sent([index])[0] for index in arrivals.verified)
        await pair.push(ticket, [0, 1, 2], [0, 1, 2])
        await arrivals.until(lambda a: len(a.verified) == 3)
        assert pair.received(ticket) == pair.sent([0, 1, 2])


async def test_what_is_read_of_a_push_after_its_cancellation_never_counts(path):
    async with path.pair(60) as pair:
        generator = random.Random(5)
        blocks = list(range(60))
        for _ in range(30):
            ticket, arrivals = pair.open(blocks, with_digests=False)
            wanted = pair.sent(blocks)
            push = asyncio.ensure_future(pair.push(ticket, blocks, blocks))
            await asyncio.sleep(generator.random() * 0.004)
            push.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await push
            pair.source.fill(generator)  # the blocks are another request's now
            await pair.push(pair.late_ticket([0]), [0], [0])  # goes by the same way, after all that was sent before
            await asyncio.sleep(0.001)
            await pair.receiver.close_ticket(ticket.ref)
            received = pair.received(ticket)
            assert all(received[index] == wanted[index] for index in arrivals.verified)


async def test_a_copy_that_ends_after_its_push_was_withdrawn_does_not_count():
    """Over shared memory it is the receiver who reads, at any time."""
    async with shm_pair(4, options=QUICK) as pair:
        ticket, arrivals = pair.open([3, 1, 2], with_digests=False)
        before = pair.sent([0, 1, 2])
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2], [0, 1, 2]))
        await until(lambda: pair.receiver.reception.permits.writers_inside(ticket.ref))
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        pair.source.fill(random.Random(8))
        pair.copies.go_on()
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert arrivals.verified == {0}
        assert pair.received(ticket)[0] == before[0]
        assert pair.received(ticket)[1] not in (before[1], *pair.sent([1]))  # half of each


async def test_a_doorbell_that_still_waits_when_its_push_is_withdrawn_is_never_read(rung):
    """Over shared memory one waits at the receiver while it is at another."""
    options = msgspec.structs.replace(QUICK, max_frame_blocks=2)
    async with shm_pair(6, options=options) as pair:
        ticket, arrivals = pair.open([5, 1, 2, 3], with_digests=False)
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2, 3], [0, 1, 2, 3]))
        await until(lambda: any(pair.target.block(1)) and len(rung) == 2)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        pair.source.fill(random.Random(8))
        pair.copies.go_on()
        await arrivals.until(lambda a: a.num_stopped == 1)
        await until(lambda: not pair.receiver.connections)
        assert arrivals.verified == {0}
        assert not any(pair.target.block(2)) and not any(pair.target.block(3))
        await pair.push(ticket, [1, 2, 3], [1, 2, 3])
        await arrivals.until(lambda a: len(a.verified) == 4)
        assert pair.received(ticket)[1:] == pair.sent([1, 2, 3])


@pytest.mark.parametrize("with_digests", [True, False])
async def test_a_doorbell_that_waits_while_its_ticket_is_closed_is_answered_unread(with_digests, rung):
    async with shm_pair(6, options=msgspec.structs.replace(QUICK, max_frame_blocks=2)) as pair:
        ticket, arrivals = pair.open([5, 1, 2, 3], with_digests=with_digests)
        pair.copies.stall(pair, ticket)
        push = asyncio.ensure_future(pair.push(ticket, [0, 1, 2, 3], [0, 1, 2, 3]))
        await until(lambda: any(pair.target.block(1)) and len(rung) == 2)
        (connection,) = pair.receiver.connections
        closed = asyncio.ensure_future(pair.receiver.close_ticket(ticket.ref))
        await until(lambda: not pair.receiver.reception.permits.is_open(ticket.ref))
        pair.copies.go_on()
        await asyncio.gather(closed, push)
        assert pair.num("kv_frames_stale") == 1
        assert arrivals.events == []
        assert not any(pair.target.block(2)) and not any(pair.target.block(3))
        assert pair.receiver.connections == [connection]


@pytest.mark.parametrize("way", ["closed", "shut down", "closed with bytes unread"])
async def test_the_end_of_a_connection_is_seen_whatever_was_sent_before_it(way):
    async with shm_pair(4, options=QUICK) as pair:
        ticket, arrivals = pair.open([3, 1, 2], with_digests=False)
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            pair.copies.stall(pair, ticket)
            sock.sendall(encode(Doorbell(1, ticket.ref, [0, 1, 2], [0, 1, 2], [])))
            await until(lambda: any(pair.target.block(1)))
            if way == "closed with bytes unread":
                sock.sendall(encode(Doorbell(2, ticket.ref, [0], [0], [])) + b"KVRP")
            sock.shutdown(2) if way == "shut down" else sock.close()
            pair.source.fill(random.Random(8))
            pair.copies.go_on()
            await arrivals.until(lambda a: a.num_stopped == 1)
        assert arrivals.verified == {0}
        await until(lambda: not pair.receiver.connections)


async def test_a_doorbell_that_comes_a_second_time_is_refused_unread():
    """Its blocks may have changed since the first was answered."""
    async with shm_pair(4) as pair:
        ticket, arrivals = pair.open([3, 1, 2], with_digests=False)
        with await asyncio.to_thread(connect_shm_writer, pair.receiver, pair.source) as sock:
            bell = encode(Doorbell(7, ticket.ref, [0], [0], []))
            sock.sendall(bell)
            await arrivals.until(lambda a: a.verified == {0})
            assert b"taken" in sock.recv(1000)
            again = encode(Doorbell(7, ticket.ref, [1], [0], []))
            sock.sendall(again)
            assert b"doorbell 7 came after 7" in sock.recv(1000)
            assert await asyncio.to_thread(is_closed_soon, sock)
        assert not any(pair.target.block(1))
        assert len(bell) < LAYOUT.block_bytes
