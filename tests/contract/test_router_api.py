"""The gateway's pages and what it refuses, over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from scripted_worker import SECRET, chat, stage, until

from pd_core.config import Config, RouterConfig
from pd_core.errors import ConfigError
from pd_model.fake import fake_model
from router.http_reply import read_body
from router.service import RouterService


def assert_is_error(reply: httpx.Response, status: int, *, code: str | None = None, param: str | None = None) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert code is None or error["code"] == code
    assert param is None or error["param"] == param


async def test_every_refusal_has_the_same_shape_and_names_the_field() -> None:
    refusals: list[tuple[Any, int, str | None]] = [
        (b"", 400, None),
        (b"{:", 400, None),
        (b"[]", 400, None),
        (b'"text"', 400, None),
        (b"\xff\xfe", 400, None),
        (b'{"model":"fake","temperature":NaN}', 400, None),
        (b"[" * 100_000, 400, None),
        ({"model": "fake"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, 400, "model"),
        (chat(messages=[]), 400, "messages"),
        (chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
        (chat(logprobs=True), 400, "logprobs"),
        (chat(surprise=1), 400, "surprise"),
        (chat(max_tokens=0), 400, "max_tokens"),
        (chat(max_tokens=-1), 400, "max_tokens"),
        (chat(model="gpt-4o"), 404, "model"),
    ]
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        for body, status, param in refusals:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = await client.post("/v1/chat/completions", content=content)
            assert_is_error(reply, status, param=param)
            assert reply.headers["x-request-id"].startswith("chatcmpl-")
        assert on.d0.started == []
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_unknown_pages_and_wrong_methods_are_errors_of_the_same_shape() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        assert_is_error(await client.get("/v1/nothing"), 404, code="not_found")
        assert_is_error(await client.get("/v1/models/"), 404)
        wrong = await client.get("/v1/chat/completions")
        assert_is_error(wrong, 405, code="method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        assert_is_error(await client.post("/health"), 405)


async def test_models_are_listed_and_an_unknown_one_is_not_found() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["fake"]
        assert (await client.get("/v1/models/fake")).json() == listed["data"][0]
        assert_is_error(await client.get("/v1/models/org/other"), 404, code="model_not_found", param="model")
        official = openai.AsyncOpenAI(base_url=f"{on.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError):
            await official.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        await official.close()


async def test_a_body_that_is_too_large_is_refused_before_it_has_come() -> None:
    async with stage(RouterConfig(max_body_bytes=2048)) as on, httpx.AsyncClient(base_url=on.url) as client:
        assert_is_error(await client.post("/v1/chat/completions", content=b"x" * 2049), 413, code="payload_too_large")
        assert_is_error(await client.post("/v1/chat/completions", content=b"x" * 2048), 400)  # no JSON, but short

        host, port = on.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        # The body has no end yet.
        assert (await asyncio.wait_for(reader.readline(), 2)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async def never() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    with pytest.raises(Exception, match=r"did not come within 0\.05 s"):
        await read_body({"headers": []}, never, 1024, deadline_s=0.05)


async def test_ready_says_why_not_until_a_request_would_be_served() -> None:
    router = RouterService(Config(router=RouterConfig(port=0)), SECRET, fake_model())
    host, port = await router.start()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        reply = await client.get("/ready")
        assert (reply.status_code, reply.json()["reason"]) == (503, "no prefill worker is ready")
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/chat/completions", json=chat())
        assert_is_error(refused, 503, code="unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/metrics")).status_code == 200
    await router.stop(0.1)

    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        detail = (await client.get("/ready")).json()
        assert detail["ready"]
        assert detail["max_request_tokens"] == 512
        assert {worker["name"]: worker["health"] for worker in detail["workers"]} == {"d0": "ready", "p0": "ready"}
        assert detail["workers"][0]["engine"] == {"invariance": "bit-exact"}
        on.p0.speaks.clear()
        await until(lambda: not on.router.ready()["ready"])
        silent = await client.get("/ready")
        assert (silent.status_code, silent.json()["reason"]) == (503, "no prefill worker is ready")
        assert silent.json()["workers"][1]["health"] == "suspect"
        on.p0.speaks.set()
        await until(lambda: on.router.ready()["ready"])


async def test_one_scrape_covers_router_and_workers() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        await client.post("/v1/chat/completions", json=chat(max_tokens=5))
        await client.post("/v1/chat/completions", json=chat(logprobs=True))
        await until(on.is_idle)
        lines = (await client.get("/metrics")).text.splitlines()
        for line in (
            'kvrelay_requests_total{status="200"} 1.0',
            'kvrelay_requests_total{status="400"} 1.0',
            'kvrelay_request_outcomes_total{outcome="finished"} 1.0',
            "kvrelay_generated_tokens_total 5.0",
            "kvrelay_ttft_seconds_count 1.0",
            "kvrelay_itl_seconds_count 4.0",
            "kvrelay_queue_seconds_count 1.0",
            "kvrelay_e2e_seconds_count 1.0",
            'kvrelay_handoff_bytes_total{path="tcp"} 4096.0',
            "kvrelay_requests_running 0.0",
            "kvrelay_requests_waiting 0.0",
            'kvrelay_worker_ready{role="decode",worker="d0"} 1.0',
            'kvrelay_worker_tokens_made_total{role="prefill",worker="p0"} 5.0',
            'kvrelay_worker_blocks{role="decode",state="free",worker="d0"} 64.0',
        ):
            assert line in lines


async def test_gauges_fall_back_to_nothing_when_all_clients_have_left() -> None:
    """Known fault 28."""
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:

        async def hang(body):
            await asyncio.sleep(3600)
            yield body

        on.p0.script = hang
        sent = [asyncio.create_task(client.post("/v1/chat/completions", json=chat())) for _ in range(8)]
        await until(lambda: on.router.serving.num_waiting == 7)
        for task in sent:
            task.cancel()
        await until(on.is_idle)
        lines = (await client.get("/metrics")).text.splitlines()
        assert "kvrelay_requests_running 0.0" in lines
        assert "kvrelay_requests_waiting 0.0" in lines
        assert 'kvrelay_request_outcomes_total{outcome="cancelled"} 8.0' in lines


async def test_the_ledger_of_every_worker_is_shown_also_when_one_does_not_answer() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        shown = (await client.get("/debug/ledger")).json()["workers"]
        assert shown["d0"]["counts"] == {"total": 64, "free": 64, "reserved": 0, "held": 0, "quarantined": 0}
        assert shown["p0"]["incarnation"] == "boot"
        on.p0.crash()
        await until(lambda: not on.router.ready()["ready"])
        shown = (await client.get("/debug/ledger")).json()["workers"]
        assert "not connected" in shown["p0"]["error"]
        assert shown["d0"]["counts"]["total"] == 64


async def test_the_ledger_is_for_the_loopback_address_alone() -> None:
    async with stage() as on:
        app = on.router.app
        for address, status in (("127.0.0.1", 200), ("::1", 200), ("10.0.0.1", 403), ("testclient", 403)):
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.get("/debug/ledger")).status_code == status


async def test_a_port_that_is_taken_is_named() -> None:
    async with stage() as on:
        taken = int(on.url.rsplit(":", 1)[1])
        second = RouterService(Config(router=RouterConfig(port=taken)), SECRET, fake_model())
        with pytest.raises(ConfigError, match=str(taken)) as refusal:
            await second.start()
        assert refusal.value.param == "router.port"
        await second.stop(0.1)


async def test_a_host_that_is_not_ours_is_named() -> None:
    router = RouterService(Config(router=RouterConfig(host="192.0.2.1")), SECRET, fake_model())
    with pytest.raises(ConfigError, match=r"router\.host 192\.0\.2\.1") as refusal:
        await router.start()
    assert refusal.value.param == "router.host"
    await router.stop(0.1)
