"""What one client can make the gateway keep, and for how long: over raw sockets, against clients of bad will."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted_worker import chat, stage, until

from router.faults import Faults
from router.http_connection import HttpLimits
from router.http_reply import Receive, Scope, Send, send_json
from router.http_server import HttpServer

CHAT = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Reply:
    """The one reply that `raw` holds."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = dict(line.lower().split(": ", 1) for line in lines[1:])

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/json"
        assert self.headers["content-length"] == str(len(self.body))
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Streams]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader, within_s: float = 2.0) -> bytes:
    """All that comes before the server closes, which it must."""
    got = bytearray()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within_s):
            while piece := await reader.read(65536):
                got += piece
    return bytes(got)


async def last_words(url: str, sent: bytes) -> Reply:
    """The reply to `sent` on a connection that the server must close."""
    async with connected(url) as (reader, writer):
        writer.write(sent)
        return Reply(await until_closed(reader))


def request(body: dict[str, object], more: str = "") -> bytes:
    content = json.dumps(body).encode()
    return (CHAT + f"{more}content-length: {len(content)}\r\n\r\n").encode() + content


async def flooded(url: str, head: bytes, piece: bytes) -> Reply:
    """The last words to a client that sends without end, until it is cut off, which it must be."""
    async with connected(url) as (reader, writer):
        writer.write(head)
        words = asyncio.create_task(until_closed(reader))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(3.0):
                while True:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        return Reply(await words)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nx: ", b"a" * 65536),
        (b"GET /health HTTP/1.1\r\n", b"".join(b"x%d: y\r\n" % i for i in range(8000))),
        (b"GET /", b"a" * 65536),
        (CHAT.encode() + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 65536),
        (CHAT.encode() + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 65536),
        (CHAT.encode() + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 8000),
    ],
    ids=["value", "fields", "url", "trailer", "chunk extension", "trailers"],
)
async def test_a_head_or_trailer_without_end_is_refused_and_not_kept(head: bytes, piece: bytes) -> None:
    async with stage() as on:
        before = peak_bytes()
        reply = await flooded(on.url, head, piece)
        assert reply.status == 431
        assert reply.error["code"] == "headers_too_large"
        assert reply.headers["connection"] == "close"
        assert peak_bytes() - before < 20 * 1024 * 1024
        await until(on.is_idle)


async def test_the_bounds_of_a_head_are_exact() -> None:
    def head(num_fields: int, num_bytes: int) -> bytes:
        start = b"GET /health HTTP/1.1\r\nconnection: close\r\n" + b"a: b\r\n" * (num_fields - 2) + b"x: "
        return start + b"y" * (num_bytes - len(start) - 4) + b"\r\n\r\n"

    async with stage() as on:
        assert (await last_words(on.url, head(100, 65536))).status == 200
        assert (await last_words(on.url, head(100, 65537))).status == 431
        assert (await last_words(on.url, head(101, 1000))).status == 431


