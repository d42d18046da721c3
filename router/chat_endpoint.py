"""POST /v1/chat/completions, from bytes to bytes.

The headers leave with the first token: what goes wrong before has its true status. Afterwards an error is an event.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence

from pd_core.config import RouterConfig
from pd_core.errors import Cancelled, KvrelayError
from pd_core.request import FinishReason, GenerateRequest
from pd_model.detokenize import IncrementalDetokenizer
from pd_model.model_assets import ModelAssets
from pd_rpc.tasks import BackgroundTasks
from router.chat_reply import ChunkWriter, TokenIds, error_event, usage_of, whole_reply
from router.chat_request import ChatCall, parse_chat
from router.http_errors import Headers
from router.http_reply import Receive, Scope, Send, header, read_body, send_error, send_json, wait_for_disconnect
from router.prompt import PromptReader, unless_left
from router.request_run import RequestRun, TokenEvent
from router.serving import Serving

logger = logging.getLogger(__name__)
access_log = logging.getLogger("router.access")

MAX_ECHOED_ID = 200
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChatEndpoint:
    """An ASGI application for one route. on_reply: told the status of every request that ends."""

    def __init__(
        self,
        serving: Serving,
        assets: ModelAssets,
        config: RouterConfig,
        clock: Callable[[], float],
        on_reply: Callable[[int], None],
    ) -> None:
        self._serving = serving
        self._assets = assets
        self._max_body_bytes = config.max_body_bytes
        self._prompts = PromptReader(assets, max_waiting=config.max_queue)
        self._watchers = BackgroundTasks()
        self._clock = clock
        self._on_reply = on_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, send, arrived_s=self._clock())
        try:
            await self._answer(exchange, receive)
        except KvrelayError as error:
            await exchange.fail(error)
        except Exception:
            logger.exception("a chat request failed", extra={"request_id": exchange.request_id})
            await exchange.fail(KvrelayError("internal error in the router; see its log"))
        finally:
            self._on_reply(exchange.status)
            exchange.log(self._clock())

    async def _answer(self, exchange: _Exchange, receive: Receive) -> None:
        body = await read_body(exchange.scope, receive, self._max_body_bytes)
        call = parse_chat(body, self._assets.name, draw_seed=lambda: secrets.randbits(63))
        max_tokens = self._serving.check_open()  # what is refused anyway is not worth tokenising
        departure = self._watchers.start(wait_for_disconnect(receive), f"{exchange.request_id}:departure")
        try:
            tokens = await unless_left(self._prompts.read(call.messages, max_tokens), departure)
            await self._serve(exchange, call, tokens, departure)
        finally:
            departure.cancel()

    async def _serve(
        self, exchange: _Exchange, call: ChatCall, tokens: list[int], departure: asyncio.Task[None]
    ) -> None:
        request = GenerateRequest(
            request_id=exchange.request_id,
            tokens=tokens,
            max_tokens=self._serving.admit(len(tokens), call.max_tokens),
            sampling=call.sampling,
            stop_token_ids=[] if call.ignores_eos else self._assets.eos_token_ids,
        )
        run = exchange.run = self._serving.open(request, exchange.arrived_s)
        departure.add_done_callback(lambda _: run.leave())
        try:
            if call.is_stream:
                await self._stream(exchange, run, call)
            else:
                await self._reply_whole(exchange, run, call)
        finally:
            run.leave()

    async def _reply_whole(self, exchange: _Exchange, run: RequestRun, call: ChatCall) -> None:
        text = AnswerText(self._assets)
        pieces: list[str] = []
        while events := await run.next_events():
            pieces.append(text.add(events))
        pieces.append(text.rest())
        assert text.finish is not None  # noqa: S101 - a stream ends well with its finish reason only
        usage = usage_of(len(run.request.tokens), len(text.token_ids))
        ids = TokenIds(run.request.tokens, text.token_ids) if call.with_token_ids else None
        reply = whole_reply(
            exchange.request_id, exchange.created, self._assets.name, "".join(pieces), text.finish, usage, ids
        )
        exchange.status = 200
        await send_json(exchange.send, 200, reply, exchange.headers)

    async def _stream(self, exchange: _Exchange, run: RequestRun, call: ChatCall) -> None:
        """One chunk for what has come since the last: usually one token, more when the client reads slowly."""
        text = AnswerText(self._assets)
        chunks = ChunkWriter(exchange.request_id, exchange.created, self._assets.name, with_usage=call.with_usage)
        prompt_ids = run.request.tokens if call.with_token_ids else None
        while events := await run.next_events():
            chunk = _text_chunk(chunks, text.add(events), events, call)
            if not exchange.has_started:
                await exchange.start_stream(chunks.role(prompt_ids) + chunk)
            elif chunk:
                await exchange.send_chunk(chunk)
        assert text.finish is not None  # noqa: S101 - as above
        rest = text.rest()
        usage = usage_of(len(run.request.tokens), len(text.token_ids))
        await exchange.end_stream((chunks.text(rest) if rest else b"") + chunks.end(text.finish, usage))


def _text_chunk(chunks: ChunkWriter, piece: str, events: Sequence[TokenEvent], call: ChatCall) -> bytes:
    """The chunk for these tokens; none when there is nothing to say yet."""
    if call.with_token_ids:
        return chunks.text_of(piece, [event.token for event in events])
    return chunks.text(piece) if piece else b""


class AnswerText:
    """Tokens in, text out that is final; and what the reply says of it."""

    def __init__(self, assets: ModelAssets) -> None:
        self._detokenizer = IncrementalDetokenizer(assets.tokenizer)
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None

    def add(self, events: Sequence[TokenEvent]) -> str:
        """Text of the tokens; the one that ends the text has none."""
        pieces = []
        for event in events:
            self.token_ids.append(event.token)
            self.finish = event.finish
            if event.finish is not FinishReason.STOP:
                pieces.append(self._detokenizer.push(event.token))
        return "".join(pieces)

    def rest(self) -> str:
        """At the end: what was held back of a character that is not complete."""
        return self._detokenizer.finish()


class _Exchange:
    """One request and its reply on the connection; what the access log says of them.

    request_id: ours, and the reply's id; the client's own id is only said back and logged
    """

    def __init__(self, scope: Scope, send: Send, arrived_s: float) -> None:
        self.scope = scope
        self.send = send
        self.arrived_s = arrived_s
        self.created = int(time.time())
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self.client_id = (header(scope, b"x-request-id") or b"")[:MAX_ECHOED_ID].decode("latin-1")
        self.headers: Headers = [(b"x-request-id", (self.client_id or self.request_id).encode("latin-1"))]
        self.run: RequestRun | None = None
        self.status = 500
        self.has_started = False
        self.error: str | None = None

    async def start_stream(self, chunk: bytes) -> None:
        self.has_started = True
        self.status = 200
        await self.send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *self.headers]})
        await self.send_chunk(chunk)

    async def send_chunk(self, chunk: bytes) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self, chunk: bytes) -> None:
        await self.send({"type": "http.response.body", "body": chunk})

    async def fail(self, error: KvrelayError) -> None:
        """Tells the client, in the way that is still open; one that has left is told nothing."""
        self.error = error.code
        if self.has_started:
            if not isinstance(error, Cancelled):
                await self.end_stream(error_event(error))
            return
        self.status = error.http_status
        if not isinstance(error, Cancelled):
            await send_error(self.send, error, self.headers)

    def log(self, now_s: float) -> None:
        client = self.scope.get("client")
        line: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self.client_id or None,
            "client": client[0] if client else None,
            "status": self.status,
            "error": self.error,
            "duration_ms": round((now_s - self.arrived_s) * 1e3, 2),
        }
        if self.run is not None:
            line |= self.run.timeline.for_log()
            ttft_s = self.run.timeline.ttft_s
            line["ttft_ms"] = None if ttft_s is None else round(ttft_s * 1e3, 2)
        access_log.info("chat", extra=line)
