"""The engine on native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import Fingerprint
from pd_core.memory import BlockMemory
from pd_engine.engine import ModelEngine
from pd_engine.invariance import InvarianceProof
from pd_engine.native.model import Floats, NativeModel


class NativeEngine(ModelEngine):
    """Between layers `is_cancelled` is asked at most every `STOP_INTERVAL_S`."""

    def __init__(
        self, model: NativeModel, memory: BlockMemory, fingerprint: Fingerprint, proof: InvarianceProof
    ) -> None:
        """Raises EngineError when the memory's blocks are not the model's."""
        if memory.block_bytes != model.spec.layout.block_bytes:
            raise EngineError(f"a block is {model.spec.layout.block_bytes} bytes, the pool has {memory.block_bytes}")
        super().__init__(
            vocab_size=model.spec.vocab_size,
            context_tokens=model.spec.context_tokens,
            num_blocks=memory.num_blocks,
            fingerprint=fingerprint,
            proof=proof,
            detail={},
        )
        self._model = model
        self._memory = memory

    def forward(self, steps: Sequence[SequenceStep], picked: Sequence[int], is_cancelled: Callable[[], bool]) -> Floats:
        return self._model.forward(steps, picked, self._memory, is_cancelled)
