"""Keeps one seat filled: feeds its life with events and carries out the commands. No decisions here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import RayError

from cluster.asking import sentence_of
from cluster.policy import (
    Announce,
    Exited,
    Gone,
    Heard,
    Kill,
    Launch,
    SeatCommand,
    SeatEvent,
    SeatLife,
    SeatLimits,
    SeatState,
    Started,
    StartFailed,
    TimePassed,
    first_boot,
    step,
)
from cluster.seat import Seat
from pd_core.errors import KvrelayError, Unavailable
from pd_rpc.tasks import BackgroundTasks

TICKS_PER_SUSPECT = 8
"""How often silence is looked at within suspect_s."""
KILL_RETRY_S = 5.0
logger = logging.getLogger(__name__)


class Keeper:
    """One seat and its tasks, all on the event loop that `begin` is called on.

    on_announce: called when the seat joins or leaves the set of those who can be given work
    on_failure:  told when the seat is not kept any more, through a fault of ours
    """

    def __init__(
        self,
        seat: Seat,
        limits: SeatLimits,
        on_announce: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.seat = seat
        self._limits = limits
        self._on_announce = on_announce
        self._on_failure = on_failure
        self._life: SeatLife | None = None
        self._boot_tasks: set[asyncio.Task[None]] = set()
        self._tasks = BackgroundTasks(on_failure=self._failed)
        self._loop = asyncio.get_running_loop()
        self.first_boot: asyncio.Future[None] = self._loop.create_future()
        """Done when the first boot can be reached; fails with what it failed with."""

    @property
    def life(self) -> SeatLife:
        if self._life is None:
            raise RuntimeError(f"{self.seat.name} was never begun")
        return self._life

    @property
    def has_begun(self) -> bool:
        return self._life is not None

    def begin(self) -> None:
        """Launches the first boot."""
        self._life, commands = first_boot(self.seat.name, self._limits, self._loop.time())
        self._carry_out(commands)
        self._tasks.start(self._tick(), f"{self.seat.name}:tick")

    async def end(self) -> None:
        """No watching and no restarts any more. The actor is left as it is."""
        await self._tasks.close()
        self.first_boot.cancel()

    def _feed(self, event: SeatEvent) -> None:
        before = self.life
        self._life, commands = step(before, event)
        if self._life.state is not before.state:
            self._log_change(before)
        self._carry_out(commands)

    def _carry_out(self, commands: list[SeatCommand]) -> None:
        for command in commands:
            match command:
                case Launch():
                    self._start_boot_task(self._boot(), "boot")
                case Announce():
                    self._on_announce()
                case Kill(reason=reason):
                    self._fail_first_boot(Unavailable(f"{self.seat.name}: {reason}"))
                    for task in self._boot_tasks:
                        task.cancel()
                    self._tasks.start(self._kill(), f"{self.seat.name}:kill")

    async def _boot(self) -> None:
        """One boot: from launch until its process has ended or the keeper gives it up."""
        try:
            await self.seat.launch()
        except (KvrelayError, RayError, OSError) as error:
            self._fail_first_boot(error)
            self._feed(StartFailed(sentence_of(error), self._loop.time()))
            return
        self._feed(Started(self._loop.time()))
        if not self.first_boot.done():
            self.first_boot.set_result(None)
        self._start_boot_task(self.seat.watch(lambda: self._feed(Heard(self._loop.time()))), "watch")
        reason = await self.seat.wait_exit()
        self._feed(Exited(reason, self._loop.time()))

    async def _kill(self) -> None:
        while True:
            try:
                await self.seat.kill()
                break
            except (KvrelayError, RayError, OSError) as error:
                # Until it is gone nothing may take its place: it could still write into another's memory.
                logger.error("a process does not end", extra={"seat": self.seat.name, "reason": sentence_of(error)})
                await asyncio.sleep(KILL_RETRY_S)
        self._feed(Gone(self._loop.time()))

    async def _tick(self) -> None:
        tick_s = self._limits.suspect_s / TICKS_PER_SUSPECT
        while True:
            await asyncio.sleep(tick_s)
            self._feed(TimePassed(self._loop.time()))

    def _start_boot_task(self, work: Coroutine[Any, Any, None], doing: str) -> None:
        """A task that ends with the present boot."""
        task = self._tasks.start(work, f"{self.seat.name}:{doing}")
        self._boot_tasks.add(task)
        task.add_done_callback(self._boot_tasks.discard)

    def _failed(self, error: BaseException) -> None:
        self._fail_first_boot(error)
        self._on_failure(error)

    def _fail_first_boot(self, error: BaseException) -> None:
        if not self.first_boot.done():
            self.first_boot.set_exception(error)
            self.first_boot.exception()  # whoever waits gets it; nobody has to

    def _log_change(self, before: SeatLife) -> None:
        life = self.life
        bad = life.state in (SeatState.DEAD, SeatState.SUSPECT)
        logger.log(
            logging.WARNING if bad else logging.INFO,
            "seat is %s",
            life.state.value,
            extra={
                "seat": life.name,
                "was": before.state.value,
                "boot": life.num_boots,
                "incarnation": self.seat.incarnation,
                "pid": self.seat.pid,
                "failures": life.num_failures,
                "reason": life.reason if life.state in (SeatState.DEAD, SeatState.RESTARTING) else None,
            },
        )
