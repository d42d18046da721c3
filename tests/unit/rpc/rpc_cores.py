"""Two cores and the bytes between them: no socket, no clock."""

from __future__ import annotations

import itertools

import msgspec

from pd_rpc.auth import CONTROL_KIND, NONCE_BYTES, Challenge, Side
from pd_rpc.client_core import ClientConnection, ItemsReceived
from pd_rpc.connection import ConnectionClosed, ConnectionState, Event, PeerProved
from pd_rpc.limits import DEFAULT_LIMITS, RpcLimits
from pd_rpc.server_core import ServerConnection
from pd_rpc.wire import PeerIdentity, encode

SECRET = b"the secret of the cluster"
ROUTER = PeerIdentity("router-0", "router", "a1")
DECODE = PeerIdentity("decode-0", "decode", "b2")
_nonces = itertools.count(1)


class Ask(msgspec.Struct, tag="ask", frozen=True):
    text: str


class Answer(msgspec.Struct, tag="answer", frozen=True):
    index: int


RAW = msgspec.Raw(encode(Answer(0)))


def challenge(side: Side, secret: bytes = SECRET, kind: str = CONTROL_KIND) -> Challenge:
    identity = ROUTER if side is Side.CLIENT else DECODE
    return Challenge(side, secret, identity, next(_nonces).to_bytes(NONCE_BYTES, "big"), kind=kind)


def opening_pair(limits: RpcLimits = DEFAULT_LIMITS) -> tuple[ClientConnection, ServerConnection]:
    """Both have queued their Hello; time is 0."""
    client = ClientConnection(challenge(Side.CLIENT), limits, now_s=0.0)
    server = ServerConnection(challenge(Side.SERVER), limits, now_s=0.0)
    client.start()
    server.start()
    return client, server


def open_pair(limits: RpcLimits = DEFAULT_LIMITS) -> tuple[ClientConnection, ServerConnection]:
    """Both are open; time is 0."""
    client, server = opening_pair(limits)
    exchange(client, server)
    assert client.state is server.state is ConnectionState.OPEN
    return client, server


def exchange(client: ClientConnection, server: ServerConnection, now_s: float = 0.0) -> list[Event]:
    """Carries bytes until nobody has any; accepts peers that prove themselves. All other events, in order."""
    events: list[Event] = []
    while client.num_unsent_bytes or server.num_unsent_bytes:
        for sender, receiver in ((client, server), (server, client)):
            for event in receiver.receive(sender.data_to_send(now_s), now_s):
                if isinstance(event, PeerProved):
                    events += receiver.accept()
                else:
                    events.append(event)
    return events


def answers(event: Event) -> list[tuple[int, int]]:
    """Call and index of each Answer in an ItemsReceived."""
    assert isinstance(event, ItemsReceived)
    return [(call_id, msgspec.msgpack.decode(body, type=Answer).index) for call_id, body in event.items]


def closing_error(events):
    """The error of the one ConnectionClosed, which must be the last event."""
    assert [isinstance(event, ConnectionClosed) for event in events].count(True) == 1
    assert isinstance(events[-1], ConnectionClosed)
    return events[-1].error
