"""A ring between a device's pool and transports: who waits for what, and what is reused when. The device is a memory
whose copies end when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import pytest_asyncio
from late_copies import HeldCopies, MemoryCopies
from waiting import until

from kv_transport.digest import block_digest
from kv_transport.interface import BlocksArrived, ReceiverEvent, WriterStopped
from kv_transport.reception import Reception
from pd_core.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidTransition,
    ProtocolError,
    StaleTicket,
    TransferError,
)
from pd_core.ticket import Ticket, TicketRef
from pd_engine.scratch import ScratchMemory
from pd_worker import ring_blocks
from pd_worker.device_ring import DeviceRing
from pd_worker.ring_blocks import RingBlocks
from pd_worker.ring_landing import RingLanding

BLOCK_BYTES = 64
NUM_BLOCKS = 12
ROOM_S = 0.2


def content(number: int) -> bytes:
    return bytes([number % 256]) * BLOCK_BYTES


class Bench:
    """A device with a pool of numbered blocks, and a ring of `num_slots` slots beside it."""

    def __init__(self, num_slots: int) -> None:
        self.device = ScratchMemory(NUM_BLOCKS, BLOCK_BYTES)
        for block_id in range(NUM_BLOCKS):
            self.device.block(block_id)[:] = content(block_id)
        self.memory = ScratchMemory(num_slots, BLOCK_BYTES)
        self.moved = MemoryCopies(self.device, self.memory)
        self.copies = HeldCopies(self.moved)
        self.ring = DeviceRing(self.memory, self.copies, NUM_BLOCKS, room_s=ROOM_S)
        self.blocks = RingBlocks(self.ring)
        self.landing = RingLanding(self.ring)
        self.failures: list[EngineError] = []
        self.ring.start(self.failures.append)

    @property
    def num_free(self) -> int:
        return self.ring.slots.num_free

    def in_memory(self, slots: list[int]) -> list[bytes]:
        return [bytes(self.memory.block(slot)) for slot in slots]

    async def until_copying(self, num_copies: int = 1) -> None:
        await until(lambda: self.copies.num_waiting == num_copies)


@contextmanager
def bench_of(num_slots: int) -> Iterator[Bench]:
    bench = Bench(num_slots)
    yield bench
    bench.copies.go_on(100)
    bench.ring.close()
    assert bench.moved.is_closed


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Bench]:
    with bench_of(2) as bench:
        yield bench


@pytest_asyncio.fixture
async def four() -> AsyncIterator[Bench]:
    with bench_of(4) as bench:
        yield bench


# outward


async def test_blocks_are_shown_when_the_device_has_copied_them_and_not_before(four: Bench) -> None:
    shown = four.blocks.shown([7, 3], 1.0)
    entering = asyncio.ensure_future(shown.__aenter__())
    await four.until_copying()
    await asyncio.sleep(0.02)
    assert not entering.done()
    four.copies.go_on()
    assert four.in_memory(list(await entering)) == [content(7), content(3)]
    assert four.num_free == 2
    await shown.__aexit__(None, None, None)
    assert four.num_free == 4


async def test_while_one_part_is_shown_the_device_copies_the_next(four: Bench) -> None:
    four.copies.go_on()
    async with four.blocks.shown([1, 2], 1.0) as first:
        second = four.blocks.shown([5, 6], 1.0)
        entering = asyncio.ensure_future(second.__aenter__())
        await four.until_copying()
        four.copies.go_on()
        assert four.in_memory(list(await entering)) == [content(5), content(6)]
        assert four.in_memory(list(first)) == [content(1), content(2)], "the first part is where it was"
        await second.__aexit__(None, None, None)
    assert four.num_free == 4


async def test_who_waits_for_slots_has_them_when_a_part_has_been_sent(two: Bench) -> None:
    two.copies.go_on(2)
    async with two.blocks.shown([1, 2], 1.0):
        second = asyncio.ensure_future(two.blocks.shown([3], 1.0).__aenter__())
        await asyncio.sleep(0.02)
        assert not second.done()
    assert two.in_memory(list(await second)) == [content(3)]


async def test_who_waits_too_long_for_slots_is_told_so_and_those_behind_have_their_turn(two: Bench) -> None:
    two.copies.go_on(2)
    async with two.blocks.shown([1], 1.0):
        behind: asyncio.Future[object] | None = None
        waits = asyncio.ensure_future(two.blocks.shown([2, 3], 0.05).__aenter__())
        await asyncio.sleep(0.01)
        behind = asyncio.ensure_future(two.blocks.shown([4], 1.0).__aenter__())
        with pytest.raises(DeadlineExceeded, match=r"2 slots were not free within 0\.05 s"):
            await waits
        assert two.in_memory(list(await behind)) == [content(4)]


async def test_who_is_cancelled_while_it_waits_for_slots_takes_none(two: Bench) -> None:
    two.copies.go_on()
    async with two.blocks.shown([1, 2], 1.0):
        waits = asyncio.ensure_future(two.blocks.shown([3], 1.0).__aenter__())
        await asyncio.sleep(0.01)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
    assert (two.num_free, two.ring.slots.num_waiting) == (2, 0)


async def test_who_is_cancelled_in_mid_copy_returns_when_the_device_has_left_its_block(two: Bench) -> None:
    entering = asyncio.ensure_future(two.blocks.shown([5], 1.0).__aenter__())
    await two.until_copying()
    for _ in range(3):
        entering.cancel()
        await asyncio.sleep(0.01)
    assert not entering.done(), "the device still reads block 5, which others would be given now"
    two.copies.go_on()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert two.num_free == 2


async def test_a_device_that_hangs_fails_the_push_and_the_boot_and_its_slot_is_nobodys(
    two: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_blocks, "COPY_S", 0.05)
    with pytest.raises(EngineError, match=r"no copy from the device within 0\.05 s"):
        await two.blocks.shown([5], 1.0).__aenter__()
    assert len(two.failures) == 1
    assert (two.num_free, two.ring.slots.busy()) == (1, {5: 1})
    two.copies.go_on()
    await until(lambda: two.num_free == 2)


async def test_a_device_that_fails_is_told_once_and_what_it_was_copying_is_never_used_again(four: Bench) -> None:
    first = asyncio.ensure_future(four.blocks.shown([5], 1.0).__aenter__())
    second = asyncio.ensure_future(four.blocks.shown([6, 7], 1.0).__aenter__())
    await four.until_copying()
    four.copies.fail(RuntimeError("an illegal memory access"))
    for failed in (first, second):
        with pytest.raises(EngineError, match="failed to copy blocks: an illegal memory access"):
            await failed
    assert [error.message for error in four.failures] == ["the device failed to copy blocks: an illegal memory access"]
    assert four.num_free == 1
    with pytest.raises(EngineError, match="illegal memory access"):
        await four.blocks.shown([8], 1.0).__aenter__()


# inward: a reception whose landing is the ring


class Writer:
    path = "test"

    def __init__(self) -> None:
        self.cuts: list[str] = []

    def cut(self, reason: str) -> None:
        self.cuts.append(reason)


class Receiving:
    """A ticket for `block_ids` of the bench's device, and somebody who writes."""

    def __init__(self, bench: Bench, block_ids: list[int], epoch: int = 1) -> None:
        self.bench = bench
        self.events: list[ReceiverEvent] = []
        self.writer = Writer()
        self.ref = TicketRef(f"t{epoch}", "boot", epoch, 1)
        self.ticket = Ticket(self.ref, "r", 0, block_ids, 3.0, "h", 1, [], most_frame_blocks=2)
        self.reception = Reception(bench.memory, bench.landing, asyncio.get_running_loop(), 0.05, 1.0)

    def open(self) -> Receiving:
        self.reception.open_ticket(self.ticket, self.events.append)
        return self

    def begin(self, *indices: int):
        digests = [block_digest(memoryview(content(100 + index))) for index in indices]
        return self.reception.begin_frame(self.ref, list(indices), digests, self.writer)

    def write(self, frame, *, wrong: tuple[int, ...] = ()) -> None:
        for index, slot in zip(frame.indices, frame.slots, strict=True):
            if slot is not None:
                self.bench.memory.block(slot)[:] = content(100 + index + (index in wrong))

    @property
    def verified(self) -> list[int]:
        return [index for event in self.events if isinstance(event, BlocksArrived) for index in event.verified]


