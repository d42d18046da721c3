"""The outermost application: whom requests are for, and a short way for those that generate text."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http_errors import Forbidden
from router.http_reply import send_error
from router.json_body import said

access_log = logging.getLogger("router.access")


class Front:
    """generators: by path, what answers a POST there; pages: everything else

    The layers of `pages` cost a coroutine each for every chunk that is sent, so what sends many goes past them.
    host: what we are bound to; on_reply: told the status of what is refused here
    """

    def __init__(
        self, generators: Mapping[str, ASGIApp], pages: ASGIApp, host: str, on_reply: Callable[[int], None]
    ) -> None:
        self._generators = generators
        self._pages = pages
        self._host = host
        self._on_reply = on_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stranger = next((value for name, value in scope["headers"] if name == b"host" and not self._is_us(value)), None)
        if stranger is not None:
            await self._refuse(scope, send, stranger.decode("latin-1"))
            return
        app = self._generators.get(scope["path"]) if scope["method"] == "POST" else None
        await (self._pages if app is None else app)(scope, receive, send)

    def _is_us(self, host: bytes) -> bool:
        return is_for_us(host.decode("latin-1"), self._host)

    async def _refuse(self, scope: Scope, send: Send, stranger: str) -> None:
        error = Forbidden(
            f"the host {said(stranger)} is not this server: it is bound to {self._host} and answers to loopback "
            f"addresses, localhost and {self._host} alone; to serve others set router.host"
        )
        self._on_reply(error.http_status)
        client = scope.get("client")
        said_of = {"client": client[0] if client else None, "status": error.http_status, "error": error.code}
        access_log.info("refused", extra=said_of)
        await send_error(send, error, [])


def is_for_us(host: str, bound: str) -> bool:
    """Whether a request with this Host header may be answered by a server that is bound to `bound`.

    A web page can let a name of its own stand for 127.0.0.1 and so make a browser talk to a server of this machine; but
    the browser sends that name. A server that others can reach anyway takes any name.
    """
    if not is_loopback(bound):
        return True
    name = _without_port(host)
    return name == bound.lower() or is_loopback(name)


def is_loopback(host: str) -> bool:
    """A loopback address, or a name that never stands for anything else (RFC 6761)."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
