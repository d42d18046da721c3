"""What an attention kernel is.

A kernel must be *row-invariant*: a query row's result depends on that row, and on the keys and values of its own
sequence up to its own position, by one fixed order of arithmetic; never on the other rows of the step, how many there
are, how the sequence was cut into chunks, or how many threads run. Every kernel of `pd_engine.kernels` is held to
that by one contract test and by the engine's check at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pd_engine.pool import KvPool


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of one sequence: rows first_row .. first_row + num_rows - 1 stand at positions start, start + 1, ...

    block_ids: the blocks of positions 0 .. end - 1 and no other: all of them hold finite numbers
    """

    first_row: int
    num_rows: int
    start: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.num_rows


class AttentionPlan(Protocol):
    """How one step's rows are laid out for a kernel; made once, used by every layer."""

    def attend(self, queries: Tensor, block_rows: Tensor) -> Tensor:
        """queries: [rows, num_heads, head_dim], rotated; block_rows: `KvPool.block_rows(layer)`.

        Returns [rows, num_heads * head_dim] in the dtype of the queries; rows outside every span hold finite numbers.
        """
        ...


class AttentionKernel(Protocol):
    """`name`, `version` and `tile_keys` are part of the numerics id: raise the version when a bit may change."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def tile_keys(self) -> int:
        """Keys are taken in tiles of so many, which begin at absolute positions."""
        ...

    def plan(self, spans: Sequence[RowSpan], num_rows: int, num_heads: int, pool: KvPool) -> AttentionPlan: ...
