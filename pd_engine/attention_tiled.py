"""Attention written out: tiles of 32 rows by 64 keys at absolute positions, a running softmax in float32.

Every product is a batch of matrices of one fixed shape, so a row meets the same arithmetic whatever else is in the
batch. Slower than `attention_sdpa`, but it leaves nothing to the inside of a library call: it is the one to compare
others with, and to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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

TILE_ROWS = 32
TILE_KEYS = 64


@dataclass(frozen=True, slots=True)
class _KeyTile:
    """Key tile j of all query tiles that reach it: the first `num_tiles`, for they are sorted by reach.

    keys: [num_tiles * kv_heads * 2 * 4] rows of the pool; hidden: [num_tiles, 1, TILE_ROWS, TILE_KEYS]
    """

    num_tiles: int
    keys: Tensor
    hidden: Tensor


class TiledPlan:
    def __init__(self, rows: Tensor, key_tiles: list[_KeyTile], source: Tensor, num_kv_heads: int) -> None:
        self._rows = rows
        self._key_tiles = key_tiles
        self._source = source
        self._num_kv_heads = num_kv_heads

    def attend(self, queries: Tensor, block_rows: Tensor) -> Tensor:
        head_dim, kv_heads = queries.shape[-1], self._num_kv_heads
        q = queries.reshape(-1, head_dim).index_select(0, self._rows).float().mul_(head_dim**-0.5)
        q = q.view(-1, kv_heads, TILE_ROWS, head_dim)
        highest = q.new_full((*q.shape[:3], 1), float("-inf"))
        total = torch.zeros_like(highest)
        result = torch.zeros_like(q)
        for tile in self._key_tiles:
            n = tile.num_tiles
            kv = block_rows.index_select(0, tile.keys).view(n, kv_heads, 2, TILE_KEYS, head_dim).float()
            scores = _bmm(q[:n], kv[:, :, 0].transpose(2, 3)).masked_fill_(tile.hidden, float("-inf"))
            higher = torch.maximum(highest[:n], scores.amax(-1, keepdim=True))
            weights = torch.exp(scores.sub_(higher))
            decay = torch.exp(highest[:n] - higher)
            total[:n] = total[:n] * decay + weights.sum(-1, keepdim=True)
            result[:n] = result[:n] * decay + _bmm(weights, kv[:, :, 1])
            highest[:n] = higher
        made = (result / total).to(queries.dtype).view(-1, head_dim)
        return made.index_select(0, self._source).view(queries.shape[0], -1)


class TiledKernel:
    """The kernel that can be read."""

    name = "tiled"
    version = 1
    tile_keys = TILE_KEYS

    def plan(self, spans: Sequence[RowSpan], num_rows: int, num_heads: int, pool: KvPool) -> TiledPlan:
        groups = HeadGroups(num_heads, pool.layout.num_kv_heads)
        tiles = [tile for span in spans for tile in _row_tiles(span, groups)]
        tiles.sort(key=_reach, reverse=True)
        rows = padded_rows(tiles, TILE_ROWS, groups)
        positions = torch.from_numpy(padded_positions(tiles, TILE_ROWS)).to(pool.device)[:, None, :, None]
        reach = np.array([_reach(tile) for tile in tiles])
        keys = key_rows([tile.block_ids for tile in tiles], int(reach[0]) * TILE_KEYS, pool)
        blocks = keys.shape[-1] // int(reach[0])
        key_tiles = []
        for j in range(int(reach[0])):
            n = int((reach > j).sum())
            picked = np.ascontiguousarray(keys[:n, :, :, j * blocks : (j + 1) * blocks]).reshape(-1)
            hidden = torch.arange(j * TILE_KEYS, (j + 1) * TILE_KEYS, device=pool.device) > positions[:n]
            key_tiles.append(_KeyTile(n, torch.from_numpy(picked).to(pool.device), hidden))
        source = torch.from_numpy(where_from([(tiles, TILE_ROWS)], num_rows, groups)).to(pool.device)
        return TiledPlan(torch.from_numpy(rows.reshape(-1)).to(pool.device), key_tiles, source, groups.num_kv_heads)


def _row_tiles(span: RowSpan, groups: HeadGroups) -> list[QueryTile]:
    whole = span_tile(span, groups)
    return [cut(whole, i, min(i + TILE_ROWS, whole.rows.size)) for i in range(0, whole.rows.size, TILE_ROWS)]


def _reach(tile: QueryTile) -> int:
    """How many key tiles the last pair of a tile sees."""
    return int(tile.positions[-1]) // TILE_KEYS + 1


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """[n, kv_heads, i, j] x [n, kv_heads, j, k] -> [n, kv_heads, i, k]"""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(a.shape[0], a.shape[1], a.shape[2], b.shape[3])
