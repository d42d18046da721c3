"""The bench's side of two processes, one that sends blocks and one that receives them, each on a core of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import msgspec

from load_tests.child_process import ChildProcess, child_process
from load_tests.transfer_messages import (
    Answer,
    Arrived,
    Begin,
    Connect,
    Done,
    Inspect,
    Open,
    Opened,
    Question,
    Ready,
    Receive,
    Refused,
    Send,
    Sent,
)
from load_tests.transfer_ways import Shape, Way
from pd_core.errors import EngineError

PROGRAM = "load_tests.transfer_process"
ANSWER_S = 30.0
"""Far more than a half waits by itself."""
NUM_WARM_UP = 20
"""By then it has (kv_transport.stripes)."""

_Wanted = TypeVar("_Wanted")


class TransferPair:
    """One transfer at a time. Everything raises EngineError for a refusal or a process that is gone, and
    DeadlineExceeded; the pair is of no use any more then."""

    def __init__(self, source: ChildProcess, target: ChildProcess) -> None:
        self._source = source
        self._target = target
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    async def open(self, way: Way, shape: Shape) -> None:
        """Connects the way's halves, sees that the very blocks of the source arrive, and lets TCP find out how many
        connections are fastest."""
        offer = (await self._ask(self._target, Open(way.name, shape), Opened)).offer
        await self._ask(self._source, Connect(way.name, shape, offer), Done)
        await self.measure_s(way, shape)
        if way.fills_target:
            await self._ask(self._target, Inspect(shape), Done)
        for _ in range(NUM_WARM_UP if way.path == "tcp" else 0):
            await self.measure_s(way, shape)

    async def measure_s(self, way: Way, shape: Shape) -> float:
        """Seconds from the moment when the source begins until all has arrived."""
        send = Send(way.name, shape, "")
        if way.timed_by == "source":
            sent = await self._ask(self._source, send, Sent)
            return sent.ended_s - sent.began_s
        note = (await self._ask(self._target, Receive(way.name, shape), Ready)).note
        sent = await self._ask(self._source, msgspec.structs.replace(send, note=note), Sent)
        return (await self._hear(self._target, Arrived)).at_s - sent.began_s

    async def _ask(self, child: ChildProcess, question: Question, wanted: type[_Wanted]) -> _Wanted:
        await child.tell(question)
        return await self._hear(child, wanted)

    async def _hear(self, child: ChildProcess, wanted: type[_Wanted]) -> _Wanted:
        answer = await child.hear(self._decoder, ANSWER_S)
        if isinstance(answer, Refused):
            raise EngineError(answer.message)
        if not isinstance(answer, wanted):
            raise EngineError(f"a process of the bench said {type(answer).__name__} instead of {wanted.__name__}")
        return answer


@asynccontextmanager
async def transfer_pair(cores: Sequence[int]) -> AsyncIterator[TransferPair]:
    """Source on the first core, target on the last one; at the end both processes are gone."""
    begin = Begin(secrets.token_hex(32))
    async with AsyncExitStack() as stack:
        source, target = [
            await stack.enter_async_context(child_process(PROGRAM, [core], [side]))
            for side, core in (("source", cores[0]), ("target", cores[-1]))
        ]
        for child in (source, target):
            await child.tell(begin)
        yield TransferPair(source, target)
