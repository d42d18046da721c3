"""A sequence's KV and logits are the same bits however it is run: chunks, batches, threads, decode or prefill again.

The tiny model is run in thousands of ways; the embedded model in a few. Every kernel there is, float32 and bfloat16,
compared with torch.equal and byte for byte.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_engine import TINY_MANIFEST, engine_over, tiny_decoder, write_tiny_weights
from torch import Tensor

from pd_core.engine import SequenceStep
from pd_core.layout import DType
from pd_engine.decoder import Decoder
from pd_engine.kernels import kernels
from pd_engine.torch_engine import TorchEngine
from pd_model.folder import ModelFolder

KERNELS = list(kernels())
DTYPES: list[DType] = ["float32", "bfloat16"]
THREADS = (1, 2)
TABLE_BLOCKS = 40
"""Blocks a sequence may use: 640 positions, more than a key tile of either kernel."""
MAX_BATCH = 16
MAX_CHUNKS = 32


@dataclass(frozen=True)
class Made:
    """What an engine made of one sequence.

    tokens: prompt and greedy tokens after it
    logits: [number of greedy tokens, vocab], the row each was taken from
    kv:     [positions, layers * kv_heads * 2, head_dim] as bytes, of all positions that were run
    """

    tokens: list[int]
    logits: Tensor
    kv: Tensor


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(vocab_size) for _ in range(length)]


def table(number: int) -> list[int]:
    """Blocks of sequence `number`, in an order of its own."""
    blocks = list(range(number * TABLE_BLOCKS, (number + 1) * TABLE_BLOCKS))
    random.Random(number).shuffle(blocks)
    return blocks


def logits_of(engine: TorchEngine, steps: list[SequenceStep]) -> Tensor:
    return torch.as_tensor(engine.logits(steps))


def kv_of(engine: TorchEngine, block_ids: list[int], num_tokens: int) -> Tensor:
    pool = engine._pool
    picked = pool.blocks[block_ids[: -(-num_tokens // 16)]]
    heads = picked.view(-1, pool.heads_a_block, 16, pool.layout.head_dim).transpose(1, 2).flatten(0, 1)
    return heads[:num_tokens].contiguous().view(torch.uint8).clone()


class Sequence:
    """A sequence on its way through an engine: chunks of its prompt, then greedy tokens one by one."""

    def __init__(self, number: int, tokens: list[int], num_new: int) -> None:
        self.block_ids = table(number)
        self.tokens = list(tokens)
        self.num_prompt = len(tokens)
        self.num_run = 0
        self.num_new = num_new
        self.rows: list[Tensor] = []

    @property
    def finished(self) -> bool:
        return len(self.rows) == self.num_new and self.num_run >= self.num_prompt

    def next_step(self, chunk: int) -> SequenceStep:
        end = min(self.num_run + chunk, len(self.tokens))
        return SequenceStep(self.tokens[self.num_run : end], self.num_run, self.block_ids, None)

    def take(self, step: SequenceStep, row: Tensor) -> None:
        self.num_run = step.end
        if self.num_run == len(self.tokens) and len(self.rows) < self.num_new:
            self.rows.append(row.clone())
            self.tokens.append(int(row.argmax()))

    def made(self, engine: TorchEngine) -> Made:
        logits = torch.stack(self.rows) if self.rows else torch.empty(0)
        return Made(self.tokens, logits, kv_of(engine, self.block_ids, self.num_run))


def run_together(engine: TorchEngine, sequences: list[Sequence], chunks: random.Random, largest: int) -> list[Made]:
    """Runs all; each step takes some of the unfinished sequences, each with a chunk of 1 to `largest` tokens."""
    while unfinished := [sequence for sequence in sequences if not sequence.finished]:
        chosen = chunks.sample(unfinished, chunks.randint(1, len(unfinished)))
        steps = [sequence.next_step(chunks.randint(1, largest)) for sequence in chosen]
        for sequence, step, row in zip(chosen, steps, logits_of(engine, steps), strict=True):
            sequence.take(step, row)
    return [sequence.made(engine) for sequence in sequences]


def run_alone(
    engine: TorchEngine, number: int, tokens: list[int], num_new: int, chunk: int = 10_000, first: int = 0
) -> Made:
    """Runs one sequence: `first` tokens at once, the rest of the prompt in chunks of `chunk`, then one token a step."""
    sequence = Sequence(number, tokens, num_new)
    while not sequence.finished:
        step = sequence.next_step(chunk if sequence.num_run or not first else first)
        sequence.take(step, logits_of(engine, [step])[0])
    return sequence.made(engine)


def assert_same(got: Made, expected: Made) -> None:
    assert got.tokens == expected.tokens
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.kv, expected.kv)


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model.safetensors"
    write_tiny_weights(path, TINY_MANIFEST, seed=1)
    return path


@pytest.fixture(scope="module", params=[(kernel, dtype) for kernel in KERNELS for dtype in DTYPES], ids="-".join)
def tiny(request: pytest.FixtureRequest, tiny_weights: Path) -> dict[int, TorchEngine]:
    """Engines by number of threads."""
    kernel, dtype = request.param
    decoder = tiny_decoder(tiny_weights, TINY_MANIFEST, dtype, kernel)
    return {threads: engine_over(decoder, dtype, MAX_BATCH * TABLE_BLOCKS, threads) for threads in THREADS}


def vocab(engine: TorchEngine) -> int:
    return engine.vocab_size


some_runs = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
lengths = st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513, 560]))


@some_runs
@given(
    batch=st.lists(st.tuples(lengths, st.integers(0, 5)), min_size=1, max_size=MAX_BATCH),
    largest_chunk=st.integers(1, 512),
    threads=st.sampled_from(THREADS),
    seed=st.integers(0, 2**32),
)
@example(batch=[(n, 3) for n in range(1, 17)], largest_chunk=1, threads=2, seed=0)
@example(batch=[(513, 2), (1, 5), (512, 3), (16, 0), (560, 1)], largest_chunk=512, threads=1, seed=1)
def test_any_mix_of_chunks_and_neighbours_gives_what_a_sequence_gives_alone(tiny, batch, largest_chunk, threads, seed):
    prompts = [prompt(number, length, vocab(tiny[1])) for number, (length, _) in enumerate(batch)]
    alone = [run_alone(tiny[2], 0, tokens, num_new) for tokens, (_, num_new) in zip(prompts, batch, strict=True)]
    sequences = [Sequence(number, prompts[number], num_new) for number, (_, num_new) in enumerate(batch)]
    together = run_together(tiny[threads], sequences, random.Random(seed), largest_chunk)
    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)


@some_runs
@given(chunk=st.integers(1, 512), threads=st.sampled_from(THREADS))
@example(chunk=1, threads=2)
@example(chunk=511, threads=2)
@example(chunk=512, threads=1)
def test_a_prompt_past_a_key_tile_is_the_same_in_chunks_of_any_size(tiny, chunk, threads):
    tokens = prompt(3, 540, vocab(tiny[1]))
    # small chunks take over shortly before the key tile ends, which leaves each size some steps on both sides of it
    first = max(0, len(tokens) - MAX_CHUNKS * chunk)
    assert_same(run_alone(tiny[threads], 1, tokens, 1, chunk, first), run_alone(tiny[2], 0, tokens, 1))


@pytest.mark.parametrize("threads", THREADS)
def test_a_token_is_the_same_in_batches_of_1_to_16(tiny, threads):
    engine = tiny[threads]
    steps, alone = [], []
    for number in range(MAX_BATCH):
        tokens = prompt(number, 3 + 37 * number, vocab(engine))
        run_alone(engine, number, tokens[:-1], 0)
        steps.append(SequenceStep(tokens[-1:], len(tokens) - 1, table(number), None))
        alone.append(logits_of(engine, steps[-1:])[0])
    for size in range(1, MAX_BATCH + 1):
        assert torch.equal(logits_of(engine, steps[:size]), torch.stack(alone[:size])), f"batch of {size}"
        assert torch.equal(logits_of(engine, steps[:size][::-1]), torch.stack(alone[:size][::-1])), f"batch of {size}"


@some_runs
@given(length=lengths, num_new=st.integers(2, 16), chunk=st.integers(1, 512), threads=st.sampled_from(THREADS))
@example(length=505, num_new=16, chunk=128, threads=1)
def test_prefill_of_prompt_and_emitted_tokens_is_what_decode_made(tiny, length, num_new, chunk, threads):
    decoded = run_alone(tiny[2], 0, prompt(5, length, vocab(tiny[1])), num_new)
    for emitted in {1, num_new - 1}:
        again = run_alone(tiny[threads], 1, decoded.tokens[: length + emitted], num_new - emitted, chunk)
        assert_same(again, Made(decoded.tokens, decoded.logits[emitted:], decoded.kv))


@pytest.fixture(scope="module", params=DTYPES)
def weights_once(request: pytest.FixtureRequest, model_folder: ModelFolder) -> tuple[DType, Decoder]:
    """The embedded model's weights, read once for both kernels."""
    return request.param, tiny_decoder(model_folder.weights_path, model_folder.manifest, request.param, KERNELS[0])


