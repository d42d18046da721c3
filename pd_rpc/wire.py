"""The messages of a connection: msgpack arrays `[tag, field, ...]`. See docs/wire-format.md.

A later version may add fields at the end of an array; a reader ignores those that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from pd_core.errors import ErrorInfo, KvrelayError, ProtocolError
from pd_core.layout import Fingerprint
from pd_rpc.limits import MAX_FRAME_ITEMS

_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T")


class PeerIdentity(msgspec.Struct, frozen=True):
    """Who speaks on a connection, as it says itself; the secret proves only that it belongs to the cluster.

    name:        of the worker, unique in the cluster
    role:        "router", "prefill", "decode", "store"
    incarnation: random id of this boot
    fingerprint: of the KV that it makes or keeps; None for peers without KV
    """

    name: str
    role: str
    incarnation: str
    fingerprint: Fingerprint | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}"


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """Root of the messages; the tag is the class name in small letters."""


class Hello(Message, frozen=True):
    """First message of both sides. nonce: 32 random bytes, never used twice."""

    wire_version: int
    identity: PeerIdentity
    nonce: bytes


class Proof(Message, frozen=True):
    """Answer to the other side's Hello. mac: HMAC-SHA256, 32 bytes."""

    mac: bytes


class Ready(Message, frozen=True):
    """The sender has checked the other's proof and identity and is willing to work with it."""


class Close(Message, frozen=True):
    """Last message of a side: it will send nothing more and ignore what comes. error: why, None = its work is done."""

    error: ErrorInfo | None


class Ping(Message, frozen=True):
    """The sender is alive and had nothing else to say."""


class Call(Message, frozen=True):
    """Client to server. ids grow with every call of a connection.

    deadline_s: how long the caller will wait from now on
    credit:     items that the server may send before it is granted more
    body:       a map with a tag that names the call, here still in its msgpack bytes
    """

    call_id: int
    deadline_s: float
    credit: int
    body: msgspec.Raw


class Credit(Message, frozen=True):
    """Client to server: `num_items` more items may come."""

    call_id: int
    num_items: int


class Cancel(Message, frozen=True):
    """Client to server: nobody waits for this call any more. The server still ends it with End or Failed."""

    call_id: int


_AtMostInFrame = msgspec.Meta(max_length=MAX_FRAME_ITEMS)


class Items(Message, frozen=True):
    """Server to client: answers of any calls, in the order in which they were given; both lists are equally long.

    call_ids: whose each of them is; bodies: a map with a tag each, here still in its msgpack bytes
    """

    call_ids: Annotated[list[int], _AtMostInFrame]
    bodies: Annotated[list[msgspec.Raw], _AtMostInFrame]


class End(Message, frozen=True):
    """Server to client: the call is over, all items were sent."""

    call_id: int


class Failed(Message, frozen=True):
    """Server to client: the call is over because of an error."""

    call_id: int
    error: ErrorInfo


MAX_ERROR_CHARS = 4096


def error_info(error: KvrelayError) -> ErrorInfo:
    """The error for the wire; its sentence is cut where it would crowd a frame out."""
    info = error.to_wire()
    if len(info.message) <= MAX_ERROR_CHARS:
        return info
    return msgspec.structs.replace(info, message=info.message[:MAX_ERROR_CHARS] + " ...")


HANDSHAKE_DECODER = msgspec.msgpack.Decoder(Hello | Proof | Ready | Close)
SERVER_DECODER = msgspec.msgpack.Decoder(Call | Credit | Cancel | Ping | Close)
"""What a server may receive once the connection is open."""
CLIENT_DECODER = msgspec.msgpack.Decoder(Items | End | Failed | Ping | Close)
"""What a client may receive once the connection is open."""


def encode(message: Any) -> bytes:
    """msgpack bytes of a message or of a body."""
    return _encode(message)


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | msgspec.Raw) -> _T:
    """The message in `data`. Raises ProtocolError for everything that the decoder does not take.

    Lengths inside msgpack cannot make us allocate on a peer's word: a body is first walked over as Raw, which finds
    arrays and strings that claim more than there is, before anything decodes it into objects.
    """
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"message cannot be read: {error}") from error
