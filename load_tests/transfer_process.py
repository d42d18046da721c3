"""One side of a transfer under measurement: `python -m load_tests.transfer_process CORES source|target`.

The first line is a Begin, all others are questions; it ends with its input. It has a pool for every shape and a half
for every way that it was asked about. What a library prints goes to standard error: standard output is for answers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import BinaryIO

import msgspec

from load_tests.transfer_halves import Offerer, Pool, SourceHalf, TargetHalf
from load_tests.transfer_makers import make_source, make_target
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
)
from load_tests.transfer_ways import Shape, way_named
from pd_core.errors import TransferError

Say = Callable[[Answer], None]


class Source:
    """Sends. Raises whatever a half raises."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._pools: dict[str, Pool] = {}
        self._halves: dict[tuple[str, str], SourceHalf] = {}

    async def answer(self, question: Question, say: Say) -> Answer:
        match question:
            case Connect(way=way, shape=shape, offer=offer):
                half = make_source(way_named(way), self._pool(shape), self._secret)
                self._halves[way, shape.name] = half
                await half.connect(offer)
                return Done()
            case Send(way=way, shape=shape, note=note):
                return await self._halves[way, shape.name].send(note)
            case _:
                raise TransferError(f"{type(question).__name__} is no question for a source")

    async def close(self) -> None:
        for half in self._halves.values():
            await half.close()
        self._halves.clear()
        for pool in self._pools.values():
            pool.close()

    def _pool(self, shape: Shape) -> Pool:
        if shape.name not in self._pools:
            self._pools[shape.name] = Pool(shape)
            self._pools[shape.name].fill()
        return self._pools[shape.name]


class Target:
    """Receives. Raises whatever a half raises."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._pools: dict[str, Pool] = {}
        self._halves: dict[tuple[str, str], Offerer] = {}

    async def answer(self, question: Question, say: Say) -> Answer:
        match question:
            case Open(way=way, shape=shape):
                if shape.name not in self._pools:
                    self._pools[shape.name] = Pool(shape)
                pool = self._pools[shape.name]
                pool.wipe()
                half = make_target(way_named(way), pool, self._secret)
                if half is None:
                    return Opened("")
                self._halves[way, shape.name] = half
                return Opened(await half.open())
            case Receive(way=way, shape=shape):
                half = self._halves[way, shape.name]
                if not isinstance(half, TargetHalf):
                    raise TransferError(f"nothing of {way} is to be waited for")
                return Arrived(await half.receive(lambda note: say(Ready(note))))
            case Inspect(shape=shape):
                if not self._pools[shape.name].is_filled():
                    raise TransferError("the blocks are not those of the source")
                return Done()
            case _:
                raise TransferError(f"{type(question).__name__} is no question for a target")

    async def close(self) -> None:
        for half in self._halves.values():
            await half.close()
        self._halves.clear()
        for pool in self._pools.values():
            pool.close()


SIDES: dict[str, type[Source] | type[Target]] = {"source": Source, "target": Target}


async def serve(make_side: type[Source] | type[Target], lines: BinaryIO, output: BinaryIO) -> None:
    """Answers until the input ends."""
    questions: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)

    def say(answer: Answer) -> None:
        output.write(msgspec.json.encode(answer) + b"\n")
        output.flush()

    begin = msgspec.json.decode(await asyncio.to_thread(lines.readline), type=Begin)
    side = make_side(begin.secret.encode())
    try:
        while line := await asyncio.to_thread(lines.readline):
            say(await _answer(side.answer(questions.decode(line), say)))
    finally:
        await side.close()


async def _answer(work: Awaitable[Answer]) -> Answer:
    try:
        return await work
    except Exception as error:  # of libraries that raise what they like, too: the bench decides what it means
        text = " ".join(str(error).split())
        return Refused(f"{type(error).__name__}: {text}")


def main() -> None:
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with output:
        asyncio.run(serve(SIDES[sys.argv[2]], sys.stdin.buffer, output))


if __name__ == "__main__":
    main()
