"""The real engine: decoder, pool and sampler behind `pd_core.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import Fingerprint
from pd_engine.decoder import Decoder
from pd_engine.invariance import InvarianceProof
from pd_engine.pool import KvPool
from pd_engine.sampler import draw
from pd_engine.steps import check_steps


class TorchEngine:
    """One model over one pool. Synchronous; one caller at a time. See `pd_core.engine.Engine`."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        fingerprint: Fingerprint,
        proof: InvarianceProof,
        num_threads: int,
        why: str | None = None,
    ) -> None:
        """why: it is torch that runs the model, for /ready's detail"""
        self._decoder = decoder
        self._pool = pool
        self._fingerprint = fingerprint
        self._proof = proof
        self._num_threads = num_threads
        self._why = why

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        return self._decoder.manifest.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._decoder.manifest.context_tokens

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        """Runs all sequences in one pass; see `pd_core.engine.Engine.step`.

        Raises EngineError (wrong steps: nothing was written; or torch failed), Cancelled.
        """
        picked = [index for index, step in enumerate(steps) if step.sample is not None]
        logits = self._run(steps, picked, is_cancelled).numpy()
        drawn: list[int | None] = [None] * len(steps)
        for row, index in enumerate(picked):
            step = steps[index]
            if step.sample is not None:
                drawn[index] = draw(logits[row], step.sample, step.end)
        return drawn

    def logits(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Runs the steps as `step` does; float32 logits [len(steps), vocab_size] of each one's last token."""
        return self._run(steps, range(len(steps)), _never)

    def invariance_report(self) -> dict[str, str]:
        return self._proof.report() | ({} if self._why is None else {"torch_because": self._why})

    def _run(self, steps: Sequence[SequenceStep], picked: Sequence[int], is_cancelled: Callable[[], bool]) -> Tensor:
        if not steps:
            raise EngineError("a step without sequences")
        check_steps(
            steps,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            num_blocks=self._pool.num_blocks,
        )
        use_threads(self._num_threads)
        try:
            return self._decoder.forward(steps, picked, self._pool, is_cancelled)
        except RuntimeError as error:
            raise EngineError(f"torch failed inside a step: {error}") from error


def use_threads(num_threads: int) -> None:
    """Sets the number of threads for torch calls from this thread, which every thread has to do for itself."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _never() -> bool:
    return False
