"""Frames: where one message ends and the next begins.

    offset  0       4        6         10       14
            | magic | version | length  | crc32  | body (length bytes)
            | KVRP  |   u16   |   u32   |  u32   |                      all big-endian

The header is judged as soon as its bytes are there, before one byte is set aside for the body. The CRC of the body
finds the flipped bits that TCP's own sum lets through; it is no protection against an attacker.
"""

from __future__ import annotations

import struct
import zlib

from pd_core.errors import ProtocolError

MAGIC = b"KVRP"
WIRE_VERSION = 2

_HEADER = struct.Struct(">4sHII")
HEADER_BYTES = _HEADER.size


def encode_frame(body: bytes) -> bytes:
    """Header and body in one piece."""
    return _HEADER.pack(MAGIC, WIRE_VERSION, len(body), zlib.crc32(body)) + body


def parse_header(header: bytes | bytearray, max_body_bytes: int, offset: int = 0) -> tuple[int, int]:
    """Length and CRC of the body after the header that begins at `offset`. Raises ProtocolError for what is none of
    ours."""
    magic, version, num_body_bytes, crc = _HEADER.unpack_from(header, offset)
    if magic != MAGIC:
        raise ProtocolError(f"frame begins with {magic!r}, not {MAGIC!r}: this is not a kvrelay peer")
    if version != WIRE_VERSION:
        raise ProtocolError(f"wire version: ours {WIRE_VERSION}, theirs {version}")
    if num_body_bytes > max_body_bytes:
        raise ProtocolError(f"frame of {num_body_bytes} bytes, at most {max_body_bytes} are allowed here")
    return num_body_bytes, crc


def check_body(body: bytes, crc: int) -> None:
    """Raises ProtocolError when the body is not the one that its header announced."""
    if zlib.crc32(body) != crc:
        raise _damaged(body)


def _damaged(body: bytes) -> ProtocolError:
    return ProtocolError(f"frame of {len(body)} bytes was damaged on its way: crc32 differs")


class FrameReader:
    """Cuts a stream of bytes into bodies. Holds at most one unfinished frame and what was fed last.

    max_body_bytes: may be changed between two bodies; counts from the next header on
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._offset = 0
        self._announced: tuple[int, int] | None = None

    @property
    def is_inside_frame(self) -> bool:
        """Whether bytes of an unfinished frame are waiting for the rest."""
        return self._announced is not None or self._offset < len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Takes bytes as they came."""
        if self._offset:
            del self._buffer[: self._offset]
            self._offset = 0
        self._buffer += data

    def next_body(self) -> bytes | None:
        """The next whole body, or None until more bytes came. Raises ProtocolError."""
        buffer, announced = self._buffer, self._announced
        if announced is None:
            if len(buffer) - self._offset < HEADER_BYTES:
                return None
            announced = parse_header(buffer, self.max_body_bytes, self._offset)
            self._offset += HEADER_BYTES
        num_body_bytes, crc = announced
        end = self._offset + num_body_bytes
        if len(buffer) < end:
            self._announced = announced
            return None
        body = bytes(memoryview(buffer)[self._offset : end])
        self._offset = end
        self._announced = None
        if zlib.crc32(body) != crc:  # not by `check_body`: one call less for every step of a decode worker
            raise _damaged(body)
        return body
