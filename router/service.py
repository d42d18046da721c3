"""The whole router in one process: fleet, serving and gateway, put together."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from pd_core.config import Config, prompt_chunk_tokens
from pd_core.messages import WorkerEndpoint
from pd_model.model_assets import ModelAssets
from pd_rpc.tls import load_tls
from pd_rpc.wire import PeerIdentity
from router.faults import Faults
from router.fleet import Fleet
from router.http_app import build_app
from router.http_server import STALL_S, HttpServer
from router.metrics import RouterMetrics
from router.readiness import readiness
from router.serving import Serving
from router.step_clock import StepDeadlines
from router.view import Rules
from router.worker_link import rpc_connect

logger = logging.getLogger(__name__)


def rules_of(config: Config) -> Rules:
    """The settings that view and policy go by."""
    has_prefill = config.prefill.num_workers > 0
    return Rules(
        suspect_s=config.heartbeat.suspect_s,
        dead_s=config.heartbeat.dead_s,
        max_prefill=config.prefill.max_running,
        max_decode=config.decode.max_batch,
        roles=("prefill", "decode") if has_prefill else ("decode",),
        chunk_tokens=config.prefill.chunk_tokens if has_prefill else prompt_chunk_tokens(config),
        ageing_tokens_per_s=config.prefill.ageing_tokens_per_s,
    )


class RouterService:
    """Lives on one event loop, from `start` until `stop`."""

    def __init__(
        self,
        config: Config,
        secret: bytes,
        assets: ModelAssets,
        *,
        steps: StepDeadlines = StepDeadlines(),  # noqa: B008 - frozen
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        identity = PeerIdentity("router", "router", secrets.token_hex(8))
        self.metrics = RouterMetrics()
        self.faults = Faults()
        connect, interval_s = rpc_connect(identity, secret, load_tls(config.tls)), config.heartbeat.interval_s
        self.fleet = Fleet(connect, rules_of(config), interval_s, clock, self.faults)
        self.serving = Serving(self.fleet, config, self.metrics, clock, self.faults, steps)
        self.metrics.watch(self.serving, clock)
        self._clock = clock
        self.app = build_app(
            self.serving,
            assets,
            self.metrics,
            config=config.router,
            transfer_path=config.transfer.path,
            clock=clock,
        )
        self._http = HttpServer(
            self.app, config.router.host, config.router.port, self.faults, self.metrics.replied, stall_s
        )

    async def start(self) -> tuple[str, int]:
        """Begins to serve HTTP; (host, port). Raises ConfigError when the port is not free."""
        address = await self._http.start()
        self.serving.start()
        logger.info("listening", extra={"host": address[0], "port": address[1]})
        return address

    async def set_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """These boots of workers serve from now on; any other is fenced."""
        await self.fleet.set_workers(endpoints)

    def ready(self) -> dict[str, Any]:
        """What /ready says."""
        return readiness(self.serving, self._clock())

    async def stop(self, grace_s: float) -> None:
        """New requests are refused at once, running ones end within `grace_s` or are failed; nothing is left."""
        await self.serving.stop(grace_s)
        await self._http.stop(grace_s=1.0)
        await self.fleet.close()
