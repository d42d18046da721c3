"""An engine process's side without the process: the fake engine asked for everything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.engine_answers import EngineAnswers
from load_tests.engine_messages import (
    Generate,
    Generated,
    Load,
    Loaded,
    MeasureRate,
    Rate,
    Refused,
    TimeDecode,
    TimePrefill,
    Took,
)
from load_tests.floor import ModelShape
from pd_core.config import Config, FakeEngineConfig, ModelConfig
from pd_engine.fake import DECODE_FACTOR, FAKE_VOCAB_SIZE

STEP_S = 0.02
FAKE = Config(model=ModelConfig(path="fake", fake=FakeEngineConfig(step_s=STEP_S, context_tokens=1024)))
TINY = ModelShape(1, 32, 64, 2, 1, 16, 100, 4)


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[EngineAnswers]:
    """With the fake engine, which has a vocabulary and no shape."""
    answers = EngineAnswers()
    loaded = answers.to(Load(FAKE, 1, str(tmp_path)))
    assert isinstance(loaded, Loaded)
    assert (loaded.shape, loaded.vocab_size, loaded.context_tokens) == (None, FAKE_VOCAB_SIZE, 1024)
    yield answers
    answers.close()


def test_a_prompt_takes_as_long_as_its_chunks(answers):
    began_s = time.perf_counter()
    took = answers.to(TimePrefill(num_tokens=100, chunk_tokens=32, seed=1))
    assert isinstance(took, Took)
    assert 4 * STEP_S <= took.seconds[0] <= time.perf_counter() - began_s


def test_decode_steps_are_timed_one_by_one_and_not_the_kv_before_them(answers):
    for _ in range(2):  # again over the same positions, and then with more streams
        took = answers.to(TimeDecode(starts=[40, 17], num_steps=3))
        assert isinstance(took, Took)
        assert len(took.seconds) == 3
        assert min(took.seconds) >= STEP_S
    assert isinstance(answers.to(TimeDecode(starts=[43, 90, 5], num_steps=2)), Took)


def test_tokens_are_those_of_one_process_alone(answers):
    generated = answers.to(Generate(tokens=[1, 2, 3], max_tokens=3, chunk_tokens=16))
    context = [1, 2, 3]
    for _ in range(3):
        context.append(sum(context[-3:]) * DECODE_FACTOR % FAKE_VOCAB_SIZE)
    assert generated == Generated(context[3:])


@pytest.mark.parametrize(
    "question",
    [
        TimePrefill(num_tokens=2000, chunk_tokens=512, seed=1),
        TimeDecode(starts=[1] * 17, num_steps=1),
        TimeDecode(starts=[1023], num_steps=2),
        Generate(tokens=[FAKE_VOCAB_SIZE], max_tokens=1, chunk_tokens=16),
        MeasureRate("gemm", None, 1, 1),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_engine_goes_on(answers, question):
    assert isinstance(answers.to(question), Refused)
    assert isinstance(answers.to(TimePrefill(num_tokens=16, chunk_tokens=16, seed=1)), Took)


def test_without_an_engine_no_step_is_run():
    assert isinstance(EngineAnswers().to(TimePrefill(16, 16, 1)), Refused)


def test_a_gemm_rate_is_of_a_model_and_needs_no_engine():
    rate = EngineAnswers().to(MeasureRate("gemm", TINY, 1, 2))
    assert isinstance(rate, Rate)
    assert len(rate.per_s) == 2
    assert min(rate.per_s) > 0
