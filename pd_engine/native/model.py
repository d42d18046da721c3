"""A model that runs on the native kernels: one C call for a whole step."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd_core.engine import SequenceStep
from pd_core.errors import Cancelled, EngineError
from pd_core.layout import DType
from pd_core.memory import BlockMemory
from pd_engine.native.library import DTYPE_NUMBERS, WEIGHTS_NUMBERS, Library, ShouldStop, Spec, Step
from pd_engine.native.spec import NativeSpec
from pd_engine.native.weights import WeightLoader

STOP_INTERVAL_S = 0.02
"""Least time between two questions whether to stop: each one has to wait for Python's lock."""

Floats = NDArray[np.float32]


class NativeModel:
    """Packed weights and threads of their own, without a pool: the pool comes in with each call.

    One caller at a time. `close` frees weights and threads; so does the garbage collector.
    """

    def __init__(
        self,
        library: Library,
        spec: NativeSpec,
        tensors: Mapping[str, Any],
        rotary: tuple[Floats, Floats],
        *,
        num_threads: int,
        variant: str | None = None,
    ) -> None:
        """tensors: the weights under Hugging Face's names; see `weights.stored_array` for what they may be
        rotary:      cos and sin of every position's angles, float32, each [context_tokens, head_dim / 2]
        num_threads: threads of a step, the caller's included
        variant:     one of `library.variants(dtype)`; None for the best
        Raises EngineError for sizes or a variant that cannot be run, ModelError for missing or misshapen weights.
        """
        refusal = spec.refusal()
        if refusal is not None:
            raise EngineError(refusal)
        self.spec = spec
        self.variant = choose_variant(library, spec.dtype, variant)
        self.num_threads = num_threads
        self._library = library
        self._handle = library.create(_c_spec(spec), self.variant, num_threads)
        self._finalizer = weakref.finalize(self, library.destroy, self._handle)
        self._lock = threading.Lock()
        embedding = WeightLoader(library, self._handle, spec, tensors).load()
        tables = [_rotary_table(spec, table) for table in rotary]
        self._kept_alive = (embedding, *tables)
        library.set_tables(self._handle, embedding.ctypes.data, *(table.ctypes.data for table in tables))

    def forward(
        self,
        steps: Sequence[SequenceStep],
        picked: Sequence[int],
        memory: BlockMemory,
        is_cancelled: Callable[[], bool],
        stop_interval_s: float = STOP_INTERVAL_S,
    ) -> Floats:
        """Runs the steps, writes their KV, returns logits [len(picked), vocab_size].

        picked:          numbers of the steps whose last row's logits are wanted
        is_cancelled:    asked first, and then between layers, at most every stop_interval_s
        Blocks that a sequence enters are zeroed where the step does not fill them.
        Raises EngineError (ids, tables or memory out of bounds, naming the sequence: nothing was written), Cancelled.
        """
        ends = np.cumsum([len(step.tokens) for step in steps])
        selected = [int(ends[index]) - 1 for index in picked]
        return self.forward_rows(
            [step.tokens for step in steps],
            [step.start for step in steps],
            [step.block_ids for step in steps],
            selected,
            memory,
            is_cancelled,
            stop_interval_s,
        )

    def forward_rows(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        selected: Sequence[int],
        memory: BlockMemory,
        is_cancelled: Callable[[], bool],
        stop_interval_s: float = STOP_INTERVAL_S,
    ) -> Floats:
        """As `forward`, with any rows selected. tokens[i] of sequence i stand at starts[i] and on, over tables[i]."""
        if not len(tokens) == len(starts) == len(tables):
            raise EngineError("tokens, starts and tables are not of equal number")
        arrays = _StepArrays(tokens, starts, tables, selected)
        logits = np.empty((len(selected), self.spec.vocab_size), dtype=np.float32)
        question = _StopQuestion(is_cancelled)
        step = arrays.c_step(logits, self._pool(memory), memory.num_blocks, question, stop_interval_s)
        question.ask_now()
        if not self._lock.acquire(blocking=False):
            raise EngineError("another step is running on this model")
        try:
            self._run(step, question)
        finally:
            self._lock.release()
        return logits

    def close(self) -> None:
        """Frees everything; the model cannot run any more. Raises EngineError while a step is running."""
        if not self._lock.acquire(blocking=False):
            raise EngineError("a step is running on this model")
        try:
            self._finalizer()
        finally:
            self._lock.release()

    def _run(self, step: Step, question: _StopQuestion) -> None:
        if not self._finalizer.alive:
            raise EngineError("the model is closed")
        try:
            self._library.forward(self._handle, step)
        except Cancelled:
            question.raise_failure()
            raise

    def _pool(self, memory: BlockMemory) -> NDArray[np.uint8]:
        if memory.block_bytes != self.spec.layout.block_bytes:
            raise EngineError(f"a block is {self.spec.layout.block_bytes} bytes, the pool has {memory.block_bytes}")
        pool = np.frombuffer(memory.buffer, dtype=np.uint8)
        if pool.size != memory.num_blocks * memory.block_bytes or not pool.flags.writeable:
            raise EngineError("the pool's memory is not a writable buffer of all its blocks")
        return pool