@pytest.fixture(scope="module", params=KERNELS)
def embedded(request: pytest.FixtureRequest, weights_once: tuple[DType, Decoder]) -> dict[int, TorchEngine]:
    dtype, read = weights_once
    decoder = Decoder(read.manifest, read._weights, kernels()[request.param])
    return {threads: engine_over(decoder, dtype, 4 * TABLE_BLOCKS, threads) for threads in THREADS}


def test_the_embedded_model_gives_the_same_bits_in_chunks_batches_and_threads(embedded):
    prompts = [prompt(number, length, vocab(embedded[1])) for number, length in enumerate((65, 1, 32))]
    alone = [run_alone(embedded[2], 0, tokens, 3) for tokens in prompts]
    for threads, largest in ((1, 64), (2, 32)):
        sequences = [Sequence(number, tokens, 3) for number, tokens in enumerate(prompts)]
        for got, expected in zip(
            run_together(embedded[threads], sequences, random.Random(largest), largest), alone, strict=True
        ):
            assert_same(got, expected)
    again = run_alone(embedded[1], 1, alone[0].tokens[:66], 2, chunk=48)
    assert_same(again, Made(alone[0].tokens, alone[0].logits[1:], alone[0].kv))


def test_the_embedded_model_gives_the_same_bits_past_a_key_tile(embedded):
    tokens = prompt(9, 525, vocab(embedded[1]))
    whole = run_alone(embedded[2], 0, tokens, 1)
    assert_same(run_alone(embedded[2], 1, tokens, 1, chunk=256), whole)
    assert_same(run_alone(embedded[1], 2, tokens, 1, chunk=9, first=507), whole)
