"""The handshake of a control connection on a blocking socket, for connections that then carry something else.

Reads the handshake's frames to the byte and not one more: what the peer sends next is still in the socket.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time

from pd_core.errors import KvrelayError, Unavailable
from pd_rpc.address import format_address, with_address
from pd_rpc.auth import NONCE_BYTES, Challenge, Side
from pd_rpc.frames import HEADER_BYTES, check_body, encode_frame, parse_header
from pd_rpc.handshake import CheckPeer, Handshake, HandshakeState
from pd_rpc.limits import KIB
from pd_rpc.wire import PeerIdentity

_MAX_HELLO_BYTES = 64 * KIB


def authenticate_blocking_as_client(
    sock: socket.socket,
    secret: bytes,
    identity: PeerIdentity,
    *,
    kind: str,
    deadline_s: float,
    check_peer: CheckPeer | None = None,
) -> PeerIdentity:
    """Runs the handshake as the side that connected; who the other side is.

    kind: what the connection is for; both sides must name the same (see pd_rpc.auth)
    The socket's own timeout is as before afterwards. On an error the socket is the caller's to close.
    Raises AuthenticationFailed, ProtocolError, Unavailable (mute, late or gone), or the error with which `check_peer`
    refused on either side. All name the peer's host:port.
    """
    return _authenticate(sock, Side.CLIENT, secret, identity, kind, deadline_s, check_peer)


def authenticate_blocking_as_server(
    sock: socket.socket,
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
    sock: socket.socket,
    side: Side,
    secret: bytes,
    identity: PeerIdentity,
    kind: str,
    deadline_s: float,
    check_peer: CheckPeer | None,
) -> PeerIdentity:
    challenge = Challenge(side, secret, identity, secrets.token_bytes(NONCE_BYTES), kind=kind)
    wire = _BlockingFrames(sock, deadline_s)
    timeout_before_s = sock.gettimeout()
    try:
        return _run(Handshake(challenge), wire, identity, check_peer)
    except TimeoutError as error:
        raise Unavailable(f"{wire.address}: no handshake within {deadline_s:g} s") from error
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
        with contextlib.suppress(OSError):  # the peer may be gone already: there is nobody to tell
            wire.send(handshake.refuse(error))
        raise
    return handshake.require_peer()


class _BlockingFrames:
    """Whole frames on a socket, all of them within one deadline."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._ends_s = time.monotonic() + deadline_s
        self.address = _address_of(sock)

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


def _address_of(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:  # reset before we came to ask
        return "peer that has left"
    if isinstance(name, tuple):
        return format_address(*name[:2])
    if isinstance(name, bytes):  # an abstract unix socket
        return f"@{name.removeprefix(bytes(1)).decode(errors='replace')}"
    return name or "a process of this host"
