"""Tokens that wait for their reader."""

from __future__ import annotations

import tracemalloc

import pytest

from pd_core.request import FinishReason
from router.unread import TokenEvent, UnreadTokens


def test_they_are_taken_in_order_and_once_and_the_last_says_why_it_is_the_last() -> None:
    unread = UnreadTokens(first_index=5)
    assert unread.take() == []
    unread.add(7, None, 1.0)
    unread.add(8, None, 2.0)
    assert len(unread) == 2
    assert unread.take() == [TokenEvent(5, 7, None, 1.0), TokenEvent(6, 8, None, 2.0)]
    unread.add(9, None, 3.0)
    unread.add(96, FinishReason.STOP, 4.0)
    assert unread.take() == [TokenEvent(7, 9, None, 3.0), TokenEvent(8, 96, FinishReason.STOP, 4.0)]
    assert (len(unread), unread.take()) == (0, [])


def test_what_cannot_be_a_tokens_id_is_an_error() -> None:
    with pytest.raises(OverflowError):
        UnreadTokens(0).add(1 << 40, None, 0.0)


def test_four_thousand_of_them_take_less_than_64_kib() -> None:
    """Known fault 32: what a client does not read is kept for it, but cheaply."""
    tracemalloc.start()
    try:
        unread = UnreadTokens(0)
        for index in range(4000):
            unread.add(index, None, index / 7)
        size_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(unread) == 4000
    assert size_bytes < 64 << 10
    assert peak_bytes < 128 << 10
