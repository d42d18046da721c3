"""What is said on the control connections of the path "ucx". Pure. The frames are those of control connections.

sender                     receiver
attach ------------------->
       <------------------- welcome
(the nonce, over UCX) ---->
       <------------------- attached
doorbell ----------------->
       <------------------- ready
(the blocks, over UCX) --->
       <------------------- taken, where any block was wanted
       <------------------- refused, its last word
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from kv_transport.doorbell_frames import Attached, Ints, Refused, Taken
from pd_core.errors import ProtocolError
from pd_core.ticket import TicketRef

WIRE_VERSION = 1
MAX_ADDRESS_BYTES = 32 * 1024
NONCE_BYTES = 16
MAX_FIRST_TAG = 2**62
"""Tags count on from there and never come to the end of their 64 bits."""

_Address: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_ADDRESS_BYTES)]
_Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Tag: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first message. nonce: what will come over UCX as a greeting; address: of the sender's UCX worker"""

    version: int
    block_bytes: int
    address: _Address
    nonce: _Nonce


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The receiver waits for the greeting under `first_tag`; blocks have the tags after it. address: as in Attach"""

    address: _Address
    first_tag: Annotated[int, msgspec.Meta(ge=0, le=MAX_FIRST_TAG)]


class Doorbell(msgspec.Struct, frozen=True, tag="doorbell"):
    """Blocks are ready to be sent. A later version may add fields; a reader ignores those that it does not know.

    number:    of this message on its connection: 1, 2, 3 ...
    indices:   in the ticket's range, one for each block
    digests:   `block_digest` of each block; none at all under a ticket without digests
    first_tag: of the first block; the others have the tags after it. No tag of the connection comes twice.
    """

    number: int
    ref: TicketRef
    indices: Ints
    digests: Ints
    first_tag: _Tag


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Receives are posted for these places of that doorbell, and for no others. None for a ticket that is over."""

    number: int
    wanted: Ints


Answer: TypeAlias = Welcome | Attached | Ready | Taken | Refused

FROM_SENDER: msgspec.msgpack.Decoder[Attach | Doorbell] = msgspec.msgpack.Decoder(Attach | Doorbell)
FROM_RECEIVER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def check_attach(attach: Attach, block_bytes: int, our_address: bytes) -> None:
    """Raises ProtocolError for a sender that we cannot receive from, naming both values."""
    if attach.version != WIRE_VERSION:
        raise ProtocolError(f"wire version of ucx: ours {WIRE_VERSION}, theirs {attach.version}")
    if attach.block_bytes != block_bytes:
        raise ProtocolError(f"blocks of {attach.block_bytes} bytes, ours have {block_bytes}")
    check_address(attach.address, our_address)


def check_address(theirs: bytes, ours: bytes) -> None:
    """Raises ProtocolError for bytes that are no address of a UCX like ours.

    UCX ends the process when an address begins with another version than it knows.
    """
    if theirs[:1] != ours[:1]:
        raise ProtocolError(f"their UCX address is of version {theirs[:1].hex()}, ours of {ours[:1].hex()}")


def check_doorbell(doorbell: Doorbell, number: int, first_tag: int, most_blocks: int) -> None:
    """Raises ProtocolError unless it is the one that has to come next, and no larger than allowed."""
    if doorbell.number != number:
        raise ProtocolError(f"doorbell {doorbell.number} came where {number} was next")
    if doorbell.first_tag != first_tag:
        raise ProtocolError(f"doorbell {number} begins with tag {doorbell.first_tag}, {first_tag} is the next")
    if len(doorbell.indices) > most_blocks:
        raise ProtocolError(f"doorbell {number} names {len(doorbell.indices)} blocks, at most {most_blocks} may come")


def check_ready(ready: Ready, doorbell: Doorbell) -> None:
    """Raises ProtocolError unless it answers that doorbell."""
    if ready.number != doorbell.number:
        raise ProtocolError(f"doorbell {ready.number} was answered, {doorbell.number} was rung")
    if sorted(set(ready.wanted)) != ready.wanted or not set(ready.wanted) <= set(range(len(doorbell.indices))):
        raise ProtocolError(f"places {ready.wanted} are wanted of {len(doorbell.indices)} blocks")


def doorbells(
    ref: TicketRef,
    indices: Sequence[int],
    digests: Sequence[int],
    most_blocks: int,
    first_number: int,
    first_tag: int,
) -> list[Doorbell]:
    """One push as doorbells of at most so many blocks, numbered from `first_number` and tagged from `first_tag` on."""
    return [
        Doorbell(
            first_number + place,
            ref,
            list(indices[first : first + most_blocks]),
            list(digests[first : first + most_blocks]),
            first_tag + first,
        )
        for place, first in enumerate(range(0, len(indices), most_blocks))
    ]
