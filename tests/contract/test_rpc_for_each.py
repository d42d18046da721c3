"""Streams whose items are handed over as they come, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from rpc_peers import QUICK, Count, Fail, Handlers, Hang, Number
from waiting import until

from pd_core.errors import DeadlineExceeded, Overloaded, ProtocolError, WorkerLost


class Taker:
    """Remembers what it was handed, and wants no more than `num_wanted`."""

    def __init__(self, num_wanted: int = 1 << 30) -> None:
        self.num_wanted = num_wanted
        self.indices: list[int] = []
        self.tasks: set[asyncio.Task | None] = set()

    def __call__(self, item: Number) -> bool:
        self.indices.append(item.index)
        self.tasks.add(asyncio.current_task())
        return len(self.indices) < self.num_wanted


async def test_every_item_is_handed_over_in_order_however_many_there_are(peers):
    _, address = await peers.server(Handlers())
    client = await peers.client(address)
    take = Taker()
    async with client.stream(Count(1000), deadline_s=10.0) as items:
        await items.for_each(take)
    assert take.indices == list(range(1000))
    assert client.num_calls == 0


async def test_no_task_is_woken_for_an_item_that_comes_while_it_waits(peers):
    _, address = await peers.server(Handlers())
    client = await peers.client(address)
    take = Taker()
    async with client.stream(Count(5, pause_s=0.01), deadline_s=10.0) as items:
        await items.for_each(take)
    assert take.tasks == {None}


async def test_when_no_more_is_wanted_the_rest_can_be_taken_otherwise(peers):
    _, address = await peers.server(Handlers())
    client = await peers.client(address)
    first, second = Taker(num_wanted=3), Taker(num_wanted=2)
    async with client.stream(Count(10), deadline_s=10.0) as items:
        await items.for_each(first)
        await items.for_each(second)
        rest = [item.index async for item in items]
    assert (first.indices, second.indices, rest) == ([0, 1, 2], [3, 4], [5, 6, 7, 8, 9])


async def test_leaving_early_cancels_the_call_and_nothing_more_is_handed_over(peers):
    handlers = Handlers()
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    take = Taker(num_wanted=3)
    async with client.stream(Count(1000, pause_s=0.01), deadline_s=10.0) as items:
        await items.for_each(take)
    await until(lambda: len(handlers.ended_at_s) == 1, within_s=1.0)
    assert take.indices == [0, 1, 2]


async def test_items_that_came_before_an_error_are_handed_over_first(peers):
    _, address = await peers.server(Handlers())
    client = await peers.client(address)
    take = Taker()
    with pytest.raises(Overloaded, match="no blocks left"):
        async with client.stream(Fail("overloaded"), deadline_s=10.0) as items:
            await items.for_each(take)
    assert take.indices == [0]


async def test_an_error_of_the_taker_is_raised_where_it_was_asked_to_take_and_the_connection_lives_on(peers):
    _, address = await peers.server(Handlers())
    client = await peers.client(address)

    def take(item: Number) -> bool:
        if item.index == 2:
            raise ZeroDivisionError("a fault of ours")
        return True

    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        async with client.stream(Count(10, pause_s=0.005), deadline_s=10.0) as items:
            await items.for_each(take)
    other = Taker()
    async with client.stream(Count(3), deadline_s=10.0) as items:
        await items.for_each(other)
    assert other.indices == [0, 1, 2]


async def test_an_answer_that_cannot_be_read_is_an_error_and_ends_the_call(peers):
    _, address = await peers.server(Handlers())
    client = await peers.client(address)
    with pytest.raises(ProtocolError, match="answer to Fail"):
        async with client.stream(Fail("says unknown"), deadline_s=10.0) as items:
            await items.for_each(Taker())
    await until(lambda: client.num_calls == 0)


async def test_who_is_cancelled_while_it_takes_is_handed_nothing_more(peers):
    handlers = Handlers()
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    take = Taker()

    async def read() -> None:
        async with client.stream(Count(1000, pause_s=0.005), deadline_s=10.0) as items:
            await items.for_each(take)

    task = asyncio.create_task(read())
    await until(lambda: len(take.indices) > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    num_taken = len(take.indices)
    await until(lambda: len(handlers.ended_at_s) == 1, within_s=1.0)
    assert len(take.indices) == num_taken


async def test_a_deadline_and_a_lost_connection_end_it_too(peers):
    server, address = await peers.server(Handlers(), limits=QUICK)
    client = await peers.client(address, limits=QUICK)
    with pytest.raises(DeadlineExceeded):
        async with client.stream(Hang(), deadline_s=0.05) as items:
            await items.for_each(Taker())

    async def cut() -> None:
        await asyncio.sleep(0.05)
        await server.close()

    cutting = asyncio.create_task(cut())
    with pytest.raises(WorkerLost):
        async with client.stream(Count(1000, pause_s=0.01), deadline_s=10.0) as items:
            await items.for_each(Taker())
    await cutting
