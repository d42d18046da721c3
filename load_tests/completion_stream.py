"""A streamed answer of /v1/completions, as its client saw it: which token came when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from load_tests.http_reply import Piece, Reply, parse_events_so_far
from pd_core.errors import KvrelayError, ProtocolError, Unavailable

DONE = b"[DONE]"


class TokenArrival(msgspec.Struct, frozen=True):
    token: int
    at_s: float


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class CompletionStream(msgspec.Struct, frozen=True):
    """request_id: what the cluster calls the request; sent_s: when it was sent, on the clock of the arrivals."""

    request_id: str
    sent_s: float
    arrivals: list[TokenArrival]
    finish: str
    num_completion: int | None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0].at_s - self.sent_s

    @property
    def tokens(self) -> list[int]:
        return [arrival.token for arrival in self.arrivals]

    @property
    def moments(self) -> list[float]:
        """When each token came."""
        return [arrival.at_s for arrival in self.arrivals]


def text_moments(reply: Reply) -> list[float]:
    """When each event with text came; an error event or status raises as in `parse_stream`."""
    chunks = _chunks(reply)
    return [at_s for at_s, chunk in chunks for choice in chunk.choices if choice.text]


def parse_stream(reply: Reply, sent_s: float) -> CompletionStream:
    """The stream of one choice, with `return_token_ids` or without: then there are no arrivals.

    Raises Unavailable for an error status or event, ProtocolError for a stream that does not end as it should.
    """
    chunks = _chunks(reply)
    choices = [(at_s, choice) for at_s, chunk in chunks for choice in chunk.choices]
    finishes = [choice.finish_reason for _, choice in choices if choice.finish_reason is not None]
    usages = [chunk.usage for _, chunk in chunks if chunk.usage is not None]
    if len(finishes) != 1:
        raise ProtocolError(f"a stream with the finish reasons {finishes}")
    return CompletionStream(
        request_id=chunks[0][1].id,
        sent_s=sent_s,
        arrivals=[TokenArrival(token, at_s) for at_s, choice in choices for token in choice.token_ids or []],
        finish=finishes[0],
        num_completion=usages[0]["completion_tokens"] if usages else None,
    )


def moments_so_far(pieces: Sequence[Piece]) -> list[float]:
    """When each token came of a stream, with `return_token_ids`, that still runs, was closed early, or has ended."""
    events = [(at_s, event) for at_s, event in parse_events_so_far(pieces) if event != DONE]
    chunks = [(at_s, msgspec.json.decode(event, type=_Chunk)) for at_s, event in events]
    return [at_s for at_s, chunk in chunks for choice in chunk.choices for _ in choice.token_ids or []]


def _chunks(reply: Reply) -> list[tuple[float, _Chunk]]:
    """All chunks of a stream that ended well."""
    if reply.status != 200:
        raise refusal_of(reply)
    events = [event for _, event in reply.events]
    is_whole = bool(events) and events[-1] == DONE
    try:
        chunks = [msgspec.json.decode(event, type=_Chunk) for event in (events[:-1] if is_whole else events)]
    except msgspec.DecodeError as error:
        raise ProtocolError(f"an event of a stream is no chunk: {error}") from error
    if chunks and chunks[-1].error is not None:
        raise Unavailable(f"the stream failed: {chunks[-1].error}")
    if not is_whole:
        raise ProtocolError(f"a stream without its end: {reply.body[-200:]!r}")
    return list(zip((at_s for at_s, _ in reply.events), chunks, strict=False))


def refusal_of(reply: Reply) -> KvrelayError:
    """What an error reply says."""
    return Unavailable(f"HTTP {reply.status}: {reply.body[:300].decode('utf-8', 'replace')}")
