"""Both phases on one worker, and sequences that are preempted: over real sockets, with scripted workers."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from failing_scripts import Messages, crash
from scripted_worker import Stage, chat, expected_text, made, stage, until

from pd_core.errors import Overloaded
from pd_core.messages import Preempted, PromptAdmitted, StartBoth


async def test_decode_workers_alone_serve_requests() -> None:
    async with stage(num_prefill=0, num_decode=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        detail = (await client.get("/ready")).json()
        assert detail["ready"]
        assert detail["limits"]["prefill_pool_tokens"] is None
        bodies = [chat(f"prompt {i}") for i in range(16)]
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == [
            expected_text(f"prompt {i}", 8) for i in range(16)
        ]
        assert all(isinstance(body, StartBoth) for worker in on.decodes for body in worker.started)
        assert all(6 <= len(worker.started) <= 10 for worker in on.decodes)
        await until(on.is_idle)
        assert not on.d0.cancelled


async def test_without_a_decode_worker_nothing_is_ready_and_nobody_waits() -> None:
    async with stage(num_prefill=0) as on, httpx.AsyncClient(base_url=on.url) as client:
        on.d0.crash()
        await until(lambda: not on.router.ready()["ready"])
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert (await client.get("/ready")).json()["reason"] == "no decode worker is ready"


async def test_a_worker_that_has_no_room_is_asked_again() -> None:
    async with stage(num_prefill=0) as on, httpx.AsyncClient(base_url=on.url) as client:
        usual, num_refusals = on.handoffs.both, 2

        async def both(body: StartBoth) -> Messages:
            nonlocal num_refusals
            if num_refusals:
                num_refusals -= 1
                raise Overloaded("no room now")
            async for message in usual(body):
                yield message

        on.d0.script = both
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert reply.json()["choices"][0]["message"]["content"] == expected_text("x", 8)
        assert [body.attempt for body in on.d0.started] == [1, 2, 3]
        await until(on.is_idle)


@pytest.mark.parametrize("num_tokens", [-1, 0, 3])
async def test_when_the_only_worker_dies_the_request_fails_with_it(num_tokens: int) -> None:
    async with stage(num_prefill=0) as on, httpx.AsyncClient(base_url=on.url) as client:

        async def both(body: StartBoth) -> Messages:
            if num_tokens >= 0:
                yield PromptAdmitted()
            for index in range(num_tokens):
                yield made(body.request, index)
            await asyncio.sleep(0.05)
            crash(on.d0)
            await asyncio.sleep(3600)

        on.d0.script = both
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "worker_lost")
        await until(on.is_idle)


async def test_a_client_that_leaves_ends_the_only_leg_at_once() -> None:
    async with stage(num_prefill=0) as on, httpx.AsyncClient(base_url=on.url) as client:

        async def both(body: StartBoth) -> Messages:
            yield PromptAdmitted()
            await asyncio.sleep(3600)
            yield made(body.request, 0)

        on.d0.script = both
        sent = asyncio.create_task(client.post("/v1/chat/completions", json=chat("x")))
        await until(lambda: len(on.d0.started) == 1)
        sent.cancel()
        await until(lambda: len(on.d0.cancelled) == 1, within_s=1.0)
        await until(on.is_idle)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_preemption_is_counted_and_not_seen_by_the_client(num_prefill: int) -> None:
    async with stage(num_prefill=num_prefill) as on, httpx.AsyncClient(base_url=on.url) as client:
        usual = on.d0.script

        async def decode(body: StartBoth) -> Messages:
            async for message in usual(body):
                yield message
                if getattr(message, "index", None) in (2, 5):
                    yield Preempted(message.index + 1)

        on.d0.script = decode
        reply = await client.post("/v1/chat/completions", json=chat("x"))
        assert reply.json()["choices"][0]["message"]["content"] == expected_text("x", 8)
        await until(on.is_idle)
        assert "kvrelay_preemptions_total 2.0" in (await client.get("/metrics")).text.splitlines()
        page = (await client.get(f"/v1/requests/{reply.json()['id']}")).json()
        assert page["num_preemptions"] == 2
        assert page["moments_ms"]["preempted"] <= page["moments_ms"]["ended"]


async def test_where_one_waits_preempted_nobody_new_is_sent() -> None:
    async with stage(num_prefill=0, num_decode=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()

        async def both(body: StartBoth) -> Messages:
            yield PromptAdmitted()
            yield made(body.request, 0)
            yield Preempted(1)
            await gate.wait()
            for index in range(1, body.request.max_tokens):
                yield made(body.request, index)

        on.d0.script = both
        first = asyncio.create_task(client.post("/v1/chat/completions", json=chat("first")))
        view = on.router.fleet
        await until(lambda: view.view.workers["d0"].has_preempted)
        others = [await client.post("/v1/chat/completions", json=chat(f"{i}")) for i in range(4)]
        assert [reply.status_code for reply in others] == [200] * 4
        assert (len(on.d0.started), len(on.decodes[1].started)) == (1, 4)
        gate.set()
        assert (await first).json()["choices"][0]["message"]["content"] == expected_text("first", 8)
        await until(on.is_idle)
        assert not view.view.workers["d0"].has_preempted


async def test_a_short_prompt_need_not_wait_for_a_long_one_that_is_being_computed() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        usual, gate = on.handoffs.prefill, asyncio.Event()

        async def prefill(body: StartBoth) -> Messages:
            if len(body.request.tokens) > 100:
                await gate.wait()
            async for message in usual(body):
                yield message

        on.p0.script = prefill
        long = [asyncio.create_task(client.post("/v1/chat/completions", json=chat("x" * 200))) for _ in range(2)]
        await until(lambda: len(on.p0.started) == 1 and on.router.serving.num_waiting == 1)
        for number in range(3):
            reply = await client.post("/v1/chat/completions", json=chat(f"{number}"))
            assert reply.json()["choices"][0]["message"]["content"] == expected_text(f"{number}", 8)
        assert on.router.serving.num_waiting == 1
        gate.set()
        assert [(await task).status_code for task in long] == [200, 200]
        await until(on.is_idle)


def pools(num_blocks: int) -> object:
    def prepare(on: Stage) -> None:
        for worker in on.workers:
            worker.num_blocks = worker.num_free = num_blocks

    return prepare


async def test_a_large_request_is_served_though_small_ones_keep_coming() -> None:
    async with stage(num_prefill=0, prepare=pools(16)) as on, httpx.AsyncClient(base_url=on.url) as client:  # type: ignore[arg-type]

        async def both(body: StartBoth) -> Messages:
            num_blocks = (len(body.request.tokens) + body.request.max_tokens + 14) // 16
            on.d0.num_free -= num_blocks
            assert on.d0.num_free >= 0
            try:
                yield PromptAdmitted()
                for index in range(body.request.max_tokens):
                    await asyncio.sleep(0.02)
                    yield made(body.request, index)
            finally:
                on.d0.num_free += num_blocks

        on.d0.script = both
        small_replies: list[int] = []

        async def keep_coming() -> None:
            while True:
                small_replies.append((await client.post("/v1/chat/completions", json=chat("small"))).status_code)

        small = [asyncio.create_task(keep_coming()) for _ in range(6)]
        await until(lambda: len(small_replies) > 3)
        large = await asyncio.wait_for(client.post("/v1/chat/completions", json=chat("x" * 215)), 5.0)
        assert large.status_code == 200
        for task in small:
            task.cancel()
        await asyncio.gather(*small, return_exceptions=True)
        assert set(small_replies) == {200}
        await until(on.is_idle)
