from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.errors import Overloaded
from router.queue import WaitingLine


def line(max_waiting: int = 3, timeout_s: float = 60.0) -> WaitingLine[str]:
    return WaitingLine(max_waiting, timeout_s, now_s=0.0)


def test_first_come_first_served() -> None:
    waiting = line()
    for name in "abc":
        waiting.join(name, 0.0)
    assert [waiting.take_turn(1.0) for _ in range(3)] == ["a", "b", "c"]
    assert waiting.head is None


def test_one_more_than_the_bound_is_refused_and_told_when_to_come_back() -> None:
    waiting = line(max_waiting=1)
    waiting.join("a", 0.0)
    with pytest.raises(Overloaded) as refusal:
        waiting.join("b", 0.0)
    assert refusal.value.retry_after_s is not None
    assert refusal.value.retry_after_s >= 1
    assert len(waiting) == 1


def test_nobody_may_wait_in_a_line_of_length_zero() -> None:
    with pytest.raises(Overloaded):
        line(max_waiting=0).join("a", 0.0)


def test_a_turn_that_is_given_back_goes_to_the_front_even_of_a_full_line() -> None:
    waiting = line(max_waiting=2)
    for name in "ab":
        waiting.join(name, 0.0)
    first = waiting.take_turn(1.0)
    waiting.join("c", 1.0)
    waiting.give_back(first, since_s=0.0)
    assert [waiting.take_turn(2.0) for _ in range(3)] == ["a", "b", "c"]


def test_who_leaves_the_line_is_not_served() -> None:
    waiting, names = line(), ["a", "b", "c"]
    for name in names:
        waiting.join(name, 0.0)
    waiting.leave(names[1])
    waiting.leave("nobody")
    assert [waiting.take_turn(1.0), waiting.take_turn(1.0)] == ["a", "c"]


def test_who_has_waited_too_long_is_named_also_after_giving_a_turn_back() -> None:
    waiting = line(timeout_s=10.0)
    waiting.join("a", 0.0)
    waiting.join("b", 5.0)
    assert waiting.expired(9.9) == []
    assert waiting.expired(10.0) == ["a"]
    waiting.give_back(waiting.take_turn(10.0), since_s=0.0)
    assert waiting.expired(15.0) == ["a", "b"]


@pytest.mark.parametrize(("rate", "expected_s"), [(10, 1), (1, 4), (0.5, 8)])
def test_the_wait_follows_the_rate_at_which_requests_really_leave(rate: float, expected_s: float) -> None:
    waiting = line(max_waiting=100)
    for i in range(int(60 * rate)):
        waiting.served_at_once(i / rate)
    for name in "abc":
        waiting.join(name, 60.0)
    assert waiting.retry_after_s(60.0) == pytest.approx(expected_s, abs=1)


def test_a_line_that_does_not_move_asks_for_longer_and_longer_waits_up_to_a_minute() -> None:
    waiting = line()
    waiting.join("a", 0.0)
    waits = [waiting.retry_after_s(now_s) for now_s in (0.0, 5.0, 10.0, 30.0, 1000.0)]
    assert waits == sorted(waits)
    assert waits[0] >= 1
    assert waits[-1] == 60


@given(st.integers(0, 50), st.lists(st.floats(0, 1000), max_size=60), st.floats(0, 1000))
def test_the_wait_is_always_between_a_second_and_a_minute(
    num_waiting: int, served_s: list[float], now_s: float
) -> None:
    waiting = line(max_waiting=50)
    for i in range(num_waiting):
        waiting.join(str(i), 0.0)
    for moment_s in sorted(served_s):
        waiting.served_at_once(min(moment_s, now_s))
    assert 1 <= waiting.retry_after_s(now_s) <= 60
