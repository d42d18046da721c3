"""A place in the cluster that an actor fills, boot after boot: what the supervisor asks of it, and Ray's part of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.actor import ActorClass
from ray.exceptions import RayActorError, RayError

from cluster.asking import ask, future_of, sentence_of
from cluster.processes import ProcessHandle
from pd_core.errors import Unavailable, WorkerLost

START_DEADLINE_S = 600.0
"""A bound for lost answers only; how long a start may take is decided by the seat's policy."""
KILL_WAIT_S = 5.0
STOP_MARGIN_S = 0.5


class Seat(Protocol):
    """One place, filled by one actor at a time. All calls are made on one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None:
        """Process of the present boot, once known."""
        ...

    @property
    def incarnation(self) -> str:
        """Random id of the present boot; empty before the first."""
        ...

    async def launch(self) -> None:
        """Begins a new boot under a new incarnation; returns when it can be reached. Raises what it failed with."""
        ...

    async def wait_exit(self) -> str:
        """Returns, with the reason, when the present boot's process has ended."""
        ...

    async def watch(self, on_heard: Callable[[], None]) -> None:
        """Calls `on_heard` at every sign of life of the present boot; runs until cancelled."""
        ...

    async def kill(self) -> None:
        """Returns when the present boot's process does not exist any more. Raises WorkerLost if it will not go."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Asks the present boot to drain within `grace_s`. Raises what it failed with."""
        ...


class ActorSeat:
    """What router and workers share: an actor without restarts and retries of Ray's own.

    num_gpus: devices that each boot has for itself
    """

    def __init__(self, name: str, actor_class: Any, log_path: Path | None, num_gpus: int) -> None:
        self.name = name
        self.num_gpus = num_gpus
        self.incarnation = ""
        self._log_path = None if log_path is None else str(log_path)
        self._actor_class = actor_class
        self._actor: Any = None
        self._process: ProcessHandle | None = None
        self._exit: asyncio.Future[Any] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def wait_exit(self) -> str:
        if self._exit is None:
            raise Unavailable(f"{self.name} was never launched")
        try:
            await asyncio.shield(self._exit)
        except RayActorError:
            return f"process {self.pid} died"
        except RayError as error:
            return f"failed: {sentence_of(error)}"
        return "stopped by itself"

    async def kill(self) -> None:
        process, actor = self._process, self._actor
        if process is not None:
            process.kill()  # Ray alone takes 5 s for a process that does not answer
        if actor is not None:
            ray.kill(actor, no_restart=True)
            if process is None:
                await self._wait_unreachable(actor)
        if process is not None and not await process.wait_gone(KILL_WAIT_S):
            raise WorkerLost(f"{self.name}: process {process.pid} goes on after SIGKILL")
        self._actor = None

    async def stop(self, grace_s: float) -> None:
        if self._actor is not None:
            await ask(self._actor.stop.remote(grace_s), grace_s + STOP_MARGIN_S, f"{self.name}.stop")

    def _begin_boot(self) -> None:
        self._actor = self._process = self._exit = None
        self.incarnation = secrets.token_hex(8)

    async def _create(self, *arguments: object) -> Any:
        """Makes the boot's actor and learns its pid."""
        # No cpu is asked for: an actor that waits for a resource which does not exist waits for ever. That there are
        # GPUs enough has been checked.
        wrapped = self._actor_class if isinstance(self._actor_class, ActorClass) else ray.remote(self._actor_class)
        options = wrapped.options(num_cpus=0, num_gpus=self.num_gpus, max_restarts=0, max_task_retries=0)
        actor = self._actor = options.remote(*arguments)
        pid = await ask(actor.__ray_call__.remote(_own_pid), START_DEADLINE_S, f"the constructor of {self.name}")
        self._process = ProcessHandle(pid)
        self._exit = future_of(actor.run_until_stopped.remote())
        return actor

    async def _wait_unreachable(self, actor: Any) -> None:
        """For an actor that has not told its pid yet: until Ray says that it is dead."""
        with contextlib.suppress(RayActorError):
            await ask(actor.__ray_call__.remote(_own_pid), KILL_WAIT_S, f"the end of {self.name}")


def _own_pid(_actor: object) -> int:
    return os.getpid()
