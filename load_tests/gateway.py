"""A running cluster as its clients reach it: completions of token ids, timelines, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from load_tests.clusters import RunningCluster
from load_tests.completion_stream import CompletionStream, parse_stream, refusal_of
from load_tests.http_client import ANSWER_S, Exchange, HttpClient
from load_tests.request_timeline import RequestTimeline, parse_timeline

COMPLETIONS = "/v1/completions"


class StatusReply(NamedTuple):
    """took_s: from the request to the end of its answer"""

    status: int
    took_s: float


class Gateway:
    """Requests are greedy, streamed, and go on to `max_tokens` whatever the model says."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._http = HttpClient(cluster.host, cluster.port)
        self._model = cluster.model

    async def complete(self, tokens: Sequence[int], max_tokens: int, deadline_s: float = ANSWER_S) -> CompletionStream:
        """A whole stream, with its token ids. Raises Unavailable, ProtocolError, DeadlineExceeded."""
        async with self.stream(tokens, max_tokens) as exchange:
            await exchange.wait_ended(deadline_s)
            return parse_stream(exchange.reply(), exchange.sent_s)

    @asynccontextmanager
    async def stream(
        self, tokens: Sequence[int], max_tokens: int, *, with_token_ids: bool = True
    ) -> AsyncIterator[Exchange]:
        """A stream that is under way; leaving it early closes it."""
        body = self._body(tokens, max_tokens) | {"return_token_ids": with_token_ids}
        async with self._http.post(COMPLETIONS, body) as exchange:
            yield exchange

    async def ask_status(self, tokens: Sequence[int], max_tokens: int) -> StatusReply:
        """The HTTP status of a request that need not go well. Raises Unavailable, ProtocolError, DeadlineExceeded."""
        async with self.stream(tokens, max_tokens) as exchange:
            await exchange.wait_ended()
            return StatusReply(exchange.reply().status, exchange.last_s - exchange.sent_s)

    async def timeline(self, request_id: str) -> RequestTimeline:
        """What the router wrote down of a request that is over."""
        reply = await self._http.get(f"/v1/requests/{request_id}")
        if reply.status != 200:
            raise refusal_of(reply)
        return parse_timeline(reply.body)

    async def metric(self, name: str) -> float:
        """The sum of a metric over all its labels; 0 when there is none yet."""
        reply = await self._http.get("/metrics")
        if reply.status != 200:
            raise refusal_of(reply)
        lines = reply.body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def _body(self, tokens: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
