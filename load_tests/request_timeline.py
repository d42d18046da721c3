"""What `/v1/requests/{id}` says of a request that is over, as far as benches need it. Pure."""

from __future__ import annotations

import msgspec

from pd_core.errors import ProtocolError


class Chunk(msgspec.Struct, frozen=True):
    """One chunk of the prompt, as the worker that computed it measured it."""

    start: int
    num_tokens: int
    took_ms: float


class Prefill(msgspec.Struct, frozen=True):
    chunks: list[Chunk]


class Transfer(msgspec.Struct, frozen=True):
    """exposed_ms: from the moment at which the router had the first token until it knew that decode has all KV"""

    path: str
    num_bytes: int
    exposed_ms: float


class RequestTimeline(msgspec.Struct, frozen=True):
    """prefill, transfer: None where another way was taken, or nobody has said so yet"""

    prefill: Prefill | None = None
    transfer: Transfer | None = None


def parse_timeline(body: bytes) -> RequestTimeline:
    """Raises ProtocolError for a reply of another kind."""
    try:
        return msgspec.json.decode(body, type=RequestTimeline)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no timeline of a request: {error}") from error
