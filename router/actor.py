"""The router as an actor: it builds the service and forwards to it.

A plain class; whoever launches it wraps it with Ray.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pd_core.config import Config
from pd_core.messages import WorkerEndpoint
from pd_model.assets import load_assets
from pd_worker.process import log_to
from router.service import RouterService


class RouterActor:
    """cache_dir: where converted models lie; log_path: where log lines go, None is standard error."""

    def __init__(self, config: Config, secret: bytes, cache_dir: str, log_path: str | None) -> None:
        log_to(None if log_path is None else Path(log_path))
        self._service = RouterService(config, secret, load_assets(config.model.path, Path(cache_dir)))
        self._stopped = asyncio.Event()

    async def start(self) -> tuple[str, int]:
        return await self._service.start()

    async def set_workers(self, endpoints: list[WorkerEndpoint]) -> None:
        await self._service.set_workers(endpoints)

    async def ready(self) -> dict[str, Any]:
        return self._service.ready()

    async def stop(self, grace_s: float) -> None:
        await self._service.stop(grace_s)
        self._stopped.set()

    async def run_until_stopped(self) -> None:
        """Returns at `stop` only. Fails when this process dies, which is how the supervisor hears of it.

        Raises KvrelayError when a part of the router has failed that it cannot do without: it must be started again.
        """
        stopped = asyncio.ensure_future(self._stopped.wait())
        faulty = asyncio.ensure_future(self._service.faults.wait())
        try:
            await asyncio.wait([stopped, faulty], return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                raise faulty.result()
        finally:
            stopped.cancel()
            faulty.cancel()
