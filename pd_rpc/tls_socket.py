"""TLS on a blocking socket. The socket stays whole: whoever holds it may shut it down at any time from any thread."""

from __future__ import annotations

import contextlib
import socket
import time

from pd_core.errors import KvrelayError, Unavailable
from pd_rpc.address import with_address
from pd_rpc.blocking import address_of
from pd_rpc.tls_session import TlsSession

RECEIVE_BYTES = 256 * 1024
PIECE_BYTES = 256 * 1024
"""Enciphered and sent at once: small enough to stay in the core's cache."""
LINGER_S = 0.5


class TlsSocket:
    """What a HandshakeSocket is, and bulk in both directions. Belongs to one thread.

    Timeouts are the socket's own. Its methods raise what the socket raises, and what TlsSession does.
    """

    def __init__(self, sock: socket.socket, session: TlsSession) -> None:
        self._sock = sock
        self._session = session
        self._received = memoryview(bytearray(RECEIVE_BYTES))

    @property
    def is_worn(self) -> bool:
        """See TlsSession."""
        return self._session.is_worn

    def shake_hands(self, deadline_s: float) -> None:
        """Agrees on keys. The socket's timeout is as before afterwards; on an error the socket is the caller's to
        close.

        Raises AuthenticationFailed, ProtocolError (no TLS), Unavailable (mute, late or gone); all name host:port.
        """
        address = address_of(self._sock)
        timeout_before_s = self._sock.gettimeout()
        ends_s = time.monotonic() + deadline_s
        try:
            self._shake_hands(ends_s)
        except TimeoutError as error:
            raise Unavailable(f"{address}: no TLS handshake within {deadline_s:g} s") from error
        except OSError as error:
            raise Unavailable(f"{address}: connection ended during the TLS handshake: {error}") from error
        except KvrelayError as error:
            self._leave()
            raise with_address(error, address) from error
        finally:
            self._sock.settimeout(timeout_before_s)

    def sendall(self, data: bytes | memoryview) -> None:
        """Returns when the kernel has all of it."""
        view = memoryview(data)
        for first in range(0, len(view), PIECE_BYTES):
            self._session.write(view[first : first + PIECE_BYTES])
            self._sock.sendall(self._session.take_outgoing())

    def recv(self, num_bytes: int) -> bytes:
        """At least one byte, or none at the peer's end."""
        piece = memoryview(bytearray(num_bytes))
        return bytes(piece[: self.recv_into(piece)])

    def recv_into(self, view: memoryview) -> int:
        """At least one byte, or none at the peer's end."""
        while not (num_bytes := self._session.read_into(view)):
            if self._session.is_ended or not self._feed():
                return 0
        return num_bytes

    def gettimeout(self) -> float | None:
        return self._sock.gettimeout()

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def getpeername(self) -> object:
        return self._sock.getpeername()

    def _shake_hands(self, ends_s: float) -> None:
        self._session.start()
        while not self._session.is_open:
            self._arm(ends_s)
            self._sock.sendall(self._session.take_outgoing())
            self._arm(ends_s)
            if not self._feed():
                raise ConnectionError("closed by the peer")
        self._arm(ends_s)
        self._sock.sendall(self._session.take_outgoing())

    def _feed(self) -> bool:
        """Gives the session more of what comes; False at the end of the stream."""
        num_bytes = self._sock.recv_into(self._received)
        self._session.feed(self._received[:num_bytes])
        return num_bytes > 0

    def _leave(self) -> None:
        """Tells the peer why and lets it read that: closing at once might reset the connection before it does."""
        ends_s = time.monotonic() + LINGER_S
        with contextlib.suppress(OSError):
            self._arm(ends_s)
            self._sock.sendall(self._session.take_outgoing())
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv_into(self._received):
                self._arm(ends_s)

    def _arm(self, ends_s: float) -> None:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
