"""Scripts of workers that fail at a chosen moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from scripted_worker import COMMITTED, DONE, ScriptedWorker, Stage, granted, made

from pd_core.errors import EngineError, InvalidRequest, KvrelayError
from pd_core.messages import StartDecode, StartPrefill

Messages = AsyncIterator[msgspec.Struct]
BAD = InvalidRequest("decode does not like it", param="messages")
BROKEN = EngineError("decode broke")


def crash(worker: ScriptedWorker) -> None:
    worker.crash()


def fall_silent(worker: ScriptedWorker) -> None:
    worker.speaks.clear()


def raise_it(error: KvrelayError) -> Callable[[ScriptedWorker], None]:
    def fail(_: ScriptedWorker) -> None:
        raise error

    return fail


def decode_that_fails(on: Stage, num_tokens: int, fail: Callable[[ScriptedWorker], None]) -> None:
    """After so many tokens; before the ticket with -1, with 0 after it."""

    async def decode(body: StartDecode) -> Messages:
        if num_tokens >= 0:
            yield granted(body)
            await on.handoffs.drawn(body.request.request_id).wait()
        for index in range(num_tokens):
            yield made(body.request, index)
        if num_tokens > 0:
            yield COMMITTED
        await asyncio.sleep(0.05)  # what was said is on its way
        fail(on.d0)
        await asyncio.sleep(3600)
        yield COMMITTED

    async def prefill(body: StartPrefill) -> Messages:
        on.handoffs.drawn(body.request.request_id).set()
        if num_tokens > 0:
            yield made(body.request, 0)
            yield DONE
        else:
            await asyncio.sleep(3600)
            yield DONE

    on.d0.script, on.p0.script = decode, prefill


def prefill_that_fails(on: Stage, num_tokens: int, fail: Callable[[ScriptedWorker], None]) -> None:
    """Before its token (0) or after it (1), but never with a commit."""

    async def prefill(body: StartPrefill) -> Messages:
        if num_tokens:
            yield made(body.request, 0)
            await asyncio.sleep(0.05)
        fail(on.p0)
        await asyncio.sleep(3600)
        yield DONE

    on.p0.script = prefill
