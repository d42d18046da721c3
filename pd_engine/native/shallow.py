"""The first layers of a native model over a pool of their own, for the engine's check of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.memory import BlockMemory
from pd_engine.invariance import NUM_BLOCKS
from pd_engine.native.model import NativeModel
from pd_engine.native.spec import NativeSpec
from pd_engine.scratch import ScratchMemory
from pd_engine.steps import never


class ShallowNative:
    """See `pd_engine.invariance.Shallow`. A native model has its threads for life, so there is one for each number.

    make: the model of `spec` with so many threads
    """

    def __init__(self, spec: NativeSpec, make: Callable[[int], NativeModel]) -> None:
        self._spec = spec
        self._model = cache(make)
        self._memory = ScratchMemory(NUM_BLOCKS, spec.layout.block_bytes)

    @property
    def memory(self) -> BlockMemory:
        return self._memory

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._spec.context_tokens

    def run(self, steps: Sequence[SequenceStep], num_threads: int) -> NDArray[np.float32]:
        return self._model(num_threads).forward(steps, [0], self._memory, never)
