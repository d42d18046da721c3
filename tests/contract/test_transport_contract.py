"""What every path must do, over every path."""

import asyncio
import contextlib
import random
import time

import msgspec
import pytest
from transport_parts import FINGERPRINT, GRACE_S, changed
from transport_paths import PATHS
from waiting import until

from kv_transport.digest import block_digest
from kv_transport.interface import WriterStopped
from pd_core.errors import InvalidTransition, LayoutMismatch, TransferError
from pd_core.ticket import TicketRef


@pytest.fixture(params=PATHS.values(), ids=PATHS.keys())
def path(request):
    return request.param


async def test_every_block_arrives_as_it_was_sent_and_is_verified(path):
    async with path.pair(20) as pair:
        ticket, arrivals = pair.open([19, 3, 7, 0, 11, 2, 5, 13, 17, 1])
        blocks = [4, 9, 0, 19, 2, 6, 15, 8, 3, 10]
        receipt = await pair.push(ticket, list(range(10)), blocks)
        await arrivals.until(lambda a: len(a.verified) == 10)
        assert pair.received(ticket) == pair.sent(blocks)
        assert arrivals.corrupt == []
        assert receipt.path == path.name
        assert receipt.num_bytes == arrivals.num_bytes == pair.num("kv_bytes_received")
        assert receipt.seconds > 0


async def test_chunks_go_to_the_places_that_their_indices_name(path):
    async with path.pair(12) as pair:
        ticket, arrivals = pair.open([8, 9, 10, 11])
        await pair.push(ticket, [2, 0], [5, 6])
        await pair.push(ticket, [3], [1])
        await pair.push(ticket, [1], [2])
        await arrivals.until(lambda a: len(a.verified) == 4)
        assert pair.received(ticket) == pair.sent([6, 2, 5, 1])
        assert not any(pair.target.buffer[: 8 * pair.target.block_bytes])


async def test_pushes_of_many_tickets_at_once_do_not_mix(path):
    async with path.pair(32) as pair:
        opened = [pair.open([first, first + 1]) for first in range(0, 32, 2)]
        await asyncio.gather(*(pair.push(ticket, [1, 0], ticket.block_ids) for ticket, _ in opened))
        for ticket, arrivals in opened:
            await arrivals.until(lambda a: len(a.verified) == 2)
            assert pair.received(ticket) == pair.sent(ticket.block_ids[::-1])


async def test_a_push_of_nothing_moves_nothing(path):
    async with path.pair(2) as pair:
        ticket, arrivals = pair.open([0])
        assert (await pair.push(ticket, [], [])).num_bytes == 0
        assert arrivals.events == []


async def test_a_block_with_another_digest_is_corrupt_and_can_be_sent_again(path):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([3, 1])
        digests = pair.source.digests([0, 2])
        await pair.sender.push(ticket, [0, 1], [0, 2], [digests[0], digests[1] ^ 1], 5.0)
        await arrivals.until(lambda a: a.corrupt == [1])
        assert arrivals.verified == {0}
        assert pair.num("kv_blocks_corrupt") == 1
        await pair.push(ticket, [1], [2])
        await arrivals.until(lambda a: a.verified == {0, 1})
        assert pair.received(ticket) == pair.sent([0, 2])


async def test_a_second_copy_of_a_verified_block_changes_nothing(path):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([3, 1])
        await pair.push(ticket, [0], [0])
        await arrivals.until(lambda a: a.verified == {0})
        await pair.push(ticket, [0], [2])  # other bytes with their right digest
        await pair.push(ticket, [0, 1], [2, 3])
        await arrivals.until(lambda a: a.verified == {0, 1})
        assert pair.received(ticket) == pair.sent([0, 3])
        assert pair.num("kv_blocks_duplicate") == 2
        assert [event.verified for event in arrivals.events] == [[0], [1]]


