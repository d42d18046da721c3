"""Whose prompt is computed next: short ones share a step and wait for no long one; long ones are not starved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_core.layout import BLOCK_TOKENS
from pd_worker.policy import PromptWork, chunk_end, next_shares

PROMPTS = st.integers(1, 700)
CHUNKS = st.integers(1, 32).map(lambda blocks: blocks * BLOCK_TOKENS)
AGEING = 200.0


@given(PROMPTS, CHUNKS)
def test_chunks_tile_the_prompt_and_start_at_multiples_of_their_size(num_prompt: int, chunk_tokens: int) -> None:
    start = 0
    while start < num_prompt:
        assert start % chunk_tokens == 0
        end = chunk_end(start, num_prompt, chunk_tokens)
        assert start < end <= min(start + chunk_tokens, num_prompt)
        start = end
    assert start == num_prompt


@given(PROMPTS, CHUNKS, st.integers(0, 700))
def test_a_prompt_taken_up_in_the_middle_meets_the_same_chunk_bounds(
    num_prompt: int, chunk_tokens: int, start: int
) -> None:
    start = min(start, num_prompt - 1)
    end = chunk_end(start, num_prompt, chunk_tokens)
    assert start < end
    assert end % chunk_tokens == 0 or end == num_prompt


def work(start: int, end: int, waited_s: float = 0.0) -> PromptWork:
    return PromptWork(start, end, waited_s)


def shares(*prompts: PromptWork, chunk_tokens: int = 64) -> list[tuple[int, int, int]]:
    chosen = next_shares(prompts, chunk_tokens, chunk_tokens, AGEING)
    return [(share.index, share.start, share.end) for share in chosen]


def test_short_prompts_share_a_step_in_order_of_their_length() -> None:
    assert shares(work(0, 20), work(0, 12), work(0, 30)) == [(1, 0, 12), (0, 0, 20), (2, 0, 30)]


def test_what_does_not_fit_any_more_waits_and_what_fits_behind_it_does_not() -> None:
    assert shares(work(0, 30), work(0, 40), work(0, 34)) == [(0, 0, 30), (2, 0, 34)]
    assert shares(work(0, 30), work(0, 35), work(0, 36), work(64, 66)) == [(3, 64, 66), (0, 0, 30)]


def test_a_full_chunk_goes_alone_and_waits_for_short_prompts() -> None:
    assert shares(work(0, 1000)) == [(0, 0, 64)]
    assert shares(work(0, 1000), work(0, 5)) == [(1, 0, 5)]
    assert shares(work(64, 128), work(0, 1000)) == [(0, 64, 128)]


def test_the_short_rest_of_a_long_prompt_shares_too() -> None:
    assert shares(work(960, 1000), work(0, 24)) == [(1, 0, 24), (0, 960, 1000)]


def test_among_equals_the_first_come_goes_first() -> None:
    assert shares(work(0, 40), work(0, 40)) == [(0, 0, 40)]


def test_waiting_counts_as_being_shorter() -> None:
    assert shares(work(0, 1000, waited_s=4.6), work(0, 64)) == [(1, 0, 64)]
    assert shares(work(0, 1000, waited_s=4.7), work(0, 64)) == [(0, 0, 64)]


def test_nobody_has_a_share_of_no_prompts() -> None:
    assert shares() == []


@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(1, 600), st.floats(0, 100)), max_size=12),
    CHUNKS,
    st.integers(0, 512),
    st.floats(0, 1000),
)
def test_shares_fit_the_budget_are_whole_chunks_and_nobody_has_two(
    prompts: list[tuple[int, int, float]], chunk_tokens: int, budget: int, ageing: float
) -> None:
    works = [work(start, start + left, waited_s) for start, left, waited_s in prompts]
    chosen = next_shares(works, chunk_tokens, budget, ageing)
    assert sum(share.num_tokens for share in chosen) <= budget
    assert len({share.index for share in chosen}) == len(chosen)
    for share in chosen:
        prompt = works[share.index]
        assert (share.start, share.end) == (prompt.start, chunk_end(prompt.start, prompt.end, chunk_tokens))
    if works and budget >= chunk_tokens:
        ranks = [prompt.end - prompt.start - ageing * prompt.waited_s for prompt in works]
        assert ranks[chosen[0].index] == min(ranks), "the first choice is in the step whatever its size"


@dataclass
class Prompt:
    num_tokens: int
    came_s: float
    start: int = 0
    since_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)


@dataclass
class Line:
    """A prefill worker in virtual time: a step takes a fixed while and a while for every token."""

    chunk_tokens: int = 256
    token_s: float = 0.001
    now_s: float = 0.0
    here: list[Prompt] = field(default_factory=list)

    def add(self, num_tokens: int) -> Prompt:
        prompt = Prompt(num_tokens, self.now_s, since_s=self.now_s)
        self.here.append(prompt)
        return prompt

    def step(self) -> None:
        works = [work(prompt.start, prompt.num_tokens, self.now_s - prompt.since_s) for prompt in self.here]
        chosen = next_shares(works, self.chunk_tokens, self.chunk_tokens, AGEING)
        assert chosen
        self.now_s += self.token_s * sum(share.num_tokens for share in chosen)
        for share in chosen:
            prompt = self.here[share.index]
            prompt.start = share.end
            prompt.since_s = self.now_s
            prompt.chunk_times_s.append(self.now_s)
        self.here = [prompt for prompt in self.here if prompt.start < prompt.num_tokens]


@given(st.integers(257, 4000), st.lists(st.integers(24, 256), min_size=1, max_size=8))
@example(4000, [64])
@settings(deadline=None, max_examples=40)
def test_a_long_prompt_is_not_starved_however_many_short_ones_come(num_long: int, sizes: list[int]) -> None:
    """Before every step so many short ones come that the long one is never alone."""
    line = Line()
    long = line.add(num_long)
    number = 0
    while long in line.here:
        while sum(prompt.num_tokens for prompt in line.here if prompt is not long) < 2 * line.chunk_tokens:
            line.add(sizes[number % len(sizes)])
            number += 1
        line.step()
    chunk_s = line.chunk_tokens * line.token_s
    times_s = [0.0, *long.chunk_times_s]
    for number, (earlier_s, later_s) in enumerate(itertools.pairwise(times_s)):
        left = num_long - number * line.chunk_tokens
        # By then it is shorter than a prompt that has just come, and those before it are few: what two chunks hold.
        assert later_s - earlier_s <= left / AGEING + 2 * line.chunk_tokens / AGEING + 4 * chunk_s


@given(
    st.lists(st.integers(257, 4000), min_size=1, max_size=6),
    st.lists(st.tuples(st.floats(0.15, 1.0), st.integers(1, 64)), min_size=1, max_size=30),
)
def test_a_short_prompt_waits_for_the_chunk_under_way_and_for_one_of_each_long_one_that_had_waited_long(
    longs: list[int], arrivals: list[tuple[float, int]]
) -> None:
    line = Line()
    for num_tokens in longs:
        line.add(num_tokens)
    chunk_s = line.chunk_tokens * line.token_s
    due_s = 0.0
    for gap_s, num_tokens in arrivals:
        due_s += gap_s
        while line.now_s < due_s and line.here:
            line.step()
        line.now_s = max(line.now_s, due_s)
        num_aged = sum(
            prompt.num_tokens - prompt.start - AGEING * (line.now_s - prompt.since_s + chunk_s) <= num_tokens
            for prompt in line.here
        )
        newcomer = line.add(num_tokens)
        newcomer.came_s = due_s  # while a chunk was under way
        while newcomer in line.here:
            line.step()
        assert newcomer.chunk_times_s[-1] - newcomer.came_s <= (2 + num_aged) * chunk_s


def test_a_short_prompt_beside_one_of_four_thousand_tokens_is_done_within_two_chunks_at_any_time() -> None:
    line = Line()
    long = line.add(4000)
    chunk_s = line.chunk_tokens * line.token_s
    num_short = 0
    while long in line.here:
        came_s = line.now_s
        line.step()  # a short one comes at the beginning of this step
        newcomer = line.add(64)
        num_short += 1
        while newcomer in line.here:
            line.step()
        assert newcomer.chunk_times_s[-1] - came_s <= 2 * chunk_s
    assert num_short == 4000 // line.chunk_tokens
