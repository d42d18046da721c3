"""Frames: any cutting of the bytes gives the same bodies, and any damage is seen."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.errors import ProtocolError
from pd_rpc.frames import HEADER_BYTES, MAGIC, WIRE_VERSION, FrameReader, encode_frame

bodies_lists = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def read_all(reader: FrameReader) -> list[bytes]:
    bodies = []
    while (body := reader.next_body()) is not None:
        bodies.append(body)
    return bodies


@given(bodies_lists, st.data())
def test_bytes_cut_anywhere_give_the_same_bodies(bodies, data):
    stream = b"".join(map(encode_frame, bodies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader, read = FrameReader(1000), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[start:end])
        read += read_all(reader)
    assert read == bodies
    assert not reader.is_inside_frame


@given(bodies_lists, st.data())
def test_a_truncated_stream_gives_the_whole_frames_and_no_more(bodies, data):
    stream = b"".join(map(encode_frame, bodies))
    length = data.draw(st.integers(0, len(stream) - 1))
    reader = FrameReader(1000)
    reader.feed(stream[:length])
    read = read_all(reader)
    assert read == bodies[: len(read)]
    whole_bytes = sum(HEADER_BYTES + len(body) for body in read)
    assert reader.is_inside_frame is (whole_bytes < length)


@given(bodies_lists, st.data())
def test_a_flipped_bit_is_an_error_or_a_frame_that_never_ends_but_never_another_body(bodies, data):
    stream = bytearray(b"".join(map(encode_frame, bodies)))
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    reader, read, error = FrameReader(1000), [], None
    reader.feed(bytes(stream))
    try:
        while (body := reader.next_body()) is not None:
            read.append(body)
    except ProtocolError as raised:
        error = raised
    assert read == bodies[: len(read)]
    assert len(read) < len(bodies)
    assert error is not None or reader.is_inside_frame


@given(st.binary(min_size=HEADER_BYTES, max_size=100).filter(lambda data: not data.startswith(MAGIC)))
def test_what_another_protocol_sends_is_refused_at_its_first_bytes(data):
    reader = FrameReader(1000)
    reader.feed(data)
    with pytest.raises(ProtocolError, match="not a kvrelay peer"):
        reader.next_body()


def test_another_wire_version_is_refused_naming_both():
    frame = bytearray(encode_frame(b"x"))
    frame[5] = 7
    reader = FrameReader(1000)
    reader.feed(bytes(frame))
    with pytest.raises(ProtocolError, match=f"ours {WIRE_VERSION}, theirs 7"):
        reader.next_body()


def test_a_length_beyond_the_bound_is_refused_before_anything_is_allocated_for_it():
    reader = FrameReader(max_body_bytes=100)
    tracemalloc.start()
    try:
        reader.feed(encode_frame(bytes(101))[:HEADER_BYTES])
        with pytest.raises(ProtocolError, match="101 bytes, at most 100"):
            reader.next_body()
        reader = FrameReader(max_body_bytes=2**31)
        reader.feed(MAGIC + WIRE_VERSION.to_bytes(2, "big") + b"\x7f\xff\xff\xff" + bytes(4))
        assert reader.next_body() is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_bound_counts_from_the_next_frame_on():
    reader = FrameReader(max_body_bytes=10)
    reader.feed(encode_frame(b"hello") + encode_frame(bytes(50)))
    assert reader.next_body() == b"hello"
    reader.max_body_bytes = 50
    assert reader.next_body() == bytes(50)
