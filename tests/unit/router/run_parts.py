"""What stands around one request's shell: a clock and streams of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pd_core.messages import (
    ChunkDone,
    HandoffCommitted,
    PrefillDone,
    StartBoth,
    StartDecode,
    StartPrefill,
    TicketGranted,
)
from pd_core.request import GenerateRequest, SamplingParams
from pd_core.ticket import Ticket, TicketRef
from pd_core.transfer import PathTransfer
from router.policy import Placement
from router.request_run import RequestRun
from router.step_clock import StepDeadlines
from router.view import WorkerRef

PLACEMENT = Placement("p0", "d0", "because")
ON_ONE = Placement(None, "d0", "because")
STEPS = StepDeadlines(reserve_s=5, first_token_s=60, prompt_token_s=0.1, next_token_s=30, linger_s=0.05)
COMMITTED = HandoffCommitted("tcp", 1, 100, 0.1)
DONE = PrefillDone([ChunkDone(0, 20, 0.0, 0.1)], 0.1, 0.1, [PathTransfer("tcp", 100, 0.05)])


class Stream:
    """What a worker says on one leg, put in by the test; an exception is raised, None ends it.

    take: where messages go, also such that are under way while the leg is closed; None before it is read
    """

    def __init__(self, body: StartDecode | StartBoth | StartPrefill) -> None:
        self.body = body
        self.is_open = True
        self.take: Callable[[Any], bool] | None = None
        self.say_when_closed: Exception | None = None
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self._said.put_nowait(message)

    async def for_each(self, take: Callable[[Any], bool]) -> None:
        self.take = take
        while (message := await self._said.get()) is not None:
            if isinstance(message, Exception):
                raise message
            if not take(message):
                return


class Host:
    """Everything around a run; remembers what it was told. `fail_open`: raised instead of opening a stream."""

    def __init__(self) -> None:
        self.clock_s = 100.0
        self.streams: dict[str, Stream] = {}
        self.over: list[tuple[str, bool]] = []
        self.admitted: list[str] = []
        self.computed: list[str] = []
        self.preempted: list[str] = []
        self.worker_progress_s = 0.0
        self.refused_by: list[str] = []
        self.num_ended = 0
        self.sent: list[PathTransfer] = []
        self.tasks: list[asyncio.Task[None]] = []

    def now_s(self) -> float:
        return self.clock_s

    def ref_of(self, worker: str) -> WorkerRef:
        return WorkerRef(worker, "boot")

    @contextlib.asynccontextmanager
    async def open_stream(self, ref: WorkerRef, body: Any, deadline_s: float) -> AsyncIterator[Stream]:
        assert deadline_s > 0
        stream = self.streams[ref.name] = Stream(body)
        try:
            yield stream
        except asyncio.CancelledError:
            if stream.say_when_closed is not None:
                raise stream.say_when_closed from None
            raise
        finally:
            stream.is_open = False

    def leg_opened(self, task: asyncio.Task[None]) -> None:
        self.tasks.append(task)

    def leg_admitted(self, ref: WorkerRef, work_id: str) -> None:
        self.admitted.append(ref.name)

    def prompt_computed(self, ref: WorkerRef, work_id: str, num_prompt: int) -> None:
        self.computed.append(ref.name)

    def leg_preempted(self, ref: WorkerRef, work_id: str) -> None:
        self.preempted.append(ref.name)

    def leg_resumed(self, ref: WorkerRef, work_id: str) -> None:
        self.preempted.remove(ref.name)

    def progress_s(self, ref: WorkerRef) -> float:
        return self.worker_progress_s

    def leg_over(self, ref: WorkerRef, work_id: str, num_made: int, task: asyncio.Task[None] | None) -> None:
        self.over.append((ref.name, task is not None))

    def turn_given_back(self, run: RequestRun, refused_by: WorkerRef) -> None:
        self.refused_by.append(refused_by.name)

    def token_given(self, gap_s: float | None) -> None:
        pass

    def kv_sent(self, transfers: Sequence[PathTransfer]) -> None:
        self.sent += transfers

    def run_over(self, run: RequestRun) -> None:
        self.num_ended += 1

    def are_all_closed(self) -> bool:
        return all(task.done() for task in self.tasks) and not any(s.is_open for s in self.streams.values())


def new_run(host: Host, max_tokens: int = 3, first_index: int = 0) -> RequestRun:
    request = GenerateRequest("r", list(range(20)), max_tokens, SamplingParams(), first_index=first_index)
    return RequestRun(request, host, arrived_s=host.clock_s, deadline_s=600, steps=STEPS)


def ticket(attempt: int = 1) -> TicketGranted:
    return TicketGranted(Ticket(TicketRef("t", "boot", 1, attempt), "r", 0, [0], 3.0, "127.0.0.1", 1, []))


async def settle() -> None:
    """Lets every task run until it waits for the test."""
    for _ in range(20):
        await asyncio.sleep(0)


async def prefilling(host: Host, max_tokens: int = 3) -> RequestRun:
    """A run whose ticket has come."""
    run = new_run(host, max_tokens)
    run.place(PLACEMENT)
    await settle()
    host.streams["d0"].say(ticket())
    await settle()
    return run
