"""Pure decisions of both roles, against the plain meaning of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.policy import check_fits
from pd_core.errors import ContextLengthExceeded, TransferError
from pd_core.layout import BLOCK_TOKENS, blocks_for
from pd_core.ticket import Ticket, TicketRef
from pd_worker.policy import chunk_end
from pd_worker.verdict import LONGEST_QUIET_S, QUIET_AFTER_BREAK_S, QUIET_S, Arrival, answer_at_s
from prefill_worker.policy import blocks_done, check_range, indices_done
from prefill_worker.policy import check_fits as check_prompt_fits

PROMPTS = st.integers(1, 700)
CHUNKS = st.integers(1, 32).map(lambda blocks: blocks * BLOCK_TOKENS)


def ticket(first_block: int, num_blocks: int) -> Ticket:
    return Ticket(TicketRef("t", "b", 1, 1), "r", first_block, list(range(num_blocks)), 3.0, "h", 1, [])


@given(PROMPTS, st.integers(1, 700), st.integers(2, 800), st.integers(1, 60))
def test_what_fits_is_admitted_and_what_does_not_names_what_to_make_smaller(
    num_prompt: int, max_tokens: int, context: int, num_blocks: int
) -> None:
    limit = min(context, num_blocks * BLOCK_TOKENS)
    if num_prompt + max_tokens <= limit:
        check_fits(num_prompt, max_tokens, context, num_blocks)
        return
    with pytest.raises(ContextLengthExceeded) as caught:
        check_fits(num_prompt, max_tokens, context, num_blocks)
    if caught.value.param == "max_tokens":
        check_fits(num_prompt, limit - num_prompt, context, num_blocks)
        assert limit - num_prompt >= 1
    else:
        with pytest.raises(ContextLengthExceeded):
            check_fits(num_prompt, 1, context, num_blocks)


@given(PROMPTS, CHUNKS, st.data())
def test_the_chunks_of_a_prompt_finish_every_block_of_the_range_once_and_in_order(
    num_prompt: int, chunk_tokens: int, data: st.DataObject
) -> None:
    num_blocks = blocks_for(num_prompt)
    first_block = data.draw(st.integers(0, num_blocks))
    shipped = ticket(first_block, data.draw(st.integers(0, num_blocks - first_block)))
    done: list[int] = []
    end = 0
    while end < num_prompt:
        end = chunk_end(end, num_prompt, chunk_tokens)
        indices = indices_done(shipped, len(done), end, num_prompt)
        # no block may leave before every position of it that the prompt has is computed
        assert all(min((shipped.first_block + i + 1) * BLOCK_TOKENS, num_prompt) <= end for i in indices)
        done += indices
    assert done == list(range(shipped.num_blocks))


@given(PROMPTS, st.integers(0, 700))
def test_only_full_blocks_are_final_before_the_prompt_ends(num_prompt: int, end: int) -> None:
    end = min(end, num_prompt)
    done = blocks_done(end, num_prompt)
    assert done == (blocks_for(num_prompt) if end == num_prompt else end // BLOCK_TOKENS)


@pytest.mark.parametrize(("first_block", "num_blocks"), [(0, 4), (3, 1), (1, 3), (-1, 2)])
def test_a_range_that_the_prompt_does_not_have_is_refused(first_block: int, num_blocks: int) -> None:
    with pytest.raises(TransferError, match="the prompt has 3"):
        check_range(ticket(first_block, num_blocks), 3 * BLOCK_TOKENS)


@pytest.mark.parametrize(("first_block", "num_blocks"), [(0, 3), (1, 2), (3, 0), (0, 0), (1, 1)])
def test_any_part_of_the_prompt_may_be_shipped(first_block: int, num_blocks: int) -> None:
    check_range(ticket(first_block, num_blocks), 3 * BLOCK_TOKENS)


def test_a_prompt_needs_room_for_one_token_after_it() -> None:
    check_prompt_fits(99, 100, 100)
    with pytest.raises(ContextLengthExceeded):
        check_prompt_fits(100, 100, 100)
    check_prompt_fits(32, 100, 2)
    with pytest.raises(ContextLengthExceeded):
        check_prompt_fits(33, 100, 2)


def test_blocks_that_are_all_known_to_be_wrong_are_answered_at_once() -> None:
    assert answer_at_s(Arrival(num_missing=2, num_corrupt=2, has_broken=False, last_news_s=5.0), 256) == 5.0


def test_a_broken_connection_is_waited_for_shortly_and_a_silent_one_longer() -> None:
    broken = answer_at_s(Arrival(3, 1, has_broken=True, last_news_s=5.0), 256)
    silent = answer_at_s(Arrival(3, 1, has_broken=False, last_news_s=5.0), 256)
    assert broken == 5.0 + QUIET_AFTER_BREAK_S
    assert silent == pytest.approx(5.0 + QUIET_S, abs=0.001)


def test_on_a_slow_wire_blocks_are_missing_only_after_a_much_longer_silence_than_any_before() -> None:
    slow = answer_at_s(Arrival(3, 0, has_broken=False, last_news_s=5.0, longest_gap_s=0.4), 256)
    assert slow == pytest.approx(5.0 + 4 * 0.4)
    assert answer_at_s(Arrival(3, 0, has_broken=False, last_news_s=5.0, longest_gap_s=60.0), 256) == 8.0
    quick = answer_at_s(Arrival(3, 0, has_broken=False, last_news_s=5.0, longest_gap_s=0.001), 256)
    assert quick == answer_at_s(Arrival(3, 0, has_broken=False, last_news_s=5.0), 256) < 5.5


@given(st.integers(1, 10_000), st.integers(1, 1 << 24), st.floats(0, 1e6))
def test_the_wait_for_the_rest_is_bounded_however_much_is_missing(
    num_missing: int, block_bytes: int, now_s: float
) -> None:
    at_s = answer_at_s(Arrival(num_missing, 0, has_broken=False, last_news_s=now_s), block_bytes)
    assert now_s + QUIET_S <= at_s <= now_s + LONGEST_QUIET_S
