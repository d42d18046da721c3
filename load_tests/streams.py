"""Many streams at once: started together, watched, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from load_tests.gateway import Gateway
from load_tests.http_client import Exchange

_T = TypeVar("_T")


@asynccontextmanager
async def running_streams(
    gateway: Gateway, prompts: Sequence[Sequence[int]], max_tokens: int, *, with_token_ids: bool
) -> AsyncIterator[list[Exchange]]:
    """One stream for each prompt, all past their first token on entry; at the end those that still run are closed.

    Raises Unavailable, DeadlineExceeded.
    """
    async with AsyncExitStack() as stack:
        exchanges = [
            await stack.enter_async_context(gateway.stream(prompt, max_tokens, with_token_ids=with_token_ids))
            for prompt in prompts
        ]
        await asyncio.gather(*(exchange.wait_begun() for exchange in exchanges))
        yield exchanges


async def all_of(tasks: Sequence[asyncio.Task[_T]]) -> list[_T]:
    """Their results; what one of them raises, and then the others have been cancelled."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_all_ended(exchanges: Sequence[Exchange]) -> None:
    """Raises DeadlineExceeded."""
    await asyncio.gather(*(exchange.wait_ended() for exchange in exchanges))


async def wait_first_ended(exchanges: Sequence[Exchange]) -> None:
    """Returns when the first of them has ended. Raises DeadlineExceeded."""
    waiting = [asyncio.ensure_future(exchange.wait_ended()) for exchange in exchanges]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
