"""One engine step as index tensors: made once, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pd_core.engine import SequenceStep
from pd_core.layout import BLOCK_TOKENS, blocks_for
from pd_engine.attention import AttentionKernel, AttentionPlan, RowSpan
from pd_engine.pool import KvPool
from pd_engine.steps import entered_blocks

ROW_MULTIPLE: dict[torch.dtype, int] = {torch.float32: 8, torch.bfloat16: 4}
"""torch's linear layers give a row the same bits for every number of rows that is a multiple of this."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """rows: one a token, sequence after sequence, then padding (id 0 at position 0, whose KV is not written).

    Tensors lie on the pool's device.
    ids, positions: [padded rows]
    num_rows:       rows that are tokens
    kv_rows:        [num_rows * kv_heads * 2] rows of `KvPool.token_rows` that take each row's K and V
    entered:        blocks to be zeroed first
    attention:      the kernel's own plan
    """

    ids: Tensor
    positions: Tensor
    num_rows: int
    kv_rows: Tensor
    entered: list[int]
    attention: AttentionPlan
    last_rows: list[int]


def plan_step(steps: Sequence[SequenceStep], kernel: AttentionKernel, num_heads: int, pool: KvPool) -> StepPlan:
    """`steps` have been checked."""
    spans = []
    first_row = 0
    for step in steps:
        # blocks that a table holds in reserve have not been zeroed: no kernel may see them
        reached = step.block_ids[: blocks_for(step.end)]
        spans.append(RowSpan(first_row, len(step.tokens), step.start, reached))
        first_row += len(step.tokens)
    padding = -first_row % ROW_MULTIPLE[pool.blocks.dtype]
    num_padded = first_row + padding
    ids = np.concatenate([*(np.asarray(step.tokens, dtype=np.int64) for step in steps), np.zeros(padding, np.int64)])
    positions = np.concatenate([*(np.arange(span.start, span.end) for span in spans), np.zeros(padding, np.int64)])
    return StepPlan(
        ids=torch.from_numpy(ids).to(pool.device),
        positions=torch.from_numpy(positions).to(pool.device),
        num_rows=first_row,
        kv_rows=_kv_rows(spans, pool),
        entered=[block_id for step in steps for block_id in entered_blocks(step)],
        attention=kernel.plan(spans, num_padded, num_heads, pool),
        last_rows=[span.first_row + span.num_rows - 1 for span in spans],
    )


def pad_rows(rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Row numbers, the first repeated up to a multiple of ROW_MULTIPLE."""
    return torch.tensor([*rows, *[rows[0]] * (-len(rows) % ROW_MULTIPLE[dtype])])


def _kv_rows(spans: Sequence[RowSpan], pool: KvPool) -> Tensor:
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    blocks = np.concatenate(
        [np.asarray(span.block_ids)[np.arange(span.start, span.end) // BLOCK_TOKENS] for span in spans]
    )
    heads = np.arange(pool.layout.num_kv_heads * 2)
    block_rows = blocks[:, None] * pool.heads_a_block + heads[None, :]
    rows = (block_rows * BLOCK_TOKENS + positions[:, None] % BLOCK_TOKENS).reshape(-1)
    return torch.from_numpy(rows).to(pool.device)
