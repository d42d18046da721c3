"""What the client is told when its request fails or finds no room before the first token. Known faults 4, 7 and 16."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import msgspec
import pytest
from failing_scripts import BAD, BROKEN, Messages, crash, decode_that_fails, fall_silent, prefill_that_fails, raise_it
from scripted_worker import (
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
from pd_core.errors import Cancelled, ContextLengthExceeded, Overloaded, TransferError
from pd_core.messages import LeaseHeld, StartDecode, StartPrefill, TokenMade


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
        (prefill_that_fails, 0, raise_it(Cancelled("the step was cut")), 503),
        (decode_that_fails, 0, raise_it(Cancelled("the step was cut")), 503),
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


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr("router.prompt.PromptReader.read_chat", None)  # no prompt is tokenised to be refused
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
        await until(lambda: bool(on.d0.started))
        second = asyncio.create_task(client.post("/v1/chat/completions", json=chat("second")))
        for task, text in ((first, "first"), (second, "second")):
            assert (await task).json()["choices"][0]["message"]["content"] == expected_text(text, 8)
        asked = [(len(body.request.tokens), body.attempt) for body in on.d0.started]
        long, short = len(on.d0.started[-1].request.tokens), len(on.d0.started[0].request.tokens)
        assert asked == [(short, 1), (short, 2), (short, 3), (long, 1)]
        assert [len(body.request.tokens) for body in on.p0.started] == [short, long]
        await until(on.is_idle)


async def test_a_busy_prefill_worker_is_waited_for_and_the_reserved_blocks_are_given_up_meanwhile() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        usual, num_refusals = on.handoffs.prefill, 2

        async def prefill(body: StartPrefill) -> Messages:
            nonlocal num_refusals
            if num_refusals:
                num_refusals -= 1
                raise Overloaded("1 prompts are here already", retry_after_s=1.0)
            async for message in usual(body):
                yield message

        on.p0.script = prefill
        first = asyncio.create_task(client.post("/v1/chat/completions", json=chat("first")))
        await until(lambda: bool(on.p0.started))
        second = asyncio.create_task(client.post("/v1/chat/completions", json=chat("second", stream=True)))
        assert (await first).json()["choices"][0]["message"]["content"] == expected_text("first", 8)
        assert (await second).text.endswith("data: [DONE]\n\n")
        assert [body.attempt for body in on.d0.started] == [1, 2, 3, 1]
        assert len(on.d0.cancelled) == 2
        await until(on.is_idle)


async def test_more_prompts_than_the_prefill_pool_holds_all_have_their_turn() -> None:
    """12 blocks and prompts of 5: decode has room for all of them, and prefill never has to refuse."""

    def prepare(on: Stage) -> None:
        on.p0.num_blocks, on.p0.num_free = 12, 12

    async with stage(prepare=prepare) as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()

        async def prefill(body: StartPrefill) -> Messages:
            on.p0.num_free -= 5
            assert on.p0.num_free >= 0
            yield made(body.request, 0)
            await gate.wait()  # the blocks are still here
            on.handoffs.drawn(body.request.request_id).set()
            on.p0.num_free += 5
            yield DONE

        on.p0.script = prefill
        bodies = [chat("x" * 60, max_tokens=4) for _ in range(6)]
        sent = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies]
        await until(lambda: len(on.p0.started) == 2)
        await asyncio.sleep(0.15)  # three heartbeats
        assert len(on.p0.started) == 2
        gate.set()
        assert [(await reply).status_code for reply in sent] == [200] * 6
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


async def test_when_one_of_two_workers_dies_those_who_wait_are_served_by_the_other() -> None:
    async with stage(num_prefill=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()
        usual = on.handoffs.prefill

        async def prefill(body: StartPrefill) -> Messages:
            await gate.wait()
            async for message in usual(body):
                yield message

        for worker in on.prefills:
            worker.script = prefill
        sent = [asyncio.create_task(client.post("/v1/chat/completions", json=chat(f"{i}"))) for i in range(6)]
        await until(lambda: on.router.serving.num_waiting == 4)
        on.p0.crash()
        await until(lambda: any(reply.done() for reply in sent))
        gate.set()
        replies = [await reply for reply in sent]
        assert sorted(reply.status_code for reply in replies) == [200] * 5 + [503], "it had one of them"
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
            (chat("x", max_tokens=10**18), "max_tokens"),
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
