"""Calls and streams over real sockets."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time

import msgspec
import pytest
from rpc_peers import (
    DECODE,
    QUICK,
    REPLIES,
    ROUTER,
    SECRET,
    Count,
    Echo,
    Fail,
    Handlers,
    Hang,
    Number,
    Unheard,
)
from waiting import until

from pd_core.errors import (
    Cancelled,
    DeadlineExceeded,
    KvrelayError,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    WorkerLost,
)
from pd_rpc.limits import RpcLimits
from pd_rpc.server import RpcServer
from pd_rpc.wire import PeerIdentity


async def test_a_call_gets_its_answer_and_the_handler_knows_the_caller(peers, handlers):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    assert client.peer == DECODE
    assert await client.call(Echo("hello"), deadline_s=2.0) == Echo("hello")
    (context,) = handlers.contexts
    assert context.peer == ROUTER
    assert 0 < context.remaining_s < context.deadline_s <= 2.0
    assert (server.num_connections, client.num_calls) == (1, 0)


async def test_a_stream_gives_its_items_in_order_and_ends(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    async with client.stream(Count(1000), deadline_s=10.0) as items:
        assert [item.index async for item in items] == list(range(1000))
    assert [item async for item in client.stream(Count(0), deadline_s=10.0)] == []


async def test_a_thousand_calls_at_once_get_their_own_answers(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    answers = await asyncio.gather(*(client.call(Echo(str(n)), deadline_s=10.0) for n in range(1000)))
    assert [answer.text for answer in answers] == [str(n) for n in range(1000)]
    assert client.num_calls == 0


async def test_two_peers_stream_to_each_other_at_the_same_time(peers):
    here, there = Handlers(), Handlers()
    _, address_here = await peers.server(here, identity=ROUTER)
    _, address_there = await peers.server(there)
    from_there = await peers.client(address_there)
    from_here = await peers.client(address_here, identity=DECODE)

    async def indices(client):
        return [item.index async for item in client.stream(Count(300, item_bytes=50_000), deadline_s=20.0)]

    assert await asyncio.gather(indices(from_there), indices(from_here)) == [list(range(300))] * 2


async def test_a_consumer_that_takes_nothing_holds_up_its_own_handler_and_nobody_else(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address, limits=RpcLimits(stream_credit=4))
    async with client.stream(Count(1000, item_bytes=1_000_000), deadline_s=20.0) as slow:
        assert (await anext(slow)).index == 0
        await until(lambda: handlers.num_made >= 5)
        assert [item.index async for item in client.stream(Count(300), deadline_s=10.0)] == list(range(300))
        assert await client.call(Echo("still here"), deadline_s=2.0) == Echo("still here")
        made_for_slow = handlers.num_made - 300
        assert made_for_slow <= 6  # 4 granted, 1 yielded and waiting, 1 for the item that was taken
        assert [(await anext(slow)).index for _ in range(20)] == list(range(1, 21))
    await until(lambda: len(handlers.ended_at_s) == 2)


async def test_a_caller_that_takes_nothing_for_too_long_is_given_up(peers, handlers):
    _, address = await peers.server(handlers, limits=QUICK)
    client = await peers.client(address)
    stream = client.stream(Count(1000), deadline_s=20.0)
    assert (await anext(stream)).index == 0
    await until(lambda: handlers.ended_at_s)
    with pytest.raises(DeadlineExceeded, match=r"took no item for 0.3 s"):
        [item async for item in stream]


# the end of a handler


async def ended_after_s(handlers, stop) -> float:
    """How long after `stop` the handler's `finally` block ran."""
    num_before, began_s = len(handlers.ended_at_s), time.monotonic()
    await stop()
    await until(lambda: len(handlers.ended_at_s) > num_before)
    return handlers.ended_at_s[-1] - began_s


@pytest.mark.parametrize(
    "body", [Hang(), Count(10**6, pause_s=0.001), Count(10**6)], ids=["waits", "streams", "has no credit"]
)
async def test_cancelling_ends_the_handler_within_a_tenth_of_a_second(peers, handlers, body):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    took_s = []
    for _ in range(5):
        stream = await client.stream(body, deadline_s=30.0).__aenter__()
        await until(lambda: server.num_calls == 1)
        took_s.append(await ended_after_s(handlers, stream.cancel))
        with pytest.raises(Cancelled):
            await anext(stream)
        await until(lambda: client.num_calls == server.num_calls == 0)
    assert statistics.median(took_s) < 0.1


