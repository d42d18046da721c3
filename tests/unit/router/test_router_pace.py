from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pace import FORGET_S, Pace, Usual, expected_s, learn, slowness


def taught(*took: tuple[str, int, float], now_s: float = 1.0) -> tuple[Usual, dict[str, Pace]]:
    """After prompts of (worker, tokens, seconds)."""
    usual: Usual = {}
    paces = {"a": Pace(), "b": Pace()}
    for name, num_tokens, took_s in took:
        usual, paces[name] = learn(usual, paces[name], num_tokens, took_s, now_s)
    return usual, paces


def test_a_worker_that_takes_ten_times_as_long_is_ten_times_as_slow() -> None:
    _, paces = taught(*[("a", 64, 0.1), ("b", 64, 1.0)] * 4)
    assert slowness(paces["a"], paces.values(), 1.0) == 1.0
    assert slowness(paces["b"], paces.values(), 1.0) == pytest.approx(10, rel=0.5)


def test_a_worker_that_had_the_long_prompts_is_not_taken_for_slow() -> None:
    """Twice as many tokens take twice as long here, and a step of few tokens half as long as one of many."""
    _, paces = taught(*[("a", 20, 0.5), ("b", 1000, 4.0), ("a", 25, 0.5), ("b", 900, 3.6)] * 2)
    assert slowness(paces["b"], paces.values(), 1.0) == 1.0


def test_one_prompt_that_was_held_up_says_nothing() -> None:
    _, paces = taught(("a", 64, 0.1), ("b", 64, 5.0), *[("a", 64, 0.1), ("b", 64, 0.1)] * 3)
    assert slowness(paces["b"], paces.values(), 1.0) == 1.0


def test_what_was_learnt_is_forgotten_so_that_a_slow_worker_is_tried_again() -> None:
    usual, paces = taught(*[("a", 64, 0.1), ("b", 64, 1.0)] * 4)
    _, paces["a"] = learn(usual, paces["a"], 64, 0.1, 1.0 + FORGET_S)
    assert slowness(paces["b"], paces.values(), 1.0 + FORGET_S) > 5
    assert slowness(paces["b"], paces.values(), 1.1 + FORGET_S) == 1.0
    _, again = learn(usual, paces["b"], 64, 1.0, 2.0 + FORGET_S)
    assert len(again.log_ratios) == 1


def test_a_prompt_of_a_known_size_is_expected_to_take_what_it_took() -> None:
    usual, paces = taught(*[("a", 64, 0.2)] * 3)
    assert expected_s(usual, paces["a"], 100, 1.0) == pytest.approx(0.2)
    assert expected_s(usual, paces["a"], 5000, 1.0) is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5000), st.floats(0, 1e6)), max_size=30))
def test_whatever_was_measured_nobody_is_infinitely_slow_and_somebody_is_the_quickest(
    took: list[tuple[str, int, float]],
) -> None:
    _, paces = taught(*took)
    slow = [slowness(pace, paces.values(), 1.0) for pace in paces.values()]
    assert min(slow) == 1.0
    assert max(slow) <= 401
