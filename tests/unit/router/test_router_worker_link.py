"""The router's link to one worker: what its owner is told, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pd_core.errors import WorkerLost
from pd_core.layout import Fingerprint
from pd_core.messages import WorkerEndpoint, WorkerStatus
from pd_rpc.wire import PeerIdentity
from router.faults import Faults
from router.view import WorkerRef
from router.worker_link import WorkerLink

ENDPOINT = WorkerEndpoint("d0", "decode", "127.0.0.1", 1, "boot", pid=1)


class BrokenClient:
    """A connection that has just ended: every stream says so. It takes its time to close."""

    is_closed = True
    peer = PeerIdentity("d0", "decode", "boot")

    def __init__(self) -> None:
        self.is_closing = asyncio.Event()
        self.may_close = asyncio.Event()

    def stream(self, body: msgspec.Struct, deadline_s: float) -> Any:
        raise WorkerLost("closed by the peer")

    async def close(self) -> None:
        self.is_closing.set()
        await self.may_close.wait()


class Told:
    def __init__(self) -> None:
        self.lost: list[tuple[WorkerRef, str]] = []

    def on_connected(self, ref: WorkerRef, fingerprint: Fingerprint | None) -> None:
        assert not self.lost

    def on_status(self, status: WorkerStatus) -> None:
        raise AssertionError("nothing was said")

    def on_lost(self, ref: WorkerRef, why: str) -> None:
        self.lost.append((ref, why))


async def test_that_a_worker_is_lost_is_told_at_once_so_that_nobody_is_sent_there_meanwhile() -> None:
    client, told = BrokenClient(), Told()

    async def connect(endpoint: WorkerEndpoint) -> Any:
        return client

    link = WorkerLink(ENDPOINT, connect, told, 0.1, Faults())
    link.start()
    await client.is_closing.wait()
    assert told.lost == [(WorkerRef("d0", "boot"), "closed by the peer")]
    client.may_close.set()
    await link.close()
    assert len(told.lost) == 1
