"""uvicorn's connection with bounds: what one client can make us keep, and for how long.

    opened --first byte--> head --complete--> body --complete--> reply --complete--> kept alive --first byte--> head
    |------- head_s ----------|                                 |------- ours -----|           |----- head_s ...

One request at a time. What comes behind a request that has no reply yet is thrown away and the connection ends with
that reply: so we never stop reading, and see at once that a client has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pd_core.errors import InvalidRequest, KvrelayError, Unavailable
from router.http_errors import error_headers, error_json
from router.http_reply import TRY_WRITE

logger = logging.getLogger(__name__)
access_log = logging.getLogger("router.access")

WRITE_BUFFER_BYTES = 16 * 1024
"""Of a reply, in our own memory, before its writer has to wait: the kernel keeps much more for each client."""
LINGER_S = 1.0
"""How long a client that is refused may go on sending before its connection is cut."""


class HttpLimits(msgspec.Struct, frozen=True):
    """What one client may take.

    head_bytes, head_fields: of a request's head, or of what follows a body
    head_s:                  until a head is complete; also for the rest of a body that was answered before it had come
    connections:             open at once, of all clients together
    """

    head_bytes: int = 64 * 1024
    head_fields: int = 100
    head_s: float = 10.0
    connections: int = 1024


class HeadTooLarge(InvalidRequest):
    http_status = 431
    code = "headers_too_large"


class HeadTooSlow(InvalidRequest):
    http_status = 408
    code = "request_timeout"


class NotHttp(InvalidRequest):
    code = "invalid_http"


class TooManyConnections(Unavailable):
    code = "too_many_connections"


def bounded_connection(
    given: HttpLimits, given_stall_s: float, on_reply: Callable[[int], None]
) -> type[BoundedConnection]:
    """The protocol class that uvicorn makes one of for each connection. on_reply: told the status of its own replies"""

    class Configured(BoundedConnection):
        limits = given
        stall_s = given_stall_s
        replied = staticmethod(on_reply)

    return Configured


class BoundedConnection(HttpToolsProtocol):
    """Its settings come from `bounded_connection`. stall_s: how long a client may leave unread what we sent"""

    limits: HttpLimits
    stall_s: float
    replied: Callable[[int], None]

    _stall_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _num_idle_bytes = 0
    """Read since the last byte of a body or the end of a head: what the parser may be holding."""
    _num_fields = 0
    _is_in_head = False
    _is_in_message = False
    _is_deaf = False
    """Nothing that comes now is read as HTTP any more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self.limits.connections:
            self._say(TooManyConnections(f"{self.limits.connections} connections are open, which is the limit"))
            self.transport.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_stall_timer()
        self._stop_head_timer()
        super().connection_lost(exc)

    # Reading

    def data_received(self, data: bytes) -> None:
        if not self._is_deaf and not self._is_in_message and not self._is_replying():
            self._start_head_timer()
        rest = memoryview(data)
        while rest and not self._is_deaf:
            piece, rest = rest[: self.limits.head_bytes], rest[self.limits.head_bytes :]
            self._num_idle_bytes += len(piece)
            self._read(bytes(piece))
            if self._num_idle_bytes >= self.limits.head_bytes and not self._is_deaf:
                self._refuse(HeadTooLarge(f"the request's head is larger than {self.limits.head_bytes} bytes"))

    def _read(self, piece: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # The request is answered as it is; what follows is of the protocol that was asked for and not agreed to.
            self._read_no_more()
        except httptools.HttpParserError:
            if not self._is_deaf:
                self._refuse(NotHttp("this is not a request of HTTP/1.1"))

    def _read_no_more(self) -> None:
        """The reply under way is the last one; we listen on for the client's leaving alone."""
        self._is_deaf = True
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self.transport.close()

    def on_message_begin(self) -> None:
        if self._is_replying():
            self._read_no_more()
            raise _StopReading
        self._num_fields = 0
        self._is_in_head = self._is_in_message = True
        super().on_message_begin()
        self.scope["extensions"] = {TRY_WRITE: self._try_write}  # type: ignore[dict-item] # typed as serialisable

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > self.limits.head_fields:
            self._refuse(HeadTooLarge(f"the request has more than {self.limits.head_fields} headers"))
            raise _StopReading
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._num_idle_bytes = 0
        self._is_in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_idle_bytes = 0
        self._is_in_message = False
        super().on_message_complete()

    def _try_write(self, piece: bytes) -> bool:
        """Of the reply under way: there is one at a time."""
        if self.flow.write_paused or self.cycle.disconnected or not self.cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _is_replying(self) -> bool:
        """A whole request was read, and its reply is not complete."""
        return self.cycle is not None and not self._is_in_message and not self.cycle.response_complete

    def _refuse(self, error: KvrelayError) -> None:
        """The last words on this connection.

        What the client still sends is thrown away for a while: closing at once would reset the connection, and a
        client that is busy sending would never read why.
        """
        self._say(error)
        self.transport.write_eof()
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _say(self, error: KvrelayError) -> None:
        """The error as a reply of its own; nothing where a reply has begun."""
        self._is_deaf = True
        if self.cycle is not None and not self.cycle.response_complete:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True  # nothing more of it is to be sent
            self.cycle.message_event.set()
            if has_begun:
                return
        body = error_json(error)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *error_headers(error),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[error.http_status] + lines + b"\r\n" + body)
        self.replied(error.http_status)
        client = None if self.client is None else self.client[0]
        access_log.info("refused", extra={"client": client, "status": error.http_status, "error": error.code})

    # Deadlines

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_message and not self.transport.is_closing():
            self._start_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_s, self._cut_stalled)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _cut_stalled(self) -> None:
        logger.warning("client %s has read nothing for %g s: cut off", self.client, self.stall_s)
        self.transport.abort()

    def _cut_slow(self) -> None:
        if self._is_in_head:
            self._refuse(HeadTooSlow(f"the request's head did not come within {self.limits.head_s:g} s"))
        else:
            self.transport.close()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_s, self._cut_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class _StopReading(httptools.HttpParserError):
    """Ends the parser's work on what was read."""
