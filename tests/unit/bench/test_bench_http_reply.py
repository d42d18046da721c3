"""Recorded replies: whatever pieces they come in, the same events at the right moments; and broken ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.http_reply import Piece, parse_events_so_far, parse_reply
from pd_core.errors import ProtocolError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streamed(*parts: bytes) -> bytes:
    return HEAD + b"".join(map(chunk, parts)) + b"0\r\n\r\n"


def cut_into(stream: bytes, cuts: set[int]) -> list[Piece]:
    """Piece n comes at second n."""
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(stream)), len(stream)]
    return [Piece(float(number), stream[begin:end]) for number, (begin, end) in enumerate(itertools.pairwise(bounds))]


PARTS = [b"data: one\n\ndata: two\n\n", b"data: three", b"\n\n", b": a comment\n\ndata: [DONE]\n\n"]
EVENTS = [b"one", b"two", b"three", b"[DONE]"]


@given(st.sets(st.integers(1, len(streamed(*PARTS)))))
def test_however_the_bytes_come_the_events_are_the_same_and_each_has_the_moment_of_its_chunk_s_last_byte(cuts):
    stream = streamed(*PARTS)
    pieces = cut_into(stream, cuts)
    reply = parse_reply(pieces)
    assert [event for _, event in reply.events] == EVENTS
    ends = [stream.index(part) + len(part) for part in (PARTS[0], PARTS[0], b"\r\n2\r\n\n\n", PARTS[3])]
    arrived = [next(at for at, seen in _seen(pieces) if seen >= end) for end in ends]
    assert [at_s for at_s, _ in reply.events] == arrived


def _seen(pieces: list[Piece]) -> list[tuple[float, int]]:
    total, found = 0, []
    for piece in pieces:
        total += len(piece.data)
        found.append((piece.at_s, total))
    return found


def test_a_plain_body_is_one_part():
    reply = parse_reply([Piece(1.0, b'HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\n{"a"')])
    assert (reply.status, reply.body, reply.events) == (400, b'{"a"', [])


@given(st.integers(0, len(streamed(*PARTS)) - 6))
def test_a_reply_that_was_cut_anywhere_is_none(end):
    with pytest.raises(ProtocolError):
        parse_reply([Piece(0.0, streamed(*PARTS)[:end])])


@given(st.integers(0, len(streamed(*PARTS))))
def test_of_a_stream_that_still_runs_the_whole_events_are_known(end):
    events = [event for _, event in parse_events_so_far([Piece(0.0, streamed(*PARTS)[:end])])]
    assert events == EVENTS[: len(events)]


def test_all_events_of_a_stream_that_has_ended_are_known_so_far():
    assert [event for _, event in parse_events_so_far([Piece(0.0, streamed(*PARTS))])] == EVENTS


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 fine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        HEAD + b"zz\r\n",
        HEAD + b"5\r\nabcdefgh",
    ],
)
def test_garbage_is_a_protocol_error(stream):
    with pytest.raises(ProtocolError):
        parse_reply([Piece(0.0, stream)])
