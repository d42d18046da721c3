"""control_call: a call by pd_rpc and its answer, as a lease's renewal is; bare_call: a few bytes there and back.

Both are timed by the source, from the call to its answer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator

import msgspec

from kv_transport.sockets import shut_down
from load_tests.bare_shm import limit
from load_tests.transfer_halves import HOST, PUSH_S
from load_tests.transfer_messages import Sent
from pd_core.errors import TransferError
from pd_rpc.client import RpcClient
from pd_rpc.server import CallContext, RpcServer
from pd_rpc.wire import PeerIdentity

CALL_BYTES = 64
"""About what a renewal has on the wire."""


class Hail(msgspec.Struct, frozen=True, tag="hail"):
    text: str


class Hailed(msgspec.Struct, frozen=True, tag="hailed"):
    pass


class ControlCallSource:
    """SourceHalf."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._client: RpcClient | None = None

    async def connect(self, offer: str) -> None:
        self._client = await RpcClient.connect(
            HOST,
            int(offer),
            identity=PeerIdentity("prefill-bench", "prefill", "bench-source"),
            secret=self._secret,
            replies=Hailed,
        )

    async def send(self, note: str) -> Sent:
        if self._client is None:
            raise TransferError("not connected yet")
        began_s = time.monotonic()
        await self._client.call(Hail("x" * CALL_BYTES), deadline_s=PUSH_S)
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class ControlCallTarget:
    """Offerer."""

    def __init__(self, secret: bytes) -> None:
        identity = PeerIdentity("decode-bench", "decode", "bench-target")
        self._server = RpcServer(identity, secret, {Hail: _answer})

    async def open(self) -> str:
        _, port = await self._server.start(HOST)
        return str(port)

    async def close(self) -> None:
        await self._server.close()


class BareCallSource:
    """SourceHalf."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    async def connect(self, offer: str) -> None:
        self._sock.settimeout(PUSH_S)
        self._sock.connect((HOST, int(offer)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit(self._sock)

    async def send(self, note: str) -> Sent:
        began_s = time.monotonic()
        self._sock.send(bytes(CALL_BYTES))
        if not self._sock.recv(CALL_BYTES, socket.MSG_WAITALL):
            raise TransferError("the other half has gone away")
        return Sent(began_s, time.monotonic())

    async def close(self) -> None:
        self._sock.close()


class BareCallTarget:
    """Offerer; its thread answers."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._answer, name="bare-call", daemon=True)

    async def open(self) -> str:
        self._listener.bind((HOST, 0))
        self._listener.listen(1)
        self._thread.start()
        return str(self._listener.getsockname()[1])

    async def close(self) -> None:
        for sock in (self._listener, self._sock):
            if sock is not None:
                shut_down(sock)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, PUSH_S)
        self._listener.close()

    def _answer(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # closed before anybody came
        with sock:
            self._sock = sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while call := sock.recv(CALL_BYTES, socket.MSG_WAITALL):
                sock.send(call)


async def _answer(call: Hail, context: CallContext) -> AsyncIterator[Hailed]:
    yield Hailed()
