"""The router's connection to one boot of one worker: made, watched, made again until the boot is replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from pd_core.errors import DeadlineExceeded, KvrelayError, ProtocolError, StaleTicket, WorkerLost
from pd_core.layout import Fingerprint
from pd_core.messages import WORKER_REPLIES, WatchStatus, WorkerEndpoint, WorkerStatus
from pd_rpc.client import RpcClient
from pd_rpc.stream import RpcStream
from pd_rpc.tasks import BackgroundTasks
from pd_rpc.tls import Tls
from pd_rpc.wire import PeerIdentity
from router.faults import Faults
from router.view import WorkerRef

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
WATCH_S = 3600.0
"""One status stream; the next begins on the same connection."""

Connect = Callable[[WorkerEndpoint], Awaitable[RpcClient]]
"""Connects to a worker. Raises KvrelayError."""


class LinkListener(Protocol):
    """Who wants to know. Called on the event loop."""

    def on_connected(self, ref: WorkerRef, fingerprint: Fingerprint | None) -> None:
        """It can be called. fingerprint: of the KV that it makes or keeps, as it says itself"""
        ...

    def on_status(self, status: WorkerStatus) -> None: ...

    def on_lost(self, ref: WorkerRef, why: str) -> None: ...


def rpc_connect(identity: PeerIdentity, secret: bytes, tls: Tls | None) -> Connect:
    """Connects with this identity, and only to the boot that the endpoint names. tls: as RpcClient's"""

    async def connect(endpoint: WorkerEndpoint) -> RpcClient:
        def check_peer(_ours: PeerIdentity, theirs: PeerIdentity) -> None:
            expected = (endpoint.name, endpoint.role, endpoint.incarnation)
            if (theirs.name, theirs.role, theirs.incarnation) != expected:
                raise StaleTicket(f"{endpoint.role} {endpoint.name!r}: another boot or worker answers at its address")

        return await RpcClient.connect(
            endpoint.host,
            endpoint.port,
            identity=identity,
            secret=secret,
            replies=WORKER_REPLIES,
            check_peer=check_peer,
            deadline_s=CONNECT_S,
            tls=tls,
        )

    return connect


class WorkerLink:
    """Keeps one connection to the worker, and its status stream on it, from `start` until `close`.

    faults: told when it cannot go on, through a fault of ours
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        connect: Connect,
        listener: LinkListener,
        heartbeat_interval_s: float,
        faults: Faults,
    ) -> None:
        self.endpoint = endpoint
        self.ref = WorkerRef(endpoint.name, endpoint.incarnation)
        self._connect = connect
        self._listener = listener
        self._interval_s = heartbeat_interval_s
        self._client: RpcClient | None = None
        self._pause_s = FIRST_PAUSE_S
        self._tasks = BackgroundTasks(on_failure=faults.report)

    def start(self) -> None:
        self._tasks.start(self._keep(), f"link:{self.ref.name}")

    async def close(self) -> None:
        """Gives the connection up; whatever runs on it fails with WorkerLost."""
        await self._tasks.close()

    def stream(self, body: msgspec.Struct, deadline_s: float) -> RpcStream:
        """Raises WorkerLost when there is no connection now."""
        return self._connected().stream(body, deadline_s)

    async def call(self, body: msgspec.Struct, deadline_s: float) -> Any:
        """Raises WorkerLost when there is no connection now, and what RpcClient.call raises."""
        return await self._connected().call(body, deadline_s)

    def _connected(self) -> RpcClient:
        if self._client is None or self._client.is_closed:
            raise WorkerLost(f"{self.endpoint.role} worker {self.ref.name} is not connected")
        return self._client

    async def _keep(self) -> None:
        """Connects again and again, with growing pauses; a status that comes makes the pause short again."""
        while True:
            try:
                client = await self._connect(self.endpoint)
            except KvrelayError as error:
                logger.warning("no connection to %s: %s", self.ref.name, error.message)
            else:
                try:
                    self._client = client
                    self._listener.on_connected(self.ref, client.peer.fingerprint)
                    why = await self._watch(client)
                    self._listener.on_lost(self.ref, why)  # first of all: nobody is to be sent there meanwhile
                finally:
                    self._client = None
                    await client.close()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _watch(self, client: RpcClient) -> str:
        """Reads heartbeats as long as the connection lives; why it does not any more."""
        while True:
            try:
                async with client.stream(WatchStatus(self._interval_s), WATCH_S) as statuses:
                    async for status in statuses:
                        self._take(status)
                return "ended its status stream"
            except DeadlineExceeded:
                continue  # an hour is over: watch on
            except KvrelayError as error:
                return error.message

    def _take(self, status: Any) -> None:
        if not isinstance(status, WorkerStatus) or status.name != self.ref.name:
            raise ProtocolError(f"{self.ref.name} sent {type(status).__name__} as its status")
        self._pause_s = FIRST_PAUSE_S
        self._listener.on_status(status)
