"""The sampler: filters by hand, determinism, and the distribution that it claims."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.errors import EngineError
from pd_core.request import SamplingParams
from pd_engine.sampler import draw, kept_ids

PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]

logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=400)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 3),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63),
)


def logits_of(probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float64)).astype(np.float32)


def kept(probabilities: list[float], **params: float) -> list[int]:
    ids = kept_ids(np.array(probabilities), SamplingParams(temperature=1.0, **params))
    return list(range(len(probabilities))) if ids is None else ids.tolist()


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals():
    assert draw(np.array([1, 7, 3, 7, 7], dtype=np.float32), SamplingParams(), 5) == 1


@given(logit_rows, st.integers(0, 2**63), st.integers(0, 10_000))
def test_greedy_depends_on_neither_seed_nor_position(row, seed, position):
    logits = np.array(row, dtype=np.float32)
    assert draw(logits, SamplingParams(seed=seed), position) == row.index(max(row))


def test_top_k_keeps_the_likeliest_and_among_equals_the_lowest_ids():
    assert kept(PROBABILITIES, top_k=2) == [1, 3]
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == [0, 1]
    assert kept(PROBABILITIES, top_k=5) == kept(PROBABILITIES, top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_shortest_run_that_reaches_its_share():
    assert kept(PROBABILITIES, top_p=0.3) == [1]
    assert kept(PROBABILITIES, top_p=0.41) == [1, 3]
    assert kept(PROBABILITIES, top_p=0.84) == [1, 3, 4]
    assert kept(PROBABILITIES, top_p=0.86) == [0, 1, 3, 4]
    assert kept(PROBABILITIES, top_p=0.0) == [1], "one token always stays"


def test_top_p_counts_the_mass_that_top_k_left():
    # 0.4 of 0.65 is a share of 0.615
    assert kept(PROBABILITIES, top_k=2, top_p=0.6) == [1]
    assert kept(PROBABILITIES, top_k=2, top_p=0.63) == [1, 3]


def test_min_p_is_measured_against_the_likeliest():
    assert kept(PROBABILITIES, min_p=0.5) == [1, 3, 4]
    assert kept(PROBABILITIES, min_p=1.0) == [1]


def test_temperature_comes_before_top_p():
    # at temperature 0.5 probabilities are squared: 0.16 / 0.275 = 0.58 for token 1
    logits = logits_of(PROBABILITIES)
    drawn = {draw(logits, SamplingParams(temperature=0.5, top_p=0.55, seed=s), 3) for s in range(200)}
    assert drawn == {1}
    drawn = {draw(logits, SamplingParams(temperature=1.0, top_p=0.55, seed=s), 3) for s in range(200)}
    assert drawn == {1, 3}


def test_top_p_beyond_its_first_look_is_that_of_the_whole_vocabulary():
    rng = np.random.default_rng(5)
    weights = rng.exponential(size=5000)
    order = np.lexsort((np.arange(5000), -weights))
    for top_p in (0.01, 0.2, 0.9, 0.999):
        run = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
        ids = kept_ids(weights, SamplingParams(temperature=1.0, top_p=top_p))
        assert ids is not None
        assert ids.tolist() == sorted(order[:run].tolist())


@given(logit_rows, params_strategy, st.integers(0, 100_000))
def test_a_draw_is_an_allowed_token_and_the_same_every_time(row, params, position):
    logits = np.array(row, dtype=np.float32)
    token = draw(logits, params, position)
    assert token == draw(logits.copy(), params, position)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    ids = kept_ids(weights, params)
    assert weights[token] > 0
    assert ids is None or token in ids


@given(logit_rows, params_strategy)
def test_the_likeliest_token_is_never_filtered_out(row, params):
    weights = np.exp(np.array(row) - max(row))
    ids = kept_ids(weights, params)
    assert ids is None or int(weights.argmax()) in ids


def test_draws_follow_the_distribution():
    logits = logits_of(PROBABILITIES)
    params = SamplingParams(temperature=1.0, seed=11)
    counts = np.bincount([draw(logits, params, position) for position in range(20_000)], minlength=5)
    expected = 20_000 * np.array(PROBABILITIES)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5, "chi-square with 4 degrees of freedom, p = 0.001"


def test_another_seed_is_another_stream():
    logits = np.zeros(1000, dtype=np.float32)
    one, two = (
        [draw(logits, SamplingParams(temperature=1.0, seed=seed), position) for position in range(50)]
        for seed in (1, 2)
    )
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 5


def test_a_token_of_no_weight_is_never_drawn():
    logits = np.array([-math.inf, 0.0, -math.inf, 0.0, -math.inf], dtype=np.float32)
    drawn = {draw(logits, SamplingParams(temperature=2.0, seed=seed), 9) for seed in range(100)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(wrong, temperature):
    logits = np.array([0.0, wrong, 1.0], dtype=np.float32)
    with pytest.raises(EngineError, match="position 12"):
        draw(logits, SamplingParams(temperature=temperature), 12)


def test_a_row_without_any_possible_token_is_an_error():
    with pytest.raises(EngineError):
        draw(np.full(4, -math.inf, dtype=np.float32), SamplingParams(), 1)