class _StepArrays:
    """The numbers of one step, as arrays that C reads; they live as long as this does."""

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        selected: Sequence[int],
    ) -> None:
        self.ids = _joined(tokens)
        self.row_bounds = _bounds(tokens)
        self.starts = _joined([starts])
        self.tables = _joined(tables)
        self.table_bounds = _bounds(tables)
        self.selected = _joined([selected])

    def c_step(
        self, logits: Floats, pool: NDArray[np.uint8], num_blocks: int, question: _StopQuestion, stop_interval_s: float
    ) -> Step:
        return Step(
            num_rows=self.ids.size,
            num_sequences=self.starts.size,
            num_selected=self.selected.size,
            num_blocks=num_blocks,
            ids=self.ids.ctypes.data,
            row_bounds=self.row_bounds.ctypes.data,
            starts=self.starts.ctypes.data,
            tables=self.tables.ctypes.data,
            table_bounds=self.table_bounds.ctypes.data,
            selected=self.selected.ctypes.data,
            logits=logits.ctypes.data,
            pool=pool.ctypes.data,
            pool_bytes=pool.size,
            should_stop=question.address,
            stop_interval_us=int(stop_interval_s * 1e6),
        )


class _StopQuestion:
    """`is_cancelled` for C. An exception inside it stops the step, and is raised again behind it."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled
        self._failure: BaseException | None = None
        self._function = ShouldStop(self._answer)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def ask_now(self) -> None:
        if self._is_cancelled():
            raise Cancelled("stopped before a step")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _answer(self) -> int:
        try:
            return int(self._is_cancelled())
        except BaseException as error:
            self._failure = error
            return 1


def choose_variant(library: Library, dtype: DType, name: str | None) -> str:
    """The variant to run. Raises EngineError naming those there are."""
    able = library.variants(dtype)
    if not able:
        raise EngineError(f"this processor can run none of the native kernels for {dtype}")
    if name is None:
        return able[0]
    if name not in able:
        raise EngineError(f"this processor cannot run the kernels {name!r} in {dtype}; it can: {', '.join(able)}")
    return name


def _joined(parts: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """All numbers one after the other. Raises EngineError for what is no 32-bit integer."""
    try:
        numbers = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"a step's numbers are no integers: {error}") from error
    joined = numbers.astype(np.int32)
    if not np.array_equal(joined, numbers):
        raise EngineError(f"a step's numbers reach from {numbers.min()} to {numbers.max()}: more than 32 bits")
    return joined


def _bounds(parts: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Where each part begins in `_joined(parts)`, and the end."""
    return np.fromiter(itertools.accumulate(map(len, parts), initial=0), dtype=np.int32)


def _rotary_table(spec: NativeSpec, table: Floats) -> Floats:
    shape = (spec.context_tokens, spec.head_dim // 2)
    if table.shape != shape or table.dtype != np.float32:
        raise EngineError(f"a rotary table is {table.dtype} {list(table.shape)}; float32 {list(shape)} is needed")
    return np.ascontiguousarray(table)


def _c_spec(spec: NativeSpec) -> Spec:
    return Spec(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        context_tokens=spec.context_tokens,
        dtype=DTYPE_NUMBERS[spec.dtype],
        weights=WEIGHTS_NUMBERS[spec.weights],
        rms_norm_eps=spec.rms_norm_eps,
        attention_scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
    )
