"""Prompts to token ids: short ones at once, long ones beside the event loop, and only a few of those at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pd_core.errors import Cancelled, ContextLengthExceeded, Overloaded
from pd_model.chat import REPLACEMENT
from pd_model.model_assets import ModelAssets
from pd_model.tokenizer import GUARD
from pd_rpc.tasks import finish_regardless

T = TypeVar("T")

LONG_CHARACTERS = 8192
"""From which on a prompt is tokenised beside the event loop, not on it."""
MESSAGE_CHARACTERS = 64
"""A message counts as so many more: the chat template takes its time for one without text, too."""
MAX_AT_ONCE = 2
RETRY_S = 1.0


class PromptReader:
    """One for all endpoints: they share the turns. max_waiting: long prompts that may wait for others."""

    def __init__(self, assets: ModelAssets, max_waiting: int) -> None:
        self._assets = assets
        self._max_long = MAX_AT_ONCE + max_waiting
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_long = 0

    async def read_chat(self, messages: Sequence[dict[str, str]], max_tokens: int) -> list[int]:
        """The ids of a conversation; one of more than `max_tokens` may be refused before it is tokenised.

        When the caller gives up, a tokenisation that has begun still ends, and holds its turn so long: nothing can
        stop it from outside.
        Raises InvalidRequest from template and tokenizer, ContextLengthExceeded, Overloaded when too many wait.
        """
        num_characters = sum(MESSAGE_CHARACTERS + len(message["content"]) for message in messages)
        return await self._in_turn(num_characters, lambda: self._chat_tokens(messages, max_tokens))

    async def read_texts(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """The ids of each text, in front of it what the model's texts begin with; the name of a special token is that
        token. As `read_chat` otherwise."""
        num_characters = sum(map(len, texts))
        return await self._in_turn(num_characters, lambda: [self._text_tokens(text, max_tokens) for text in texts])

    async def _in_turn(self, num_characters: int, read: Callable[[], T]) -> T:
        if num_characters < LONG_CHARACTERS:
            return read()
        if self._num_long >= self._max_long:
            raise Overloaded(f"{self._num_long} long prompts are being read already", retry_after_s=RETRY_S)
        self._num_long += 1
        try:
            async with self._turns:
                return await finish_regardless(asyncio.get_running_loop().run_in_executor(None, read))
        finally:
            self._num_long -= 1

    def _chat_tokens(self, messages: Sequence[dict[str, str]], max_tokens: int) -> list[int]:
        # What the template makes of the messages is measured, not the messages: it may leave out what they say.
        return self._tokens(self._assets.chat_template.render([dict(message) for message in messages]), max_tokens)

    def _text_tokens(self, text: str, max_tokens: int) -> list[int]:
        prefix = list(self._assets.tokenizer.text_prefix)
        tokens = self._tokens(text.replace(GUARD, REPLACEMENT), max_tokens)  # GUARD is for chat templates alone
        # Who has written the beginning of the text himself does not want it twice.
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

    def _tokens(self, text: str, max_tokens: int) -> list[int]:
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
