"""What connections with doorbells have in common, over shared memory and over UCX. Pure.

The sender says that blocks are ready, the receiver when it has them. The frames are those of control connections
(pd_rpc.frames).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from pd_core.errors import ProtocolError
from pd_rpc.frames import encode_frame

MAX_FRAME_BLOCKS = 1024
MAX_BODY_BYTES = 64 * 1024
MAX_REASON_CHARS = 1000

Ints: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_FRAME_BLOCKS)]

M = TypeVar("M")


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """What the sender showed in its attach works at the receiver; doorbells may come."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The receiver needs the blocks of that doorbell no more; what came of them, the verdict says."""

    number: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the receiver closes the connection."""

    reason: str


_encode = msgspec.msgpack.Encoder().encode


def encode(message: msgspec.Struct) -> bytes:
    """The message's frame."""
    return encode_frame(_encode(message))


def decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """Raises ProtocolError for what is no message that may come from there."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
