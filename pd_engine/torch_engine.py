"""The engine on torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import Fingerprint
from pd_engine.decoder import Decoder
from pd_engine.engine import ModelEngine
from pd_engine.invariance import InvarianceProof
from pd_engine.pool import KvPool


class TorchEngine(ModelEngine):
    """why: it is torch that runs the model, when nobody asked for it; for /ready's detail"""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        fingerprint: Fingerprint,
        proof: InvarianceProof,
        num_threads: int,
        why: str | None = None,
    ) -> None:
        super().__init__(
            vocab_size=decoder.manifest.vocab_size,
            context_tokens=decoder.manifest.context_tokens,
            num_blocks=pool.num_blocks,
            fingerprint=fingerprint,
            proof=proof,
            detail={} if why is None else {"torch_because": why},
        )
        self._decoder = decoder
        self._pool = pool
        self._num_threads = num_threads

    def forward(
        self, steps: Sequence[SequenceStep], picked: Sequence[int], is_cancelled: Callable[[], bool]
    ) -> NDArray[np.float32]:
        use_threads(self._num_threads)
        try:
            try:
                logits: NDArray[np.float32] = (
                    self._decoder.forward(steps, picked, self._pool, is_cancelled).cpu().numpy()
                )
            finally:  # also when it was cancelled: the blocks may be given to others now, and copied
                self._pool.settle()
        except RuntimeError as error:
            raise EngineError(f"torch failed inside a step: {error}") from error
        return logits


def use_threads(num_threads: int) -> None:
    """Sets the number of threads for torch calls from this thread, which every thread has to do for itself."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
