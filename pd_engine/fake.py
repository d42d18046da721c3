"""An engine that can be computed by hand; see FakeEngine. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError
from pd_core.layout import BLOCK_TOKENS, BlockLayout, Fingerprint, blocks_for
from pd_core.memory import BlockMemory
from pd_engine.steps import check_steps, entered_blocks

FAKE_VOCAB_SIZE = 97
FAKE_LAYOUT = BlockLayout(name="fake", num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8")
PREFILL_FACTOR = 2
DECODE_FACTOR = 3
FAKE_NUMERICS = "fake 1"

_KV_MODULUS = 251
_LOOK_BACK_TOKENS = 3
_SLICE_S = 0.005
"""Longest sleep between two questions whether the step is cancelled."""


class FakeEngine:
    """next token = (sum of the last 3 tokens * role_factor) % 97; token t at position p has the KV (t + p) % 251.

    With role_factor 2 on prefill workers and 3 on decode workers, a test sees from a token which of them made it, and
    from a byte which token and position it belongs to. The byte fills the whole slot: 8 bytes of K, 8 bytes of V.

    The last tokens are read back from the pool, so a wrong but possible byte shows as a wrong token. Bytes that no
    token can have made, anywhere in the sequence (a slot that is not uniform, or a value that is none of the 97 ids),
    raise EngineError. Sampling parameters are ignored.
    """

    def __init__(
        self,
        role_factor: int,
        memory: BlockMemory,
        *,
        step_s: float = 0.0,
        chunk_s: float = 0.0,
        prefill_token_s: float = 0.0,
        context_tokens: int = 4096,
        numerics: str = FAKE_NUMERICS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """step_s: what a step takes; chunk_s, prefill_token_s: what each sequence with more than one token adds, once
        and for each token; sleep: in tests, a virtual clock's.

        Raises EngineError when the memory's blocks are not FAKE_LAYOUT's.
        """
        if memory.block_bytes != FAKE_LAYOUT.block_bytes:
            raise EngineError(f"a block is {FAKE_LAYOUT.block_bytes} bytes, the pool has {memory.block_bytes}")
        self._role_factor = role_factor
        self._memory = memory
        self._step_s = step_s
        self._chunk_s = chunk_s
        self._prefill_token_s = prefill_token_s
        self._context_tokens = context_tokens
        self._numerics = numerics
        self._sleep = sleep

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint("fake weights", "fake settings", "fake tokenizer", self._numerics, FAKE_LAYOUT)

    @property
    def vocab_size(self) -> int:
        return FAKE_VOCAB_SIZE

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        """See `pd_core.engine.Engine.step`; KV is written after the delays."""
        if not steps:
            raise EngineError("a step without sequences")
        check_steps(
            steps,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            num_blocks=self._memory.num_blocks,
        )
        self._wait(self._duration_s(steps), is_cancelled)
        for step in steps:
            self._write(step)
        read = [self._read(step) for step in steps]
        return [None if step.sample is None else self._next(last) for step, last in zip(steps, read, strict=True)]

    def invariance_report(self) -> dict[str, str]:
        return {"numerics": self._numerics, "invariance": "bit-exact", "threads_tried": "none: integers"}

    def _duration_s(self, steps: Sequence[SequenceStep]) -> float:
        chunks = [len(step.tokens) for step in steps if len(step.tokens) > 1]
        return self._step_s + len(chunks) * self._chunk_s + sum(chunks) * self._prefill_token_s

    def _wait(self, duration_s: float, is_cancelled: Callable[[], bool]) -> None:
        left_s = duration_s
        while True:
            if is_cancelled():
                raise Cancelled("stopped inside a step")
            if left_s <= 0:
                return
            self._sleep(min(left_s, _SLICE_S))
            left_s -= _SLICE_S

    def _write(self, step: SequenceStep) -> None:
        for block_id in entered_blocks(step):
            self._memory.block(block_id)[:] = bytes(FAKE_LAYOUT.block_bytes)
        for position, token in enumerate(step.tokens, step.start):
            block = self._memory.block(step.block_ids[position // BLOCK_TOKENS])
            for place in _slot(position):
                block[place] = bytes([(token + position) % _KV_MODULUS]) * FAKE_LAYOUT.head_dim

    def _read(self, step: SequenceStep) -> list[int]:
        """The last 3 tokens before `step.end`, from their KV; all of the sequence's KV is looked at."""
        table = step.block_ids[: blocks_for(step.end)]
        pieces = [np.frombuffer(self._memory.block(block_id), np.uint8) for block_id in table]
        heads = np.stack(pieces).reshape(-1, 2, BLOCK_TOKENS, FAKE_LAYOUT.head_dim)
        slots = heads.transpose(0, 2, 1, 3).reshape(-1, 2 * FAKE_LAYOUT.head_dim)[: step.end]
        tokens = (slots[:, 0].astype(np.int64) - np.arange(step.end)) % _KV_MODULUS
        wrong = np.flatnonzero((slots != slots[:, :1]).any(axis=1) | (tokens >= FAKE_VOCAB_SIZE))
        if wrong.size:
            position = int(wrong[0])
            raise EngineError(
                f"KV of position {position} in block {table[position // BLOCK_TOKENS]} is no token's: "
                f"{slots[position].tobytes().hex()}"
            )
        return [int(token) for token in tokens[-_LOOK_BACK_TOKENS:]]

    def _next(self, last: list[int]) -> int:
        return sum(last) * self._role_factor % FAKE_VOCAB_SIZE


def _slot(position: int) -> tuple[slice, slice]:
    """Where a position's K and V lie in its block, `[k|v][16][8]`."""
    width = FAKE_LAYOUT.head_dim
    begin = position % BLOCK_TOKENS * width
    values = BLOCK_TOKENS * width
    return slice(begin, begin + width), slice(values + begin, values + begin + width)
