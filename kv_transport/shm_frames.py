"""What is said on shared-memory connections. Pure. The frames are those of control connections (pd_rpc.frames).

sender                     receiver
attach + the file --------->
       <------------------- attached
doorbell ------------------>
       <------------------- taken
       <------------------- refused, its last word
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef
from pd_rpc.frames import encode_frame

WIRE_VERSION = 1
MAX_FRAME_BLOCKS = 1024
MAX_BODY_BYTES = 64 * 1024
MAX_REASON_CHARS = 1000

_Ints: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_FRAME_BLOCKS)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first message; the pool's file comes with its first byte.

    nonce: as in the file's label
    """

    version: int
    num_blocks: _Number
    block_bytes: _Number
    nonce: bytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The receiver has mapped the file, and it is what it should be."""


class Doorbell(msgspec.Struct, frozen=True, tag="doorbell"):
    """Blocks are ready to be taken. A later version may add fields; a reader ignores those that it does not know.

    number:    of this message on its connection
    indices:   in the ticket's range, one for each block
    block_ids: in the sender's pool
    digests:   `block_digest` of each block
    """

    number: int
    ref: TicketRef
    indices: _Ints
    block_ids: _Ints
    digests: _Ints


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The receiver reads the blocks of that doorbell no more; what came of them, the verdict says."""

    number: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the receiver closes the connection."""

    reason: str


Message: TypeAlias = Attach | Attached | Doorbell | Taken | Refused

M = TypeVar("M")

FROM_SENDER: msgspec.msgpack.Decoder[Attach | Doorbell] = msgspec.msgpack.Decoder(Attach | Doorbell)
FROM_RECEIVER: msgspec.msgpack.Decoder[Attached | Taken | Refused] = msgspec.msgpack.Decoder(Attached | Taken | Refused)

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """The message's frame."""
    return encode_frame(_encode(message))


def decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """Raises ProtocolError for what is no message that may come from there."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error


def check_doorbell(doorbell: Doorbell) -> None:
    """Raises ProtocolError when its lists contradict each other."""
    if not len(doorbell.indices) == len(doorbell.block_ids) == len(doorbell.digests):
        raise ProtocolError(
            f"{len(doorbell.indices)} indices, {len(doorbell.block_ids)} blocks, {len(doorbell.digests)} digests"
        )


def doorbells(
    ref: TicketRef,
    indices: Sequence[int],
    block_ids: Sequence[int],
    digests: Sequence[int],
    max_frame_blocks: int,
    first_number: int,
) -> list[Doorbell]:
    """One push as doorbells of at most so many blocks, numbered from `first_number` on."""
    parts = [slice(first, first + max_frame_blocks) for first in range(0, len(indices), max_frame_blocks)]
    return [
        Doorbell(first_number + place, ref, list(indices[part]), list(block_ids[part]), list(digests[part]))
        for place, part in enumerate(parts)
    ]
