"""Blocking sockets of every path: limits in the kernel, and questions that do not block."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time

_INT = struct.Struct("i")


def limit_silence(sock: socket.socket, silence_s: float) -> None:
    """From now on a receive on this blocking socket to which nothing comes for `silence_s` raises BlockingIOError.

    The kernel's timeout, because Python's makes the socket non-blocking inside and MSG_WAITALL void.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(silence_s))


def limit_send(sock: socket.socket, stuck_s: float) -> None:
    """The same for a send that the peer takes nothing of."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(stuck_s))


class EndWatch:
    """Belongs to one thread, which must not ask any more once the socket has been closed here."""

    def __init__(self, sock: socket.socket) -> None:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        self._poll = poll.poll

    def has_ended(self) -> bool:
        """Whether one side has ended the connection, also when something that was sent before waits unread."""
        return bool(self._poll(0))


def is_quiet(sock: socket.socket) -> bool:
    """Whether the connection is open and nothing waits to be read. Only then may it be used again by a side to which
    the peer speaks when spoken to, or never."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def shut_down(sock: socket.socket) -> None:
    """Wakes whoever waits in a call on the socket. Does nothing where that has been done already."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer, or another thread, was faster


def num_unacknowledged(sock: socket.socket) -> int:
    """Bytes that the kernel has of what was sent, and the other side's has not taken yet. Raises OSError."""
    return int(_INT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size)))[0])


def left_s(ends_s: float) -> float:
    """Seconds until `ends_s` of time.monotonic. Raises TimeoutError when there are none."""
    seconds = ends_s - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _timeval(duration_s: float) -> bytes:
    seconds = int(duration_s)
    return struct.pack("ll", seconds, int((duration_s - seconds) * 1_000_000))
