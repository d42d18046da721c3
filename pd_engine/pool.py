"""The KV pool as tensors: over the memory that the worker owns, or on a device.

One block is `[layer][kv_head][k|v][16 tokens][head_dim]`, so a head's K of one block is one row of 16 x head_dim
numbers, and its V the next row. `block_rows(layer)` and `token_rows(layer)` are views whose row numbers do not
depend on the layer: index tensors are made once a step and serve all layers.

    KvPool         steps and transports work on the same bytes
    DeviceKvPool   steps work on a tensor of the device; see device_copies for how its blocks come and go
"""

from __future__ import annotations

import torch
from torch import Tensor

from pd_core.errors import EngineError
from pd_core.layout import BLOCK_TOKENS, BlockLayout, DType
from pd_core.memory import BlockMemory

LAYOUT_NAME = "token-major"
TORCH_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Raises EngineError for a dtype that no model runs in."""
    if dtype not in TORCH_DTYPES:
        raise EngineError(f"a model cannot run in {dtype}; there are {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]


class KvPool:
    """Views of the pool that lies in `memory`. Raises EngineError when memory and layout do not fit."""

    def __init__(self, memory: BlockMemory, layout: BlockLayout) -> None:
        if memory.block_bytes != layout.block_bytes:
            raise EngineError(f"a block is {layout.block_bytes} bytes, the pool has {memory.block_bytes}")
        in_memory = torch.frombuffer(memory.buffer, dtype=torch_dtype(layout.dtype))
        self._view(in_memory.view(memory.num_blocks, -1), layout)

    def _view(self, blocks: Tensor, layout: BlockLayout) -> None:
        """blocks: [num_blocks, numbers of a block]"""
        if layout.name != LAYOUT_NAME:
            raise EngineError(f"this engine stores KV {LAYOUT_NAME!r}, the pool is {layout.name!r}")
        self.layout = layout
        self.blocks = blocks
        self.num_blocks = blocks.shape[0]
        self.heads_a_block = layout.num_layers * layout.num_kv_heads * 2
        self._rows_a_layer = layout.num_kv_heads * 2
        self._block_rows = blocks.view(-1, BLOCK_TOKENS * layout.head_dim)
        self._token_rows = blocks.view(-1, layout.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def device(self) -> torch.device:
        """Where steps work; index tensors have to lie there too."""
        return self.blocks.device

    def block_rows(self, layer: int) -> Tensor:
        """[rows, 16 * head_dim]; K of (block, kv_head) is row `block * heads_a_block + 2 * kv_head`, V the next."""
        return self._block_rows[layer * self._rows_a_layer :]

    def token_rows(self, layer: int) -> Tensor:
        """[rows, head_dim]; token `slot` of block row r is row `16 * r + slot`."""
        return self._token_rows[layer * self._rows_a_layer * BLOCK_TOKENS :]

    def zero(self, block_ids: list[int]) -> None:
        """Zeroes whole blocks, so that nothing of an earlier request is ever multiplied, even by 0."""
        if block_ids:
            self.blocks.index_fill_(0, torch.tensor(block_ids, device=self.device), 0)

    def settle(self) -> None:
        """Returns when the device works on none of the blocks any more. On the CPU it never does behind our back."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class DeviceKvPool(KvPool):
    """`num_blocks` blocks on a device, zero at first. Raises EngineError when it has no room for them."""

    def __init__(self, num_blocks: int, layout: BlockLayout, device: torch.device) -> None:
        dtype = torch_dtype(layout.dtype)
        try:
            blocks = torch.zeros((num_blocks, layout.block_bytes // dtype.itemsize), dtype=dtype, device=device)
        except RuntimeError as error:
            size_mib = num_blocks * layout.block_bytes / 2**20
            raise EngineError(f"a pool of {size_mib:.0f} MiB has no room on {device}: {error}") from error
        self._view(blocks, layout)
