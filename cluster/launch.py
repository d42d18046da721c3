"""Start and stop of a whole cluster in a Ray that is running already."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import ray
from ray.exceptions import RayError

from cluster.actors import ActorClasses
from cluster.asking import sentence_of
from cluster.log_files import LogFiles
from cluster.machine import read_machine
from cluster.model_size import measure_model, with_setting
from cluster.native_kernels import prepare_kernels
from cluster.policy import SeatLimits, SeatState
from cluster.ray_room import wait_for_gpus
from cluster.router_seat import RouterSeat
from cluster.seat import ActorSeat
from cluster.sizes import WorkerPlan, plan_workers, sharing_note
from cluster.supervisor import Supervisor
from cluster.worker_seat import WorkerSeat
from pd_core.config import Config
from pd_core.errors import DeadlineExceeded, InvalidTransition, KvrelayError, ModelError, Unavailable
from pd_core.messages import WorkerEndpoint
from pd_rpc.address import format_address

READY_DEADLINE_S = 30.0
READY_POLL_S = 0.05
WORKER_DRAIN_S = 1.0
"""Part of the grace time that is kept for the workers, after the router has let its streams end."""
SECRET_BYTES = 32
logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Called with one short sentence for each step that is done or begun."""


class ClusterAddress(msgspec.Struct, frozen=True):
    """Where a running cluster can be reached.

    url: of the HTTP gateway, without a path; model_name: what clients call the model
    """

    url: str
    host: str
    port: int
    model_name: str
    endpoints: list[WorkerEndpoint]


