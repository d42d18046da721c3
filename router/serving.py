"""Whose turn it is, and that every request comes to an end: queue, placement, deadlines, lost workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from pd_core.config import Config
from pd_core.errors import ContextLengthExceeded, InvalidRequest, KvrelayError, NotFound, Unavailable
from pd_core.request import GenerateRequest
from pd_core.transfer import PathTransfer
from pd_rpc.tasks import BackgroundTasks
from router.faults import Faults
from router.fleet import Fleet
from router.legs import WorkerStream
from router.policy import Placement, why_nobody
from router.queue import WaitingLine
from router.request_run import RequestRun
from router.rounds import Rounds
from router.step_clock import StepDeadlines
from router.throughput import Throughput
from router.timeline import RecentTimelines, Timeline
from router.turns import Kept, Waiter, next_turn
from router.unread import TokenEvent
from router.view import WorkerRef

logger = logging.getLogger(__name__)

TICK_S = 0.2
SUSPECT_GRACE_S = 0.5
"""A worker may be silent for `suspect_s` and this much more before requests that it holds are failed."""
RETRY_UNAVAILABLE_S = 2.0


class Observer(Protocol):
    """Who counts. Called for every token of an answer and every request that ends."""

    def token_given(self, gap_s: float | None) -> None:
        """gap_s: since the request's token before; None for its first."""
        ...

    def kv_sent(self, transfers: Sequence[PathTransfer]) -> None:
        """What one handoff sent over each path."""
        ...

    def request_over(self, timeline: Timeline) -> None: ...


