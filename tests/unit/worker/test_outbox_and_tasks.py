"""Streams to the router are bounded; background tasks are neither lost nor silent."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pd_core.errors import Cancelled, DeadlineExceeded, EngineError
from pd_core.messages import TokenMade
from pd_rpc.tasks import BackgroundTasks, finish_regardless
from pd_worker.counters import COUNTER_NAMES, Counters
from pd_worker.outbox import Outbox


async def read_all(outbox: Outbox) -> list[object]:
    return [item async for item in outbox]


async def test_items_come_in_order_and_then_the_end() -> None:
    outbox = Outbox()
    reading = asyncio.ensure_future(read_all(outbox))
    items = [TokenMade(index, index) for index in range(3)]
    for item in items:
        assert outbox.try_put(item) is None
        await asyncio.sleep(0)
    outbox.end(None)
    assert await reading == items


async def test_what_was_put_in_before_an_error_is_given_first() -> None:
    outbox = Outbox()
    outbox.try_put(TokenMade(0, 1))
    outbox.end(EngineError("broke"))
    assert await anext(outbox) == TokenMade(0, 1)
    with pytest.raises(EngineError, match="broke"):
        await anext(outbox)


async def test_the_first_end_counts() -> None:
    outbox = Outbox()
    outbox.end(None)
    outbox.end(Cancelled("too late"))
    assert await read_all(outbox) == []


async def test_a_reader_that_is_too_far_behind_is_noticed() -> None:
    outbox = Outbox(max_items=2)
    assert outbox.try_put(TokenMade(0, 0)) is None
    assert outbox.try_put(TokenMade(1, 0)) is None
    assert isinstance(outbox.try_put(TokenMade(2, 0)), DeadlineExceeded)
    assert await anext(outbox) == TokenMade(0, 0)
    assert outbox.try_put(TokenMade(2, 0)) is None


async def test_closing_cancels_tasks_and_waits_for_their_end() -> None:
    tasks, ended = BackgroundTasks(), []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    tasks.start(work("a"), "a")
    tasks.start(work("b"), "b")
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(ended) == ["a", "b"]


async def test_a_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()

    async def fail() -> None:
        raise ZeroDivisionError("oops")

    with caplog.at_level(logging.ERROR):
        await asyncio.wait([tasks.start(fail(), "broken")])
        await asyncio.sleep(0)
    assert "task broken failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_work_of_another_thread_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(finish_regardless(future))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    future.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_its_result_and_its_error_come_through() -> None:
    loop = asyncio.get_running_loop()
    right, wrong = loop.create_future(), loop.create_future()
    right.set_result(1)
    wrong.set_exception(EngineError("broke"))
    assert await finish_regardless(right) == 1
    with pytest.raises(EngineError):
        await finish_regardless(wrong)


def test_counters_know_their_names_and_no_others() -> None:
    counters = Counters()
    counters.add("steps_total")
    counters.add("kv_bytes_sent_total", 256)
    assert counters.values() == dict.fromkeys(COUNTER_NAMES, 0.0) | {"steps_total": 1, "kv_bytes_sent_total": 256}
    with pytest.raises(KeyError):
        counters.add("step_total")
