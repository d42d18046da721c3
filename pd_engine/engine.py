"""The real engine, whoever computes: steps checked on the way in, tokens drawn on the way out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import Fingerprint
from pd_engine.invariance import InvarianceProof
from pd_engine.sampler import draw
from pd_engine.steps import check_steps, never


class ModelEngine(ABC):
    """One model over one pool of `num_blocks` blocks. Synchronous; one caller at a time. See `pd_core.engine.Engine`.

    detail: what `/ready` is told beside the proof
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_tokens: int,
        num_blocks: int,
        fingerprint: Fingerprint,
        proof: InvarianceProof,
        detail: dict[str, str],
    ) -> None:
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._num_blocks = num_blocks
        self._fingerprint = fingerprint
        self._proof = proof
        self._detail = detail

    @abstractmethod
    def forward(
        self, steps: Sequence[SequenceStep], picked: Sequence[int], is_cancelled: Callable[[], bool]
    ) -> NDArray[np.float32]:
        """Runs checked steps, writes their KV; logits [len(picked), vocab_size] of the last token of those picked.

        Raises Cancelled between layers, EngineError.
        """

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        """Runs all sequences in one pass; see `pd_core.engine.Engine.step`.

        Raises EngineError (wrong steps: nothing was written; or the kernels failed), Cancelled.
        """
        picked = [index for index, step in enumerate(steps) if step.sample is not None]
        logits = self._checked(steps, picked, is_cancelled)
        drawn: list[int | None] = [None] * len(steps)
        for row, index in enumerate(picked):
            step = steps[index]
            if step.sample is not None:
                drawn[index] = draw(logits[row], step.sample, step.end)
        return drawn

    def logits(self, steps: Sequence[SequenceStep]) -> NDArray[np.float32]:
        """Runs the steps as `step` does; logits [len(steps), vocab_size] of each one's last token."""
        return self._checked(steps, range(len(steps)), never)

    def invariance_report(self) -> dict[str, str]:
        return self._proof.report() | self._detail

    def _checked(
        self, steps: Sequence[SequenceStep], picked: Sequence[int], is_cancelled: Callable[[], bool]
    ) -> NDArray[np.float32]:
        if not steps:
            raise EngineError("a step without sequences")
        check_steps(
            steps, vocab_size=self._vocab_size, context_tokens=self._context_tokens, num_blocks=self._num_blocks
        )
        return self.forward(steps, picked, is_cancelled)
