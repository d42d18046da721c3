"""Medians, quantiles and gaps."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.summary import gaps, median, quantile, summarise

numbers = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40)


@given(numbers)
def test_the_median_is_that_of_the_standard_library(samples):
    assert median(samples) == pytest.approx(statistics.median(samples), abs=1e-6)


@given(numbers, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_never_has_a_smaller_quantile_and_none_leaves_the_samples(samples, one, other):
    low, high = (quantile(samples, share) for share in sorted((one, other)))
    assert low <= high or low == pytest.approx(high)
    assert min(samples) <= low <= max(samples)
    assert min(samples) <= high <= max(samples)


@given(numbers, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(samples, generator):
    shuffled = list(samples)
    generator.shuffle(shuffled)
    assert summarise(shuffled) == summarise(samples)


def test_between_two_samples_a_quantile_is_interpolated():
    assert quantile([10.0, 20.0], 0.25) == 12.5
    assert quantile([0.0, 1.0, 2.0, 3.0, 4.0], 0.1) == pytest.approx(0.4)
    assert quantile(list(map(float, range(101))), 0.99) == 99.0


def test_one_sample_is_every_quantile_of_itself():
    summary = summarise([7.0])
    assert (summary.low, summary.median, summary.high, summary.num_samples) == (7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_nothing_and_what_is_no_number_have_no_quantile(samples):
    with pytest.raises(ValueError, match=r"quantile of nothing|not all of them are numbers"):
        quantile(samples, 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match="is not a share"):
        quantile([1.0], share)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30))
def test_gaps_add_up_to_the_whole_time_whatever_the_order(moments):
    found = gaps(moments)
    assert len(found) == len(moments) - 1
    assert min(found) >= 0
    assert sum(found) == pytest.approx(max(moments) - min(moments), abs=1e-6)


def test_fewer_than_two_moments_have_no_gap():
    assert gaps([]) == gaps([1.0]) == []
