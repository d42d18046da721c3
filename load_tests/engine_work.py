"""What an engine process does with its engine: no worker, no queue, no event loop, just steps one after the other.

The pool: one run of blocks for single prompts, and after it MAX_STREAMS runs of equal length for decoding.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec

from load_tests.engine_messages import Generate, Load, Loaded, TimeDecode, TimePrefill
from load_tests.model_facts import read_shape
from pd_core.config import Config
from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_core.layout import blocks_for
from pd_core.request import GenerateRequest, SamplingParams
from pd_engine.reference import generate_alone
from pd_engine.steps import never
from pd_worker.build import build_engine

PROMPT_TOKENS = 4096
MAX_STREAMS = 16
STREAM_TOKENS = 1024
FILL_CHUNK_TOKENS = 512
GREEDY = SamplingParams()


class EngineWork:
    """An engine over a pool of its own. Raises what loading raises: ModelError, ConfigError, EngineError."""

    def __init__(self, load: Load) -> None:
        cache_dir = Path(load.cache_dir)
        prompt_blocks, self._stream_blocks = blocks_for(PROMPT_TOKENS), blocks_for(STREAM_TOKENS)
        config = _with_pool(load.config, prompt_blocks + MAX_STREAMS * self._stream_blocks)
        self._engine, self._memory = build_engine(config, "decode", load.num_threads, cache_dir)
        self._shape = read_shape(load.config, cache_dir)
        self._prompt_table = list(range(prompt_blocks))
        self._num_filled = [0] * MAX_STREAMS
        self._random = random.Random(0)

    def close(self) -> None:
        """Gives the pool back, with the engine's last view of it."""
        self._memory.close()

    def loaded(self) -> Loaded:
        engine = self._engine
        return Loaded(self._shape, engine.vocab_size, engine.context_tokens, engine.invariance_report())

    def time_prefill(self, question: TimePrefill) -> list[float]:
        """Seconds from the first chunk's begin until the first token is drawn."""
        generator = random.Random(question.seed)
        tokens = self._draw(generator, question.num_tokens)
        began_s = time.perf_counter()
        for start in range(0, len(tokens), question.chunk_tokens):
            chunk = tokens[start : start + question.chunk_tokens]
            is_last = start + len(chunk) == len(tokens)
            self._step([SequenceStep(chunk, start, self._prompt_table, GREEDY if is_last else None)])
        return [time.perf_counter() - began_s]

    def time_decode(self, question: TimeDecode) -> list[float]:
        """Seconds of each step, its draws included. Raises EngineError for streams that are too many or too long."""
        starts = question.starts
        if len(starts) > MAX_STREAMS or max(starts) + question.num_steps > STREAM_TOKENS:
            raise EngineError(
                f"{len(starts)} streams up to {max(starts) + question.num_steps}: more than there is room"
            )
        for stream, start in enumerate(starts):
            self._fill(stream, start)
        last = self._draw(self._random, len(starts))
        took_s = []
        for step in range(question.num_steps):
            steps = [
                SequenceStep([last[stream]], start + step, self._table(stream), GREEDY)
                for stream, start in enumerate(starts)
            ]
            began_s = time.perf_counter()
            last = self._step(steps)
            took_s.append(time.perf_counter() - began_s)
        for stream, start in enumerate(starts):
            self._num_filled[stream] = max(self._num_filled[stream], start + question.num_steps)
        return took_s

    def generate(self, question: Generate) -> list[int]:
        """The reference: one request alone in one process."""
        request = GenerateRequest("alone", question.tokens, question.max_tokens, GREEDY)
        return generate_alone(self._engine, request, question.chunk_tokens, self._prompt_table)

    def _fill(self, stream: int, end: int) -> None:
        """KV of positions 0 .. end - 1 of a stream, where it is not there yet: a pool of zeros would be read faster."""
        start = self._num_filled[stream] // FILL_CHUNK_TOKENS * FILL_CHUNK_TOKENS
        if self._num_filled[stream] >= end:
            return
        for at in range(start, end, FILL_CHUNK_TOKENS):
            tokens = self._draw(self._random, min(FILL_CHUNK_TOKENS, end - at))
            self._engine.step([SequenceStep(tokens, at, self._table(stream), None)], never)
        self._num_filled[stream] = end

    def _table(self, stream: int) -> list[int]:
        first = len(self._prompt_table) + stream * self._stream_blocks
        return list(range(first, first + self._stream_blocks))

    def _step(self, steps: list[SequenceStep]) -> list[int]:
        return [token for token in self._engine.step(steps, never) if token is not None]

    def _draw(self, generator: random.Random, num_tokens: int) -> list[int]:
        return [generator.randrange(self._engine.vocab_size) for _ in range(num_tokens)]


def _with_pool(config: Config, num_blocks: int) -> Config:
    return msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, num_blocks=num_blocks))
