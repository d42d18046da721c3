"""The seat of the router: launched by Ray, heard by asking it whether it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from ray.exceptions import RayError

from cluster.asking import ask, sentence_of
from cluster.seat import START_DEADLINE_S, ActorSeat
from pd_core.config import Config
from pd_core.errors import KvrelayError, Unavailable
from pd_core.messages import WorkerEndpoint

TELL_DEADLINE_S = 5.0
logger = logging.getLogger(__name__)


class RouterSeat(ActorSeat):
    """`address` is the HTTP host and port; None before the first start. A port it chose itself is kept over boots."""

    def __init__(self, config: Config, actor_class: Any, secret: bytes, cache_dir: Path, log_path: Path | None) -> None:
        super().__init__("router", actor_class, log_path, num_gpus=0)
        self.address: tuple[str, int] | None = None
        self._config = config
        self._secret = secret
        self._cache_dir = cache_dir

    async def launch(self) -> None:
        self._begin_boot()
        actor = await self._create(self._config, self._secret, str(self._cache_dir), self._log_path)
        host, port = await ask(actor.start.remote(), START_DEADLINE_S, "the start of the router")
        self.address = (host, port)
        same_port = msgspec.structs.replace(self._config.router, port=port)
        self._config = msgspec.structs.replace(self._config, router=same_port)

    async def watch(self, on_heard: Callable[[], None]) -> None:
        heartbeat = self._config.heartbeat
        while True:
            try:
                await self.ask_ready(heartbeat.dead_s)
            except (KvrelayError, RayError) as error:
                logger.warning("the router does not answer", extra={"reason": sentence_of(error)})
            else:
                on_heard()
            # Half of what makes it suspect is often enough, and being asked is no small part of what it costs idle.
            await asyncio.sleep(max(heartbeat.interval_s, heartbeat.suspect_s / 2))

    async def ask_ready(self, deadline_s: float) -> dict[str, Any]:
        """What /ready would say."""
        ready: dict[str, Any] = await ask(self._require_actor().ready.remote(), deadline_s, "router.ready")
        return ready

    async def tell_workers(self, endpoints: list[WorkerEndpoint]) -> None:
        """These workers, and no others, can be given work."""
        await ask(self._require_actor().set_workers.remote(endpoints), TELL_DEADLINE_S, "router.set_workers")

    def _require_actor(self) -> Any:
        if self._actor is None:
            raise Unavailable("the router is not running")
        return self._actor