@pytest.mark.parametrize("field", ["ticket_id", "epoch", "attempt"])
async def test_a_frame_of_another_ticket_reservation_or_attempt_touches_nothing_and_is_counted(path, field):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        wrong = {"ticket_id": "other", "epoch": ticket.ref.epoch - 1, "attempt": 1}
        ref = TicketRef(**(msgspec.structs.asdict(ticket.ref) | {field: wrong[field]}))
        await pair.push(msgspec.structs.replace(ticket, ref=ref), [0, 1], [2, 3])
        await until(lambda: pair.num("kv_frames_stale") == 1)
        assert not any(pair.target.buffer)
        assert arrivals.events == []
        await pair.push(ticket, [0, 1], [2, 3])  # the connection is still good
        await arrivals.until(lambda a: a.verified == {0, 1})


@pytest.mark.parametrize("field", ["incarnation", "epoch"])
async def test_a_frame_of_a_ticket_that_this_boot_never_issued_ends_the_connection_with_a_reason(path, field, caplog):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        wrong = {"incarnation": "earlier boot", "epoch": ticket.ref.epoch + 1}
        ref = msgspec.structs.replace(ticket.ref, **{field: wrong[field]})
        with contextlib.suppress(TransferError):  # over a network the sender may be done before the receiver objects
            await pair.push(msgspec.structs.replace(ticket, ref=ref), [0, 1], [2, 3])
        await until(lambda: f"nobody here has issued {ref}" in caplog.text)
        await until(lambda: not getattr(pair.receiver, "connections", []))
        assert not any(pair.target.buffer)
        assert arrivals.events == []
        while pair.num("kv_bytes_received") == 0:  # over a new connection
            with contextlib.suppress(TransferError):
                await pair.push(ticket, [0, 1], [2, 3])
                await arrivals.until(lambda a: a.verified == {0, 1})
        assert pair.num("kv_frames_stale") == 0


async def test_the_slots_are_those_of_the_receivers_ticket_whatever_the_writers_ticket_says(path):
    async with path.pair(8) as pair:
        ticket, arrivals = pair.open([6, 7])
        await pair.push(msgspec.structs.replace(ticket, block_ids=[0, 1]), [0, 1], [2, 3])
        await arrivals.until(lambda a: a.verified == {0, 1})
        assert pair.received(ticket) == pair.sent([2, 3])
        assert not any(pair.target.buffer[: 6 * pair.target.block_bytes])


async def test_an_index_beyond_the_receivers_range_touches_nothing(path):
    async with path.pair(8) as pair:
        ticket, arrivals = pair.open([0])
        longer = msgspec.structs.replace(ticket, block_ids=[0, 1, 2])
        with contextlib.suppress(TransferError):  # over a network the sender may be done before the receiver objects
            await pair.push(longer, [0, 2], [3, 4])
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert arrivals.verified == set()
        assert not any(pair.target.buffer)


@pytest.mark.parametrize(
    ("indices", "block_ids", "num_digests"),
    [
        ([0, 0], [1, 2], 2),
        ([2], [1], 1),
        ([-1], [1], 1),
        ([0], [4], 1),
        ([0], [-1], 1),
        ([0, 1], [1], 2),
        ([0], [1], 0),
    ],
)
async def test_a_push_without_sense_is_refused_before_anything_is_sent(path, indices, block_ids, num_digests):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        with pytest.raises(ValueError, match=r"indices|blocks"):
            await pair.sender.push(ticket, indices, block_ids, [0] * num_digests, 5.0)
        assert arrivals.events == []


async def test_slots_cannot_be_under_two_tickets_at_once(path):
    async with path.pair(4) as pair:
        ticket, _ = pair.open([0, 1])
        with pytest.raises(InvalidTransition):
            pair.open([1, 2])
        await pair.receiver.close_ticket(ticket.ref)
        pair.open([1, 2])


async def test_nothing_arrives_under_a_closed_ticket(path):
    async with path.pair(4) as pair:
        ticket, arrivals = pair.open([0, 1])
        await pair.receiver.close_ticket(ticket.ref)
        await pair.receiver.close_ticket(ticket.ref)
        await pair.push(ticket, [0, 1], [2, 3])
        await until(lambda: pair.num("kv_frames_stale") == 1)
        assert not any(pair.target.buffer)
        assert arrivals.events == []


