"""What a decode worker admits, whom it preempts, and what it runs next. Pure.

A request is admitted when there is room for its prompt and for some growth of everybody who is here. What runs grows
block by block. One that cannot grow takes the blocks of the youngest, which may be itself; who was preempted goes on
later, ahead of everybody who is not here yet. So nobody waits for blocks while holding some, and the oldest gets
through.

    positions:  0 ........ num_prompt - 1 | num_prompt ........ num_prompt + max_tokens - 2 |
                |-- KV from the prefill --|------------ KV written by decode steps ---------|
    The last token ends the request: its KV is never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode_worker.life import Phase, SequenceLife
from pd_core.errors import ContextLengthExceeded
from pd_core.layout import BLOCK_TOKENS
from pd_worker.policy import PromptWork, Share, next_shares


def most_positions(num_prompt: int, max_tokens: int) -> int:
    """Positions whose KV the request can ever need."""
    return num_prompt + max_tokens - 1


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


def blocks_to_begin(newcomer: SequenceLife, others: Iterable[SequenceLife]) -> int:
    """Free blocks at which `newcomer` may begin beside the `others` that hold some: its tokens', and growth for all.

    One alone needs no more than it can ever use, so it always finds room in an empty pool.
    """
    growing = [newcomer, *others]
    return newcomer.num_blocks_due + sum(life.num_growth_blocks for life in growing)


def next_batch(lives: Sequence[SequenceLife], max_batch: int) -> list[SequenceLife]:
    """Who decodes in the next step: the oldest of those that run, as many as one step takes. `lives`: oldest first."""
    return [life for life in lives if life.phase is Phase.RUNNING][:max_batch]


def youngest_to_preempt(lives: Sequence[SequenceLife]) -> SequenceLife | None:
    """The youngest that holds blocks of its own. `lives`: oldest first."""
    return next((life for life in reversed(lives) if life.holds_blocks), None)


def prompt_shares(
    lives: Sequence[SequenceLife], now_s: float, chunk_tokens: int, ageing_tokens_per_s: float
) -> list[Share]:
    """Whose chunks are mixed into the next step: of those that were preempted first, of new prompts where room is left.

    `lives` compute, oldest first; a share's index is the place in it. All shares together are at most `chunk_tokens`.
    """
    shares: list[Share] = []
    for is_recomputed in (True, False):
        group = [index for index, life in enumerate(lives) if life.is_recomputed is is_recomputed]
        works = [
            PromptWork(lives[index].num_computed, lives[index].num_tokens, now_s - lives[index].waits_since_s)
            for index in group
        ]
        left = chunk_tokens - sum(share.num_tokens for share in shares)
        chosen = next_shares(works, chunk_tokens, left, ageing_tokens_per_s)
        shares += [Share(group[share.index], share.start, share.end) for share in chosen]
    return shares
