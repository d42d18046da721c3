"""The KV pool as tensors: over the memory that the worker owns, or on a device with that memory as its staging.

One block is `[layer][kv_head][k|v][16 tokens][head_dim]`, so a head's K of one block is one row of 16 x head_dim
numbers, and its V the next row. `block_rows(layer)` and `token_rows(layer)` are views whose row numbers do not
depend on the layer: index tensors are made once a step and serve all layers.

    KvPool         steps and transports work on the same bytes
    StagedKvPool   steps work on a tensor of the device; `publish` copies blocks out to the memory that transports see,
                   `adopt` copies in what they have written there
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pd_core.errors import EngineError
from pd_core.layout import BLOCK_TOKENS, BlockLayout, DType
from pd_core.memory import BlockMemory

LAYOUT_NAME = "token-major"
TORCH_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

COPIED_BLOCKS = 64
"""Blocks that are copied between device and memory at a time: bounds what the copy needs beside the two."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """Raises EngineError for a dtype that no model runs in."""
    if dtype not in TORCH_DTYPES:
        raise EngineError(f"a model cannot run in {dtype}; there are {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]


class KvPool:
    """Views of one pool. Raises EngineError when memory and layout do not fit."""

    def __init__(self, memory: BlockMemory, layout: BlockLayout) -> None:
        if layout.name != LAYOUT_NAME:
            raise EngineError(f"this engine stores KV {LAYOUT_NAME!r}, the pool is {layout.name!r}")
        if memory.block_bytes != layout.block_bytes:
            raise EngineError(f"a block is {layout.block_bytes} bytes, the pool has {memory.block_bytes}")
        self.layout = layout
        self.num_blocks = memory.num_blocks
        self.heads_a_block = layout.num_layers * layout.num_kv_heads * 2
        self._rows_a_layer = layout.num_kv_heads * 2
        in_memory = torch.frombuffer(memory.buffer, dtype=torch_dtype(layout.dtype)).view(memory.num_blocks, -1)
        self.blocks = self._where_steps_work(in_memory)
        self._block_rows = self.blocks.view(-1, BLOCK_TOKENS * layout.head_dim)
        self._token_rows = self.blocks.view(-1, layout.head_dim)

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

    def publish(self, block_ids: Sequence[int]) -> None:
        """Makes the memory show these blocks. Nothing to do here: it is where steps work."""

    def adopt(self, block_ids: Sequence[int]) -> None:
        """Takes these blocks from the memory. Nothing to do here: it is where steps work."""

    def _where_steps_work(self, in_memory: Tensor) -> Tensor:
        return in_memory


def pool_on(memory: BlockMemory, layout: BlockLayout, device: torch.device) -> KvPool:
    """The pool for steps on `device`: in the memory itself where that is the CPU. Raises EngineError."""
    return KvPool(memory, layout) if device.type == "cpu" else StagedKvPool(memory, layout, device)


class StagedKvPool(KvPool):
    """A pool on a device. Raises EngineError also when the device has no room for it.

    A block whose latest bytes are on one side has to be published, or adopted, before the other side is read: who
    calls knows which side wrote it last.
    """

    def __init__(self, memory: BlockMemory, layout: BlockLayout, device: torch.device) -> None:
        self._on = device
        self._staging = torch.empty(0)
        super().__init__(memory, layout)

    def publish(self, block_ids: Sequence[int]) -> None:
        for ids in self._checked(block_ids):
            self._staging.index_copy_(0, ids, self.blocks.index_select(0, ids.to(self.device)).cpu())

    def adopt(self, block_ids: Sequence[int]) -> None:
        for ids in self._checked(block_ids):
            self.blocks.index_copy_(0, ids.to(self.device), self._staging.index_select(0, ids).to(self.device))

    def _where_steps_work(self, in_memory: Tensor) -> Tensor:
        self._staging = in_memory
        try:
            return torch.zeros(in_memory.shape, dtype=in_memory.dtype, device=self._on)
        except RuntimeError as error:
            size_mib = in_memory.numel() * in_memory.element_size() / 2**20
            raise EngineError(f"a pool of {size_mib:.0f} MiB has no room on {self._on}: {error}") from error

    def _checked(self, block_ids: Sequence[int]) -> Iterator[Tensor]:
        """The ids, COPIED_BLOCKS at a time. Raises EngineError, before any is copied, for one outside the pool."""
        if outside := [block_id for block_id in block_ids if not 0 <= block_id < self.num_blocks]:
            raise EngineError(f"block {outside[0]} is outside the pool of {self.num_blocks}")
        for begin in range(0, len(block_ids), COPIED_BLOCKS):
            yield torch.tensor(block_ids[begin : begin + COPIED_BLOCKS])
