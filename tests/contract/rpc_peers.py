"""Message types, handlers that remember what became of them, and limits with small times."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import psutil
from waiting import until

from pd_core.errors import Overloaded
from pd_rpc.auth import CONTROL_KIND
from pd_rpc.blocking import authenticate_blocking_as_client
from pd_rpc.client import RpcClient
from pd_rpc.limits import RpcLimits
from pd_rpc.server import CallContext, RpcServer
from pd_rpc.wire import PeerIdentity, encode

SECRET = b"the secret of the cluster"
ROUTER = PeerIdentity("router-0", "router", "a1")
DECODE = PeerIdentity("decode-0", "decode", "b2")
QUICK = RpcLimits(handshake_s=0.4, heartbeat_s=0.05, silent_dead_s=0.4, credit_wait_s=0.3, linger_s=0.2)


class Echo(msgspec.Struct, tag="echo"):
    text: str


class Count(msgspec.Struct, tag="count"):
    """`num_items` answers of `item_bytes` each, `pause_s` apart; `tidy_s`: how long the handler tidies up."""

    num_items: int
    item_bytes: int = 0
    pause_s: float = 0.0
    tidy_s: float = 0.0


class Number(msgspec.Struct, tag="number"):
    index: int
    filling: bytes = b""


class Fail(msgspec.Struct, tag="fail"):
    how: str


class Hang(msgspec.Struct, tag="hang"):
    """Never answers; `stubborn_s`: how long it takes no notice of being cancelled."""

    stubborn_s: float = 0.0


class Unheard(msgspec.Struct, tag="unheard"):
    """Nobody answers this one."""


REPLIES = [Echo, Number]


class Handlers:
    """What the server does, and what became of it."""

    def __init__(self) -> None:
        self.num_made = 0
        self.contexts: list[CallContext] = []
        self.ended_at_s: list[float] = []

    def table(self):
        return {Echo: self.echo, Count: self.count, Fail: self.fail, Hang: self.hang}

    async def echo(self, body: Echo, context: CallContext) -> AsyncIterator[msgspec.Struct]:
        self.contexts.append(context)
        yield body

    async def count(self, body: Count, context: CallContext) -> AsyncIterator[msgspec.Struct]:
        try:
            for index in range(body.num_items):
                self.num_made += 1
                yield Number(index, bytes(body.item_bytes))
                if body.pause_s:
                    await asyncio.sleep(body.pause_s)
        finally:
            await asyncio.sleep(body.tidy_s)
            self.ended_at_s.append(time.monotonic())

    async def fail(self, body: Fail, context: CallContext) -> AsyncIterator[msgspec.Struct]:
        match body.how:
            case "overloaded":
                yield Number(0)
                raise Overloaded("no blocks left", retry_after_s=3.0)
            case "bug":
                raise ZeroDivisionError("the password is 1234")
            case "timeout of its own":
                raise TimeoutError("the disk")
            case "too long":
                yield Number(0, bytes(17 * 1024 * 1024))
            case "says nothing":
                return
            case "says unknown":
                yield Fail("a type that the caller does not expect")
            case "says too much":
                yield Number(0)
                yield Number(1)
                await asyncio.sleep(60)

    async def hang(self, body: Hang, context: CallContext) -> AsyncIterator[msgspec.Struct]:
        try:
            await asyncio.sleep(60)
            yield Number(0)
        finally:
            if body.stubborn_s:
                await asyncio.sleep(body.stubborn_s)
            self.ended_at_s.append(time.monotonic())


class Peers:
    """Servers and clients of one test, all closed at its end."""

    def __init__(self) -> None:
        self._servers: list[RpcServer] = []
        self._clients: list[RpcClient] = []

    async def server(self, handlers: Handlers, host: str = "127.0.0.1", **options):
        server = RpcServer(options.pop("identity", DECODE), SECRET, handlers.table(), **options)
        self._servers.append(server)
        address = await server.start(host)
        return server, address

    async def client(self, address: tuple[str, int], **options) -> RpcClient:
        options = {"identity": ROUTER, "secret": SECRET, "replies": REPLIES, **options}
        client = await RpcClient.connect(*address, **options)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for server in self._servers:
            await server.close()


@contextlib.asynccontextmanager
async def no_leaks() -> AsyncIterator[Peers]:
    """Peers for one test; afterwards there are no more tasks and open files than before, and no unseen errors."""
    tasks, num_fds = asyncio.all_tasks(), psutil.Process().num_fds()
    unhandled: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    peers = Peers()
    try:
        yield peers
    finally:
        await peers.close()
    own = asyncio.current_task()  # not the one that set the test up
    await until(lambda: asyncio.all_tasks() - {own} <= tasks, within_s=1.0)
    await until(lambda: psutil.Process().num_fds() <= num_fds, within_s=1.0)
    gc.collect()  # a future whose error nobody looked at complains when it goes
    assert unhandled == []


async def connect_blocking(address) -> socket.socket:
    """A client that has authenticated and now does what the test likes."""

    def connect():
        sock = socket.create_connection(address)
        authenticate_blocking_as_client(sock, SECRET, ROUTER, kind=CONTROL_KIND, deadline_s=5.0)
        return sock

    return await asyncio.to_thread(connect)


def encode_raw(body) -> msgspec.Raw:
    """A body as it stands inside a Call."""
    return msgspec.Raw(encode(body))
