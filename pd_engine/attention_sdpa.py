"""Attention by torch's scaled_dot_product_attention, called in shapes for which it is row-invariant.

Its CPU kernel takes the keys in a fixed order, but a row's bits depend on how many keys there are, masked or not. So
the number of keys is made a function of the row's own position: up to the next multiple of 128, the rest masked. Rows
are multiplied in blocks whose size depends on how many there are; a row's bits are the same for every multiple of 4
rows, and of 1 to 3 rows they are not, so the number of rows is padded too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own custom)
from torch import Tensor

from pd_core.layout import BLOCK_TOKENS
from pd_engine.attention import RowSpan
from pd_engine.attention_rows import (
    HeadGroups,
    QueryTile,
    cut,
    key_rows,
    padded_positions,
    padded_rows,
    span_tile,
    where_from,
)
from pd_engine.pool import KvPool

TILE_KEYS = 128
ROW_STEPS = ((32, 4), (192, 32), (768, 64))
"""Below so many rows, pad to a multiple of so many; above, of 256: torch cuts them into blocks of 32, 64 and 256."""
LARGEST_ROW_STEP = 256


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tiles of equal size and equal number of keys: one call.

    rows:     [tiles * kv_heads * pairs]
    keys:     [tiles * kv_heads * 2 * blocks]
    mask:     [tiles, 1, pairs, keys]
    gathered: room for one layer's K and V, used again by every layer: fresh memory would cost more than the copy
    """

    rows: Tensor
    keys: Tensor
    mask: Tensor
    gathered: Tensor


class SdpaPlan:
    def __init__(self, batches: list[_Batch], source: Tensor, groups: HeadGroups, head_dim: int) -> None:
        self._batches = batches
        self._source = source
        self._groups = groups
        self._head_dim = head_dim

    def attend(self, queries: Tensor, block_rows: Tensor) -> Tensor:
        head_dim, scale = self._head_dim, self._head_dim**-0.5
        flat = queries.reshape(-1, head_dim)
        results = []
        for batch in self._batches:
            tiles, _, pairs, keys = batch.mask.shape
            q = flat.index_select(0, batch.rows).view(tiles, -1, pairs, head_dim)
            torch.index_select(block_rows, 0, batch.keys, out=batch.gathered)
            kv = batch.gathered.view(tiles, -1, 2, keys, head_dim)
            made = F.scaled_dot_product_attention(q, kv[:, :, 0], kv[:, :, 1], attn_mask=batch.mask, scale=scale)
            results.append(made.reshape(-1, head_dim))
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.index_select(0, self._source).view(queries.shape[0], -1)


class SdpaKernel:
    """The fast kernel of plain torch."""

    name = "sdpa"
    version = 1
    tile_keys = TILE_KEYS

    def plan(self, spans: Sequence[RowSpan], num_rows: int, num_heads: int, pool: KvPool) -> SdpaPlan:
        groups = HeadGroups(num_heads, pool.layout.num_kv_heads)
        by_shape: dict[tuple[int, int], list[QueryTile]] = {}
        for span in spans:
            for tile in _cut_at_tiles(span, groups):
                num_keys = (int(tile.positions[-1]) // TILE_KEYS + 1) * TILE_KEYS
                by_shape.setdefault((pad_pairs(tile.rows.size), num_keys), []).append(tile)
        batches = [_make_batch(tiles, pairs, keys, groups, pool) for (pairs, keys), tiles in by_shape.items()]
        made = [(tiles, pairs) for (pairs, _), tiles in by_shape.items()]
        source = torch.from_numpy(where_from(made, num_rows, groups)).to(pool.device)
        return SdpaPlan(batches, source, groups, pool.layout.head_dim)


def pad_pairs(num_pairs: int) -> int:
    """Rows to run for `num_pairs` rows."""
    for below, step in ROW_STEPS:
        padded = -(-num_pairs // step) * step
        if padded < below:
            return padded
    return -(-num_pairs // LARGEST_ROW_STEP) * LARGEST_ROW_STEP


def _cut_at_tiles(span: RowSpan, groups: HeadGroups) -> list[QueryTile]:
    """The span's pairs, cut where a token sees one key tile more than the one before it."""
    whole = span_tile(span, groups)
    edges = np.flatnonzero(np.diff(whole.positions // TILE_KEYS)) + 1
    bounds = [0, *edges.tolist(), whole.rows.size]
    return [cut(whole, begin, end) for begin, end in itertools.pairwise(bounds)]


def _make_batch(tiles: list[QueryTile], num_pairs: int, num_keys: int, groups: HeadGroups, pool: KvPool) -> _Batch:
    seen = torch.from_numpy(padded_positions(tiles, num_pairs)).to(pool.device)[:, None, :, None]
    hidden = torch.arange(num_keys, device=pool.device) > seen
    mask = seen.new_zeros(hidden.shape, dtype=pool.blocks.dtype).masked_fill_(hidden, float("-inf"))
    rows = padded_rows(tiles, num_pairs, groups)
    keys = key_rows([tile.block_ids for tile in tiles], num_keys, pool).reshape(-1)
    return _Batch(
        rows=torch.from_numpy(rows.reshape(-1)).to(pool.device),
        keys=torch.from_numpy(keys).to(pool.device),
        mask=mask,
        gathered=pool.blocks.new_empty((keys.size, BLOCK_TOKENS * pool.layout.head_dim)),
    )
