"""bare_socket: the least that moves blocks over TCP between two processes.

The source gives its blocks to blocking sendmsg calls; the target receives straight into place, in as few calls as the
kernel allows. No names of blocks, no permits, no digests.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from load_tests.bare_shm import limit
from load_tests.transfer_halves import HOST, PUSH_S, Pool
from load_tests.transfer_messages import Sent
from pd_core.errors import TransferError

MAX_PIECES = 1024
"""Most that one sendmsg takes."""


class BareSocketSource:
    """SourceHalf."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    async def connect(self, offer: str) -> None:
        self._sock.settimeout(PUSH_S)
        self._sock.connect((HOST, int(offer)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit(self._sock)

    async def send(self, note: str) -> Sent:
        pieces = self._pool.blocks
        began_s = time.monotonic()
        while pieces:
            num_sent = self._sock.sendmsg(pieces[:MAX_PIECES])
            while pieces and num_sent >= len(pieces[0]):
                num_sent -= len(pieces.pop(0))
            if num_sent:
                pieces[0] = pieces[0][num_sent:]
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        self._sock.close()


class BareSocketTarget:
    """TargetHalf."""

    def __init__(self, pool: Pool) -> None:
        self._buffer = pool.buffer
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock: socket.socket | None = None

    async def open(self) -> str:
        self._listener.bind((HOST, 0))
        self._listener.listen(1)
        return str(self._listener.getsockname()[1])

    async def receive(self, say_ready: Callable[[str], None]) -> float:
        if self._sock is None:
            self._listener.settimeout(PUSH_S)
            self._sock, _ = self._listener.accept()
            limit(self._sock)
        sock, left = self._sock, self._buffer
        say_ready("")
        while left:
            num_bytes = sock.recv_into(left, 0, socket.MSG_WAITALL)  # wakes us less often
            if not num_bytes:
                raise TransferError("the other half has gone away")
            left = left[num_bytes:]
        return time.monotonic()

    async def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._listener.close()
        self._buffer = self._buffer[:0]
