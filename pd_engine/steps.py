"""What a step must fulfil before anything is written: shared by the real engine and the fake one."""

from __future__ import annotations

from collections.abc import Sequence

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import BLOCK_TOKENS, blocks_for


def never() -> bool:
    """`is_cancelled` of a step that nobody will want to stop."""
    return False


def check_steps(steps: Sequence[SequenceStep], *, vocab_size: int, context_tokens: int, num_blocks: int) -> None:
    """Raises EngineError, naming the step, when one of them cannot be run; nothing has been written then."""
    writers: dict[int, int] = {}
    for index, step in enumerate(steps):
        _check_tokens(index, step, vocab_size, context_tokens)
        _check_table(index, step, num_blocks)
        for block_id in written_blocks(step):
            if block_id in writers:
                raise EngineError(f"steps {writers[block_id]} and {index} both write into block {block_id}")
            writers[block_id] = index


def written_blocks(step: SequenceStep) -> Sequence[int]:
    """Ids of the blocks that the step's own positions lie in."""
    return step.block_ids[step.start // BLOCK_TOKENS : blocks_for(step.end)]


def entered_blocks(step: SequenceStep) -> Sequence[int]:
    """Ids of the blocks that the sequence writes into for the first time: the engine zeroes them."""
    return step.block_ids[blocks_for(step.start) : blocks_for(step.end)]


def _check_tokens(index: int, step: SequenceStep, vocab_size: int, context_tokens: int) -> None:
    if not step.tokens:
        raise EngineError(f"step {index} has no tokens")
    if step.start < 0:
        raise EngineError(f"step {index} starts at position {step.start}")
    if step.end > context_tokens:
        raise EngineError(f"step {index} ends at position {step.end}; the context has {context_tokens}")
    if min(step.tokens) < 0 or max(step.tokens) >= vocab_size:
        wrong = next(token for token in step.tokens if not 0 <= token < vocab_size)
        raise EngineError(f"step {index}: id {wrong} is outside the vocabulary of {vocab_size}")


def _check_table(index: int, step: SequenceStep, num_blocks: int) -> None:
    needed = blocks_for(step.end)
    table = step.block_ids[:needed]
    if len(table) < needed:
        raise EngineError(f"step {index} needs {needed} blocks, its table has {len(table)}")
    if min(table) < 0 or max(table) >= num_blocks:
        raise EngineError(f"step {index}: a block id is outside the pool of {num_blocks} blocks")
    if len(set(table)) != needed:
        raise EngineError(f"step {index}: a block stands twice in its table")
