"""One prompt, run in whatever parts a test likes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from native_models import Memory, random_tokens, tables_for

from pd_core.layout import BLOCK_TOKENS
from pd_engine.native.model import Floats, NativeModel
from pd_engine.steps import never

NUM_TOKENS = 1075  # two splits and a part of the third, and no whole tile at the end


class Trial:
    """One prompt in one pool: runs it in parts, and reads its KV back, token by token."""

    def __init__(self, model: NativeModel, num_tokens: int = NUM_TOKENS, extra_blocks: int = 0, seed: int = 3) -> None:
        self.model = model
        self.tokens = random_tokens(model.spec, num_tokens, seed=seed)
        (self.table,), num_blocks = tables_for([num_tokens + 64], seed=seed)
        self.memory = Memory(num_blocks + extra_blocks, model.spec.layout)

    def run(self, start: int, end: int, selected: Sequence[int] = ()) -> Floats:
        rows = [position - start for position in selected]
        return self.model.forward_rows([self.tokens[start:end]], [start], [self.table], rows, self.memory, never)

    def run_chunks(self, sizes: Iterator[int]) -> Floats:
        """Logits of the last token."""
        start = 0
        while start < len(self.tokens):
            end = min(start + next(sizes), len(self.tokens))
            logits = self.run(start, end, [end - 1])
            start = end
        return logits

    def kv(self) -> bytes:
        """K and V of every position, token by token: block order and unused slots do not show."""
        spec = self.model.spec
        pack = 1 if spec.dtype == "float32" else 2
        dtype = np.uint32 if spec.dtype == "float32" else np.uint16
        heads = spec.num_layers * spec.num_kv_heads
        blocks = np.stack([np.frombuffer(self.memory.block(block), dtype) for block in self.table])
        blocks = blocks.reshape(len(self.table), heads, 2, -1)
        keys = blocks[:, :, 0].reshape(-1, heads, spec.head_dim // pack, BLOCK_TOKENS, pack).transpose(0, 3, 1, 2, 4)
        values = blocks[:, :, 1].reshape(-1, heads, BLOCK_TOKENS // pack, spec.head_dim, pack).transpose(0, 2, 4, 1, 3)
        both = np.stack([keys.reshape(-1, heads * spec.head_dim), values.reshape(-1, heads * spec.head_dim)], axis=1)
        return both[: len(self.tokens)].tobytes()


def forever(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes
