"""The loop of engine steps: what the roster plans is run, what it brings goes out. Decides nothing itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from decode_worker.life import Phase
from decode_worker.roster import PlannedPart, Roster, Work
from decode_worker.sequence import DecodeSequence
from pd_core.errors import EngineError
from pd_worker.counters import Counters
from pd_worker.engine_thread import EngineThread
from pd_worker.step_run import PartDone, PartOutcome, StepPart, StepRunner

_log = logging.getLogger(__name__)


class DecodeBatch:
    """Sequences whose KV is here, or made here. Belongs to the event loop.

    on_left: called once for each sequence that has joined, when it is over and has left the roster: no engine step
             uses its blocks, and they are free
    on_room: called when nobody waits for blocks any more, or fewer prompts are computed than before
    """

    def __init__(
        self,
        roster: Roster,
        engine_thread: EngineThread,
        counters: Counters,
        *,
        on_left: Callable[[DecodeSequence], None],
        on_room: Callable[[], None],
    ) -> None:
        self._roster = roster
        self._runner = StepRunner(engine_thread)
        self._counters = counters
        self._on_left = on_left
        self._on_room = on_room
        self._beginning = (False, 0)  # whether somebody waits for blocks, and how many prompts are computed
        self._loop = asyncio.get_running_loop()
        self._sequences: dict[str, DecodeSequence] = {}
        self._stepping: frozenset[str] = frozenset()
        self._news = asyncio.Event()

    def join(self, sequence: DecodeSequence) -> None:
        """Takes part from the next step on; the roster has it already."""
        self._sequences[sequence.holder] = sequence
        self.wake()

    def wake(self) -> None:
        """Blocks may have come free: who waits for some is looked at again."""
        self._news.set()

    def sweep(self) -> None:
        """To be called when a sequence has ended from outside: it leaves at once, or after the step that it is in.

        A step that nobody wants any more is cancelled.
        """
        for name in [name for name, sequence in self._sequences.items() if sequence.is_over]:
            if name not in self._stepping:
                self._roster.leave(name)
                self._on_left(self._sequences.pop(name))
                self.wake()
        self._runner.reconsider()

    async def run(self) -> None:
        """Steps for ever; ends by cancellation, and then no step is under way."""
        while True:
            self._news.clear()
            parts = self._plan()
            if not parts:
                self.sweep()  # who was preempted may have ended by it, because its router reads too slowly
                await self._news.wait()
                continue
            self._stepping = frozenset(part.name for part in parts)
            try:
                await self._step(parts)
            finally:
                self._stepping = frozenset()
                self.sweep()

    def _plan(self) -> list[PlannedPart]:
        plan = self._roster.plan(self._loop.time())
        for name in plan.preempted:
            self._counters.add("preemptions_total")
            sequence = self._sequences[name]
            _log.info("preempted after %d tokens", sequence.num_made, extra=_extra(sequence))
            sequence.preempted()
        before, self._beginning = self._beginning, (self._roster.has_waiting, self._roster.count(Phase.COMPUTING))
        if self._beginning < before:
            self._on_room()
        return plan.parts

    async def _step(self, parts: list[PlannedPart]) -> None:
        sequences = [self._sequences[part.name] for part in parts]
        steps = [self._step_part(part, sequence) for part, sequence in zip(parts, sequences, strict=True)]
        outcomes = await self._runner.run(steps)
        for part, sequence, outcome in zip(parts, sequences, outcomes, strict=True):
            self._take(part, sequence, outcome)

    def _step_part(self, part: PlannedPart, sequence: DecodeSequence) -> StepPart:
        step = sequence.step_for(part, self._roster.table(part.name))
        return StepPart(step, partial(_is_over, sequence))

    def _take(self, part: PlannedPart, sequence: DecodeSequence, outcome: PartOutcome) -> None:
        match outcome:
            case PartDone(token=token, ended_s=ended_s):
                sequence.chunk_done(part, outcome)
                self._count(self._roster.computed(part, ended_s))
                if part.draws and not sequence.is_over:
                    self._drew(sequence, token)
            case None:
                return  # nobody wanted it; had somebody, the next step would be the same again
            case error:
                _log.error("decode step failed: %s", error, extra=_extra(sequence))
                sequence.end(error)

    def _count(self, work: Work | None) -> None:
        if work is not None:
            self._counters.add("local_prefill_tokens_total", work.num_new)
            self._counters.add("recomputed_tokens_total", work.num_again)

    def _drew(self, sequence: DecodeSequence, token: int | None) -> None:
        if token is None:
            sequence.end(EngineError(f"the engine drew no token for {sequence.request.request_id}"))
            return
        self._counters.add("decode_tokens_total")
        self._roster.drew(sequence.holder)
        sequence.take(token)


def _is_over(sequence: DecodeSequence) -> bool:
    return sequence.is_over


def _extra(sequence: DecodeSequence) -> dict[str, object]:
    return {"request_id": sequence.request.request_id, "attempt": sequence.attempt}