async def test_blocks_count_as_arrived_when_the_device_has_them(four: Bench) -> None:
    receiving = Receiving(four, [7, 3]).open()
    frame = receiving.begin(0, 1)
    receiving.write(frame)
    receiving.reception.end_frame(frame, 2)
    await four.until_copying()
    await asyncio.sleep(0.02)
    assert receiving.events == []
    assert bytes(four.device.block(7)) == content(7)
    four.copies.go_on()
    await until(lambda: receiving.verified == [0, 1])
    assert [bytes(four.device.block(block_id)) for block_id in (7, 3)] == [content(100), content(101)]
    assert four.num_free == 4


async def test_a_block_that_came_wrong_never_reaches_the_device(four: Bench) -> None:
    receiving = Receiving(four, [7, 3]).open()
    frame = receiving.begin(0, 1)
    receiving.write(frame, wrong=(1,))
    four.copies.go_on()
    receiving.reception.end_frame(frame, 2)
    await until(lambda: receiving.events)
    [event] = receiving.events
    assert isinstance(event, BlocksArrived)
    assert (event.verified, event.corrupt) == ([0], [1])
    assert bytes(four.device.block(3)) == content(3)
    assert four.num_free == 4


async def test_a_frame_that_brings_nothing_right_costs_no_copy(four: Bench) -> None:
    receiving = Receiving(four, [7, 3]).open()
    receiving.reception.end_frame(receiving.begin(0, 1), 0)
    frame = receiving.begin(1)
    receiving.write(frame, wrong=(1,))
    receiving.reception.end_frame(frame, 1)
    await until(lambda: receiving.events)
    assert (four.num_free, four.moved.num_in) == (4, 0)


