"""What keeping a block is worth: learnt from returns, by how often it was used and how old it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.return_times import (
    FEWEST_NEWS,
    HALF_LIFE_S,
    NUM_KINDS,
    NUM_SPANS,
    ReturnTimes,
    kind_of,
    span_end_s,
    span_of,
)

SHORTEST_SPAN_S = 2**0.5 - 1


def taught(num_uses: int, returns: list[tuple[float, int]], now_s: float = 0.0) -> ReturnTimes:
    """Blocks that were used once, and (age, how many of them) returned."""
    times = ReturnTimes()
    for _ in range(num_uses):
        times.used(1)
    for age_s, number in returns:
        for _ in range(number):
            times.returned(1, age_s)
    assert times.learn(now_s)
    return times


@given(st.floats(-10.0, 1e9))
def test_every_age_lies_in_one_span(age_s: float) -> None:
    span = span_of(age_s)
    end_s = span_end_s(span)
    assert 0 <= span < NUM_SPANS
    assert end_s is None or age_s < end_s
    begun_s = span_end_s(span - 1) if span else None
    assert begun_s is None or begun_s <= age_s


def test_uses_are_told_apart_up_to_a_few() -> None:
    assert [kind_of(number) for number in (1, 2, 3, 4, 5, 1000)] == [0, 1, 2, 3, 3, 3]


def test_nothing_is_worth_anything_before_something_returned() -> None:
    times = taught(1000, [])
    assert {times.worth(kind, span) for kind in range(NUM_KINDS) for span in range(NUM_SPANS)} == {0.0}


def test_a_worth_is_returns_by_seconds_of_room() -> None:
    """All return within the first second: each takes half a second of room, on the average."""
    times = taught(100, [(0.5, 100)])
    assert times.worth(0, 0) == pytest.approx(2.0)
    assert times.worth(0, 1) == 0.0


def test_a_worth_looks_ahead_as_far_as_it_pays() -> None:
    """Half of 100 return in the span of 60 s, nobody else ever; the room until then is all that counts against it."""
    times, span = taught(100, [(60.0, 50)]), span_of(60.0)
    begun_s, end_s = span_end_s(span - 1), span_end_s(span)
    assert begun_s is not None
    assert end_s is not None
    room_s = 100 * begun_s + (50 + 50 / 2) * (end_s - begun_s)
    assert times.worth(0, 0) == pytest.approx(50 / room_s)
    worths = [times.worth(0, at) for at in range(NUM_SPANS)]
    assert worths[: span + 1] == sorted(worths[: span + 1])  # the nearer, the more
    assert set(worths[span + 1 :]) == {0.0}


def test_kinds_learn_apart() -> None:
    times = taught(100, [(60.0, 50)])
    assert times.worth(0, 0) > 0.0
    assert all(times.worth(kind, 0) == 0.0 for kind in range(1, NUM_KINDS))


def test_it_learns_when_there_is_news_enough() -> None:
    times = ReturnTimes()
    for _ in range(FEWEST_NEWS - 1):
        times.used(1)
    assert not times.learn(0.0)
    times.used(1)
    assert times.learn(0.0)
    assert not times.learn(1e9)


def test_what_was_long_ago_counts_less_than_what_is_now() -> None:
    """Once they came back after 10 s, now they do after 1000 s, which is seen before it happened as often."""
    old, new = span_of(10.0), span_of(1000.0)
    times = taught(1000, [(10.0, 500)])
    assert times.worth(0, new) == 0.0
    for _ in range(100):
        times.used(1)
        times.returned(1, 1000.0)
    assert times.learn(10 * HALF_LIFE_S)
    assert times.worth(0, new) > 0.5 * taught(100, [(1000.0, 100)]).worth(0, new)
    assert times.worth(0, old) < 0.01 * taught(1000, [(10.0, 500)]).worth(0, old)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.floats(-1.0, 1e7)), max_size=150),
    st.integers(0, 200),
    st.lists(st.floats(-1e4, 1e6), min_size=1, max_size=4),
)
def test_worths_are_finite_and_never_negative_whatever_is_told(
    returns: list[tuple[int, float]], num_uses: int, clock: list[float]
) -> None:
    """More returns than uses, clocks that go back: a store that was restarted may see both."""
    times = ReturnTimes()
    for now_s in clock:
        for number, age_s in returns:
            times.returned(number, age_s)
        for _ in range(num_uses):
            times.used(1)
        times.learn(now_s)
        for kind in range(NUM_KINDS):
            for span in range(NUM_SPANS):
                assert 0.0 <= times.worth(kind, span) <= 2.0 / SHORTEST_SPAN_S + 1e-9
