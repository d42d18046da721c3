"""One request and its reply on the connection; what the access log says of them.

The headers leave with the first token: what goes wrong before has its true status. Afterwards an error is an event.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Sequence

from pd_core.errors import Cancelled, KvrelayError
from router.http_errors import Headers, error_json
from router.http_reply import TRY_WRITE, Scope, Send, TryWrite, header, send_error, send_json
from router.request_run import RequestRun

access_log = logging.getLogger("router.access")

MAX_ECHOED_ID = 200
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """name: what was asked for, in the log; id_prefix: of the reply's id

    request_id: ours, and the reply's id; the client's own id is only said back and logged
    runs:       what the reply is made of, as soon as there is something
    """

    def __init__(self, scope: Scope, send: Send, *, name: str, id_prefix: str, arrived_s: float) -> None:
        self.scope = scope
        self.send = send
        self.arrived_s = arrived_s
        self.created = int(time.time())
        self.request_id = f"{id_prefix}-{uuid.uuid4().hex}"
        self.client_id = (header(scope, b"x-request-id") or b"")[:MAX_ECHOED_ID].decode("latin-1")
        self._try_write: TryWrite | None = scope.get("extensions", {}).get(TRY_WRITE)
        self.headers: Headers = [(b"x-request-id", (self.client_id or self.request_id).encode("latin-1"))]
        self.runs: Sequence[RequestRun] = ()
        self.status = 500
        self._name = name
        self.has_started = False
        self._error: str | None = None

    async def reply(self, body: bytes) -> None:
        """The whole reply."""
        self.status = 200
        await send_json(self.send, 200, body, self.headers)

    async def start_stream(self) -> None:
        """Sends the headers. From now on what goes wrong is told as an event."""
        self.has_started = True
        self.status = 200
        await self.send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *self.headers]})

    def try_stream(self, chunk: bytes) -> bool:
        """Events of a stream that has begun, one or several. False, and nothing was done, when that has to wait."""
        return self.has_started and self._try_write is not None and self._try_write(chunk)

    def stream(self, chunk: bytes) -> Awaitable[None]:
        """The same, as soon as the client has read enough of what was sent before."""
        return self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self, chunk: bytes) -> None:
        """The last events, and a clean end: the client takes the stream for complete."""
        await self.send({"type": "http.response.body", "body": chunk})

    async def fail(self, error: KvrelayError) -> None:
        """Tells the client, in the way that is still open; one that has left is told nothing."""
        self._error = error.code
        if not self.has_started:
            self.status = error.http_status
        if isinstance(error, Cancelled):
            return
        if self.has_started:
            event = b"data: " + error_json(error) + b"\n\n"
            await self.send({"type": "http.response.body", "body": event})
        else:
            await send_error(self.send, error, self.headers)

    def log(self, now_s: float) -> None:
        """One line; with several choices it has their sums, and each choice a line of its own."""
        client = self.scope.get("client")
        line: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self.client_id or None,
            "client": client[0] if client else None,
            "status": self.status,
            "error": self._error,
            "duration_ms": round((now_s - self.arrived_s) * 1e3, 2),
        }
        timelines = [run.timeline for run in self.runs]
        if len(timelines) == 1:
            line |= timelines[0].for_log()
        elif timelines:
            line |= {"num_choices": len(timelines), "num_tokens": sum(timeline.num_tokens for timeline in timelines)}
            for timeline in timelines:
                access_log.info("choice", extra={"of_request_id": self.request_id} | timeline.for_log())
        if timelines:
            ttfts_s = [timeline.ttft_s for timeline in timelines if timeline.ttft_s is not None]
            line["ttft_ms"] = round(min(ttfts_s) * 1e3, 2) if ttfts_s else None
        access_log.info(self._name, extra=line)