async def test_closing_a_ticket_waits_for_the_frame_that_is_just_coming(path):
    async with path.pair(4) as pair:
        ticket, _ = pair.open([0, 1, 2])
        async with path.writer_in_mid_frame(pair, ticket, [0, 1, 2]):
            closing = asyncio.ensure_future(pair.receiver.close_ticket(ticket.ref))
            await asyncio.sleep(GRACE_S / 4)
            assert not closing.done()
            with pytest.raises(InvalidTransition):
                pair.open([0])
            await closing


async def test_a_writer_that_stopped_in_mid_frame_delays_the_closing_by_the_grace_and_can_never_write_again(path):
    async with path.pair(6) as pair:
        ticket, arrivals = pair.open([3, 4, 5])
        async with path.writer_in_mid_frame(pair, ticket, [0, 1, 2]) as send_rest:
            started_s = time.monotonic()
            await pair.receiver.close_ticket(ticket.ref)
            assert GRACE_S * 0.9 < time.monotonic() - started_s < GRACE_S + 0.5
            num_events = len(arrivals.events)
            pair.target.buffer[:] = bytes(len(pair.target.buffer))
            await send_rest()
            await asyncio.sleep(0.02)
            assert not any(pair.target.buffer)
            assert len(arrivals.events) == num_events
        # Others are not hurt: the same slots, under the next ticket.
        after, arrivals = pair.open([3, 4, 5])
        await pair.push(after, [0, 1, 2], [3, 4, 5])
        await arrivals.until(lambda a: len(a.verified) == 3)


async def test_a_writer_that_goes_away_in_mid_frame_is_reported_and_what_it_finished_counts(path):
    async with path.pair(6) as pair:
        ticket, arrivals = pair.open([3, 4, 5])
        async with path.writer_in_mid_frame(pair, ticket, [0, 1, 2]):
            pass
        await arrivals.until(lambda a: a.num_stopped == 1)
        assert isinstance(arrivals.events[-1], WriterStopped)
        assert arrivals.verified <= path.whole_in_mid_frame
        assert arrivals.corrupt == []
        await pair.push(ticket, [0, 1, 2], [0, 1, 2])
        await arrivals.until(lambda a: len(a.verified) == 3)
        assert pair.received(ticket) == pair.sent([0, 1, 2])


async def test_two_writers_are_never_inside_one_slot(path):
    async with path.pair(6) as pair:
        ticket, arrivals = pair.open([3, 4, 5])
        async with path.writer_in_mid_frame(pair, ticket, [0, 1, 2]):
            await pair.push(ticket, [0, 1, 2], [3, 4, 5])
            await until(lambda: pair.num("kv_blocks_duplicate") == 3)
            pair.receiver.reception.permits.validate()
            assert arrivals.verified == set()


async def test_closing_the_receiver_lets_go_of_a_writer_in_mid_frame_at_once(path):
    async with path.pair(3) as pair:
        ticket, _ = pair.open([0, 1, 2])
        async with path.writer_in_mid_frame(pair, ticket, [0, 1, 2]) as send_rest:
            started_s = time.monotonic()
            await pair.receiver.close()
            assert time.monotonic() - started_s < 0.5
            before = bytes(pair.target.buffer)
            await send_rest()
            assert bytes(pair.target.buffer) == before


async def test_closing_the_sender_during_pushes_ends_them_all(path):
    async with path.pair(60) as pair:
        ticket, _ = pair.open(list(range(60)))
        pushes = [asyncio.ensure_future(pair.push(ticket, list(range(60)), list(range(60)))) for _ in range(8)]
        await asyncio.sleep(0)
        await pair.sender.close()
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert all(isinstance(result, TransferError) or result.num_bytes for result in results)
        with pytest.raises(TransferError):
            await pair.push(ticket, [0], [0])


