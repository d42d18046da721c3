"""The first layers of a torch decoder over a pool of their own, for the engine's check of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.layout import BlockLayout
from pd_core.memory import BlockMemory
from pd_engine.decoder import Decoder
from pd_engine.device_copies import slots_like
from pd_engine.invariance import NUM_BLOCKS, NUM_LAYERS
from pd_engine.pool import DeviceKvPool, KvPool
from pd_engine.scratch import ScratchMemory
from pd_engine.steps import never


class ShallowDecoder:
    """See `pd_engine.invariance.Shallow`. make_pool: the kind of pool that the decoder works on"""

    def __init__(
        self, decoder: Decoder, layout: BlockLayout, make_pool: Callable[[BlockMemory, BlockLayout], KvPool] = KvPool
    ) -> None:
        self._decoder = decoder.shallow(NUM_LAYERS)
        shallow = msgspec.structs.replace(layout, num_layers=self._decoder.manifest.num_layers)
        self._memory = ScratchMemory(NUM_BLOCKS, shallow.block_bytes)
        self._pool = make_pool(self._memory, shallow)
        is_elsewhere = isinstance(self._pool, DeviceKvPool)
        self._rows = slots_like(self._pool, self._memory) if is_elsewhere else None

    @property
    def memory(self) -> BlockMemory:
        return self._memory

    @property
    def vocab_size(self) -> int:
        return self._decoder.manifest.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._decoder.manifest.context_tokens

    def run(self, steps: Sequence[SequenceStep], num_threads: int) -> NDArray[np.float32]:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            if self._rows is not None:
                self._pool.blocks.copy_(self._rows)  # the trial copies blocks from one table to another
            logits: NDArray[np.float32] = self._decoder.forward(steps, [0], self._pool, never).cpu().numpy()
            if self._rows is not None:
                self._rows.copy_(self._pool.blocks)
            return logits
        finally:
            torch.set_num_threads(before)
