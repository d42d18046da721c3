"""The seat of a prefill or decode worker: launched by Ray, heard over our own connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.asking import ask
from cluster.seat import START_DEADLINE_S, ActorSeat
from cluster.sizes import WorkerPlan
from pd_core.errors import KvrelayError, Unavailable
from pd_core.messages import WORKER_REPLIES, WatchStatus, WorkerEndpoint, WorkerStatus
from pd_rpc.client import RpcClient
from pd_rpc.limits import MAX_DEADLINE_S
from pd_rpc.tls import load_tls
from pd_rpc.wire import PeerIdentity

logger = logging.getLogger(__name__)


class WorkerSeat(ActorSeat):
    """`endpoint` is where the present boot can be reached; None until it has said so."""

    def __init__(
        self, plan: WorkerPlan, actor_class: Any, secret: bytes, cache_dir: Path, log_path: Path | None
    ) -> None:
        super().__init__(plan.name, actor_class, log_path, plan.num_gpus)
        self.endpoint: WorkerEndpoint | None = None
        self._plan = plan
        self._secret = secret
        self._tls = load_tls(plan.config.tls)
        self._cache_dir = cache_dir

    async def launch(self) -> None:
        self.endpoint = None
        self._begin_boot()
        plan = self._plan
        actor = await self._create(
            plan.name, self.incarnation, self._secret, plan.config, plan.cores, str(self._cache_dir), self._log_path
        )
        endpoint: WorkerEndpoint = await ask(actor.start.remote(), START_DEADLINE_S, f"the start of {self.name}")
        if (endpoint.name, endpoint.incarnation, endpoint.pid) != (self.name, self.incarnation, self.pid):
            raise Unavailable(f"{self.name} answered under another name: {endpoint}")
        self.endpoint = endpoint

    async def watch(self, on_heard: Callable[[], None]) -> None:
        """Connects as often as needed. A lost connection is no death by itself: it is silence, which adds up."""
        interval_s = self._plan.config.heartbeat.interval_s
        while True:
            try:
                await self._listen(interval_s, on_heard)
                reason = "the worker ended the stream"
            except (KvrelayError, OSError) as error:
                reason = str(error)
            logger.warning("heartbeats interrupted", extra={"worker": self.name, "reason": reason})
            await asyncio.sleep(interval_s)

    async def _listen(self, interval_s: float, on_heard: Callable[[], None]) -> None:
        if self.endpoint is None:
            raise Unavailable(f"{self.name} has no address yet")
        client = await RpcClient.connect(
            self.endpoint.host,
            self.endpoint.port,
            identity=PeerIdentity(name=f"supervisor of {self.name}", role="supervisor", incarnation=self.incarnation),
            secret=self._secret,
            replies=WORKER_REPLIES,
            tls=self._tls,
        )
        async with client, client.stream(WatchStatus(interval_s), deadline_s=MAX_DEADLINE_S) as statuses:
            async for status in statuses:
                if isinstance(status, WorkerStatus) and status.incarnation == self.incarnation:
                    on_heard()
