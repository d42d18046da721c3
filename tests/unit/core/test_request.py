"""Where a stream ends, and how it is taken up by somebody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.request import FinishReason, GenerateRequest, SamplingParams, continue_request, finish_after

TOKENS = st.lists(st.integers(0, 96), min_size=1, max_size=40)


def request_of(tokens: list[int], max_tokens: int, stop: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest("r", tokens, max_tokens, SamplingParams(seed=5), stop_token_ids=stop or [])


@given(TOKENS, st.lists(st.integers(0, 96), max_size=20), st.lists(st.integers(0, 96), max_size=20))
def test_continuing_twice_is_continuing_once_with_all_tokens(prompt: list[int], a: list[int], b: list[int]) -> None:
    request = request_of(prompt, len(a) + len(b) + 1)
    once = continue_request(request, a + b)
    assert continue_request(continue_request(request, a), b) == once
    assert once.tokens == prompt + a + b
    assert once.first_index == len(a) + len(b)
    assert once.max_tokens == 1
    assert once.sampling == request.sampling
    assert request.tokens == prompt, "the first request is left as it was"


def test_there_is_nothing_to_continue_after_the_last_token() -> None:
    with pytest.raises(ValueError, match="nothing left"):
        continue_request(request_of([1], 2), [5, 6])


def test_a_stop_token_ends_the_stream_with_stop_even_when_it_is_the_last_allowed() -> None:
    assert finish_after(request_of([1], 3, stop=[7]), 7, 1) is FinishReason.STOP
    assert finish_after(request_of([1], 3, stop=[7]), 7, 3) is FinishReason.STOP


def test_the_last_allowed_token_ends_the_stream_with_length() -> None:
    assert finish_after(request_of([1], 3, stop=[7]), 8, 2) is None
    assert finish_after(request_of([1], 3, stop=[7]), 8, 3) is FinishReason.LENGTH