async def test_a_ticket_that_is_closed_in_mid_copy_is_left_when_the_copy_has_ended(four: Bench) -> None:
    receiving = Receiving(four, [7, 3]).open()
    frame = receiving.begin(0, 1)
    receiving.write(frame)
    receiving.reception.end_frame(frame, 2)
    await four.until_copying()
    closing = asyncio.ensure_future(receiving.reception.close_ticket(receiving.ref))
    await asyncio.sleep(0.03)
    assert not closing.done()
    with pytest.raises(InvalidTransition, match=r"slots \[3\] are under another permit"):
        receiving.reception.permits.open_permit(TicketRef("t2", "boot", 2, 1), [3, 4], needs_digests=True)
    four.copies.go_on()
    await closing
    assert receiving.events == [], "nobody waits for its blocks any more"
    receiving.reception.permits.open_permit(TicketRef("t2", "boot", 2, 1), [3, 4], needs_digests=True)
    assert four.num_free == 4


async def test_a_device_that_does_not_come_back_keeps_the_blocks_of_a_closed_ticket(four: Bench) -> None:
    receiving = Receiving(four, [7]).open()
    frame = receiving.begin(0)
    receiving.write(frame)
    receiving.reception.end_frame(frame, 1)
    await four.until_copying()
    four.copies.fail(RuntimeError("gone"))
    await until(lambda: four.failures)
    with pytest.raises(TransferError, match="still inside the blocks"):
        await receiving.reception.close_ticket(receiving.ref)
    assert receiving.events == []


