"""When clients leave, nothing is left of their requests. Known fault 6."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from failing_scripts import Messages
from scripted_worker import (
    COMMITTED,
    DONE,
    chat,
    granted,
    made,
    stage,
    until,
)

from pd_core.messages import StartDecode, StartPrefill


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
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        await asyncio.wait_for(reached.wait(), 2)
        writer.transport.abort()
        await until(on.is_idle, within_s=1.0)
        assert on.d0.cancelled == on.d0.ended != []
        assert len(on.p0.cancelled) == (phase in ("prefilling", "before the commit"))
        assert [timeline.outcome for timeline in on.router.serving.recent] == ["cancelled"]


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
