"""What a prefill worker takes, and what a chunk finishes; whose chunk is next says pd_worker.policy. Pure.

tokens:  0 ....... chunk_tokens ....... 2 x chunk_tokens .... num_prompt
         |--- one step ---|------ one step ------|-- the rest --|  -> first token
blocks:  |0|1|2|...|      all full: final                    |n|     the last may be partly filled
"""

from __future__ import annotations

from pd_core.errors import ContextLengthExceeded, TransferError
from pd_core.layout import BLOCK_TOKENS, blocks_for
from pd_core.ticket import Ticket


def check_fits(num_prompt: int, context_tokens: int, num_pool_blocks: int) -> None:
    """Raises ContextLengthExceeded when the prompt can never be computed here, however empty the pool is."""
    limit = min(context_tokens - 1, num_pool_blocks * BLOCK_TOKENS)
    if num_prompt > limit:
        raise ContextLengthExceeded(
            f"the messages are {num_prompt} tokens; the context holds {context_tokens} with at least one token made, "
            f"the KV pool {num_pool_blocks * BLOCK_TOKENS}",
            param="messages",
        )


def check_range(ticket: Ticket, num_prompt: int) -> None:
    """Raises TransferError for a ticket whose range is not a part of the prompt's blocks, or that lets none in."""
    end = ticket.first_block + ticket.num_blocks
    if ticket.first_block < 0 or end > blocks_for(num_prompt):
        raise TransferError(
            f"the ticket is for blocks {ticket.first_block} .. {end - 1}, the prompt has {blocks_for(num_prompt)}"
        )
    if ticket.most_frame_blocks is not None and ticket.most_frame_blocks < 1:
        raise TransferError(f"the ticket allows {ticket.most_frame_blocks} blocks in a frame")


def blocks_done(end: int, num_prompt: int) -> int:
    """Blocks, from the first on, that are final when positions 0 .. end - 1 of the prompt are computed.

    A block in the middle of the prompt is final when it is full; the last one when the prompt is done.
    """
    return blocks_for(end) if end == num_prompt else end // BLOCK_TOKENS


def indices_done(ticket: Ticket, num_ready: int, end: int, num_prompt: int) -> list[int]:
    """Blocks of the ticket's range that are final when positions 0 .. end - 1 are computed, after the `num_ready`
    first ones, which were final before."""
    num_done = blocks_done(end, num_prompt) - ticket.first_block
    return list(range(num_ready, min(num_done, ticket.num_blocks)))
