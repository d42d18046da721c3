"""What a bench asks of an engine process, and what comes back: one line of JSON each way.

Load            : Loaded          the engine and its pool; before any step
TimePrefill     : Took            one prompt, alone, chunk after chunk
TimeDecode      : Took            a batch, step after step; one time for each step
Generate        : Generated       the tokens of one request, alone
MeasureRate     : Rate            see `machine_rates`
any of them     : Refused         with the sentence of what went wrong
"""

from __future__ import annotations

from typing import Literal

import msgspec

from load_tests.floor import ModelShape
from pd_core.config import Config

RateName = Literal["gemm", "read", "memcpy", "digest"]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """num_threads: of every engine step. config: the model to load; the pool's size is the engine process's own."""

    config: Config
    num_threads: int
    cache_dir: str


class TimePrefill(msgspec.Struct, frozen=True, tag="time_prefill"):
    """A prompt of random tokens from position 0, until its first token is drawn."""

    num_tokens: int
    chunk_tokens: int
    seed: int


class TimeDecode(msgspec.Struct, frozen=True, tag="time_decode"):
    """One sequence for each of `starts`; in step k the sequence is at position start + k. KV before it is made first,
    which is not timed."""

    starts: list[int]
    num_steps: int


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Greedy, without an end token."""

    tokens: list[int]
    max_tokens: int
    chunk_tokens: int


class MeasureRate(msgspec.Struct, frozen=True, tag="measure_rate"):
    """One of the machine's own bounds, measured `num_times` at once; needs no engine. shape: the model of "gemm"."""

    name: RateName
    shape: ModelShape | None
    num_threads: int
    num_times: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """shape: None for the fake engine; detail: what the engine says of itself."""

    shape: ModelShape | None
    vocab_size: int
    context_tokens: int
    detail: dict[str, str]


class Took(msgspec.Struct, frozen=True, tag="took"):
    seconds: list[float]


class Rate(msgspec.Struct, frozen=True, tag="rate"):
    """Operations or bytes in a second, one number for each time."""

    per_s: list[float]


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    tokens: list[int]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str


Question = Load | TimePrefill | TimeDecode | Generate | MeasureRate
Answer = Loaded | Took | Rate | Generated | Refused
