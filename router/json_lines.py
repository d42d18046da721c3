"""A reply of lines of JSON, each sent as soon as it is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http_reply import wait_for_disconnect


class JsonLines(Response):
    """Work for lines that nobody waits for any more is cancelled as soon as the client has left. A reply whose lines
    fail in the middle is cut off: it has no clean end.

    on_end: called when all lines were sent, or will never be
    """

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncIterator[Mapping[str, Any]], on_end: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._lines = lines
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._lines:
            body = msgspec.json.encode(line) + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
