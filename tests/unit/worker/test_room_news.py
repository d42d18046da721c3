"""Watchers hear at once of room that somebody was refused for want of, and of nothing else."""

from __future__ import annotations

import asyncio

from pd_worker.outbox import Outbox, let_messages_out
from pd_worker.room_news import SHORTEST_GAP_S, RoomNews

LONG_S = 30.0


async def test_room_that_comes_after_a_refusal_ends_the_wait() -> None:
    news = RoomNews()
    waiting = asyncio.ensure_future(news.wait(news.mark(), LONG_S))
    await asyncio.sleep(2 * SHORTEST_GAP_S)
    news.refused()
    await asyncio.sleep(0)
    assert not waiting.done()
    news.freed()
    await asyncio.wait_for(waiting, 1.0)


async def test_room_that_nobody_was_refused_ends_no_wait() -> None:
    news = RoomNews()
    news.refused()
    news.freed()
    waiting = asyncio.ensure_future(news.wait(news.mark(), LONG_S))
    await asyncio.sleep(2 * SHORTEST_GAP_S)
    news.freed()
    await asyncio.sleep(2 * SHORTEST_GAP_S)
    assert not waiting.done()
    waiting.cancel()


async def test_news_between_the_look_and_the_wait_are_not_missed() -> None:
    news = RoomNews()
    mark = news.mark()
    news.refused()
    news.freed()
    await asyncio.wait_for(news.wait(mark, LONG_S), 1.0)


async def test_every_watcher_hears_of_it() -> None:
    news = RoomNews()
    waiting = [asyncio.ensure_future(news.wait(news.mark(), LONG_S)) for _ in range(3)]
    news.refused()
    news.freed()
    await asyncio.wait_for(asyncio.gather(*waiting), 1.0)


async def test_statuses_keep_their_distance_and_their_interval() -> None:
    news, loop = RoomNews(), asyncio.get_running_loop()
    mark, began_s = news.mark(), loop.time()
    news.refused()
    news.freed()
    await news.wait(mark, LONG_S)
    assert loop.time() - began_s >= SHORTEST_GAP_S
    for interval_s in (0.001, SHORTEST_GAP_S, 2 * SHORTEST_GAP_S):
        began_s = loop.time()
        await news.wait(news.mark(), interval_s)
        assert loop.time() - began_s >= interval_s


async def test_a_message_has_been_read_and_written_when_the_engine_gets_its_next_step() -> None:
    outbox, written = Outbox(), []

    async def reader() -> None:
        async for message in outbox:
            asyncio.get_running_loop().call_soon(written.append, message)  # as a connection flushes

    reading = asyncio.ensure_future(reader())
    await asyncio.sleep(0)
    for number in range(3):
        outbox.try_put(number)  # type: ignore[arg-type]
        await let_messages_out()
        assert written == list(range(number + 1))
    outbox.end(None)
    await reading
