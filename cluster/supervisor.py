"""Keeps every seat filled and tells the router at once who is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from ray.exceptions import RayError

from cluster.asking import sentence_of
from cluster.keeper import Keeper
from cluster.policy import SeatLimits, SeatState
from cluster.seat import Seat
from pd_core.errors import DeadlineExceeded, KvrelayError
from pd_core.messages import WorkerEndpoint
from pd_rpc.tasks import BackgroundTasks

RETELL_S = 0.5
TELL_DEADLINE_S = 15.0
logger = logging.getLogger(__name__)


class WorkerLike(Seat, Protocol):
    @property
    def endpoint(self) -> WorkerEndpoint | None: ...


class RouterLike(Seat, Protocol):
    async def tell_workers(self, endpoints: list[WorkerEndpoint]) -> None: ...


class Supervisor:
    """Lives on the event loop that makes it.

    A change is told to the router until it has understood it; when several come at once, the last state is told.
    """

    def __init__(self, router: RouterLike, workers: Sequence[WorkerLike], limits: SeatLimits) -> None:
        self._workers = list(workers)
        self._router = router
        self._changed = asyncio.Event()
        self._router_keeper = Keeper(router, limits, self._changed.set, self._failed)
        self._worker_keepers = [Keeper(worker, limits, self._changed.set, self._failed) for worker in workers]
        self._tasks = BackgroundTasks(on_failure=self._failed)
        self._fault: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        self._told: tuple[str, list[WorkerEndpoint]] | None = None
        self._told_changed = asyncio.Event()

    @property
    def endpoints(self) -> list[WorkerEndpoint]:
        """Workers that can be given work now."""
        alive = [keeper.life.is_alive for keeper in self._worker_keepers]
        return [
            worker.endpoint
            for worker, is_alive in zip(self._workers, alive, strict=True)
            if is_alive and worker.endpoint
        ]

    def states(self) -> dict[str, SeatState]:
        """By the seat's name."""
        return {keeper.seat.name: keeper.life.state for keeper in self._keepers}

    @property
    def _keepers(self) -> list[Keeper]:
        return [self._router_keeper, *self._worker_keepers]

    async def start(self, on_started: Callable[[str], None]) -> None:
        """Fills all seats at once and returns when each can be reached and the router knows them.

        on_started: called with the name of each seat as it gets there
        Raises what the first failing seat failed with: what cannot start the first time is not tried again.
        """
        for keeper in self._keepers:
            keeper.begin()
            keeper.first_boot.add_done_callback(_report(keeper.seat.name, on_started))
        self._tasks.start(self._tell(), "supervisor:tell")
        await asyncio.gather(*(keeper.first_boot for keeper in self._keepers))  # each has its start deadline
        try:
            async with asyncio.timeout(TELL_DEADLINE_S):
                await self._wait_told()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the router could not be told its workers in {TELL_DEADLINE_S:g} s") from error

    async def end(self) -> None:
        """No watching, no restarts, nothing told any more. The actors are left as they are."""
        await self._tasks.close()
        await asyncio.gather(*(keeper.end() for keeper in self._keepers if keeper.has_begun))

    async def run_until_failed(self) -> NoReturn:
        """Never returns. Raises KvrelayError when a task of the supervisor itself has failed: then a seat is not kept,
        or the router is not told, any more."""
        await asyncio.shield(self._fault)
        raise AssertionError("a fault has no result")

    def _failed(self, error: BaseException) -> None:
        if self._fault.done():
            return
        fault = KvrelayError(f"supervision failed: {type(error).__name__}: {sentence_of(error)}")
        fault.__cause__ = error
        self._fault.set_exception(fault)
        self._fault.exception()  # whoever waits gets it; nobody has to
        self._told_changed.set()

    async def _wait_told(self) -> None:
        """Raises what the supervision failed with meanwhile."""
        while self._told != (self._router.incarnation, self.endpoints):
            if self._fault.done():
                self._fault.result()
            self._told_changed.clear()
            await self._told_changed.wait()

    async def _tell(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._router_keeper.life.is_alive:
                continue  # its next start is a change too
            endpoints, incarnation = self.endpoints, self._router.incarnation
            try:
                await self._router.tell_workers(endpoints)
            except (KvrelayError, RayError) as error:
                logger.warning("the router could not be told its workers", extra={"reason": sentence_of(error)})
                await asyncio.sleep(RETELL_S)
                self._changed.set()
                continue
            self._told = (incarnation, endpoints)
            self._told_changed.set()
            names = {endpoint.name: endpoint.incarnation for endpoint in endpoints}
            logger.info("the router was told its workers", extra={"workers": names, "router": incarnation})


def _report(name: str, on_started: Callable[[str], None]) -> Callable[[asyncio.Future[None]], None]:
    def on_done(first_boot: asyncio.Future[None]) -> None:
        if not first_boot.cancelled() and first_boot.exception() is None:
            on_started(name)

    return on_done