async def test_a_large_body_is_no_large_head() -> None:
    async with stage() as on:
        text = "x" * 300_000
        reply = await last_words(on.url, request(chat(text), "connection: close\r\n"))
        assert reply.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        CHAT.encode() + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx",
        CHAT.encode() + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_in_the_shape_of_every_error(sent: bytes) -> None:
    async with stage() as on:
        reply = await last_words(on.url, sent)
        assert reply.status == 400
        assert reply.error["code"] == "invalid_http"
        assert reply.headers["connection"] == "close"
        await until(on.is_idle)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuses a body without reading it; /slow has its reply late."""
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    await send_json(send, 200, b"{}", [])


@contextlib.asynccontextmanager
async def served(**limits: float) -> AsyncIterator[str]:
    bounds = HttpLimits(**limits)  # type: ignore[arg-type]
    server = HttpServer(answer, "127.0.0.1", 0, Faults(), lambda _: None, limits=bounds)
    host, port = await server.start()
    try:
        yield f"http://{host}:{port}"
    finally:
        await server.stop(grace_s=0.0)


async def test_a_client_that_says_nothing_is_let_go() -> None:
    async with served(head_s=0.2) as url, connected(url) as (reader, _):
        assert await until_closed(reader) == b""


async def test_a_head_that_drips_in_is_not_waited_for() -> None:
    async with served(head_s=0.3) as url, connected(url) as (reader, writer):

        async def drip() -> None:
            writer.write(b"GET / HTTP/1.1\r\n")
            while not writer.is_closing():
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        reply = Reply(await until_closed(reader))
        dripping.cancel()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")


async def test_the_second_head_of_a_connection_has_its_own_time() -> None:
    async with served(head_s=0.3) as url, connected(url) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.5)  # idle: that is the time-out of kept connections, not this one
        writer.write(b"GET / HT")
        assert Reply(await until_closed(reader)).status == 408


async def test_the_time_for_the_head_ends_with_the_head() -> None:
    async with served(head_s=0.2) as url, connected(url) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")


async def test_the_rest_of_a_body_that_was_answered_is_not_awaited_for_ever() -> None:
    async with served(head_s=0.2) as url, connected(url) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: 1000\r\n\r\nx")
        assert (await until_closed(reader)).endswith(b"{}")


async def test_a_connection_too_many_is_told_so_and_the_others_are_served() -> None:
    async with served(connections=3) as url, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connected(url)) for _ in range(3)]
        async with connected(url) as (reader, _):
            reply = Reply(await until_closed(reader))
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
            assert reply.headers["retry-after"] == "1"
        reader, writer = streams[0]
        writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert Reply(await until_closed(reader)).status == 200
        async with connected(url) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
            assert Reply(await until_closed(reader)).status == 200


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "behind", [request(chat("second")), b"P", b"\r\nGET /health HTTP/1.1\r\n\r\n", b"\0" * 200_000]
)
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_client_that_sent_more_and_left_is_noticed(is_stream: bool, behind: bytes, is_at_once: bool) -> None:
    async with stage() as on:

        async def hang(body: Any) -> AsyncIterator[Any]:
            await asyncio.sleep(3600)
            yield body

        on.d0.script = hang
        async with connected(on.url) as (_, writer):
            first = request(chat("first", stream=is_stream))
            if is_at_once:
                writer.write(first + behind)
            else:
                writer.write(first)
            await until(lambda: len(on.d0.started) == 1)
            if not is_at_once:
                writer.write(behind)
                await writer.drain()
                await asyncio.sleep(0.02)
        await until(on.is_idle, within_s=1.0)
        assert len(on.d0.started) == 1


async def test_of_two_requests_at_once_the_first_is_answered_and_says_that_it_is_the_last() -> None:
    async with stage() as on:
        reply = await last_words(on.url, request(chat("one")) + request(chat("two")))
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert json.loads(reply.body)["usage"]["completion_tokens"] == 8
        assert len(on.d0.started) == 1


async def test_a_line_end_behind_a_body_does_no_harm() -> None:
    async with stage() as on, connected(on.url) as (reader, writer):
        for _ in range(2):
            writer.write(request(chat("one")) + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b'"total_tokens":')
            await reader.readuntil(b"}}")


async def test_an_upgrade_that_is_not_agreed_to_is_answered_as_plain_http() -> None:
    async with stage() as on:
        upgrade = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
        assert (await last_words(on.url, f"GET /health HTTP/1.1\r\n{upgrade}\r\n".encode())).status == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"content-type": "text/plain"}, "'text/plain'"),
        ({"content-type": "application/x-www-form-urlencoded"}, "send the header 'content-type: application/json'"),
        ({"content-type": "multipart/form-data; boundary=application/json"}, "multipart/form-data"),
        ({"content-type": "application/jsonp"}, "application/jsonp"),
        ({"content-type": ""}, "''"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "'gzip'"),
        ({"origin": "http://evil.example"}, "content-type: application/json"),
    ],
)
async def test_a_body_that_is_not_said_to_be_json_is_refused(headers: dict[str, str], said: str) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post("/v1/chat/completions", content=json.dumps(chat()), headers=headers)
        assert reply.status_code == 415
        assert reply.json()["error"]["code"] == "unsupported_media_type"
        assert said in reply.json()["error"]["message"]
        assert on.d0.started == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "Application/JSON ; charset=utf-8"},
        {"content-type": "application/json", "content-encoding": "identity", "origin": "http://chat.example"},
    ],
)
async def test_a_body_of_json_is_read(headers: dict[str, str]) -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        content = json.dumps(chat())
        assert (await client.post("/v1/chat/completions", content=content, headers=headers)).status_code == 200


async def test_a_long_header_is_said_back_short() -> None:
    async with stage() as on, httpx.AsyncClient(base_url=on.url) as client:
        reply = await client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "x" * 60_000})
        assert reply.status_code == 415
        assert len(reply.json()["error"]["message"]) < 250
