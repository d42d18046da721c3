"""bare_shm: the least that moves blocks through shared memory between two processes.

The source shows its pool once. For each transfer it rings with one byte; the target copies block by block out of the
mapped pool, and answers with one byte. No names of blocks, no permits, no digests, nobody who could stop it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable

from kv_transport.shm_pool import map_shared
from kv_transport.sockets import limit_send, limit_silence
from load_tests.bare_memcpy import address_of, memmove
from load_tests.transfer_halves import PUSH_S, Pool
from load_tests.transfer_messages import Sent
from pd_core.errors import TransferError

BELL = b"!"


class BareShmSource:
    """SourceHalf."""

    def __init__(self, pool: Pool) -> None:
        self._fd = pool.memory.fd
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    async def connect(self, offer: str) -> None:
        self._sock.settimeout(PUSH_S)
        self._sock.connect("\0" + offer)
        socket.send_fds(self._sock, [BELL], [self._fd])
        limit(self._sock)

    async def send(self, note: str) -> Sent:
        began_s = time.monotonic()
        self._sock.send(BELL)
        hear(self._sock)
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        self._sock.close()


class BareShmTarget:
    """TargetHalf."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock: socket.socket | None = None
        self._pages: memoryview | None = None
        self._pairs: list[tuple[int, int]] = []

    async def open(self) -> str:
        name = f"kvrelay-bench-{secrets.token_hex(16)}"
        self._listener.bind("\0" + name)
        self._listener.listen(1)
        return name

    async def receive(self, say_ready: Callable[[str], None]) -> float:
        sock = self._accept() if self._sock is None else self._sock
        num_bytes, pairs = self._pool.shape.block_bytes, self._pairs
        say_ready("")
        hear(sock)
        for to, source in pairs:
            memmove(to, source, num_bytes)
        at_s = time.monotonic()
        sock.send(BELL)
        return at_s

    async def close(self) -> None:
        self._pages = None
        if self._sock is not None:
            self._sock.close()
        self._listener.close()

    def _accept(self) -> socket.socket:
        self._listener.settimeout(PUSH_S)
        sock, _ = self._listener.accept()
        self._sock = sock
        sock.settimeout(PUSH_S)
        _, [fd], _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            self._pages = map_shared(fd, self._pool.shape.num_bytes, mmap.PROT_READ)
        finally:
            os.close(fd)
        limit(sock)
        first, num_bytes = address_of(self._pages), self._pool.shape.block_bytes
        self._pairs = [
            (address_of(block), first + number * num_bytes) for number, block in enumerate(self._pool.blocks)
        ]
        return sock


def limit(sock: socket.socket) -> None:
    """From now on it blocks in the kernel, PUSH_S at the longest."""
    sock.settimeout(None)
    limit_silence(sock, PUSH_S)
    limit_send(sock, PUSH_S)


def hear(sock: socket.socket) -> None:
    """Waits for one byte. Raises OSError, TransferError when the other half is gone."""
    if not sock.recv(1):
        raise TransferError("the other half has gone away")
