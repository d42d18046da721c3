"""The generator against its published answers (Random123's kat_vectors) and as a source of uniform numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert philox4x32(counter, key) == answer


def test_uniform_takes_its_53_bits_from_the_first_two_words():
    assert uniform(0, 0) == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53


@given(st.integers(), st.integers(0, 2**40))
def test_any_seed_and_position_give_a_number_below_one(seed, position):
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) == uniform(seed, position)


def test_numbers_of_neighbouring_positions_and_seeds_are_uniform_and_unrelated():
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(50)])
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 43.8, "chi-square with 19 degrees of freedom, p = 0.001"
    along_positions = np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]
    along_seeds = np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]
    assert abs(along_positions) < 0.04
    assert abs(along_seeds) < 0.04
