"""Steps that cannot be run are refused, naming the step, before anything is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.engine import SequenceStep
from pd_core.errors import EngineError
from pd_engine.steps import check_steps, entered_blocks, written_blocks


def check(*steps: SequenceStep) -> None:
    check_steps(steps, vocab_size=100, context_tokens=64, num_blocks=10)


def step(tokens: list[int], start: int, block_ids: list[int]) -> SequenceStep:
    return SequenceStep(tokens, start, block_ids, None)


def test_a_step_that_fits_exactly_is_allowed():
    check(step([0, 99], 0, [9]), step([5] * 64, 0, [0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (step([], 0, [0]), "no tokens"),
        (step([100], 0, [0]), "id 100 is outside"),
        (step([3, -1], 0, [0]), "id -1 is outside"),
        (step([1], -1, [0]), "starts at position -1"),
        (step([1], 64, [0, 1, 2, 3, 4]), "ends at position 65"),
        (step([1] * 17, 0, [0]), "needs 2 blocks, its table has 1"),
        (step([1], 16, [0]), "needs 2 blocks, its table has 1"),
        (step([1], 0, [10]), "outside the pool"),
        (step([1], 16, [-1, 3]), "outside the pool"),
        (step([1], 16, [3, 3]), "stands twice"),
    ],
)
def test_a_step_that_cannot_be_run_is_refused(wrong, sentence):
    with pytest.raises(EngineError, match=f"step 1.*{sentence}"):
        check(step([1], 0, [7]), wrong)


def test_two_sequences_may_read_one_block_but_not_write_it():
    check(step([1], 16, [0, 1]), step([1], 16, [0, 2]))
    with pytest.raises(EngineError, match="steps 0 and 1 both write into block 1"):
        check(step([1], 16, [0, 1]), step([1], 0, [1]))


@given(st.integers(0, 60), st.integers(1, 60))
def test_entered_blocks_are_those_whose_first_position_is_in_the_step(start, size):
    one = step([1] * size, start, list(range(10)))
    assert list(entered_blocks(one)) == [p // 16 for p in range(start, start + size) if p % 16 == 0]
    assert list(written_blocks(one)) == sorted({p // 16 for p in range(start, start + size)})
