"""What the client sees when a worker fails, and that nothing is left of its request. Known faults 6, 7, 8 and 16."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec
import openai
import pytest
from scripted_worker import (
    COMMITTED,
    DONE,
    ScriptedWorker,
    Stage,
    chat,
    expected_text,
    granted,
    made,
    stage,
    until,
)

from pd_core.config import RouterConfig
from pd_core.errors import ContextLengthExceeded, EngineError, InvalidRequest, KvrelayError, Overloaded, TransferError
from pd_core.messages import LeaseHeld, StartDecode, StartPrefill, TokenMade

Messages = AsyncIterator[msgspec.Struct]
BAD = InvalidRequest("decode does not like it", param="messages")
BROKEN = EngineError("decode broke")


def crash(worker: ScriptedWorker) -> None:
    worker.crash()


def fall_silent(worker: ScriptedWorker) -> None:
    worker.speaks.clear()


def raise_it(error: KvrelayError) -> Callable[[ScriptedWorker], None]:
    def fail(_: ScriptedWorker) -> None:
        raise error

    return fail


def decode_that_fails(on: Stage, num_tokens: int, fail: Callable[[ScriptedWorker], None]) -> None:
    """After so many tokens; before the ticket with -1, with 0 after it."""

    async def decode(body: StartDecode) -> Messages:
        if num_tokens >= 0:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
        for index in range(num_tokens):
            yield made(body.request, index)
        if num_tokens > 0:
            yield COMMITTED
        await asyncio.sleep(0.05)  # what was said is on its way
        fail(on.d0)
        await asyncio.sleep(3600)
        yield COMMITTED

    async def prefill(body: StartPrefill) -> Messages:
        on.handoffs.drawn(body.request.request_id).set()
        if num_tokens > 0:
            yield made(body.request, 0)
            yield DONE
        else:
            await asyncio.sleep(3600)
            yield DONE

    on.d0.script, on.p0.script = decode, prefill


def prefill_that_fails(on: Stage, num_tokens: int, fail: Callable[[ScriptedWorker], None]) -> None:
    """Before its token (0) or after it (1), but never with a commit."""

    async def prefill(body: StartPrefill) -> Messages:
        if num_tokens:
            yield made(body.request, 0)
            await asyncio.sleep(0.05)
        fail(on.p0)
        await asyncio.sleep(3600)
        yield DONE

    on.p0.script = prefill


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("which", "num_tokens", "fail", "status"),
    [
        (decode_that_fails, -1, raise_it(BAD), 400),
        (decode_that_fails, -1, raise_it(BROKEN), 500),
        (decode_that_fails, 0, raise_it(BAD), 400),
        (decode_that_fails, 0, raise_it(BROKEN), 500),
        (decode_that_fails, -1, crash, 503),
        (decode_that_fails, 0, crash, 503),
        (decode_that_fails, -1, fall_silent, 503),
        (decode_that_fails, 0, fall_silent, 503),
        (prefill_that_fails, 0, raise_it(BROKEN), 500),
        (prefill_that_fails, 0, raise_it(TransferError("no path")), 503),
        (prefill_that_fails, 0, crash, 503),
        (prefill_that_fails, 0, fall_silent, 503),
    ],
)
async def test_a_failure_before_the_first_token_has_its_true_status(
    which: Callable[..., None],
    num_tokens: int,
    fail: Callable[[ScriptedWorker], None],
    status: int,
    is_stream: bool,
) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        which(on, num_tokens, fail)
        began_s = time.monotonic()
        reply = await client.post("/v1/chat/completions", json=chat("x", stream=is_stream))
        assert time.monotonic() - began_s < 2.0
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert reply.headers["content-type"] == "application/json"
        assert ("retry-after" in reply.headers) == (status == 503 and "path" not in reply.text)
        await until(on.is_idle)


@pytest.mark.parametrize(
    ("which", "num_tokens", "fail", "code"),
    [
        (decode_that_fails, 5, raise_it(BROKEN), "engine_error"),
        (decode_that_fails, 5, crash, "worker_lost"),
        (decode_that_fails, 5, fall_silent, "worker_lost"),
        (prefill_that_fails, 1, raise_it(BROKEN), "engine_error"),
        (prefill_that_fails, 1, crash, "worker_lost"),
        (prefill_that_fails, 1, fall_silent, "worker_lost"),
    ],
)
async def test_a_failure_after_the_first_token_is_an_error_event_and_never_a_clean_end(
    which: Callable[..., None], num_tokens: int, fail: Callable[[ScriptedWorker], None], code: str
) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        which(on, num_tokens, fail)
        began_s = time.monotonic()
        reply = await client.post("/v1/chat/completions", json=chat("x", stream=True))
        assert time.monotonic() - began_s < 2.0
        assert reply.status_code == 200
        assert "[DONE]" not in reply.text
        assert '"finish_reason":"' not in reply.text
        *chunks, last = reply.text.removesuffix("\n\n").split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
        text = "".join(json.loads(c.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for c in chunks)
        assert text == expected_text("x", num_tokens)
        await until(on.is_idle)


async def test_the_official_client_raises_for_an_error_event() -> None:
    async with stage() as on:
        decode_that_fails(on, 5, raise_it(BROKEN))
        client = openai.AsyncOpenAI(base_url=f"{on.url}/v1", api_key="none", max_retries=0)
        message = {"role": "user", "content": "x"}
        stream = await client.chat.completions.create(model="fake", messages=[message], stream=True)
        with pytest.raises(openai.APIError, match="decode broke"):
            async for _ in stream:
                pass
        await client.close()


async def test_without_streaming_a_late_failure_is_a_plain_error() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        decode_that_fails(on, 5, crash)
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")


async def test_two_copies_of_a_token_that_differ_are_an_error_not_a_guess() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def decode(body: StartDecode) -> Messages:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            await asyncio.sleep(0.05)
            yield TokenMade(0, (made(body.request, 0).token + 1) % 95)
            await asyncio.sleep(3600)

        on.d0.script = decode
        reply = await client.post("/v1/chat/completions", json=chat("x", stream=True))
        assert json.loads(reply.text.split("data: ")[-1])["error"]["code"] == "token_mismatch"
        assert "[DONE]" not in reply.text
        await until(on.is_idle)


@pytest.mark.parametrize("nonsense", [LeaseHeld(), DONE, TokenMade(3, 7), None], ids=lambda n: type(n).__name__)
async def test_a_worker_that_is_out_of_step_is_an_error(nonsense: msgspec.Struct | None) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def decode(body: StartDecode) -> Messages:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            yield granted(body) if nonsense is None else nonsense
            await asyncio.sleep(3600)

        on.d0.script = decode
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "protocol_error")
        await until(on.is_idle)


async def test_a_decode_worker_that_gives_no_ticket_is_not_waited_for_for_ever() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def decode(body: StartDecode) -> Messages:
            await asyncio.sleep(3600)
            yield granted(body)

        on.d0.script = decode  # it is alive: heartbeats come; the stage's reserve_s is 2 s
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
        await until(on.is_idle)


async def test_the_whole_request_has_a_deadline() -> None:
    async with stage(RouterConfig(request_timeout_s=0.3)) as on, httpx.AsyncClient(base_url=on.url) as client:
        decode_that_fails(on, 2, lambda _: None)  # two tokens, then nothing
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
        await until(on.is_idle)


async def test_after_a_restart_the_next_request_is_served_and_the_old_boot_is_fenced() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        decode_that_fails(on, 1, lambda _: None)
        hanging = asyncio.create_task(client.post("/v1/chat/completions", json=chat("x")))
        await until(lambda: bool(on.d0.started))
        old, new = on.d0, ScriptedWorker("d0", "decode", on.handoffs.decode, incarnation="boot-2")
        on.decodes.append(new)
        on.p0.script = on.handoffs.prefill
        await on.router.set_workers([on.endpoints[0], await new.start()])
        assert (await hanging).json()["error"]["code"] == "worker_lost"
        await until(lambda: bool(on.router.ready()["ready"]))
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert reply.json()["choices"][0]["message"]["content"] == expected_text("x", 8)
        assert (len(old.started), len(new.started)) == (1, 1)
        await until(lambda: old.ended == old.cancelled != [])


async def test_a_worker_whose_connection_breaks_is_connected_again() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        for connection in list(on.d0._server._connections):
            connection.link.abort()
        await until(lambda: not on.router.ready()["ready"])
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        await until(lambda: bool(on.router.ready()["ready"]))
        assert (await client.post("/v1/chat/completions", json=chat("x"))).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", ["reserving", "prefilling", "before the commit", "decoding"])
async def test_when_the_client_leaves_all_its_work_is_cancelled_within_a_second(phase: str, is_stream: bool) -> None:
    """Known fault 6."""
    async with stage() as on:
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.sleep(3600)

        async def decode(body: StartDecode) -> Messages:
            if phase == "reserving":
                await hang()
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
            if phase == "decoding":
                yield COMMITTED
                for index in range(3):
                    yield made(body.request, index)
                await hang()
            await asyncio.sleep(3600)

        async def prefill(body: StartPrefill) -> Messages:
            if phase == "prefilling":
                await hang()
            yield made(body.request, 0)
            on.handoffs.drawn(body.request.request_id).set()
            if phase == "before the commit":
                await hang()
            yield DONE

        on.d0.script, on.p0.script = decode, prefill
        host, port = on.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, port)
        body = json.dumps(chat("x", stream=is_stream, max_tokens=200)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(reached.wait(), 2)
        writer.transport.abort()
        await until(on.is_idle, within_s=1.0)
        assert on.d0.cancelled == on.d0.ended != []
        assert len(on.p0.cancelled) == (phase in ("prefilling", "before the commit"))
        assert [timeline.outcome for timeline in on.router.serving.recent] == ["cancelled"]


async def test_a_client_that_leaves_the_queue_is_never_served() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()
        usual = on.handoffs.prefill

        async def prefill(body: StartPrefill) -> Messages:
            await gate.wait()
            async for message in usual(body):
                yield message

        on.p0.script = prefill
        first = asyncio.create_task(client.post("/v1/chat/completions", json=chat("first")))
        await until(lambda: len(on.p0.started) == 1)
        second = asyncio.create_task(client.post("/v1/chat/completions", json=chat("second")))
        await until(lambda: on.router.serving.num_waiting == 1)
        second.cancel()
        await until(lambda: on.router.serving.num_waiting == 0, within_s=1.0)
        gate.set()
        assert (await first).status_code == 200
        await until(on.is_idle)
        assert len(on.d0.started) == 1


async def test_many_clients_that_leave_at_once_leave_nothing_behind() -> None:
    async with stage(num_prefill=2, num_decode=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()
        usual = on.handoffs.decode

        async def decode(body: StartDecode) -> Messages:
            async for message in usual(body):
                if getattr(message, "index", 0) == 2:
                    await gate.wait()
                yield message

        for worker in on.decodes:
            worker.script = decode
        bodies = [chat(f"x{i}", stream=i % 2 == 0, max_tokens=300) for i in range(40)]
        sent = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies]
        await until(lambda: on.router.serving.num_running + on.router.serving.num_waiting == 40)
        for task in sent:
            task.cancel()
        await until(on.is_idle, within_s=1.0)
        assert len(on.router.serving.recent) == 40
        gate.set()
        assert (await client.post("/v1/chat/completions", json=chat("x"))).status_code == 200


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async with stage(RouterConfig(max_queue=2)) as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()
        usual = on.handoffs.prefill

        async def prefill(body: StartPrefill) -> Messages:
            await gate.wait()
            async for message in usual(body):
                yield message

        on.p0.script = prefill
        sent = []
        for i in range(3):  # one before its first token, two in the queue
            sent.append(asyncio.create_task(client.post("/v1/chat/completions", json=chat(f"{i}"))))
            await until(lambda i=i: on.router.serving.num_running + on.router.serving.num_waiting == i + 1)
        began_s = time.monotonic()
        refused = await client.post("/v1/chat/completions", json=chat("x", stream=True))
        assert time.monotonic() - began_s < 0.5
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert [(await reply).status_code for reply in sent] == [200, 200, 200]


async def test_who_waits_too_long_in_the_queue_is_refused() -> None:
    async with stage(RouterConfig(queue_timeout_s=0.2)) as on, httpx.AsyncClient(base_url=on.url) as client:
        on.d0.num_free = 0
        await until(lambda: on.router.fleet.view.workers["d0"].num_free_blocks == 0)
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        await until(on.is_idle)


async def test_who_was_refused_by_decode_keeps_its_turn_and_is_tried_again_when_there_is_room() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        usual, num_refusals = on.handoffs.decode, 2

        async def decode(body: StartDecode) -> Messages:
            nonlocal num_refusals
            if num_refusals:
                num_refusals -= 1
                raise Overloaded("no room now")
            async for message in usual(body):
                yield message

        on.d0.script = decode
        first = asyncio.create_task(client.post("/v1/chat/completions", json=chat("first")))
        await until(lambda: len(on.d0.started) == 1)
        second = asyncio.create_task(client.post("/v1/chat/completions", json=chat("second")))
        for task, text in ((first, "first"), (second, "second")):
            assert (await task).json()["choices"][0]["message"]["content"] == expected_text(text, 8)
        asked = [(len(body.request.tokens), body.attempt) for body in on.d0.started]
        long, short = len(on.d0.started[-1].request.tokens), len(on.d0.started[0].request.tokens)
        assert asked == [(short, 1), (short, 2), (short, 3), (long, 1)]
        assert [len(body.request.tokens) for body in on.p0.started] == [short, long]
        await until(on.is_idle)


async def test_when_the_last_worker_of_a_role_dies_nobody_waits_for_it() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        prefill_that_fails(on, 0, lambda _: None)  # it hangs
        sent = [asyncio.create_task(client.post("/v1/chat/completions", json=chat(f"{i}"))) for i in range(4)]
        await until(lambda: on.router.serving.num_waiting == 3)
        on.p0.crash()
        began_s = time.monotonic()
        replies = await asyncio.gather(*sent)
        assert time.monotonic() - began_s < 1.0
        assert {reply.status_code for reply in replies} == {503}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        await until(on.is_idle)


async def test_what_never_fits_is_refused_at_once_and_always_alike_however_full_the_pools_are() -> None:
    """Known fault 4: the smallest of context, prefill pool and decode pool is the limit: 12 blocks here."""

    def prepare(on: Stage) -> None:
        on.d0.num_blocks, on.d0.num_free = 12, 12

    async with stage(prepare=prepare) as on, httpx.AsyncClient(base_url=on.url) as client:
        fits = 12 * 16 - len("user: \nassistant: ")
        too_long = [
            (chat("x" * fits, max_tokens=None), "messages"),
            (chat("x" * 5000, max_tokens=1), "messages"),
            (chat("x" * (fits - 4), max_tokens=5), "max_tokens"),
            (chat("x", max_tokens=10**30), "max_tokens"),
        ]

        async def refusals() -> list[str]:
            texts = []
            for body, param in too_long:
                for is_stream in (False, True):
                    began_s = time.monotonic()
                    reply = await client.post("/v1/chat/completions", json={**body, "stream": is_stream})
                    assert time.monotonic() - began_s < 1.0
                    assert reply.status_code == 400
                    assert reply.headers["content-type"] == "application/json"
                    error = reply.json()["error"]
                    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
                    texts.append(reply.text)
            return texts

        empty = await refusals()
        on.d0.num_free = 0  # full, and with somebody waiting
        await until(lambda: on.router.fleet.view.workers["d0"].num_free_blocks == 0)
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=chat("x" * (fits - 4), max_tokens=4)))
        await until(lambda: on.router.serving.num_waiting == 1)
        assert await refusals() == empty
        on.p0.crash()  # nor does it help that nobody could serve it anyway
        assert (await waiting).status_code == 503
        assert await refusals() == empty
        assert on.d0.started == []


async def test_decode_may_still_say_that_a_request_never_fits() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        decode_that_fails(on, -1, raise_it(ContextLengthExceeded("not in this pool", param="messages")))
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_router_that_stops_lets_streams_end_and_refuses_new_ones() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()
        usual = on.handoffs.decode

        async def decode(body: StartDecode) -> Messages:
            async for message in usual(body):
                if getattr(message, "index", 0) == 2:
                    await gate.wait()
                yield message

        on.d0.script = decode
        live = asyncio.create_task(client.post("/v1/chat/completions", json=chat("x", stream=True)))
        await until(lambda: len(on.d0.started) == 1)
        stopping = asyncio.create_task(on.router.stop(grace_s=5.0))
        await asyncio.sleep(0)
        refused = await client.post("/v1/chat/completions", json=chat("x"))
        assert refused.status_code == 503
        assert (await client.get("/ready")).status_code == 503
        gate.set()
        assert (await live).text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(stopping, 2.5)


async def test_a_stream_that_outlives_the_grace_time_ends_with_an_error_event() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        decode_that_fails(on, 2, lambda _: None)
        live = asyncio.create_task(client.post("/v1/chat/completions", json=chat("x", stream=True)))
        await until(lambda: any(timeline for timeline in [on.router.serving.num_running]) and bool(on.d0.started))
        await until(lambda: on.router.metrics.registry.get_sample_value("kvrelay_generated_tokens_total") == 2)
        await on.router.stop(grace_s=0.1)
        assert json.loads((await live).text.split("data: ")[-1])["error"]["code"] == "unavailable"
