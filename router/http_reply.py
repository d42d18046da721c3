"""Reading a request's body and sending whole replies, on bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pd_core.errors import Cancelled, KvrelayError, PayloadTooLarge
from router.http_errors import BodyTooSlow, Headers, error_headers, error_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_S = 30.0


async def read_body(scope: Scope, receive: Receive, max_body_bytes: int, deadline_s: float = BODY_S) -> bytes:
    """The whole body.

    Raises PayloadTooLarge as soon as it is certain, before the rest has come; BodyTooSlow; Cancelled when the client
    leaves meanwhile.
    """
    too_large = PayloadTooLarge(f"the body is larger than {max_body_bytes} bytes")
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced[:20]) > max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client left while it sent its request")
                body += message.get("body", b"")
                if len(body) > max_body_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not come within {deadline_s:g} s") from None


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has left (or the reply is complete). Call it after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """One whole reply."""
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: KvrelayError, headers: Headers) -> None:
    """An error as a whole reply."""
    await send_json(send, error.http_status, error_json(error), [*error_headers(error), *headers])


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this name (lower case)."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)