class Serving:
    """All requests of the router. Lives on one event loop; `start` and `stop` frame its life."""

    def __init__(
        self,
        fleet: Fleet,
        config: Config,
        observer: Observer,
        clock: Callable[[], float],
        faults: Faults,
        steps: StepDeadlines = StepDeadlines(),  # noqa: B008 - frozen
    ) -> None:
        self.fleet = fleet
        self.faults = faults
        self.recent = RecentTimelines()
        self.throughput = Throughput(clock())
        self.rounds = Rounds()
        self.now_s = clock
        self._config = config
        self._observer = observer
        self._clock = clock
        self._steps = steps
        self._line: WaitingLine[RequestRun] = WaitingLine(
            config.router.max_queue, config.router.queue_timeout_s, clock()
        )
        self._num_new_tokens = 0
        self._kept: Kept | None = None
        self._withdrawn: RequestRun | None = None
        self._runs: dict[str, RequestRun] = {}
        self._leg_tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._all_over = asyncio.Event()
        self._tasks = BackgroundTasks(on_failure=faults.report)
        fleet.listen(self)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_running(self) -> int:
        """Requests that hold something on a worker."""
        return len(self._runs) - len(self._line)

    @property
    def max_waiting(self) -> int:
        return self._line.max_waiting

    def timelines(self, request_id: str, max_choices: int) -> list[Timeline]:
        """Of a request that is here or was lately: one, or that of each of its choices. Raises NotFound."""
        names = (request_id, *(f"{request_id}-{number}" for number in range(max_choices)))
        found = [timeline for timeline in map(self._timeline, names) if timeline is not None]
        if not found:
            raise NotFound("no request of this id is here, nor among the last ones that ended")
        return found

    def start(self) -> None:
        self._tasks.start(self._tick_for_ever(), "router:ticker")

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, lets what runs end within `grace_s`, then fails the rest; no task is left."""
        self._is_draining = True
        if self._runs:
            self._all_over.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_over.wait(), grace_s)
        for run in list(self._runs.values()):
            run.fail(Unavailable("the router is shutting down"))
        legs = set(self._leg_tasks)
        for task in legs:
            task.cancel()
        await self._tasks.close()
        if legs:
            await asyncio.wait(legs, timeout=self._steps.linger_s)

    def why_not_ready(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        if self._is_draining:
            return "the router is shutting down"
        if self.faults.reason is not None:
            return self.faults.reason
        return why_nobody(self.fleet.view, self._clock())

    def check_open(self) -> int:
        """Most tokens that a request may have, prompt and answer together; for before its prompt is looked at.

        Raises Unavailable when nothing new is taken or nobody knows yet what fits, Overloaded when the queue is full.
        """
        if self._is_draining:
            raise self._unavailable("the router is shutting down")
        if self.num_waiting:  # with nobody there a newcomer may get a turn at once, however small the queue
            self._line.check_room(self._clock())
        limits = self.fleet.view.limits
        if limits is None:
            raise self._unavailable(self.why_not_ready() or "no worker is ready")
        return limits.num_tokens

    def admit(self, num_prompt: int, max_tokens: int | None) -> int:
        """How many tokens the request may make; None asks for all that are left.

        Raises ContextLengthExceeded when it can never fit, Unavailable when nobody knows yet what fits.
        """
        if num_prompt < 1:
            raise InvalidRequest("the prompt has no tokens", param="messages")
        limits = self.fleet.view.limits
        if limits is None:
            raise self._unavailable(self.why_not_ready() or "no worker is ready")
        left = limits.num_tokens - num_prompt
        if left < 1:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens; at most {limits.num_tokens} tokens fit, the answer's among them",
                param="messages",
            )
        if max_tokens is None:
            return left
        if max_tokens > left:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt tokens and {max_tokens} more are too many; at most {limits.num_tokens} fit",
                param="max_tokens",
            )
        return max_tokens

    def open(self, request: GenerateRequest, arrived_s: float | None = None) -> RequestRun:
        """Begins to serve a request that was admitted. Its reader calls `leave` in the end, whatever happens.

        Raises Overloaded when the queue is full, Unavailable when nobody can serve it now or soon.
        """
        now_s = self._clock()
        self.admit(len(request.tokens), request.max_tokens)
        reason = "the router is shutting down" if self._is_draining else self._missing(now_s)
        if reason is not None:
            raise self._unavailable(reason)
        run = RequestRun(
            request,
            self,
            arrived_s=now_s if arrived_s is None else arrived_s,
            deadline_s=self._config.router.request_timeout_s,
            steps=self._steps,
        )
        if request.request_id in self._runs:
            raise InvalidRequest("a request of this id is here already")
        placement = None if self.num_waiting else self._place_alone(run, now_s)
        if placement is None:
            self._line.join(run, run.demand, now_s)
        self._runs[request.request_id] = run
        if placement is None:
            self._serve_line()
        else:
            run.number = self._line.served_at_once(now_s)
            self._begin(run, placement)
        return run

    def withdraw(self, run: RequestRun) -> None:
        """Ends one that was opened this very moment, as if it had never been: it counts nowhere."""
        self._withdrawn = run
        run.leave()
        self._withdrawn = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """The request's tokens as they come. Closing the iterator cancels all work within the second.

        Raises what `open` raises, and before or between tokens whatever the request failed with.
        """
        run = self.open(request)
        try:
            while events := await run.next_events():
                for event in events:
                    run.given((event,))
                    yield event
        finally:
            run.leave()

    def check_times(self, now_s: float) -> None:
        """Ends requests whose deadline has passed."""
        for run in self._line.expired(now_s):
            try:
                run.fail(self._line.timed_out(now_s))
            except Exception:
                self._break_down(run)
        for run in list(self._runs.values()):
            try:
                run.check_time(now_s)
            except Exception:
                self._break_down(run)

    def check_silence(self, now_s: float) -> None:
        """Fails requests whose worker has been silent for too long, and those that nobody can serve any more."""
        view = self.fleet.view
        for worker in list(view.workers.values()):
            silent_s = now_s - worker.heard_s
            if silent_s > view.rules.suspect_s + SUSPECT_GRACE_S and worker.num_ours:
                self._fail_all_of(worker.ref, f"has been silent for {silent_s:.1f} s")
        self._fail_hopeless(now_s)

    # FleetListener

    def on_worker_heard(self) -> None:
        self._serve_line()

    def on_worker_lost(self, ref: WorkerRef) -> None:
        # Its requests hear of it through their own streams, after what had come before.
        self._fail_hopeless(self._clock())

    def on_worker_replaced(self, ref: WorkerRef) -> None:
        self._fail_all_of(ref, "was replaced")
        self._fail_hopeless(self._clock())

    # RunHost

    def ref_of(self, worker: str) -> WorkerRef:
        return self.fleet.ref_of(worker)

    def open_stream(self, ref: WorkerRef, body: msgspec.Struct, deadline_s: float) -> WorkerStream:
        return self.fleet.stream(ref, body, deadline_s)

    def leg_opened(self, task: asyncio.Task[None]) -> None:
        self._leg_tasks.add(task)

    def leg_admitted(self, ref: WorkerRef, work_id: str) -> None:
        self.fleet.admitted(ref, work_id)

    def prompt_computed(self, ref: WorkerRef, work_id: str, num_prompt: int) -> None:
        self.throughput.add(num_prompt, 0, self._clock())
        self.fleet.computed(ref, work_id)
        self._serve_line()

    def leg_preempted(self, ref: WorkerRef, work_id: str) -> None:
        self.fleet.preempted(ref, work_id)

    def leg_resumed(self, ref: WorkerRef, work_id: str) -> None:
        self.fleet.resumed(ref, work_id)
        self._serve_line()

    def progress_s(self, ref: WorkerRef) -> float:
        return self.fleet.progress_s(ref)

    def leg_over(self, ref: WorkerRef, work_id: str, num_made: int, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._leg_tasks.discard(task)
        self.fleet.released(ref, work_id, num_made)
        self._serve_line()

    def turn_given_back(self, run: RequestRun, refused_by: WorkerRef) -> None:
        self.fleet.refused(refused_by)
        self._line.give_back(run, run.number, run.demand)
        self._serve_line()

    def token_given(self, gap_s: float | None) -> None:
        self._num_new_tokens += 1
        self._observer.token_given(gap_s)

    def kv_sent(self, transfers: Sequence[PathTransfer]) -> None:
        self._observer.kv_sent(transfers)

    def run_over(self, run: RequestRun) -> None:
        self._forget(run)
        if run is not self._withdrawn:
            self.recent.add(run.timeline)
            if run.timeline.outcome == "finished":
                self.fleet.answered(run.life.num_tokens)
            self._observer.request_over(run.timeline)
        self._serve_line()

    # inside

    def _serve_line(self) -> None:
        """Gives turns as long as there is a place for one that waits."""
        now_s = self._clock()
        while len(self._line):
            turn = next_turn(self._line.waiters, self.fleet.view, now_s, self._kept)
            self._kept = turn.kept
            if turn.number is None or turn.placement is None:
                return
            run = self._line.item(turn.number)
            run.number = self._line.take_turn(run, now_s)
            self._begin(run, turn.placement)

    def _place_alone(self, run: RequestRun, now_s: float) -> Placement | None:
        """Its place when nobody else waits."""
        return next_turn([Waiter(0, run.demand)], self.fleet.view, now_s, None).placement

    def _begin(self, run: RequestRun, placement: Placement) -> None:
        run.place(placement)
        self.fleet.placed(placement, run.work_id, run.demand)

    def _fail_all_of(self, ref: WorkerRef, why: str) -> None:
        for run in list(self._runs.values()):
            try:
                run.worker_lost(ref, why)
            except Exception:
                self._break_down(run)

    def _break_down(self, run: RequestRun) -> None:
        """A fault of ours in one request ends that request, and not the loop over all of them."""
        logger.exception("a request broke down", extra={"request_id": run.request.request_id})
        run.fail(KvrelayError("internal error in the router; see its log"))
        self._forget(run)

    def _timeline(self, request_id: str) -> Timeline | None:
        run = self._runs.get(request_id)
        return self.recent.find(request_id) if run is None else run.timeline

    def _forget(self, run: RequestRun) -> None:
        self._line.leave(run)
        self._runs.pop(run.request.request_id, None)
        if not self._runs:
            self._all_over.set()

    def _fail_hopeless(self, now_s: float) -> None:
        """Nobody waits for a role that nobody can fill."""
        reason = self._missing(now_s) if len(self._line) else None
        if reason is None:
            return
        for run in self._line:
            run.fail(self._unavailable(reason))

    def _missing(self, now_s: float) -> str | None:
        return why_nobody(self.fleet.view, now_s)

    def _unavailable(self, reason: str) -> Unavailable:
        return Unavailable(reason, retry_after_s=RETRY_UNAVAILABLE_S)

    async def _tick_for_ever(self) -> None:
        due_s = self._clock() + TICK_S
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock()
            if self._num_new_tokens:
                self.throughput.add(0, self._num_new_tokens, now_s)
                self._num_new_tokens = 0
            self.check_times(now_s)
            # After the loop itself was held up, heartbeats lie unread: read them before anybody is called silent.
            if now_s - due_s < SUSPECT_GRACE_S:
                self.check_silence(now_s)
            due_s = now_s + TICK_S
