"""Requests that are not meant for us, and what is counted of those that no application has seen."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from scripted_worker import chat, stage, until

from router.http_connection import HttpLimits


async def replied(url: str, sent: bytes) -> bytes:
    """All that comes until the server closes."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(-1), 2)
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/chat/completions", "/debug/ledger", "/nothing"])
async def test_a_web_page_that_lets_its_name_stand_for_this_machine_gets_nothing(path: str) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.request("POST" if "chat" in path else "GET", path, headers={"host": "evil.example:8000"})
        assert reply.status_code == 403
        error = reply.json()["error"]
        assert error["code"] == "forbidden"
        assert "'evil.example:8000'" in error["message"]
        assert "router.host" in error["message"]
        for host in ("localhost:1", "[::1]", on.url.removeprefix("http://")):
            assert (await client.get("/health", headers={"host": host})).status_code == 200
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'kvrelay_requests_total{status="403"} 1.0' in lines


async def test_of_two_hosts_both_must_be_ours() -> None:
    async with stage() as on:
        two = b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
        assert (await replied(on.url, two)).startswith(b"HTTP/1.1 403")
        none = b"GET /health HTTP/1.0\r\n\r\n"  # older than the header; no browser sends this
        assert (await replied(on.url, none)).startswith(b"HTTP/1.1 200")


async def test_a_long_name_in_the_path_or_the_host_is_said_back_short() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        long = "x" * 50_000
        for reply in (
            await client.get(f"/v1/models/{long}"),
            await client.get(f"/{long}"),
            await client.get("/health", headers={"host": long}),
        ):
            assert reply.status_code in (403, 404)
            assert len(reply.content) < 500


async def test_replies_of_the_connection_itself_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        with caplog.at_level("INFO", logger="router.access"):
            assert (await replied(on.url, b"hello\r\n\r\n")).startswith(b"HTTP/1.1 400")
            fields = b"x: y\r\n" * (HttpLimits().head_fields + 1)
            head = b"GET /health HTTP/1.1\r\n" + fields + b"\r\n"
            assert (await replied(on.url, head)).startswith(b"HTTP/1.1 431")
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'kvrelay_requests_total{status="400"} 1.0' in lines
        assert 'kvrelay_requests_total{status="431"} 1.0' in lines
        logged = [vars(record) for record in caplog.records if record.name == "router.access"]
        assert [(line["status"], line["error"]) for line in logged] == [
            (400, "invalid_http"),
            (431, "headers_too_large"),
        ]
        assert {line["client"] for line in logged} == {"127.0.0.1"}


async def test_a_client_that_ends_its_sending_side_counts_as_one_that_has_left() -> None:
    """Nothing tells it from one that has closed until something is written, and what it wants is then computed."""
    async with stage() as on:

        async def hang(body):
            await asyncio.sleep(3600)
            yield body

        on.d0.script = hang
        async with httpx.AsyncClient(base_url=on.url) as client:
            content = client.build_request("POST", "/", json=chat()).content
        _, writer = await asyncio.open_connection(*on.url.removeprefix("http://").split(":"))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(content)
        writer.write(head + content)
        await until(lambda: len(on.d0.started) == 1)
        writer.write_eof()
        await until(on.is_idle, within_s=1.0)
        writer.close()