async def test_a_call_is_over_only_when_its_handler_has_tidied_up(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    async with client.stream(Count(10**6, tidy_s=0.1), deadline_s=30.0) as items:  # waits for credit at its `yield`
        await anext(items)
        await until(lambda: handlers.num_made > client._core.limits.stream_credit)
    assert client.num_calls == 1
    await until(lambda: client.num_calls == 0)
    assert handlers.ended_at_s


async def test_leaving_the_block_early_ends_the_handler(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    async with client.stream(Count(10**6, pause_s=0.001), deadline_s=30.0) as items:
        async for item in items:
            if item.index == 3:
                break
    await until(lambda: handlers.ended_at_s)


async def test_a_caller_whose_task_is_cancelled_ends_the_handler(peers, handlers):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    task = asyncio.create_task(client.call(Hang(), deadline_s=30.0))
    await until(lambda: server.num_calls == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: handlers.ended_at_s and client.num_calls == 0)


async def test_a_caller_that_leaves_ends_its_handlers(peers, handlers):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    calls = [asyncio.create_task(client.call(Hang(), deadline_s=30.0)) for _ in range(10)]
    await until(lambda: server.num_calls == 10)
    took_s = await ended_after_s(handlers, client.close)
    assert took_s < 0.5
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {WorkerLost}
    await until(lambda: server.num_calls == server.num_connections == 0)
    assert len(handlers.ended_at_s) == 10


async def test_a_call_ends_at_its_deadline_on_both_sides(peers, handlers):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"Hang to decode 'decode-0' took longer than 0.2 s"):
        await client.call(Hang(), deadline_s=0.2)
    assert 0.19 < time.monotonic() - began_s < 1.0
    await until(lambda: handlers.ended_at_s and server.num_calls == 0)
    with pytest.raises(DeadlineExceeded):
        await client.call(Echo("too late"), deadline_s=-0.5)
    assert handlers.contexts == []
    with pytest.raises(ValueError, match="deadline of nan"):
        await client.call(Echo("when?"), deadline_s=float("nan"))


async def test_items_that_came_before_the_deadline_are_given_before_its_error(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    stream = client.stream(Count(3, pause_s=0.2), deadline_s=0.3)
    await anext(stream)
    await asyncio.sleep(0.4)
    assert (await anext(stream)).index == 1
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


# errors


async def test_an_error_of_ours_arrives_as_it_was_after_the_items_before_it(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    received = []
    with pytest.raises(Overloaded, match="no blocks left") as raised:
        async for item in client.stream(Fail("overloaded"), deadline_s=2.0):
            received.append(item)
    assert received == [Number(0)]
    assert raised.value.retry_after_s == 3.0


@pytest.mark.parametrize("how", ["bug", "timeout of its own"])
async def test_any_other_error_is_logged_there_and_told_without_details(peers, handlers, caplog, how):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    with caplog.at_level(logging.ERROR), pytest.raises(KvrelayError) as raised:
        await client.call(Fail(how), deadline_s=2.0)
    assert type(raised.value) is KvrelayError
    assert raised.value.message == "internal error in Fail; see the log of decode 'decode-0'"
    assert "the password is 1234" in caplog.text or "the disk" in caplog.text
    assert await client.call(Echo("alive"), deadline_s=2.0) == Echo("alive")


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (Unheard(), ProtocolError, "unheard"),
        (Fail("says nothing"), ProtocolError, "no answer to Fail"),
        (Fail("says too much"), ProtocolError, "more than one answer to Fail"),
        (Fail("says unknown"), ProtocolError, "answer to Fail"),
        (Fail("too long"), KvrelayError, "a frame holds"),
        (Echo("x" * 17_000_000), PayloadTooLarge, "a frame holds"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_fault_in_one_call_fails_that_call_alone(peers, handlers, body, error, words):
    server, address = await peers.server(handlers)
    client = await peers.client(address)
    async with client.stream(Count(50, pause_s=0.002), deadline_s=10.0) as other:
        with pytest.raises(error, match=words):
            await client.call(body, deadline_s=2.0)
        assert len([item async for item in other]) == 50
    await until(lambda: client.num_calls == server.num_calls == 0)


async def test_a_body_that_does_not_fit_its_type_fails_that_call_alone(peers, handlers):
    class WrongEcho(Echo, tag="echo"):
        text: int  # type: ignore[assignment]

    _, address = await peers.server(handlers)
    client = await peers.client(address)
    with pytest.raises(ProtocolError, match="Expected `str`, got `int`"):
        await client.call(WrongEcho(7), deadline_s=2.0)
    assert await client.call(Echo("alive"), deadline_s=2.0) == Echo("alive")


async def test_calls_beyond_the_bound_are_refused_and_the_others_go_on(peers, handlers):
    server, address = await peers.server(handlers, limits=RpcLimits(max_calls=3))
    client = await peers.client(address)
    hanging = [asyncio.create_task(client.call(Hang(), deadline_s=30.0)) for _ in range(3)]
    await until(lambda: server.num_calls == 3)
    with pytest.raises(Overloaded, match="3 calls are open"):
        await client.call(Echo("one more"), deadline_s=2.0)
    hanging[0].cancel()
    await until(lambda: server.num_calls == 2)
    assert await client.call(Echo("now"), deadline_s=2.0) == Echo("now")
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


def test_a_handler_table_that_cannot_work_is_refused(handlers):
    class Untagged(msgspec.Struct):
        pass

    async def no_generator(body, context):
        return body

    with pytest.raises(TypeError, match="has no tag"):
        RpcServer(DECODE, SECRET, {Untagged: handlers.echo})
    with pytest.raises(TypeError, match="must be an async generator"):
        RpcServer(DECODE, SECRET, {Echo: no_generator})


async def test_a_stream_has_one_consumer(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    async with client.stream(Hang(), deadline_s=10.0) as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two consumers"):
            await anext(stream)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_replies_may_be_a_union_or_one_type(peers, handlers):
    _, address = await peers.server(handlers)
    for replies in (Echo | Number, Echo, (Echo,), REPLIES):
        client = await peers.client(address, replies=replies, identity=PeerIdentity("x", "router", "1"))
        assert await client.call(Echo("hi"), deadline_s=2.0) == Echo("hi")


async def test_a_call_on_loopback_takes_well_under_a_millisecond(peers, handlers):
    _, address = await peers.server(handlers)
    client = await peers.client(address)
    took_s = []
    for _ in range(300):
        began_s = time.perf_counter()
        await client.call(Echo("x"), deadline_s=5.0)
        took_s.append(time.perf_counter() - began_s)
    assert statistics.median(took_s) < 0.001
