"""The bytes of a KV data connection, as they are or under TLS. Blocking; each belongs to the connection's thread.

Limits on silence are those of the socket beneath (`sockets.limit_silence`): BlockingIOError comes through either.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Protocol

from kv_transport.tcp_sockets import receive_all, send_all
from pd_core.errors import KvrelayError
from pd_rpc.auth import Side
from pd_rpc.blocking import HandshakeSocket
from pd_rpc.tls import Tls
from pd_rpc.tls_session import TlsSession
from pd_rpc.tls_socket import TlsSocket


class DataStream(Protocol):
    """What a data connection asks of its bytes."""

    @property
    def handshake_socket(self) -> HandshakeSocket:
        """To prove oneself on, after `begin`."""
        ...

    @property
    def is_worn(self) -> bool:
        """Whether another connection should take over."""
        ...

    def begin(self, deadline_s: float) -> None:
        """What comes before the first byte of ours. Raises KvrelayError naming host:port."""
        ...

    def send_all(self, views: list[memoryview]) -> None:
        """Returns when the kernel has all pieces, in order. Raises OSError."""
        ...

    def receive_some(self, view: memoryview) -> int:
        """At least one byte, or 0 at the end of the stream. Raises OSError."""
        ...

    def receive_all(self, views: list[memoryview]) -> Iterator[int]:
        """Fills all pieces in order; yields how many bytes each step brought, ends early at the end of the stream.

        Raises OSError.
        """
        ...

    def fill(self, view: memoryview, within_s: float) -> int:
        """Fills a small piece, however it drips; fewer bytes when that takes longer than about `within_s`, which is the
        limit on silence too, or at the end of the stream. Raises OSError."""
        ...


class PlainStream:
    """Straight from and into memory: one copy, which the kernel makes."""

    is_worn = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @property
    def handshake_socket(self) -> HandshakeSocket:
        return self._sock

    def begin(self, deadline_s: float) -> None:
        """Nothing."""

    def send_all(self, views: list[memoryview]) -> None:
        send_all(self._sock, views)

    def receive_some(self, view: memoryview) -> int:
        return self._sock.recv_into(view)

    def receive_all(self, views: list[memoryview]) -> Iterator[int]:
        return receive_all(self._sock, views)

    def fill(self, view: memoryview, within_s: float) -> int:
        if not len(view):
            return 0
        try:
            return self._sock.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError:
            return 0


class TlsStream:
    """Enciphered and signed by TLS 1.3. What is wrong with its bytes is a ConnectionError, as a reset is."""

    def __init__(self, sock: socket.socket, session: TlsSession) -> None:
        self._socket = TlsSocket(sock, session)

    @property
    def handshake_socket(self) -> HandshakeSocket:
        return self._socket

    @property
    def is_worn(self) -> bool:
        return self._socket.is_worn

    def begin(self, deadline_s: float) -> None:
        self._socket.shake_hands(deadline_s)

    def send_all(self, views: list[memoryview]) -> None:
        try:
            for view in views:
                self._socket.sendall(view)
        except KvrelayError as error:
            raise ConnectionError(error.message) from error

    def receive_some(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view)
        except KvrelayError as error:
            raise ConnectionError(error.message) from error

    def receive_all(self, views: list[memoryview]) -> Iterator[int]:
        for view in views:
            num_bytes = 0
            while num_bytes < len(view):
                num_more = self.receive_some(view[num_bytes:])
                if not num_more:
                    return
                yield num_more
                num_bytes += num_more

    def fill(self, view: memoryview, within_s: float) -> int:
        ends_s = time.monotonic() + within_s
        num_bytes = 0
        try:
            for num_more in self.receive_all([view]):
                num_bytes += num_more
                if time.monotonic() >= ends_s:
                    break
        except BlockingIOError:
            return num_bytes
        return num_bytes


def make_stream(sock: socket.socket, tls: Tls | None, side: Side) -> DataStream:
    """Of a new connection."""
    return PlainStream(sock) if tls is None else TlsStream(sock, tls.session(side))
