"""What is said before the bytes of the blocks; and that the format is the one that is written down."""

import itertools
import struct
import zlib
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transport.tcp_frames import (
    MAX_FRAME_BLOCKS,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    blocks_per_frame,
    encode_frame_start,
    parse_header,
    parse_prefix,
)
from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef

REF = TicketRef("t-1", "boot", 7, 2)
RECORDED = bytes.fromhex(
    "4b56524200010000005500000200beeda189"
    "83a372656684a97469636b65745f6964a3742d31ab696e6361726e6174696f6ea4626f6f74a565706f636807a7617474656d707402"
    "a7696e64696365739203cd012ca76469676573747392cfffffffffffffffff05"
)
"""Of a frame of blocks 3 and 300 of 256 bytes; also in docs/wire-format.md."""

DOCUMENT = Path(__file__).parents[3] / "docs" / "wire-format.md"

refs = st.builds(
    TicketRef,
    ticket_id=st.text(max_size=40),
    incarnation=st.text(max_size=40),
    epoch=st.integers(0, 2**63),
    attempt=st.integers(0, 2**31),
)


def test_the_frame_in_the_documentation_is_what_is_sent():
    lines = DOCUMENT.read_text().partition("512 bytes of blocks follow.\n\n")[2].splitlines()
    example = itertools.takewhile(lambda line: line.startswith("    "), lines)
    assert bytes.fromhex("".join(example)) == RECORDED
    assert encode_frame_start(REF, [3, 300], [2**64 - 1, 5], 256) == RECORDED


def test_the_frame_in_the_documentation_can_be_read_with_nothing_but_msgpack():
    magic, version, num_header_bytes, num_payload_bytes, crc = struct.unpack(">4sHIII", RECORDED[:18])
    assert (magic, version, num_payload_bytes) == (b"KVRB", 1, 512)
    header = RECORDED[18:]
    assert len(header) == num_header_bytes
    assert zlib.crc32(header) == crc
    assert msgpack.unpackb(header) == {
        "ref": {"ticket_id": "t-1", "incarnation": "boot", "epoch": 7, "attempt": 2},
        "indices": [3, 300],
        "digests": [2**64 - 1, 5],
    }


@given(refs, st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**64 - 1)), max_size=50), st.integers(1, 10**6))
def test_what_was_encoded_is_decoded(ref, blocks, block_bytes):
    indices, digests = [index for index, _ in blocks], [digest for _, digest in blocks]
    data = encode_frame_start(ref, indices, digests, block_bytes)
    prefix = parse_prefix(data[:PREFIX_BYTES], 50 * block_bytes)
    assert len(data) == PREFIX_BYTES + prefix.num_header_bytes
    header = parse_header(data[PREFIX_BYTES:], prefix, block_bytes)
    assert (header.ref, header.indices, header.digests) == (ref, indices, digests)


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_a_prefix_of_random_bytes_is_refused(data):
    with pytest.raises(ProtocolError):
        parse_prefix(data, 2**32)


@given(st.binary(max_size=200))
def test_a_header_of_random_bytes_is_refused_with_one_kind_of_error(data):
    prefix = parse_prefix(struct.pack(">4sHIII", b"KVRB", 1, len(data), 256, zlib.crc32(data)), 2**20)
    with pytest.raises(ProtocolError):
        parse_header(data, prefix, 256)


def test_no_flipped_bit_goes_unnoticed():
    stream = RECORDED + bytes(512)
    for bit in range(len(RECORDED) * 8):
        damaged = bytearray(stream)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            prefix = parse_prefix(damaged[:PREFIX_BYTES], 512)
            end = PREFIX_BYTES + prefix.num_header_bytes
            parse_header(bytes(damaged[PREFIX_BYTES:end]), prefix, 256)


def test_the_largest_frame_of_a_sender_has_room_in_the_header():
    ref = TicketRef("t" * 1000, "i" * 1000, 2**63, 2**31)
    indices = list(range(2**62, 2**62 + MAX_FRAME_BLOCKS))
    data = encode_frame_start(ref, indices, [2**64 - 1] * MAX_FRAME_BLOCKS, 1)
    assert parse_prefix(data, MAX_FRAME_BLOCKS).num_header_bytes <= MAX_HEADER_BYTES


def test_a_field_that_we_do_not_know_is_ignored():
    header = msgpack.packb(msgpack.unpackb(RECORDED[PREFIX_BYTES:]) | {"later": {"a": [1]}})
    prefix = parse_prefix(struct.pack(">4sHIII", b"KVRB", 1, len(header), 512, zlib.crc32(header)), 512)
    assert parse_header(header, prefix, 256).indices == [3, 300]


@pytest.mark.parametrize(
    ("block_bytes", "max_frame_bytes", "expected"),
    [(100, 1000, 10), (100, 999, 9), (1000, 10, 1), (1, 10**6, MAX_FRAME_BLOCKS)],
)
def test_a_frame_has_as_many_blocks_as_fit_and_at_least_one(block_bytes, max_frame_bytes, expected):
    assert blocks_per_frame(block_bytes, max_frame_bytes) == expected


def test_the_header_is_a_map_so_that_fields_can_be_added():
    assert isinstance(msgspec.msgpack.decode(RECORDED[PREFIX_BYTES:]), dict)
