"""A fault of ours inside the router is confined to one request, or known to everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from failing_scripts import Messages
from scripted_worker import SECRET, Stage, chat, stage, until

from pd_core.config import Config, ModelConfig, RouterConfig
from pd_core.errors import KvrelayError
from pd_core.messages import StartDecode
from router.actor import RouterActor


def break_down(*_: object) -> None:
    raise ZeroDivisionError("a fault")


async def test_a_fault_in_one_requests_clock_ends_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(num_prefill=2) as on, httpx.AsyncClient(base_url=on.url) as client:
        gate = asyncio.Event()
        usual = on.handoffs.decode

        async def decode(body: StartDecode) -> Messages:
            await gate.wait()
            async for message in usual(body):
                yield message

        on.d0.script = decode
        first = asyncio.create_task(client.post("/v1/chat/completions", json=chat("first")))
        await until(lambda: on.router.serving.num_running == 1)
        [run] = on.router.serving._runs.values()
        second = asyncio.create_task(client.post("/v1/chat/completions", json=chat("second")))
        await until(lambda: on.router.serving.num_running == 2)
        run.check_time = break_down  # type: ignore[method-assign]
        assert (await first).status_code == 500
        assert "ZeroDivisionError: a fault" in caplog.text
        gate.set()
        assert (await second).status_code == 200
        assert on.router.ready()["ready"]
        await until(on.is_idle)


def break_the_ticker(on: Stage) -> None:
    on.router.serving.check_silence = break_down  # type: ignore[method-assign]


def break_the_links(on: Stage) -> None:
    on.router.serving.on_worker_heard = break_down  # type: ignore[method-assign]


def break_the_http_server(on: Stage) -> None:
    on.router._http._server.on_tick = break_down  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("break_it", [break_the_ticker, break_the_links])
async def test_a_part_that_has_broken_down_is_told_by_ready(break_it: Callable[[Stage], None]) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        break_it(on)
        await until(lambda: on.router.faults.reason is not None)
        reply = await client.get("/ready")
        assert reply.status_code == 503
        assert reply.json()["reason"] == "a background task of the router failed: ZeroDivisionError: a fault"


@pytest.mark.parametrize("break_it", [break_the_ticker, break_the_links, break_the_http_server])
async def test_whoever_waits_for_a_fault_gets_the_first(break_it: Callable[[Stage], None]) -> None:
    async with stage() as on:
        break_it(on)
        error = await asyncio.wait_for(on.router.faults.wait(), 2)
        assert isinstance(error.__cause__, ZeroDivisionError)


async def test_the_actors_run_fails_with_the_router_and_returns_when_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.actor.log_to", lambda _: None)  # it is not alone in this process
    config = Config(model=ModelConfig(path="fake"), router=RouterConfig(port=0))
    actor = RouterActor(config, SECRET, str(tmp_path), log_path=None)
    await actor.start()
    running = asyncio.create_task(actor.run_until_stopped())
    actor._service.serving.check_silence = break_down  # type: ignore[method-assign]
    with pytest.raises(KvrelayError, match="ZeroDivisionError: a fault"):
        await asyncio.wait_for(running, 2)
    await actor.stop(0.1)
    await asyncio.wait_for(actor.run_until_stopped(), 2)
