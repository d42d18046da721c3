"""Messages to token ids: short ones at once, long ones beside the event loop, and only a few of those at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from pd_core.errors import Cancelled, ContextLengthExceeded, Overloaded
from pd_model.model_assets import ModelAssets
from pd_rpc.tasks import finish_regardless

T = TypeVar("T")

LONG_CHARACTERS = 8192
"""From which on a prompt is tokenised beside the event loop, not on it."""
MAX_AT_ONCE = 2
RETRY_S = 1.0


class PromptReader:
    """max_waiting: long prompts that may wait until others have been tokenised."""

    def __init__(self, assets: ModelAssets, max_waiting: int) -> None:
        self._assets = assets
        self._max_long = MAX_AT_ONCE + max_waiting
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_long = 0

    async def read(self, messages: Sequence[dict[str, str]], max_tokens: int) -> list[int]:
        """The prompt's ids; a prompt of more than `max_tokens` may be refused before it is tokenised.

        When the caller gives up, a tokenisation that has begun still ends, and holds its turn so long: nothing can
        stop it from outside.
        Raises InvalidRequest from template and tokenizer, ContextLengthExceeded, Overloaded when too many wait.
        """
        if sum(len(message["content"]) for message in messages) < LONG_CHARACTERS:
            return self._to_tokens(messages, max_tokens)
        if self._num_long >= self._max_long:
            raise Overloaded(f"{self._num_long} long prompts are being read already", retry_after_s=RETRY_S)
        self._num_long += 1
        try:
            async with self._turns:
                loop = asyncio.get_running_loop()
                return await finish_regardless(loop.run_in_executor(None, self._to_tokens, messages, max_tokens))
        finally:
            self._num_long -= 1

    def _to_tokens(self, messages: Sequence[dict[str, str]], max_tokens: int) -> list[int]:
        # What the template makes of the messages is measured, not the messages: it may leave out what they say.
        text = self._assets.chat_template.render([dict(message) for message in messages])
        least = self._assets.tokenizer.least_tokens(text)
        if least > max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens; at most {max_tokens} tokens fit, the answer's among them",
                param="messages",
            )
        return self._assets.tokenizer.encode(text)


async def unless_left(work: Awaitable[T], departure: asyncio.Future[None]) -> T:
    """The result of `work`. Raises Cancelled when the client leaves first, and then `work` has ended too."""
    task = asyncio.ensure_future(work)
    try:
        both: set[asyncio.Future[Any]] = {task, departure}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client left before its prompt was read")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
