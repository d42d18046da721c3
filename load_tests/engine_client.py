"""The bench's side of an engine process: what can be asked of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from load_tests.child_process import ChildProcess, child_process
from load_tests.engine_messages import (
    Answer,
    Generate,
    Generated,
    Load,
    Loaded,
    MeasureRate,
    Question,
    Rate,
    RateName,
    Refused,
    TimeDecode,
    TimePrefill,
    Took,
)
from load_tests.floor import ModelShape
from pd_core.config import Config
from pd_core.errors import EngineError

LOAD_S = 300.0
"""The prototype may be built on the way."""
ANSWER_S = 120.0
PROGRAM = "load_tests.engine_process"

_Wanted = TypeVar("_Wanted")


class EngineClient:
    """One engine process. One question at a time.

    Everything raises EngineError for a refusal or a process that is gone, and DeadlineExceeded.
    """

    def __init__(self, child: ChildProcess) -> None:
        self.child = child
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    async def load(self, config: Config, num_threads: int, cache_dir: Path) -> Loaded:
        return await self._ask(Load(config, num_threads, str(cache_dir)), Loaded, LOAD_S)

    async def time_prefill(self, num_tokens: int, chunk_tokens: int, seed: int) -> float:
        """Seconds of one prompt, alone."""
        [took_s] = (await self._ask(TimePrefill(num_tokens, chunk_tokens, seed), Took)).seconds
        return took_s

    async def time_decode(self, starts: Sequence[int], num_steps: int) -> list[float]:
        """Seconds of each step."""
        return (await self._ask(TimeDecode(list(starts), num_steps), Took)).seconds

    async def generate(self, tokens: Sequence[int], max_tokens: int, chunk_tokens: int) -> list[int]:
        return (await self._ask(Generate(list(tokens), max_tokens, chunk_tokens), Generated)).tokens

    async def measure_rate(
        self, name: RateName, shape: ModelShape | None, num_threads: int, num_times: int
    ) -> list[float]:
        """Operations or bytes a second, one number for each time. See `machine_rates`."""
        return (await self._ask(MeasureRate(name, shape, num_threads, num_times), Rate)).per_s

    async def _ask(self, question: Question, wanted: type[_Wanted], deadline_s: float = ANSWER_S) -> _Wanted:
        name = type(question).__name__
        await self.child.tell(question)
        answer = await self.child.hear(self._decoder, deadline_s)
        if isinstance(answer, Refused):
            raise EngineError(f"the engine process, asked for {name}: {answer.message}")
        if not isinstance(answer, wanted):
            raise EngineError(f"the engine process answered {name} with {type(answer).__name__}")
        return answer


@asynccontextmanager
async def engine_process(
    cores: Sequence[int], program: str = PROGRAM, arguments: Sequence[str] = ()
) -> AsyncIterator[EngineClient]:
    """A process tied to these cores, nothing loaded yet; at the end it is gone.

    program: a module that speaks `engine_messages`
    """
    async with child_process(program, cores, arguments) as child:
        yield EngineClient(child)
