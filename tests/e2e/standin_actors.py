"""Actors with the methods of the real ones and nothing behind them but heartbeats: lifecycle tests need no engine."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pd_core.config import Config
from pd_core.errors import ModelError
from pd_core.ledger import LedgerCounts
from pd_core.messages import WatchStatus, WorkerEndpoint, WorkerState, WorkerStatus
from pd_rpc.server import RpcServer
from pd_rpc.wire import PeerIdentity
from pd_worker.process import compute_on


def visible_gpus(_actor: object) -> str:
    """Run in an actor: the devices that CUDA would show it."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


class StandinWorker:
    role = "prefill"

    def __init__(
        self,
        name: str,
        incarnation: str,
        secret: bytes,
        config: Config,
        cores: list[int],
        cache_dir: str,
        log_path: str | None,
    ) -> None:
        self._computing = ThreadPoolExecutor(1, initializer=compute_on, initargs=(cores,))
        self._computing.submit(os.getpid).result()  # now there is a thread that would compute
        self._name, self._incarnation, self._config = name, incarnation, config
        self._stopped = asyncio.Event()
        identity = PeerIdentity(name=name, role=self.role, incarnation=incarnation)
        self._server = RpcServer(identity, secret, {WatchStatus: self._watch_status})

    async def start(self) -> WorkerEndpoint:
        host, port = await self._server.start("127.0.0.1")
        return WorkerEndpoint(self._name, self.role, host, port, self._incarnation, os.getpid())

    async def stop(self, grace_s: float) -> None:
        await self._server.close()
        self._stopped.set()

    async def run_until_stopped(self) -> None:
        await self._stopped.wait()

    async def _watch_status(self, call: WatchStatus, _context: Any) -> Any:
        number = 0
        while True:
            number += 1
            yield WorkerStatus(
                name=self._name,
                role=self.role,
                incarnation=self._incarnation,
                number=number,
                state=WorkerState.READY,
                num_running=0,
                num_waiting=0,
                blocks=LedgerCounts(total=1, free=1, reserved=0, held=0, quarantined=0),
                context_tokens=512,
                pool_tokens=16,
                counters={},
                detail={},
            )
            await asyncio.sleep(call.interval_s)


class StandinPrefill(StandinWorker):
    pass


class StandinDecode(StandinWorker):
    role = "decode"


class BrokenDecode(StandinDecode):
    """Cannot start, and says why."""

    async def start(self) -> WorkerEndpoint:
        raise ModelError("the weights are torn")


class DyingDecode(StandinDecode):
    """Dies without a word while it starts."""

    async def start(self) -> WorkerEndpoint:
        os._exit(3)


class MuteDecode(StandinDecode):
    """Never gets ready."""

    async def start(self) -> WorkerEndpoint:
        await asyncio.sleep(3600)
        raise AssertionError


class DeafPrefill(StandinPrefill):
    """Does not come back from `stop`."""

    async def stop(self, grace_s: float) -> None:
        await asyncio.sleep(3600)


class StandinRouter:
    """Listens on the HTTP port and writes what it is told into `log_path`, one line for each set of workers."""

    def __init__(self, config: Config, secret: bytes, cache_dir: str, log_path: str | None) -> None:
        self._config = config
        self._told: list[WorkerEndpoint] = []
        self._stopped = asyncio.Event()
        self._listener: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        router = self._config.router
        self._listener = await asyncio.start_server(lambda reader, writer: writer.close(), router.host, router.port)
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def set_workers(self, endpoints: list[WorkerEndpoint]) -> None:
        self._told = endpoints

    async def ready(self) -> dict[str, Any]:
        roles = {endpoint.role for endpoint in self._told}
        return {
            "ready": roles == {"prefill", "decode"},
            "told": {endpoint.name: endpoint.incarnation for endpoint in self._told},
        }

    async def stop(self, grace_s: float) -> None:
        if self._listener is not None:
            self._listener.close()
        self._stopped.set()

    async def run_until_stopped(self) -> None:
        await self._stopped.wait()
