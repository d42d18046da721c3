"""Frames of KV data connections: what is said before the bytes of the blocks.

    offset  0       4         6               10               14             18
            | magic | version | header length | payload length | header crc32 | header (msgpack) | blocks ...
            | KVRB  |   u16   |      u32      |      u32       |     u32      |                       all big-endian

The blocks follow each other without gaps, in the order of `indices`. The CRC covers the header because the blocks'
digests do not: a flipped bit in an index would put a right block into the wrong place. Pure; blocks never come here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef

MAGIC = b"KVRB"
WIRE_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_FRAME_BLOCKS = 1024

_PREFIX = struct.Struct(">4sHIII")
PREFIX_BYTES = _PREFIX.size

_encode = msgspec.msgpack.Encoder().encode


class FramePrefix(msgspec.Struct, frozen=True):
    """The fixed part: how much follows."""

    num_header_bytes: int
    num_payload_bytes: int
    header_crc32: int


class FrameHeader(msgspec.Struct, frozen=True):
    """What the blocks are. A later version may add fields; a reader ignores those that it does not know.

    indices: in the ticket's range, one for each block
    digests: `block_digest` of each block; none at all where the ticket asks for none
    """

    ref: TicketRef
    indices: Annotated[list[int], msgspec.Meta(max_length=MAX_FRAME_BLOCKS)]
    digests: Annotated[list[int], msgspec.Meta(max_length=MAX_FRAME_BLOCKS)]


_header_decoder = msgspec.msgpack.Decoder(FrameHeader)


def blocks_per_frame(block_bytes: int, max_frame_bytes: int) -> int:
    """How many blocks a sender puts into one frame."""
    return min(max(max_frame_bytes // block_bytes, 1), MAX_FRAME_BLOCKS)


def encode_frame_start(ref: TicketRef, indices: Sequence[int], digests: Sequence[int], block_bytes: int) -> bytes:
    """Prefix and header; the blocks are to follow."""
    header = _encode(FrameHeader(ref, list(indices), list(digests)))
    prefix = _PREFIX.pack(MAGIC, WIRE_VERSION, len(header), len(indices) * block_bytes, zlib.crc32(header))
    return prefix + header


def parse_prefix(data: bytes | bytearray | memoryview, max_payload_bytes: int) -> FramePrefix:
    """Judges the first PREFIX_BYTES of a frame. Raises ProtocolError for what is no frame of ours or too long."""
    magic, version, num_header_bytes, num_payload_bytes, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"frame begins with {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise ProtocolError(f"wire version of KV frames: ours {WIRE_VERSION}, theirs {version}")
    if num_header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {num_header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed")
    if num_payload_bytes > max_payload_bytes:
        raise ProtocolError(f"frame of {num_payload_bytes} KV bytes, at most {max_payload_bytes} are allowed")
    return FramePrefix(num_header_bytes, num_payload_bytes, crc)


def parse_header(data: bytes | memoryview, prefix: FramePrefix, block_bytes: int) -> FrameHeader:
    """Decodes the header. Raises ProtocolError for damage, nonsense, or lengths that contradict each other."""
    if zlib.crc32(data) != prefix.header_crc32:
        raise ProtocolError("the frame header was damaged on its way: crc32 differs")
    try:
        header = _header_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the frame header cannot be read: {error}") from error
    if header.digests and len(header.digests) != len(header.indices):
        raise ProtocolError(f"{len(header.indices)} blocks with {len(header.digests)} digests")
    if prefix.num_payload_bytes != len(header.indices) * block_bytes:
        raise ProtocolError(
            f"{prefix.num_payload_bytes} KV bytes for {len(header.indices)} blocks of {block_bytes} bytes"
        )
    return header