async def test_a_writer_waits_for_slots_until_the_device_has_copied_others(two: Bench) -> None:
    receiving = Receiving(two, [1, 2, 3, 4]).open()
    frame = receiving.begin(0)
    second = receiving.begin(1)
    receiving.write(frame)
    receiving.reception.end_frame(frame, 1)
    waits = asyncio.ensure_future(asyncio.to_thread(receiving.begin, 2))
    await two.until_copying()
    await asyncio.sleep(0.02)
    assert not waits.done()
    two.copies.go_on(2)
    third = await waits
    assert third.slots == frame.slots, "the slot that the copy has left"
    for open_frame in (second, third):
        receiving.reception.end_frame(open_frame, 0)
    assert two.num_free == 2


async def test_a_writer_that_finds_no_slot_in_time_has_to_come_again(two: Bench) -> None:
    receiving = Receiving(two, [1, 2, 3, 4]).open()
    frames = [receiving.begin(0), receiving.begin(1)]
    with pytest.raises(TransferError, match=r"1 of 2 slots were not free within 0\.2 s"):
        await asyncio.to_thread(receiving.begin, 2)
    await until(lambda: receiving.events)
    assert isinstance(receiving.events[0], WriterStopped)
    for frame in frames:
        receiving.reception.end_frame(frame, 0)
    again = receiving.begin(2)
    assert again.slots != [None], "its block is not taken for one that somebody is writing"
    receiving.reception.end_frame(again, 0)
    receiving.reception.permits.validate()


async def test_a_writer_that_waits_for_slots_goes_when_its_ticket_is_closed(two: Bench) -> None:
    first, second = Receiving(two, [1, 2]).open(), Receiving(two, [3], epoch=2)
    second.reception = first.reception
    second.open()
    frames = [first.begin(0), first.begin(1)]
    two.ring._room_s = 5.0
    waits = asyncio.ensure_future(asyncio.to_thread(second.begin, 0))
    await until(lambda: two.ring.slots.num_waiting == 1)
    async with asyncio.timeout(1.0):
        await first.reception.close_ticket(second.ref)
        with pytest.raises(StaleTicket):
            await waits
    assert first.reception.counters()["kv_frames_stale"] == 1
    assert second.writer.cuts == []
    for frame in frames:
        first.reception.end_frame(frame, 0)
    assert (two.num_free, two.ring.slots.num_waiting) == (2, 0)


async def test_a_frame_of_more_blocks_than_the_ticket_allows_is_no_frame(four: Bench) -> None:
    receiving = Receiving(four, [1, 2, 3]).open()
    assert four.landing.most_frame_blocks == 2
    with pytest.raises(ProtocolError, match="a frame of 3 blocks, and the ticket allows 2"):
        receiving.begin(0, 1, 2)
    assert receiving.reception.permits.writers_inside(receiving.ref) == []
    assert four.num_free == 4


async def test_what_came_before_and_comes_again_needs_no_slot(two: Bench) -> None:
    receiving = Receiving(two, [7, 3]).open()
    two.copies.go_on()
    frame = receiving.begin(0)
    receiving.write(frame)
    receiving.reception.end_frame(frame, 1)
    await until(lambda: receiving.verified == [0])
    again = receiving.begin(0)
    assert again.slots == [None]
    assert two.num_free == 2
    receiving.reception.end_frame(again, 1)
    assert receiving.reception.counters()["kv_blocks_duplicate"] == 1


async def test_a_ring_that_is_closed_in_mid_copy_waits_for_the_device() -> None:
    with bench_of(2) as bench:
        receiving = Receiving(bench, [7]).open()
        frame = receiving.begin(0)
        receiving.write(frame)
        receiving.reception.end_frame(frame, 1)
        await bench.until_copying()
        with pytest.raises(EngineError, match=r"still copying blocks after 0\.05 s"):
            bench.ring.close(0.05)
        assert not bench.moved.is_closed
        bench.copies.go_on()
        bench.ring.close()
    await until(lambda: receiving.verified == [0])
