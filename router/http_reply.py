"""Reading a request's body and sending whole replies, on bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pd_core.errors import Cancelled, InvalidRequest, KvrelayError, PayloadTooLarge
from router.http_errors import BodyTooSlow, Headers, error_headers, error_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TryWrite = Callable[[bytes], bool]
TRY_WRITE = "kvrelay.try_write"
"""Extension of the scope, a TryWrite: writes a piece of a body that has begun, and more will follow, without a
coroutine. False, and nothing was written, when `send` would wait."""

BODY_S = 30.0


class UnsupportedMediaType(InvalidRequest):
    """The body is not said to be plain JSON."""

    http_status = 415
    code = "unsupported_media_type"


async def read_body(scope: Scope, receive: Receive, max_body_bytes: int, deadline_s: float = BODY_S) -> bytes:
    """The whole body.

    Raises UnsupportedMediaType; PayloadTooLarge as soon as it is certain, before the rest has come; BodyTooSlow;
    Cancelled when the client leaves meanwhile.
    """
    _check_is_json(scope)
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


def _check_is_json(scope: Scope) -> None:
    """Only JSON that is said to be JSON: a browser lets any web page send other kinds to a server of this machine.

    A page can leave the content type out; but a browser names the page's origin then, and other clients do not.
    """
    for name, value in scope["headers"]:
        if name == b"content-type" and value.split(b";")[0].strip().lower() != b"application/json":
            raise UnsupportedMediaType(
                f"the content type {_said(value)} is not read here; send the header 'content-type: application/json'"
            )
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            raise UnsupportedMediaType(f"the content encoding {_said(value)} is not read here; send the body as it is")
    if header(scope, b"content-type") is None and header(scope, b"origin") is not None:
        raise UnsupportedMediaType("a web page must send the header 'content-type: application/json'")


def _said(value: bytes) -> str:
    """A client's header, short enough to be said back to it."""
    said = repr(value[:101].decode("latin-1"))
    return said if len(said) <= 102 else said[:100] + "…'"


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
