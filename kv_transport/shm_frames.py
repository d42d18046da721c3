"""What is said on shared-memory connections. Pure. The frames are those of control connections (pd_rpc.frames).

sender                     receiver
attach + the file --------->
       <------------------- attached
doorbell ------------------>
       <------------------- taken
       <------------------- refused, its last word
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec

from kv_transport.doorbell_frames import Attached, Ints, Refused, Taken
from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef

WIRE_VERSION = 1
FIRST_FRAME_BLOCKS = 8

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first message; the pool's file comes with its first byte.

    nonce: as in the file's label
    """

    version: int
    num_blocks: _Number
    block_bytes: _Number
    nonce: bytes


class Doorbell(msgspec.Struct, frozen=True, tag="doorbell"):
    """Blocks are ready to be taken. A later version may add fields; a reader ignores those that it does not know.

    number:    of this message on its connection, larger than those before
    indices:   in the ticket's range, one for each block
    block_ids: in the sender's pool
    digests:   `block_digest` of each block; none at all where the ticket asks for none
    """

    number: int
    ref: TicketRef
    indices: Ints
    block_ids: Ints
    digests: Ints


FROM_SENDER: msgspec.msgpack.Decoder[Attach | Doorbell] = msgspec.msgpack.Decoder(Attach | Doorbell)
FROM_RECEIVER: msgspec.msgpack.Decoder[Attached | Taken | Refused] = msgspec.msgpack.Decoder(Attached | Taken | Refused)


def check_doorbell(doorbell: Doorbell) -> None:
    """Raises ProtocolError when its lists contradict each other."""
    num_blocks = len(doorbell.indices)
    if len(doorbell.block_ids) != num_blocks or len(doorbell.digests) not in (0, num_blocks):
        raise ProtocolError(f"{num_blocks} indices, {len(doorbell.block_ids)} blocks, {len(doorbell.digests)} digests")


def doorbells(
    ref: TicketRef,
    indices: Sequence[int],
    block_ids: Sequence[int],
    digests: Sequence[int],
    max_frame_blocks: int,
    first_number: int,
) -> Iterator[Doorbell]:
    """One push as doorbells of at most so many blocks, numbered from `first_number` on.

    Each is made, and the digests that it needs, when it is asked for: the first is small, so that the other side soon
    has something to do, and each is at most twice as large as the one before, so that it is there in time.
    """
    first, number = 0, first_number
    num_blocks = FIRST_FRAME_BLOCKS if digests else max_frame_blocks
    while first < len(indices):
        part = slice(first, first + min(num_blocks, max_frame_blocks))
        yield Doorbell(number, ref, list(indices[part]), list(block_ids[part]), list(digests[part]))
        first, num_blocks, number = part.stop, 2 * num_blocks, number + 1
