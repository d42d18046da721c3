"""One destination of a ChannelSender: its connections, and pushes divided among as many of them as the plan says.

          .--> channel 0: part 0 --.
push ---- +--> channel 1: part 1 --+--> over when all parts are
          '--> channel 2: part 2 --'

One that breaks fails the push: the others are withdrawn. What has arrived of it by then is dropped as a duplicate when
it comes again. One whose connection cannot be made goes over another's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from kv_transport.channel import Channel
from kv_transport.path_options import PathOptions
from kv_transport.push_job import PushJob, PushOutcome
from kv_transport.stripes import StripePlan, divide
from kv_transport.turn import within_turn
from pd_rpc.tasks import finish_regardless

_log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A job and who has it."""

    channel: Channel
    job: PushJob


class ChannelGroup:
    """Belongs to the event loop.

    open_channel: makes a channel and starts its thread
    plan:         how many a push takes
    block_bytes:  of every block
    """

    def __init__(
        self,
        address: str,
        open_channel: Callable[[], Channel],
        plan: StripePlan,
        block_bytes: int,
        options: PathOptions,
    ) -> None:
        self.address = address
        self.room = asyncio.Semaphore(options.max_queued_pushes)
        self._open_channel = open_channel
        self._plan = plan
        self._block_bytes = block_bytes
        self._options = options
        self._channels: list[Channel] = []
        self._submitted: dict[int, list[asyncio.Future[PushOutcome]]] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def num_connections(self) -> int:
        """Channels that have not ended."""
        return sum(not channel.is_retired for channel in self._channels)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.num_connections == 0

    async def push(self, job: PushJob, turn_s: float) -> PushOutcome:
        """What became of the whole job; when cancelled or late, returns only when no thread reads its blocks.

        turn_s: longest from when its turn comes, that is when those ahead of it on its connections are over. Each of
                those has its own, and `room` allows only so many.
        Raises TimeoutError.
        """
        num_bytes = len(job.indices) * self._block_bytes
        async with self.room:
            count = self._plan.choose(len(job.indices), num_bytes, self._loop.time())
            jobs = list(enumerate(job.part(where) for where in divide(len(job.indices), count)))
            outcomes = await self._push_over(jobs, turn_s)
            reached = [number for number, outcome in enumerate(outcomes) if outcome.was_reached]
            if 0 < len(reached) < len(outcomes):  # so none of the others has failed
                why = _together(outcomes).error
                _log.warning("%s: not all of %d connections can be had: %s", self.address, count, why)
                self._plan.refused(count, self._loop.time())
                left = [(reached[0], part.part(slice(None))) for number, part in jobs if number not in reached]
                again = await self._push_over(left, turn_s)
                return _together([*(outcomes[number] for number in reached), *again])
            outcome = _together(outcomes)
            if outcome.error is None:
                self._learn(count, num_bytes, outcome)
            return outcome

    def stop(self) -> None:
        """Ends all threads: what is queued fails, what is being written is cut off."""
        for channel in self._channels:
            channel.stop()

    async def _push_over(self, jobs: list[tuple[int, PushJob]], turn_s: float) -> list[PushOutcome]:
        """What became of each, given with the number of its channel; of the first alone that broke, if one did."""
        ahead = [outcome for number, _ in jobs for outcome in self._submitted.get(number, [])]
        async with within_turn(ahead, turn_s):
            return await self._push_all(jobs)

    async def _push_all(self, jobs: list[tuple[int, PushJob]]) -> list[PushOutcome]:
        parts: list[_Part] = []
        try:
            for number, job in jobs:
                parts.append(self._submit(number, job))
            broken = await _first_broken(parts)
        except BaseException:
            await finish_regardless(asyncio.ensure_future(_end(parts, self._options.withdraw_s)))
            raise
        if broken is not None:
            await finish_regardless(asyncio.ensure_future(_end(parts, 0.0)))
            return [broken]
        return [part.job.outcome.result() for part in parts]

    def _submit(self, number: int, job: PushJob) -> _Part:
        while True:
            if number == len(self._channels):
                self._channels.append(self._open_channel())
            if self._channels[number].submit(job):
                before = (outcome for outcome in self._submitted.get(number, []) if not outcome.done())
                self._submitted[number] = [*before, job.outcome]
                return _Part(self._channels[number], job)
            self._channels[number] = self._open_channel()

    def _learn(self, count: int, num_bytes: int, outcome: PushOutcome) -> None:
        before = self._plan.settled
        num_delivered_bytes = num_bytes - outcome.num_waiting
        self._plan.sent(count, num_bytes, num_delivered_bytes, outcome.seconds, self._loop.time())
        if self._plan.settled not in (None, before):
            _log.info("%s: connections for large pushes: %d", self.address, self._plan.settled)


async def _first_broken(parts: list[_Part]) -> PushOutcome | None:
    """Returns when all parts are over, or one has failed half-way. One whose connection could not be made is no reason
    to give up the others: it can go over theirs."""
    waiting = {part.job.outcome for part in parts}
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for outcome in done:
            if outcome.result().error is not None and outcome.result().was_reached:
                return outcome.result()
    return None


async def _end(parts: list[_Part], patience_s: float) -> None:
    """Returns when no thread reads any part's blocks; those that run may go on for `patience_s`."""
    outcomes = [part.job.outcome for part in parts]
    if outcomes and patience_s > 0:
        await asyncio.wait(outcomes, timeout=patience_s)
    for part in parts:
        part.channel.withdraw(part.job)
    if outcomes:
        await asyncio.wait(outcomes)


def _together(outcomes: list[PushOutcome]) -> PushOutcome:
    """The first that failed; else one for all, from the first's begin to the last's end."""
    for outcome in outcomes:
        if outcome.error is not None:
            return outcome
    began_s = min(outcome.began_s for outcome in outcomes)
    ended_s = max(outcome.began_s + outcome.seconds for outcome in outcomes)
    num_waiting = sum(outcome.num_waiting for outcome in outcomes)
    return PushOutcome(ended_s - began_s, began_s=began_s, num_waiting=num_waiting)
