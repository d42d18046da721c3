"""Sans-IO core of a connection: bytes and time come in, events and bytes come out. No socket, no clock, no task.

    OPENING --both Ready--> OPEN --close | Close | EOF | silence | bad bytes--> CLOSED
        \\___________________________refused | late | bad bytes_________________/

`receive`, `tick`, `accept` and `close` return events; whatever is to be sent waits in `data_to_send`. The last event
of every connection is ConnectionClosed. In CLOSED bytes are ignored, because the peer may not know yet; every call of
ours that needs an open connection raises InvalidTransition.

ServerConnection and ClientConnection add the calls.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import msgspec

from pd_core.errors import InvalidTransition, KvrelayError, ProtocolError, Unavailable, WorkerLost, from_wire
from pd_rpc.auth import Challenge
from pd_rpc.frames import FrameReader, encode_frame
from pd_rpc.handshake import Handshake, HandshakeState
from pd_rpc.limits import RpcLimits
from pd_rpc.wire import Close, PeerIdentity, Ping, decode, encode, error_info


class PeerProved(msgspec.Struct, frozen=True):
    """The peer belongs to the cluster; the owner has to `accept` it or to `close`."""

    peer: PeerIdentity


class Opened(msgspec.Struct, frozen=True):
    """Both sides accepted: calls may begin."""

    peer: PeerIdentity


class ConnectionClosed(msgspec.Struct, frozen=True):
    """Nothing will come any more. error: None if a side closed it because its work was done."""

    error: KvrelayError | None


Event = Any
"""One of the events above, or of those of the two sides."""


class ConnectionState(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


_ALIVE = (ConnectionState.OPENING, ConnectionState.OPEN)


class Connection:
    """What both sides share: handshake, frames, heartbeats, closing. `now_s` is a monotonic time in seconds."""

    _decoder: msgspec.msgpack.Decoder[Any]

    def __init__(self, challenge: Challenge, limits: RpcLimits, now_s: float) -> None:
        self.limits = limits
        self.state = ConnectionState.OPENING
        self._handshake = Handshake(challenge)
        self._frames = FrameReader(limits.max_hello_bytes)
        self._unsent: deque[bytes] = deque()
        self.num_unsent_bytes = 0
        self._began_s = now_s
        self.last_received_s = now_s
        self._last_sent_s = now_s

    @property
    def peer(self) -> PeerIdentity | None:
        """Who the other side is; None until it has proved itself."""
        return self._handshake.peer

    def require_peer(self) -> PeerIdentity:
        """Who the other side is. Raises InvalidTransition before it has proved itself."""
        return self._handshake.require_peer()

    def start(self) -> None:
        """Queues our Hello."""
        self._queue_body(self._handshake.start())

    def accept(self) -> list[Event]:
        """The owner's answer to PeerProved: the peer will do."""
        self._queue_body(self._handshake.accept())
        return self._opened_if_done()

    def close(self, error: KvrelayError | None) -> list[Event]:
        """Ends the connection; the peer is told `error`, or that our work is done."""
        if self.state is ConnectionState.CLOSED:
            raise InvalidTransition("connection is closed already")
        if self.state is ConnectionState.OPEN:
            self._queue(Close(None if error is None else error_info(error)))
        else:
            self._queue_body(self._handshake.refuse(error))
        return self._closed(error)

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Takes bytes as they came. Bytes that the wire format does not allow close the connection."""
        if self.state is ConnectionState.CLOSED:
            return []
        self.last_received_s = now_s
        self._frames.feed(data)
        events: list[Event] = []
        try:
            while self.state in _ALIVE and (body := self._frames.next_body()) is not None:
                if self.state is ConnectionState.OPENING:
                    events += self._on_handshake_body(body)
                else:
                    events += self._on_message(decode(self._decoder, body))
        except KvrelayError as error:
            events += self.close(error)
        return events

    def receive_eof(self, reason: str) -> list[Event]:
        """The transport is gone. reason: for the error, like "closed by the peer" """
        if self.state is ConnectionState.CLOSED:
            return []
        inside = " inside a frame" if self._frames.is_inside_frame else ""
        if self.state is ConnectionState.OPEN:
            return self._closed(WorkerLost(f"connection ended{inside}: {reason}"))
        return self._closed(Unavailable(f"connection ended{inside} during the handshake: {reason}"))

    def tick(self, now_s: float) -> list[Event]:
        """What time alone brings about: a Ping of ours, or the end of a peer that is late or silent."""
        match self.state:
            case ConnectionState.OPEN:
                silent_s = now_s - self.last_received_s
                if silent_s >= self.limits.silent_dead_s:
                    return self.close(WorkerLost(f"{self.peer} was silent for {silent_s:.1f} s"))
                if now_s - self._last_sent_s >= self.limits.heartbeat_s:
                    self._queue(Ping())
            case ConnectionState.OPENING if now_s - self._began_s >= self.limits.handshake_s:
                return self.close(Unavailable(f"no handshake within {self.limits.handshake_s:g} s"))
            case _:
                pass
        return []

    def next_tick_s(self) -> float | None:
        """When `tick` should be called next, or None when it is over."""
        match self.state:
            case ConnectionState.OPEN:
                dead_s = self.last_received_s + self.limits.silent_dead_s
                return min(dead_s, self._last_sent_s + self.limits.heartbeat_s)
            case ConnectionState.OPENING:
                return self._began_s + self.limits.handshake_s
            case ConnectionState.CLOSED:
                return None

    def data_to_send(self, now_s: float) -> bytes:
        """All bytes that wait to be sent; they count as sent now."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        self.num_unsent_bytes = 0
        if data:
            self._last_sent_s = now_s
        return data

    def _on_handshake_body(self, body: bytes) -> list[Event]:
        before = self._handshake.state
        answer = self._handshake.receive(body)
        if answer is not None:
            self._queue_body(answer)
        if before is HandshakeState.AWAITING_PROOF:
            self._frames.max_body_bytes = self.limits.max_body_bytes
            return [PeerProved(self._handshake.require_peer())]
        return self._opened_if_done()

    def _opened_if_done(self) -> list[Event]:
        if self._handshake.state is not HandshakeState.DONE:
            return []
        self.state = ConnectionState.OPEN
        return [Opened(self._handshake.require_peer())]

    def _on_message(self, message: Any) -> list[Event]:
        """A message of an open connection; each side adds its own. Raises ProtocolError."""
        match message:
            case Ping():
                return []
            case Close(error=error):
                return self._closed(None if error is None else from_wire(error))
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for this side")

    def _closed(self, error: KvrelayError | None) -> list[Event]:
        self.state = ConnectionState.CLOSED
        return [ConnectionClosed(error)]

    def _require_open(self, action: str) -> None:
        if self.state is not ConnectionState.OPEN:
            raise InvalidTransition(f"cannot {action}: connection is {self.state.value}")

    def _queue(self, message: Any) -> None:
        self._queue_body(encode(message))

    def _queue_body(self, body: bytes) -> None:
        frame = encode_frame(body)
        self._unsent.append(frame)
        self.num_unsent_bytes += len(frame)
