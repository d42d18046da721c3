"""What the client sees when a worker fails after the first token, or the router stops. Known faults 7, 8 and 16."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import httpx
import openai
import pytest
from failing_scripts import BROKEN, Messages, crash, decode_that_fails, fall_silent, prefill_that_fails, raise_it
from scripted_worker import (
    ScriptedWorker,
    chat,
    expected_text,
    granted,
    made,
    stage,
    until,
)

from pd_core.config import RouterConfig
from pd_core.messages import StartDecode, TokenMade


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
