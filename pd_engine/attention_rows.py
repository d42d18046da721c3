"""Index arithmetic that kernels share: query heads into tiles, block tables into rows of the pool.

Heads that share a KV head (a group) are rows like any other: they meet the same keys. A tile of a sequence is
therefore a run of (token, head of the group) pairs, tokens outermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_core.layout import BLOCK_TOKENS
from pd_engine.attention import RowSpan
from pd_engine.pool import KvPool

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """How query heads share KV heads."""

    num_heads: int
    num_kv_heads: int

    @property
    def size(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Some (token, head of the group) pairs of one sequence.

    rows:      [pairs] row of the step, times num_heads, plus head of the group; KV head 0
    positions: [pairs] position of each pair's token
    block_ids: block table of the sequence
    """

    rows: Indices
    positions: Indices
    block_ids: Sequence[int]


def span_tile(span: RowSpan, groups: HeadGroups) -> QueryTile:
    """All pairs of a span as one tile."""
    tokens = np.arange(span.num_rows)
    rows = (span.first_row + tokens)[:, None] * groups.num_heads + np.arange(groups.size)
    return QueryTile(rows.reshape(-1), np.repeat(span.start + tokens, groups.size), span.block_ids)


def cut(tile: QueryTile, begin: int, end: int) -> QueryTile:
    """Pairs begin .. end - 1 of a tile."""
    return QueryTile(tile.rows[begin:end], tile.positions[begin:end], tile.block_ids)


def padded_rows(tiles: Sequence[QueryTile], num_pairs: int, groups: HeadGroups) -> Indices:
    """[tiles, kv_heads, num_pairs] rows of `queries.view(-1, head_dim)`; short tiles repeat their first pair."""
    padded = np.stack([_pad(tile.rows, num_pairs) for tile in tiles])
    return padded[:, None, :] + (np.arange(groups.num_kv_heads) * groups.size)[None, :, None]


def padded_positions(tiles: Sequence[QueryTile], num_pairs: int) -> Indices:
    """[tiles, num_pairs] positions that go with `padded_rows`."""
    return np.stack([_pad(tile.positions, num_pairs) for tile in tiles])


def key_rows(tables: Sequence[Sequence[int]], num_keys: int, pool: KvPool) -> Indices:
    """[tables, kv_heads, k|v, num_keys / 16] rows of `pool.block_rows`.

    Behind its end a table goes on with its own first block: those keys are masked, and what is multiplied by 0 must
    be finite numbers of the same sequence.
    """
    num_blocks = num_keys // BLOCK_TOKENS
    blocks = np.stack([_pad(np.asarray(table[:num_blocks]), num_blocks) for table in tables])
    heads = np.arange(pool.layout.num_kv_heads * 2).reshape(1, -1, 2, 1)
    return blocks[:, None, None, :] * pool.heads_a_block + heads


def where_from(made: Sequence[tuple[Sequence[QueryTile], int]], num_rows: int, groups: HeadGroups) -> Indices:
    """[num_rows * num_heads]: for each row and head, its row in the kernel's results laid one after the other.

    made: batches of tiles with the pairs each tile was padded to; results are [tiles, kv_heads, pairs]
    """
    source = np.zeros(num_rows * groups.num_heads, dtype=np.int64)
    begin = 0
    kv_heads = np.arange(groups.num_kv_heads)[:, None]
    for tiles, num_pairs in made:
        for tile in tiles:
            rows = tile.rows[None, :] + kv_heads * groups.size
            source[rows] = begin + kv_heads * num_pairs + np.arange(tile.rows.size)[None, :]
            begin += groups.num_kv_heads * num_pairs
    return source


def _pad(values: Indices, size: int) -> Indices:
    return np.concatenate([values, np.full(size - values.size, values[0])])
