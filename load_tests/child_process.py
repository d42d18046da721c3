"""A process of a bench's own, tied to cores, that is spoken to in lines of JSON and ends with its input."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from pd_core.errors import DeadlineExceeded, EngineError

END_S = 10.0
MAX_LINE_BYTES = 1 << 20

_T = TypeVar("_T")


class ChildProcess:
    """The bench's side. One question at a time."""

    def __init__(self, program: str, process: asyncio.subprocess.Process) -> None:
        self._program = program
        self._process = process

    async def tell(self, message: msgspec.Struct) -> None:
        """Raises EngineError when the process is gone."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe, as asked for
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise EngineError(f"{self._program} was gone before {type(message).__name__}: {error}") from error

    async def hear(self, decoder: msgspec.json.Decoder[_T], deadline_s: float) -> _T:
        """The next line. Raises DeadlineExceeded, or EngineError when the process has ended instead or says something
        else."""
        assert self._process.stdout is not None  # noqa: S101 - as above
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._program} did not answer within {deadline_s:g} s") from error
        if not line:
            raise EngineError(f"{self._program} ended instead of answering; see its standard error")
        try:
            return decoder.decode(line)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._program} said what it should not: {line[:200]!r}: {error}") from error

    def kill(self) -> None:
        self._process.kill()


@asynccontextmanager
async def child_process(
    program: str, cores: Sequence[int], arguments: Sequence[str] = ()
) -> AsyncIterator[ChildProcess]:
    """The module `program`, run with its cores, joined by commas, and the arguments; gone at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program, ",".join(map(str, cores)), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        start_new_session=True,  # Ctrl-C on a terminal is for the bench, which ends its processes itself
    )
    try:
        yield ChildProcess(program, process)
    finally:
        await asyncio.shield(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Its input ends, so it does; one that is in the middle of something long is killed."""
    assert process.stdin is not None  # noqa: S101 - a pipe, as asked for
    process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
