from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.errors import Overloaded
from router.policy import Demand
from router.queue import WaitingLine


def line(max_waiting: int = 3, timeout_s: float = 60.0) -> WaitingLine[str]:
    return WaitingLine(max_waiting, timeout_s, now_s=0.0)


def join(waiting: WaitingLine[str], names: str, now_s: float = 0.0) -> None:
    for name in names:
        waiting.join(name, Demand(10, 10, since_s=now_s), now_s)


def test_those_that_wait_stand_in_the_order_in_which_they_came() -> None:
    waiting = line()
    join(waiting, "abc")
    assert [*waiting] == ["a", "b", "c"]
    assert [waiter.number for waiter in waiting.waiters] == [0, 1, 2]
    assert waiting.item(1) == "b"


def test_one_more_than_the_bound_is_refused_and_told_when_to_come_back() -> None:
    waiting = line(max_waiting=1)
    join(waiting, "a")
    with pytest.raises(Overloaded) as refusal:
        join(waiting, "b")
    assert refusal.value.retry_after_s is not None
    assert refusal.value.retry_after_s >= 1
    assert [*waiting] == ["a"]


def test_nobody_may_wait_in_a_line_of_length_zero() -> None:
    with pytest.raises(Overloaded):
        join(line(max_waiting=0), "a")


def test_a_turn_that_is_given_back_is_the_same_place_as_before_even_in_a_full_line() -> None:
    waiting = line(max_waiting=3)
    join(waiting, "abc")
    number = waiting.take_turn("b", 1.0)  # it passed a
    join(waiting, "d", 1.0)
    waiting.give_back("b", number, Demand(10, 10))
    assert [*waiting] == ["a", "b", "c", "d"]


def test_one_that_was_served_at_once_and_gives_its_turn_back_is_before_those_that_came_later() -> None:
    waiting = line()
    number = waiting.served_at_once(0.0)
    join(waiting, "b")
    waiting.give_back("a", number, Demand(10, 10))
    assert [*waiting] == ["a", "b"]


def test_who_leaves_the_line_is_not_served() -> None:
    waiting = line()
    join(waiting, "abc")
    waiting.leave("b")
    waiting.leave("nobody")
    assert [*waiting] == ["a", "c"]
    with pytest.raises(KeyError):
        waiting.take_turn("b", 1.0)


def test_who_has_waited_too_long_is_named_also_after_giving_a_turn_back() -> None:
    waiting = line(timeout_s=10.0)
    join(waiting, "a", 0.0)
    join(waiting, "b", 5.0)
    assert waiting.expired(9.9) == []
    assert waiting.expired(10.0) == ["a"]
    waiting.give_back("a", waiting.take_turn("a", 10.0), Demand(10, 10, since_s=0.0))
    assert waiting.expired(15.0) == ["a", "b"]


@pytest.mark.parametrize(("rate", "expected_s"), [(10, 1), (1, 4), (0.5, 8)])
def test_the_wait_follows_the_rate_at_which_requests_really_leave(rate: float, expected_s: float) -> None:
    waiting = line(max_waiting=100)
    for i in range(int(60 * rate)):
        waiting.served_at_once(i / rate)
    join(waiting, "abc", 60.0)
    assert waiting.retry_after_s(60.0) == pytest.approx(expected_s, abs=1)


def test_a_line_that_does_not_move_asks_for_longer_and_longer_waits_up_to_a_minute() -> None:
    waiting = line()
    join(waiting, "a")
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
        waiting.join(str(i), Demand(10, 10), 0.0)
    for moment_s in sorted(served_s):
        waiting.served_at_once(min(moment_s, now_s))
    assert 1 <= waiting.retry_after_s(now_s) <= 60


@given(
    st.lists(st.sampled_from(["join", "take", "give back", "leave"]), max_size=60), st.randoms(use_true_random=False)
)
def test_whatever_happens_the_line_is_in_order_of_arrival(steps: list[str], chance: object) -> None:
    waiting, served = line(max_waiting=60), dict[str, int]()
    for number, action in enumerate(steps):
        present = [*waiting]
        if action == "join":
            waiting.join(f"{number:03}", Demand(10, 10), 0.0)
        elif action == "give back" and served:
            name = chance.choice(sorted(served))  # type: ignore[attr-defined]
            waiting.give_back(name, served.pop(name), Demand(10, 10))
        elif present:
            name = chance.choice(present)  # type: ignore[attr-defined]
            if action == "take":
                served[name] = waiting.take_turn(name, 0.0)
            else:
                waiting.leave(name)
        assert [*waiting] == sorted(waiting)
        assert len(waiting) == len([*waiting])
