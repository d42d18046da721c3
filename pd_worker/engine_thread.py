"""The one thread that runs an engine. The event loop hands it a step and awaits the tokens; heartbeats go on meanwhile.

loop    step(...) ---- job ---->                      <---- tokens ---- future
thread                          engine.step(...)
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from pd_core.engine import Engine, SequenceStep
from pd_core.errors import EngineError, InvalidTransition, KvrelayError
from pd_rpc.tasks import finish_regardless
from pd_worker.process import compute_on

_log = logging.getLogger(__name__)


class _Job:
    """A step, who asks whether it is still wanted, and where its tokens go.

    tokens: what the caller awaits, and may cancel
    left:   done when the engine has left the step, whatever became of `tokens`
    """

    def __init__(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> None:
        self.steps = steps
        self.loop = asyncio.get_running_loop()
        self.tokens: asyncio.Future[list[int | None]] = self.loop.create_future()
        self.left: asyncio.Future[None] = self.loop.create_future()
        self.is_abandoned = False  # set on the loop, read by the thread
        self._is_cancelled = is_cancelled

    def is_cancelled(self) -> bool:
        return self.is_abandoned or self._is_cancelled()

    def run(self, engine: Engine) -> list[int | None]:
        """On the engine's thread."""
        return engine.step(self.steps, self.is_cancelled)

    def resolve(self, tokens: list[int | None]) -> None:
        self._tell(tokens, None)

    def fail(self, error: KvrelayError) -> None:
        self._tell([], error)

    def _settle(self, tokens: list[int | None], error: KvrelayError | None) -> None:
        self.left.set_result(None)
        if self.tokens.done():
            return  # the caller was cancelled
        if error is None:
            self.tokens.set_result(tokens)
        else:
            self.tokens.set_exception(error)

    def _tell(self, tokens: list[int | None], error: KvrelayError | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self._settle, tokens, error)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            _log.warning("the event loop was closed during an engine step")


class _Stop:
    """The last thing in the queue; its future is resolved when the thread has seen it."""

    def __init__(self, answer: _Job) -> None:
        self.answer = answer


class EngineThread:
    """One step at a time. `num_steps` and `busy_s` are totals of steps that ended."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        self._engine = engine
        self._jobs: queue.SimpleQueue[_Job | _Stop] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._last: _Job | None = None
        self._cores: list[int] = []
        # A daemon: an engine that hangs in native code must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"{name}-engine", daemon=True)

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    def use_cores(self, cores: Sequence[int]) -> None:
        """Before `start`: the only ones that it computes on; see compute_on."""
        self._cores = list(cores)

    def start(self) -> None:
        self._thread.start()

    async def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        """See Engine.step.

        When it returns or raises, also by cancellation, the engine has left the step.
        Raises InvalidTransition when a step is under way, EngineError also for what the engine did not foresee.
        """
        if self._current is not None or self._last is not None or not self._thread.is_alive():
            raise InvalidTransition(f"{self._thread.name} takes one step at a time, and none when it is not running")
        job = self._current = _Job(steps, is_cancelled)
        self._jobs.put(job)
        try:
            return await self._tokens_of(job)
        finally:
            self._current = None

    async def close(self, deadline_s: float) -> None:
        """Ends the thread after the step that it is in. Raises EngineError when it is still inside at the deadline;
        calling again waits again.
        """
        if not self._thread.is_alive():
            return
        if self._current is not None:
            self._current.is_abandoned = True
        if self._last is None:
            self._last = _Job([], lambda: True)
            self._jobs.put(_Stop(self._last))
        done, _ = await asyncio.wait([self._last.tokens], timeout=deadline_s)
        if not done:
            raise EngineError(f"{self._thread.name} is still inside a step after {deadline_s:g} s")
        self._thread.join()  # it has said its last word

    async def _tokens_of(self, job: _Job) -> list[int | None]:
        try:
            return await job.tokens
        except asyncio.CancelledError:
            job.is_abandoned = True
            if job.tokens.done() and not job.tokens.cancelled():
                job.tokens.exception()  # seen: nobody wants the step any more, nor its error
            await finish_regardless(job.left)
            raise

    def _run(self) -> None:
        compute_on(self._cores)
        while isinstance(job := self._jobs.get(), _Job):
            self._run_one(job)
        job.answer.resolve([])

    def _run_one(self, job: _Job) -> None:
        began_s = time.monotonic()
        failure: KvrelayError | None = None
        tokens: list[int | None] = []
        try:
            tokens = job.run(self._engine)
        except KvrelayError as error:
            failure = error
        except Exception as error:
            _log.exception("the engine failed")
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        self.busy_s += time.monotonic() - began_s
        self.num_steps += 1
        if failure is None:
            job.resolve(tokens)
        else:
            job.fail(failure)
