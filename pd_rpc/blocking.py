"""The handshake of a control connection on a blocking socket, for connections that then carry something else.

Reads the handshake's frames to the byte and not one more: what the peer sends next is still in the socket.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Protocol

from pd_core.errors import KvrelayError, Unavailable
from pd_rpc.address import format_address, with_address
from pd_rpc.auth import NONCE_BYTES, Challenge, Side
from pd_rpc.frames import HEADER_BYTES, check_body, encode_frame, parse_header
from pd_rpc.handshake import CheckPeer, Handshake, HandshakeState
from pd_rpc.limits import KIB
from pd_rpc.wire import PeerIdentity

_MAX_HELLO_BYTES = 64 * KIB


class HandshakeSocket(Protocol):
    """What the handshake asks of a connection: a blocking socket, or TLS on one."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, num_bytes: int, /) -> bytes: ...

    def gettimeout(self) -> float | None: ...

    def settimeout(self, timeout_s: float | None, /) -> None: ...

    def getpeername(self) -> object: ...


def authenticate_blocking_as_client(
    sock: HandshakeSocket,
    secret: bytes,
    identity: PeerIdentity,
    *,
    kind: str,
    deadline_s: float,
    limit_s: float | None = None,
    check_peer: CheckPeer | None = None,
) -> PeerIdentity:
    """Runs the handshake as the side that connected; who the other side is.

    kind:    what the connection is for; both sides must name the same (see pd_rpc.auth)
    limit_s: what people know as the limit, where connecting has taken a part of it and `deadline_s` is left
    The socket's own timeout is as before afterwards. On an error the socket is the caller's to close.
    Raises AuthenticationFailed, ProtocolError, Unavailable (mute, late or gone), or the error with which `check_peer`
    refused on either side. All name the peer's host:port.
    """
    return _authenticate(sock, Side.CLIENT, secret, identity, kind, deadline_s, check_peer, limit_s)


def authenticate_blocking_as_server(
    sock: HandshakeSocket,
    secret: bytes,
    identity: PeerIdentity,
    *,
    kind: str,
    deadline_s: float,
    check_peer: CheckPeer | None = None,
) -> PeerIdentity:
    """The same as the side that was connected to."""
    return _authenticate(sock, Side.SERVER, secret, identity, kind, deadline_s, check_peer)


def _authenticate(
    sock: HandshakeSocket,
    side: Side,
    secret: bytes,
    identity: PeerIdentity,
    kind: str,
    deadline_s: float,
    check_peer: CheckPeer | None,
    limit_s: float | None = None,
) -> PeerIdentity:
    challenge = Challenge(side, secret, identity, secrets.token_bytes(NONCE_BYTES), kind=kind)
    wire = _BlockingFrames(sock, deadline_s)
    timeout_before_s = sock.gettimeout()
    try:
        return _run(Handshake(challenge), wire, identity, check_peer)
    except TimeoutError as error:
        raise Unavailable(f"{wire.address}: no handshake within {limit_s or deadline_s:g} s") from error
    except OSError as error:
        raise Unavailable(f"{wire.address}: connection ended during the handshake: {error}") from error
    except KvrelayError as error:
        raise with_address(error, wire.address) from error
    finally:
        sock.settimeout(timeout_before_s)


def _run(
    handshake: Handshake, wire: _BlockingFrames, identity: PeerIdentity, check_peer: CheckPeer | None
) -> PeerIdentity:
    wire.send(handshake.start())
    try:
        while handshake.state is not HandshakeState.DONE:
            answer = handshake.receive(wire.receive())
            if answer is not None:
                wire.send(answer)
            if handshake.state is HandshakeState.CHECKING:
                if check_peer is not None:
                    check_peer(identity, handshake.require_peer())
                wire.send(handshake.accept())
    except KvrelayError as error:
        with contextlib.suppress(OSError, KvrelayError):  # gone already, or TLS is over: there is nobody to tell
            wire.send(handshake.refuse(error))
        raise
    return handshake.require_peer()


class _BlockingFrames:
    """Whole frames on a socket, all of them within one deadline."""

    def __init__(self, sock: HandshakeSocket, deadline_s: float) -> None:
        self._sock = sock
        self._ends_s = time.monotonic() + deadline_s
        self.address = address_of(sock)

    def send(self, body: bytes) -> None:
        self._arm()
        self._sock.sendall(encode_frame(body))

    def receive(self) -> bytes:
        num_body_bytes, crc = parse_header(self._receive_exactly(HEADER_BYTES), _MAX_HELLO_BYTES)
        body = self._receive_exactly(num_body_bytes)
        check_body(body, crc)
        return body

    def _receive_exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            self._arm()
            piece = self._sock.recv(num_bytes - len(received))
            if not piece:
                raise ConnectionError("closed by the peer")
            received += piece
        return bytes(received)

    def _arm(self) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)


def address_of(sock: HandshakeSocket) -> str:
    """The other side's host:port, for people."""
    try:
        name = sock.getpeername()
    except OSError:  # reset before we came to ask
        return "peer that has left"
    if isinstance(name, tuple):
        return format_address(*name[:2])
    if isinstance(name, bytes):  # an abstract unix socket
        return f"@{name.removeprefix(bytes(1)).decode(errors='replace')}"
    return name if isinstance(name, str) and name else "a process of this host"
