"""`kvrelay up`: a cluster in the foreground, from the first check until nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cluster.actors import ActorClasses
from cluster.launch import Cluster, ClusterAddress
from cluster.log_files import LogFiles, log_to_file
from cluster.model_size import measure_model
from cluster.orphans import kill_all_descendants
from cluster.progress import Progress
from cluster.ray_runtime import RayRuntime
from cluster.ray_watch import RayStartWatch
from cluster.sizes import gpus_for, num_workers_of
from cluster.stop_signals import StopSignals
from pd_core.config import Config
from pd_core.errors import Cancelled, KvrelayError, Unavailable, WorkerLost
from pd_rpc.tasks import BackgroundTasks

SIGNAL_POLL_S = 0.05
RAY_POLL_S = 0.25
CONVERSION_END_S = 5.0
"""How long the conversion of a model may take to clear up after itself."""
SHUTDOWN_S = 8.0
FORCED_EXIT = 130
LOST_EXIT = 1
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


class Up:
    """One run. grace_s: how long running requests may go on after the first Ctrl-C or SIGTERM."""

    def __init__(
        self,
        config: Config,
        *,
        actors: ActorClasses,
        state_dir: Path,
        cache_dir: Path,
        grace_s: float,
        on_lost: Callable[[KvrelayError], None],
    ) -> None:
        """on_lost: told, in any thread, why Ray itself is gone; then this process ends at once, with LOST_EXIT."""
        self._config = config
        self._state_dir = state_dir
        self._cache_dir = cache_dir
        self._grace_s = grace_s
        self._actors = actors
        self._on_lost = on_lost
        self._runtime = RayRuntime(state_dir)
        self._is_over = False
        self._num_actors = 1 + num_workers_of(config)

    @property
    def num_steps(self) -> int:
        """Of the progress: Ray, the model, the start of all, and each actor."""
        return 3 + self._num_actors

    async def run(self, progress: Progress, on_ready: Callable[[ClusterAddress], None]) -> None:
        """Returns after Ctrl-C or SIGTERM, when nothing is left.

        Raises what kept the cluster from starting, or its supervision from going on, or WorkerLost naming processes
        that could not be ended; then too everything that can be ended is.
        """
        log_files = LogFiles(self._state_dir, os.getpid())
        handler = log_to_file(log_files.path("cluster"))
        stops = StopSignals(self._leave_at_once)
        stops.install()
        try:
            await self._run(stops, log_files, progress, on_ready)
        finally:
            self._is_over = True
            try:
                stuck = await asyncio.wait_for(asyncio.to_thread(self._runtime.stop), SHUTDOWN_S)
            except TimeoutError:
                logger.error("ray does not shut down", extra={"waited_s": SHUTDOWN_S})
                self._leave_at_once()
            stops.uninstall()
            logging.getLogger().removeHandler(handler)
            handler.close()
        if stuck:
            raise WorkerLost(f"processes {stuck} go on after SIGKILL")

    async def _run(
        self, stops: StopSignals, log_files: LogFiles, progress: Progress, on_ready: Callable[[ClusterAddress], None]
    ) -> None:
        began_s = time.monotonic()
        cluster = Cluster(
            actors=self._actors,
            cache_dir=self._cache_dir,
            log_files=log_files,
            limits=None,
            on_progress=progress,
        )
        ticking = BackgroundTasks()
        ticking.start(progress.keep_alive(), "progress")
        try:
            await self._prepare(stops, progress)
            address = await _unless_stopped(cluster.start(self._config), stops.first)
        finally:
            await ticking.close()
            progress.close()
        if address is None:
            return
        logger.info("ready", extra={"url": address.url, "took_s": round(time.monotonic() - began_s, 3)})
        on_ready(address)
        try:
            await _unless_stopped(cluster.run_until_failed(), stops.first)
        finally:
            await self._stop(cluster, stops)

    async def _stop(self, cluster: Cluster, stops: StopSignals) -> None:
        logger.info("stopping")
        await _unless_stopped(cluster.stop(self._grace_s), stops.second)
        if stops.second.is_set():
            await cluster.kill()

    async def _prepare(self, stops: StopSignals, progress: Progress) -> None:
        """Ray takes seconds to start; the model is opened, and converted the first time, meanwhile."""
        progress("starting Ray")
        num_gpus = gpus_for(self._config, num_workers_of(self._config))
        started = asyncio.ensure_future(
            asyncio.to_thread(self._runtime.start, self._num_actors, num_gpus, self._leave_lost)
        )
        opened = asyncio.ensure_future(asyncio.to_thread(self._open_model, stops, progress))
        opened.add_done_callback(lambda done: done.cancelled() or done.exception())  # Ray's failure may come first
        ray, look_s = RayStartWatch(), 0.0
        while not started.done():
            stops.install()  # Ray takes SIGTERM for itself while it starts, and would abort
            if stops.first.is_set():
                # Nothing can stop Ray's start, and nobody is served yet: its processes are ended, and this one.
                await asyncio.wait([opened], timeout=CONVERSION_END_S)
                self._leave_at_once(0)
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + RAY_POLL_S
                dead = ray.find_dead()
                if dead is not None:
                    self._leave_lost(dead)
            await asyncio.wait([started], timeout=SIGNAL_POLL_S)
        stops.install()
        await started
        with contextlib.suppress(Cancelled):
            await opened

    def _open_model(self, stops: StopSignals, progress: Progress) -> None:
        """Runs in a thread, which nothing can cancel from outside: the conversion asks, and clears up after itself."""

        def on_progress(doing: str, fraction: float) -> None:
            if self._is_over or stops.first.is_set():
                raise Cancelled("the start was given up")
            progress(f"{doing}: {fraction:.0%}")

        measure_model(self._config, self._cache_dir, on_progress)

    def _leave_at_once(self, status: int = FORCED_EXIT) -> NoReturn:
        kill_all_descendants()
        self._runtime.remove_files()
        os._exit(status)

    def _leave_lost(self, name: str) -> NoReturn:
        """Nothing is unwound: every call into a Ray without its processes may hang, or abort us."""
        try:
            stuck = kill_all_descendants()
            self._runtime.remove_files()
            rest = f"processes {stuck} go on after SIGKILL" if stuck else "everything was ended; start kvrelay again"
            error = Unavailable(f"Ray's {name} died, and no cluster goes on without it: {rest}")
            logger.error(error.message)
            self._on_lost(error)
        finally:
            os._exit(LOST_EXIT)


async def _unless_stopped(work: Coroutine[Any, Any, _T], stopped: asyncio.Event) -> _T | None:
    """The result of `work`; None if `stopped` came first, and then `work` has been cancelled and is over."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return await task
    finally:
        stop.cancel()
