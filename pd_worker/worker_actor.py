"""What the actors of both roles are: they prepare their process, build the worker and forward to it.

Plain classes; whoever launches them wraps them with Ray.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from pd_core.config import Config
from pd_core.engine import Engine
from pd_core.errors import KvrelayError
from pd_core.messages import WorkerEndpoint
from pd_rpc.tasks import BackgroundTasks
from pd_worker.build import Role, build_engine
from pd_worker.device_ring import call_soon
from pd_worker.process import compute_on, log_to
from pd_worker.shell import WorkerShell
from pd_worker.worker_pool import WorkerPool


class Worker(Protocol):
    """What an actor forwards to."""

    @property
    def shell(self) -> WorkerShell: ...

    async def start(self) -> WorkerEndpoint: ...

    async def stop(self, grace_s: float) -> None: ...

    async def wait_failed(self) -> KvrelayError: ...


class WorkerActor(ABC):
    """One boot of a worker of `role`.

    cores: the only ones that its engine computes on; empty leaves it anywhere
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
        self.name = name
        self.incarnation = incarnation
        self.secret = secret
        self.config = config
        section = config.prefill if self.role == "prefill" else config.decode
        self._cores = cores
        self._num_threads = section.num_threads or max(1, len(cores))
        self._cache_dir = Path(cache_dir)
        self._pool: WorkerPool | None = None
        self._worker: Worker | None = None
        self._failure: KvrelayError | None = None
        self._tasks = BackgroundTasks()
        self._ended = asyncio.Event()

    @abstractmethod
    def make_worker(self, engine: Engine, pool: WorkerPool) -> Worker:
        """The role's worker over this engine and pool; not started yet."""

    async def start(self) -> WorkerEndpoint:
        """Loads the model, which takes seconds, and listens. Raises ModelError, ConfigError, EngineError, OSError."""
        # In a thread of its own: those that the engine starts to compute with are as this one is.
        building = ThreadPoolExecutor(1, "build-engine", initializer=compute_on, initargs=(self._cores,))
        try:
            engine, pool = await asyncio.get_running_loop().run_in_executor(
                building, build_engine, self.config, self.role, self._num_threads, self._cache_dir
            )
        finally:
            building.shutdown(wait=False)  # one that is cancelled in the middle ends by itself
        self._pool = pool
        worker = self._worker = self.make_worker(engine, pool)
        worker.shell.engine_thread.use_cores(self._cores)
        pool.start(partial(call_soon, asyncio.get_running_loop(), worker.shell.fail))
        endpoint = await worker.start()
        self._tasks.start(self._end_at_failure(worker), "end-at-failure")
        return endpoint

    async def stop(self, grace_s: float) -> None:
        """Lets running requests end within `grace_s`; afterwards nothing is left but the process."""
        await self._tasks.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop(grace_s)
        if self._pool is not None:
            self._pool.close()
        self._ended.set()

    async def run_until_stopped(self) -> None:
        """Returns at `stop` only. Raises WorkerLost when the worker has failed, and Ray fails it when this process
        dies: the supervisor takes both for the end of this boot."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def _end_at_failure(self, worker: Worker) -> None:
        self._failure = await worker.wait_failed()
        self._ended.set()
