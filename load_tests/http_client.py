"""A small HTTP client for measuring: it writes down what comes when, and reads it afterwards.

While a stream runs, each piece that arrives costs one method call and a list entry: the client shares two cores with
what it measures. One connection for each request, open before its clock starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from load_tests.http_reply import Piece, Reply, parse_reply
from pd_core.errors import DeadlineExceeded, Unavailable

CONNECT_S = 10.0
ANSWER_S = 120.0


class Exchange(asyncio.Protocol):
    """One request and all that comes back, until the server closes.

    sent_s: when the request was written; first_s: when the first bytes of the reply came, None before
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.sent_s = 0.0
        self.has_begun = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream connection
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.pieces:
            self.has_begun.set()
        self.pieces.append(Piece(time.monotonic(), data))

    def connection_lost(self, _error: Exception | None) -> None:
        self.has_begun.set()
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def first_s(self) -> float | None:
        return self.pieces[0].at_s if self.pieces else None

    @property
    def last_s(self) -> float:
        """When the latest bytes came; the moment of sending before any have."""
        return self.pieces[-1].at_s if self.pieces else self.sent_s

    def send(self, request: bytes) -> None:
        assert self._transport is not None  # noqa: S101 - connected
        self.sent_s = time.monotonic()
        self._transport.write(request)

    async def wait_ended(self, deadline_s: float = ANSWER_S) -> None:
        """Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._ended)
        except TimeoutError as error:
            raise DeadlineExceeded(f"a request has not ended after {deadline_s:g} s") from error

    async def wait_begun(self, deadline_s: float = ANSWER_S) -> None:
        """Until the first bytes of the reply, which leave with the first token. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.has_begun.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"a request has no first byte after {deadline_s:g} s") from error

    def reply(self) -> Reply:
        """Raises ProtocolError unless a whole reply has come."""
        return parse_reply(self.pieces)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Requests to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    @asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[Exchange]:
        """Sent on entry; at the end the connection is closed, whatever is still on its way."""
        async with self._connected() as exchange:
            exchange.send(self._request("POST", path, msgspec.json.encode(body)))
            yield exchange

    async def get(self, path: str, deadline_s: float = CONNECT_S) -> Reply:
        """Raises Unavailable, DeadlineExceeded, ProtocolError."""
        async with self._connected() as exchange:
            exchange.send(self._request("GET", path, b""))
            await exchange.wait_ended(deadline_s)
            return exchange.reply()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Exchange]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, exchange = await loop.create_connection(Exchange, self._host, self._port)
        except OSError as error:  # TimeoutError is one
            raise Unavailable(f"no connection to {self._host}:{self._port}: {error}") from error
        try:
            yield exchange
        finally:
            exchange.close()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body
