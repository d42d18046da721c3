"""The engine on native kernels: model, pool and sampler behind `pd_core.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import Fingerprint
from pd_core.memory import BlockMemory
from pd_engine.invariance import InvarianceProof
from pd_engine.native.model import Floats, NativeModel
from pd_engine.sampler import draw
from pd_engine.steps import check_steps


class NativeEngine:
    """One model over one pool. Synchronous; one caller at a time. See `pd_core.engine.Engine`."""

    def __init__(
        self, model: NativeModel, memory: BlockMemory, fingerprint: Fingerprint, proof: InvarianceProof
    ) -> None:
        """Raises EngineError when the memory's blocks are not the model's."""
        if memory.block_bytes != model.spec.layout.block_bytes:
            raise EngineError(f"a block is {model.spec.layout.block_bytes} bytes, the pool has {memory.block_bytes}")
        self._model = model
        self._memory = memory
        self._fingerprint = fingerprint
        self._proof = proof

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        return self._model.spec.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._model.spec.context_tokens

    def step(self, steps: Sequence[SequenceStep], is_cancelled: Callable[[], bool]) -> list[int | None]:
        """Runs all sequences in one pass; see `pd_core.engine.Engine.step`.

        Between layers `is_cancelled` is asked at most every `STOP_INTERVAL_S`.
        Raises EngineError (wrong steps: nothing was written), Cancelled.
        """
        picked = [index for index, step in enumerate(steps) if step.sample is not None]
        logits = self._run(steps, picked, is_cancelled)
        drawn: list[int | None] = [None] * len(steps)
        for row, index in enumerate(picked):
            step = steps[index]
            if step.sample is not None:
                drawn[index] = draw(logits[row], step.sample, step.end)
        return drawn

    def logits(self, steps: Sequence[SequenceStep]) -> Floats:
        """Runs the steps as `step` does; logits [len(steps), vocab_size] of each one's last token."""
        return self._run(steps, range(len(steps)), _never)

    def invariance_report(self) -> dict[str, str]:
        return self._proof.report()

    def _run(self, steps: Sequence[SequenceStep], picked: Sequence[int], is_cancelled: Callable[[], bool]) -> Floats:
        if not steps:
            raise EngineError("a step without sequences")
        check_steps(
            steps,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            num_blocks=self._memory.num_blocks,
        )
        return self._model.forward(steps, picked, self._memory, is_cancelled)


def _never() -> bool:
    return False
