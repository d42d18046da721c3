"""What a decode worker admits and what it runs next. Pure.

A request gets all the room that it can ever need when it is admitted: a running sequence never has to grow, so nobody
can wait for blocks while holding some, and nobody has to be preempted.

    positions:  0 ........ num_prompt - 1 | num_prompt ........ num_prompt + max_tokens - 2 |
                |-- KV from the prefill --|------------ KV written by decode steps ---------|
    The last token ends the request: its KV is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pd_core.errors import ContextLengthExceeded
from pd_core.layout import BLOCK_TOKENS, blocks_for

T = TypeVar("T")


class Room(msgspec.Struct, frozen=True):
    """Blocks for one request: those that the prefill fills, and those for the tokens after it."""

    num_prompt_blocks: int
    num_head_room_blocks: int

    @property
    def num_blocks(self) -> int:
        return self.num_prompt_blocks + self.num_head_room_blocks


def room_for(num_prompt: int, max_tokens: int) -> Room:
    """All blocks that the request can ever touch."""
    num_prompt_blocks = blocks_for(num_prompt)
    return Room(num_prompt_blocks, blocks_for(num_prompt + max_tokens - 1) - num_prompt_blocks)


def check_fits(num_prompt: int, max_tokens: int, context_tokens: int, num_pool_blocks: int) -> None:
    """Raises ContextLengthExceeded when the request can never run here, however empty the pool is.

    `param` is what the client has to make smaller: the messages when not even one token would fit after them.
    """
    limit = min(context_tokens, num_pool_blocks * BLOCK_TOKENS)
    if num_prompt + max_tokens <= limit:
        return
    raise ContextLengthExceeded(
        f"the messages are {num_prompt} tokens, and max_tokens is {max_tokens}: {num_prompt + max_tokens} together; "
        f"the context holds {context_tokens}, the KV pool {num_pool_blocks * BLOCK_TOKENS}",
        param="messages" if num_prompt + 1 > limit else "max_tokens",
    )


def next_batch(running: Sequence[T], max_batch: int) -> list[T]:
    """Who takes part in the next step: the oldest, as many as one step takes. `running` is in order of joining."""
    return list(running[:max_batch])
