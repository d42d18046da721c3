"""Blocking sockets: options, gather-send, receive straight into place."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from kv_transport.tcp import TcpOptions

MAX_IOV = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 16
"""Most pieces that one system call takes."""


def tune(sock: socket.socket, options: TcpOptions) -> None:
    """Sends at once, notices peers that vanish. Options that the platform lacks are its loss."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(int(options.keepalive_s), 1)
    for name, value in (
        ("TCP_KEEPIDLE", probe_s),
        ("TCP_KEEPINTVL", probe_s),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(options.unacknowledged_s * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def size_buffers(sock: socket.socket, options: TcpOptions) -> None:
    """To be called before listen or connect: the window scale is agreed upon there."""
    if options.socket_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.socket_buffer_bytes)


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """Writes all pieces in order, up to MAX_IOV with one call. Raises OSError."""
    pending = _Pieces(views)
    while pending:
        pending.advance(sock.sendmsg(pending.head()))


def receive_all(sock: socket.socket, views: list[memoryview]) -> Iterator[int]:
    """Fills all pieces in order; yields how many bytes each call brought, ends early at the peer's end of stream.

    Raises OSError; BlockingIOError when the peer was silent too long (see `sockets.limit_silence`).
    """
    pending = _Pieces(views)
    while pending:
        num_bytes = sock.recvmsg_into(pending.head(), 0, socket.MSG_WAITALL)[0]
        if num_bytes == 0:
            return
        yield num_bytes
        pending.advance(num_bytes)


class _Pieces:
    """Pieces of memory of which the first so many bytes are done."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._first = 0

    def __bool__(self) -> bool:
        return self._first < len(self._views)

    def head(self) -> list[memoryview]:
        return self._views[self._first : self._first + MAX_IOV]

    def advance(self, num_bytes: int) -> None:
        while num_bytes:
            view = self._views[self._first]
            if num_bytes < len(view):
                self._views[self._first] = view[num_bytes:]
                return
            num_bytes -= len(view)
            self._first += 1
