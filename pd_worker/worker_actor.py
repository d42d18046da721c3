"""What the actors of both roles are: they prepare their process, build the worker and forward to it.

Plain classes; whoever launches them wraps them with Ray.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from pd_core.config import Config
from pd_core.engine import Engine
from pd_core.messages import WorkerEndpoint
from pd_worker.build import Role, build_engine
from pd_worker.memory import PoolMemory
from pd_worker.process import log_to, use_cores


class Worker(Protocol):
    """What an actor forwards to."""

    async def start(self) -> WorkerEndpoint: ...

    async def stop(self, grace_s: float) -> None: ...


class WorkerActor(ABC):
    """One boot of a worker of `role`.

    cores: the only ones that this process runs on; empty leaves it where it is
    cache_dir: where converted models lie; log_path: where log lines go, None is standard error
    """

    role: Role

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
        self.name = name
        self.incarnation = incarnation
        self.secret = secret
        self.config = config
        section = config.prefill if self.role == "prefill" else config.decode
        self._num_threads = section.num_threads or max(1, len(cores))
        self._cache_dir = Path(cache_dir)
        self._memory: PoolMemory | None = None
        self._worker: Worker | None = None
        self._stopped = asyncio.Event()

    @abstractmethod
    def make_worker(self, engine: Engine, memory: PoolMemory) -> Worker:
        """The role's worker over this engine and pool; not started yet."""

    async def start(self) -> WorkerEndpoint:
        """Loads the model, which takes seconds, and listens. Raises ModelError, ConfigError, EngineError, OSError."""
        engine, memory = await asyncio.to_thread(
            build_engine, self.config, self.role, self._num_threads, self._cache_dir
        )
        self._memory = memory
        self._worker = self.make_worker(engine, memory)
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
