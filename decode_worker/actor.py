"""The decode worker as an actor: it prepares its process, builds the worker and forwards to it.

A plain class; whoever launches it wraps it with Ray.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from decode_worker.worker import DecodeWorker
from kv_transport.interface import BlockReceiver
from kv_transport.tcp_receiver import TcpBlockReceiver
from pd_core.config import Config
from pd_core.memory import BlockMemory
from pd_core.messages import WorkerEndpoint
from pd_rpc.wire import PeerIdentity
from pd_worker.build import build_engine
from pd_worker.memory import PoolMemory
from pd_worker.process import log_to, use_cores


class DecodeActor:
    """One boot of a decode worker.

    cores: the only ones that this process runs on; empty leaves it where it is
    cache_dir: where converted models lie; log_path: where log lines go, None is standard error
    """

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
        log_to(None if log_path is None else Path(log_path))
        if cores:
            use_cores(cores)
        self._name = name
        self._incarnation = incarnation
        self._secret = secret
        self._config = config
        self._num_threads = config.decode.num_threads or max(1, len(cores))
        self._cache_dir = Path(cache_dir)
        self._memory: PoolMemory | None = None
        self._worker: DecodeWorker | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> WorkerEndpoint:
        """Loads the model, which takes seconds, and listens. Raises ModelError, ConfigError, EngineError, OSError."""
        engine, memory = await asyncio.to_thread(
            build_engine, self._config, "decode", self._num_threads, self._cache_dir
        )
        self._memory = memory
        self._worker = DecodeWorker(
            name=self._name,
            incarnation=self._incarnation,
            secret=self._secret,
            config=self._config,
            engine=engine,
            memory=memory,
            transport=self._transport,
        )
        return await self._worker.start()

    async def stop(self, grace_s: float) -> None:
        """Lets running requests end within `grace_s`; afterwards nothing is left but the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop(grace_s)
        if self._memory is not None:
            self._memory.close()
        self._stopped.set()

    async def run_until_stopped(self) -> None:
        """Returns at `stop` only; fails when this process dies, which is how the supervisor hears of it."""
        await self._stopped.wait()

    def _transport(self, memory: BlockMemory, identity: PeerIdentity) -> BlockReceiver:
        return TcpBlockReceiver(memory, identity, self._secret, host=self._config.transfer.host)