async def test_closing_the_receiver_during_pushes_fails_them_or_lets_them_end(path):
    async with path.pair(60) as pair:
        ticket, arrivals = pair.open(list(range(60)))
        pushes = [asyncio.ensure_future(pair.push(ticket, list(range(60)), list(range(60)))) for _ in range(8)]
        await asyncio.sleep(0.002)
        await pair.receiver.close()
        num_events, before = len(arrivals.events), bytes(pair.target.buffer)
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert all(isinstance(result, TransferError) or result.num_bytes for result in results)
        assert len(arrivals.events) == num_events
        assert bytes(pair.target.buffer) == before


async def test_a_receiver_that_is_gone_is_an_error_and_not_a_wait(path):
    async with path.pair(4) as pair:
        ticket, _ = pair.open([0, 1])
        await pair.receiver.close()
        started_s = time.monotonic()
        with pytest.raises(TransferError):
            await pair.push(ticket, [0, 1], [2, 3])
        assert time.monotonic() - started_s < 1.0


async def test_a_ticket_without_an_address_of_this_path_is_an_error(path):
    async with path.pair(4) as pair:
        ticket, _ = pair.open([0])
        with pytest.raises(TransferError, match=path.name):
            await pair.push(msgspec.structs.replace(ticket, addresses=[]), [0], [1])


async def test_a_cancelled_push_no_longer_reads_our_blocks(path):
    async with path.pair(60) as pair:
        generator = random.Random(3)
        for _ in range(20):
            ticket, arrivals = pair.open(list(range(60)))
            blocks = list(range(60))
            wanted = pair.sent(blocks)
            push = asyncio.ensure_future(pair.push(ticket, blocks, blocks))
            await asyncio.sleep(generator.random() * 0.004)
            push.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await push
            pair.source.fill(generator)  # from here on a reader would send bytes that do not fit their digests
            await pair.push(pair.late_ticket([0]), [0], [0])  # goes by the same way, after all that was sent before
            await asyncio.sleep(0.001)
            await pair.receiver.close_ticket(ticket.ref)
            assert arrivals.corrupt == []
            received = pair.received(ticket)
            assert all(received[index] == wanted[index] for index in arrivals.verified)


async def test_a_late_write_never_lands_in_blocks_given_to_the_next_ticket(path):
    async with path.rough_pair(96) as pair:
        slots, others = list(range(48)), list(range(48, 96))
        for _ in range(200):
            first, first_arrivals = pair.open(slots)
            first_push = asyncio.ensure_future(pair.push(first, slots, slots))
            await first_arrivals.until(lambda a: len(a.verified) >= 24)
            await pair.receiver.close_ticket(first.ref)
            second, arrivals = pair.open(slots)
            second_push = asyncio.ensure_future(pair.push(second, slots, others))
            with contextlib.suppress(TransferError):  # the first writer may have been cut off, and the second with it
                await first_push
            with contextlib.suppress(TransferError):
                await second_push
            while missing := sorted(set(slots) - arrivals.verified):
                await pair.push(second, missing, [others[index] for index in missing])
                await asyncio.sleep(0.002)
            assert pair.received(second) == pair.sent(others)
            await pair.receiver.close_ticket(second.ref)
            assert pair.received(second) == pair.sent(others)
            assert first_arrivals.corrupt == arrivals.corrupt == []


async def test_pools_that_keep_other_kv_refuse_to_pair_naming_both_values(path):
    async with path.pair(4, sender_fingerprint=changed(FINGERPRINT, numerics="other numerics")) as pair:
        ticket, arrivals = pair.open([0])
        with pytest.raises(LayoutMismatch, match=r"'numerics'.*'other numerics'|'other numerics'.*'numerics'"):
            await pair.push(ticket, [0], [1])
        assert not any(pair.target.buffer)
        assert arrivals.events == []


def test_the_digest_is_xxh3_of_the_bytes():
    assert block_digest(memoryview(b"")) == 0x2D06800538D394C2
    assert block_digest(memoryview(bytes(1000))) != block_digest(memoryview(bytes(1001)))
