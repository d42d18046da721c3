"""A recorded HTTP reply, taken apart after it has ended: which bytes came when, and what they say. Pure.

The client only writes down pieces and moments while a stream runs; all the reading is here, when nothing is measured
any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pd_core.errors import ProtocolError

END_OF_HEADERS = b"\r\n\r\n"
DATA = b"data: "


class Piece(NamedTuple):
    """Bytes as the socket gave them, and when."""

    at_s: float
    data: bytes


class Reply(NamedTuple):
    """events: the text of each server-sent event and when its last byte came; body: all of the body's bytes."""

    status: int
    headers: dict[str, str]
    body: bytes
    events: list[tuple[float, bytes]]


def parse_reply(pieces: Sequence[Piece]) -> Reply:
    """The reply of a connection that was closed after it. Raises ProtocolError for what is no whole HTTP/1.1 reply."""
    stream = b"".join(piece.data for piece in pieces)
    head, found, _ = stream.partition(END_OF_HEADERS)
    if not found:
        raise ProtocolError(f"no whole HTTP reply: {stream[:200]!r}")
    status, headers = _parse_head(head)
    begin = len(head) + len(END_OF_HEADERS)
    if headers.get("transfer-encoding") == "chunked":
        parts = list(_chunks(stream, begin))
    else:
        _check_length(headers, len(stream) - begin)
        parts = [(len(stream), stream[begin:])]
    clock = _Clock(pieces)
    events = list(_events([(clock.moment_of(end), data) for end, data in parts]))
    return Reply(status, headers, b"".join(data for _, data in parts), events)


def parse_events_so_far(pieces: Sequence[Piece]) -> list[tuple[float, bytes]]:
    """The whole events of a stream that still runs; none before its headers have come."""
    stream = b"".join(piece.data for piece in pieces)
    head, found, _ = stream.partition(END_OF_HEADERS)
    if not found:
        return []
    parts = _whole_chunks(stream, len(head) + len(END_OF_HEADERS))
    clock = _Clock(pieces)
    return list(_events([(clock.moment_of(end), data) for end, data in parts]))


def _whole_chunks(stream: bytes, begin: int) -> Iterator[tuple[int, bytes]]:
    """Chunks until the stream, which may end anywhere, does."""
    try:
        yield from _chunks(stream, begin)
    except ProtocolError:
        return


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ProtocolError(f"no HTTP status: {first[:200]!r}")
    fields = (line.partition(":") for line in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


def _check_length(headers: dict[str, str], num_bytes: int) -> None:
    length = headers.get("content-length")
    if length is not None and length != str(num_bytes):
        raise ProtocolError(f"{num_bytes} bytes of a body of {length}")


def _chunks(stream: bytes, begin: int) -> Iterator[tuple[int, bytes]]:
    """Each chunk of a chunked body with the place behind its last byte."""
    at = begin
    while True:
        line_end = stream.find(b"\r\n", at)
        size_text = stream[at : max(line_end, at)].partition(b";")[0].strip()
        try:
            size = int(size_text, 16)
        except ValueError:
            raise ProtocolError(f"the body was cut off, or is not chunked, at byte {at - begin}") from None
        if size == 0:
            return
        start, end = line_end + 2, line_end + 2 + size
        if stream[end : end + 2] != b"\r\n":
            raise ProtocolError(f"the body was cut off inside a chunk of {size} bytes")
        yield end, stream[start:end]
        at = end + 2


def _events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Server-sent events of one data line each; an event has come when the part with its end has."""
    rest = b""
    for at_s, data in parts:
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            if event.startswith(DATA):
                yield at_s, event.removeprefix(DATA)


class _Clock:
    """When a byte of the stream came. Asked for places in rising order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._left = iter(pieces)
        self._piece = Piece(0.0, b"")
        self._end = 0

    def moment_of(self, end: int) -> float:
        """Of the piece that holds the byte before `end`."""
        while self._end < end:
            self._piece = next(self._left)
            self._end += len(self._piece.data)
        return self._piece.at_s
