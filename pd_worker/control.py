"""Control connections to the workers that our handoffs go to: one each, made when needed, kept while it lives."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pd_core.errors import DeadlineExceeded, Unavailable, WorkerLost
from pd_core.messages import WORKER_REPLIES
from pd_rpc.address import format_address
from pd_rpc.client import RpcClient
from pd_rpc.handshake import CheckPeer
from pd_rpc.tls import Tls
from pd_rpc.wire import PeerIdentity


class _Boot(NamedTuple):
    """One boot of a worker, and where it listens."""

    host: str
    port: int
    incarnation: str


class ControlConnections:
    """Belongs to one event loop.

    identity: ours; check_peer: refuses workers whose KV does not fit ours; tls: as RpcClient's
    """

    def __init__(self, identity: PeerIdentity, secret: bytes, check_peer: CheckPeer, tls: Tls | None = None) -> None:
        self._identity = identity
        self._secret = secret
        self._check_peer = check_peer
        self._tls = tls
        self._clients: dict[_Boot, RpcClient] = {}
        self._connecting: dict[_Boot, asyncio.Lock] = {}
        self._is_closed = False

    async def client(self, host: str, port: int, incarnation: str, deadline_s: float) -> RpcClient:
        """A live connection to that boot of the worker.

        Raises WorkerLost when another boot answers there, DeadlineExceeded, and what RpcClient.connect raises.
        """
        boot = _Boot(host, port, incarnation)
        lock = self._connecting.setdefault(boot, asyncio.Lock())
        try:
            async with asyncio.timeout(deadline_s), lock:
                client = self._clients.get(boot)
                if client is None or client.is_closed:
                    client = await self._connect(boot, deadline_s)
                return client
        except TimeoutError as error:
            raise DeadlineExceeded(f"{format_address(host, port)}: no connection within {deadline_s:g} s") from error

    @property
    def peers(self) -> list[PeerIdentity]:
        """Who is connected now."""
        return [client.peer for client in self._clients.values() if not client.is_closed]

    async def close(self) -> None:
        self._is_closed = True
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    async def _connect(self, boot: _Boot, deadline_s: float) -> RpcClient:
        self._forget_closed()
        client = await RpcClient.connect(
            boot.host,
            boot.port,
            identity=self._identity,
            secret=self._secret,
            replies=WORKER_REPLIES,
            check_peer=self._check_peer,
            deadline_s=deadline_s,
            tls=self._tls,
        )
        refusal: Unavailable | None = None
        if self._is_closed:
            refusal = Unavailable("this worker is shutting down")
        elif client.peer.incarnation != boot.incarnation:
            refusal = WorkerLost(
                f"{client.peer} at {format_address(boot.host, boot.port)} was started again: its old tickets are void"
            )
        if refusal is not None:
            await client.close()
            raise refusal
        self._clients[boot] = client
        return client

    def _forget_closed(self) -> None:
        self._clients = {boot: client for boot, client in self._clients.items() if not client.is_closed}
        self._connecting = {
            boot: lock for boot, lock in self._connecting.items() if lock.locked() or boot in self._clients
        }