class Cluster:
    """One router and its workers, supervised. Several can live in one Ray: nothing has a global name.

    Lives on one event loop. `start` once, `stop` once or more; also after a start that failed.
    """

    def __init__(
        self,
        *,
        actors: ActorClasses,
        cache_dir: Path,
        log_files: LogFiles | None,
        limits: SeatLimits | None,
        on_progress: Progress,
    ) -> None:
        """limits: None takes them from the config's heartbeat; log_files: None leaves the actors without log files."""
        self._actors = actors
        self._cache_dir = cache_dir
        self._log_files = log_files
        self._limits = limits
        self._on_progress = on_progress
        self._supervisor: Supervisor | None = None
        self._router: RouterSeat | None = None
        self._workers: list[WorkerSeat] = []
        self._stopped = False

    @property
    def endpoints(self) -> list[WorkerEndpoint]:
        """Workers that can be given work now."""
        return [] if self._supervisor is None else self._supervisor.endpoints

    @property
    def states(self) -> dict[str, SeatState]:
        """State of every seat, by its name ("router", "prefill-0", "decode-0", ...)."""
        return {} if self._supervisor is None else self._supervisor.states()

    @property
    def pids(self) -> dict[str, int]:
        """Process of every seat's present boot, by the seat's name, where it is known."""
        return {seat.name: seat.pid for seat in self._seats if seat.pid is not None}

    async def start(self, config: Config) -> ClusterAddress:
        """Starts everything at once and returns when a request would be served.

        Raises what the first failing part failed with (ConfigError, ModelError, Unavailable, DeadlineExceeded, ...);
        then everything is gone again.
        """
        if self._supervisor is not None:
            raise InvalidTransition("a cluster is started once")
        if not ray.is_initialized():
            raise Unavailable("Ray is not running in this process")
        self._on_progress("looking at the model")
        model = await asyncio.to_thread(measure_model, config, self._cache_dir, self._on_model_progress)
        await asyncio.to_thread(prepare_kernels, config, self._cache_dir, self._on_progress)
        machine = read_machine()
        plans = plan_workers(config, machine, model)
        note = sharing_note(machine.cores, len(plans))
        if note is not None:
            logger.warning(note)
            self._on_progress(note)
        await wait_for_gpus(sum(plan.num_gpus for plan in plans))
        self._make_seats(config, plans)
        assert self._router is not None  # noqa: S101 - narrows
        limits = self._limits or limits_of(config)
        self._supervisor = Supervisor(self._router, self._workers, limits)
        names = ", ".join(seat.name for seat in self._seats)
        self._on_progress(f"starting {names}")
        try:
            await self._supervisor.start(lambda name: self._on_progress(f"{name} is up"))
            await self._wait_ready()
        except ModelError as error:
            await self.kill()
            raise with_setting(error, config) from error
        except RayError as error:
            await self.kill()
            raise Unavailable(f"the cluster did not start: {sentence_of(error)}") from error
        except BaseException:
            await self.kill()
            raise
        return self._address(model.name)

    async def run_until_failed(self) -> NoReturn:
        """Never returns. Raises KvrelayError when the supervision itself has failed: then stop the cluster."""
        if self._supervisor is None:
            raise InvalidTransition("the cluster was never started")
        await self._supervisor.run_until_failed()

    async def stop(self, grace_s: float) -> None:
        """Running requests may end within `grace_s`; then every process is ended, and proved to be gone.

        Raises WorkerLost when a process does not end even after SIGKILL.
        """
        if self._stopped or self._supervisor is None:
            return
        began_s = time.monotonic()
        await self._supervisor.end()
        if self._router is not None:
            await self._drain(self._router, max(grace_s - WORKER_DRAIN_S, grace_s / 2))
        left_s = max(began_s + grace_s - time.monotonic(), 0.1)
        await asyncio.gather(*(self._drain(worker, left_s) for worker in self._workers))
        await self.kill()
        logger.info("cluster stopped", extra={"took_s": round(time.monotonic() - began_s, 3)})

    async def kill(self) -> None:
        """Ends every process now, whatever it does; also while `start` or `stop` is under way and given up.

        Raises WorkerLost when a process does not end even after SIGKILL.
        """
        self._stopped = True
        if self._supervisor is not None:
            await self._supervisor.end()
        killed = await asyncio.gather(*(seat.kill() for seat in self._seats), return_exceptions=True)
        for result in killed:
            if isinstance(result, BaseException):
                raise result

    @property
    def _seats(self) -> list[ActorSeat]:
        router = [] if self._router is None else [self._router]
        return [*router, *self._workers]

    def _make_seats(self, config: Config, plans: list[WorkerPlan]) -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        self._router = RouterSeat(config, self._actors.router, secret, self._cache_dir, self._log_path("router"))
        classes = {"prefill": self._actors.prefill, "decode": self._actors.decode}
        self._workers = [
            WorkerSeat(plan, classes[plan.role], secret, self._cache_dir, self._log_path(plan.name)) for plan in plans
        ]

    async def _wait_ready(self) -> None:
        assert self._router is not None  # noqa: S101 - narrows
        deadline_s = time.monotonic() + READY_DEADLINE_S
        while True:
            ready = await self._router.ask_ready(READY_DEADLINE_S)
            if ready["ready"]:
                return
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"not ready {READY_DEADLINE_S:g} s after the start: {ready}")
            await asyncio.sleep(READY_POLL_S)

    async def _drain(self, seat: ActorSeat, grace_s: float) -> None:
        try:
            await seat.stop(grace_s)
        except (KvrelayError, RayError) as error:
            logger.warning("did not drain", extra={"seat": seat.name, "reason": sentence_of(error)})

    def _address(self, model_name: str) -> ClusterAddress:
        assert self._router is not None and self._router.address is not None  # noqa: S101 - narrows
        host, port = self._router.address
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
        url = f"http://{format_address(reachable, port)}"
        return ClusterAddress(url=url, host=host, port=port, model_name=model_name, endpoints=self.endpoints)

    def _log_path(self, name: str) -> Path | None:
        return None if self._log_files is None else self._log_files.path(name)

    def _on_model_progress(self, doing: str, fraction: float) -> None:
        self._on_progress(f"{doing}: {fraction:.0%}")


def limits_of(config: Config) -> SeatLimits:
    """The supervisor is as patient as the config's heartbeat says."""
    heartbeat = config.heartbeat
    return SeatLimits(
        suspect_s=heartbeat.suspect_s, dead_s=heartbeat.dead_s, max_gap_s=max(heartbeat.suspect_s / 2, 0.5)
    )
