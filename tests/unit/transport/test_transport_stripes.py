"""Over how many connections a push goes: links in virtual time, as slow and as moody as the generator likes."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transport.stripes import (
    COUNTS,
    LEAST_PART_BYTES,
    LONGEST_EVERY_S,
    MARGIN,
    MAX_TRIAL_PUSHES,
    MEASURED_BYTES,
    NUM_RECENT,
    NUM_SAMPLES,
    TRIAL_EVERY_S,
    FixedStripes,
    MeasuredStripes,
    divide,
)

BIG = 16 * MEASURED_BYTES
PUSH_S = 0.1
ENOUGH = len(COUNTS) * (NUM_SAMPLES + 1)


class Link:
    """Pushes of a plan over a link with so many bytes a second over 1, 2 and 4 connections."""

    def __init__(self, plan, rates, noise=0.0, seed=0):
        self.plan = plan
        self.rates = dict(zip(COUNTS, rates, strict=True))
        self.now_s = 0.0
        self._noise = noise
        self._random = random.Random(seed)

    def push(self, num_bytes=BIG, num_blocks=100):
        count = self.plan.choose(num_blocks, num_bytes, self.now_s)
        rate = self.rates[count] * (1 + self._noise * self._random.uniform(-1, 1))
        self.now_s += PUSH_S
        self.plan.sent(count, num_bytes, num_bytes, num_bytes / rate, self.now_s)
        return count

    def pushes(self, number, **options):
        return [self.push(**options) for _ in range(number)]


def clearly_best(rates):
    """More connections only where they are faster by the margin than the fewer that would be taken."""
    best = 0
    for place in range(1, len(rates)):
        if rates[place] > MARGIN * rates[best]:
            best = place
    return COUNTS[best]


rates_of_links = st.lists(st.floats(1e6, 1e11), min_size=3, max_size=3)


@given(rates_of_links)
def test_what_is_clearly_fastest_is_found_within_one_trial(rates):
    link = Link(MeasuredStripes(), rates)
    tried = link.pushes(ENOUGH)
    assert {count: tried.count(count) for count in COUNTS} == dict.fromkeys(COUNTS, NUM_SAMPLES + 1)
    assert link.plan.settled == clearly_best(rates)
    assert set(link.pushes(50)) == {clearly_best(rates)}


@given(st.integers(0, 1000), st.floats(0.5, 1.0), st.floats(0.5, 1.0))
def test_where_more_connections_are_no_faster_one_is_taken_whatever_the_noise(seed, two, four):
    link = Link(MeasuredStripes(), [4e9, two * 4e9, four * 4e9], noise=0.08, seed=seed)
    link.pushes(ENOUGH)
    assert link.plan.settled == 1


@given(st.integers(0, 1000))
def test_a_link_that_needs_four_gets_them_whatever_the_noise(seed):
    link = Link(MeasuredStripes(), [1e9, 2e9, 3.5e9], noise=0.15, seed=seed)
    link.pushes(ENOUGH)
    assert link.plan.settled == 4


def test_the_first_push_of_each_count_which_made_connections_is_not_counted():
    plan = MeasuredStripes()
    link = Link(plan, [1e9, 1e9, 1e9])
    for _ in COUNTS:
        count = plan.choose(100, BIG, 0.0)
        plan.sent(count, BIG, BIG, BIG / (1e12 if count == 4 else 1e9), 0.0)
    link.pushes(ENOUGH)
    assert plan.settled == 1


def test_bytes_that_only_our_kernel_has_taken_prove_nothing():
    plan = MeasuredStripes()
    for _ in range(ENOUGH):
        count = plan.choose(100, BIG, 0.0)
        # Four connections have four buffers: the push seems four times as fast, and as little has arrived.
        seconds = BIG / (1e9 * count)
        plan.sent(count, BIG, int(1e9 * seconds), seconds, 0.0)
    assert plan.settled == 1


@given(st.integers(0, 4 * LEAST_PART_BYTES), st.integers(1, 500), st.integers(1, 16))
def test_every_part_has_enough_bytes_and_at_least_one_block(num_bytes, num_blocks, fixed):
    for plan in (MeasuredStripes(), FixedStripes(fixed)):
        count = plan.choose(num_blocks, num_bytes, 0.0)
        assert 1 <= count <= num_blocks
        assert count == 1 or num_bytes // count >= LEAST_PART_BYTES


def test_a_small_push_takes_one_connection_and_is_no_part_of_a_trial():
    plan = MeasuredStripes()
    for _ in range(100):
        assert plan.choose(4, 2 * LEAST_PART_BYTES - 1, 0.0) == 1
        plan.sent(1, 2 * LEAST_PART_BYTES - 1, 0, 1.0, 0.0)
    assert plan.settled is None


def test_a_number_fixes_it():
    assert {FixedStripes(3).choose(100, BIG, now_s) for now_s in range(1000)} == {3}


@given(rates_of_links, rates_of_links)
def test_a_link_that_has_changed_is_measured_again_in_time(before, after):
    link = Link(MeasuredStripes(), before)
    link.pushes(ENOUGH)
    link.rates = dict(zip(COUNTS, after, strict=True))
    link.now_s += LONGEST_EVERY_S
    link.pushes(ENOUGH)
    assert link.plan.settled == clearly_best(after)


def test_a_rate_that_falls_is_doubted_long_before_the_time_has_come():
    link = Link(MeasuredStripes(), [1e9, 2e9, 4e9])
    link.pushes(ENOUGH)
    assert link.plan.settled == 4
    link.now_s += 20.0
    link.rates = dict(zip(COUNTS, [1e9, 1e9, 1e9], strict=True))
    link.pushes(NUM_RECENT + ENOUGH)
    assert link.plan.settled == 1
    assert link.now_s < TRIAL_EVERY_S / 2


@settings(max_examples=15)
@given(rates_of_links)
def test_trials_become_rarer_while_they_find_the_same(rates):
    link = Link(MeasuredStripes(), rates)
    began_s = []
    was_settled = True
    for _ in range(6000):
        link.push()
        link.now_s += 1.0
        is_settled = link.plan.settled is not None
        if was_settled and not is_settled:
            began_s.append(link.now_s)
        was_settled = is_settled
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(began_s)]
    assert pauses_s == sorted(pauses_s)
    assert len(began_s) <= 6


def test_connections_that_cannot_be_had_are_left_alone_for_a_while():
    plan = MeasuredStripes()
    counts = []
    for _ in range(100):
        count = plan.choose(100, BIG, 0.0)
        counts.append(count)
        if count > 1:
            plan.refused(count, 0.0)
        else:
            plan.sent(count, BIG, BIG, BIG / 1e9, 0.0)
    assert len([count for count in counts if count > 1]) <= 2
    assert plan.settled == 1


def test_connections_that_can_be_had_no_more_are_tried_again_later():
    link = Link(MeasuredStripes(), [1e9, 2e9, 4e9])
    link.pushes(ENOUGH)
    link.plan.refused(4, link.now_s)
    assert set(link.pushes(20)) == {1}
    link.now_s += LONGEST_EVERY_S
    link.pushes(ENOUGH)
    assert link.plan.settled == 4


def test_a_trial_ends_also_when_pushes_have_too_few_blocks_for_a_count():
    link = Link(MeasuredStripes(), [1e9, 3e9, 9e9])
    link.pushes(MAX_TRIAL_PUSHES, num_blocks=2)
    assert link.plan.settled == 2


@given(st.lists(st.sampled_from(["push", "small", "lost", "refused", "wait"]), max_size=200), st.integers(0, 100))
def test_no_order_of_events_leaves_it_without_an_answer(events, seed):
    generator = random.Random(seed)
    plan, now_s = MeasuredStripes(), 0.0
    for event in events:
        num_blocks = generator.randint(1, 200)
        num_bytes = 4096 * num_blocks if event == "small" else generator.randint(1, 64) * MEASURED_BYTES
        count = plan.choose(num_blocks, num_bytes, now_s)
        assert count in range(1, num_blocks + 1)
        match event:
            case "push" | "small":
                plan.sent(count, num_bytes, generator.randint(-10, num_bytes), generator.random() / 10, now_s)
            case "refused":
                plan.refused(count, now_s)
            case "wait":
                now_s += generator.random() * 2 * LONGEST_EVERY_S
    for _ in range(MAX_TRIAL_PUSHES):
        count = plan.choose(100, BIG, now_s)
        plan.sent(count, BIG, BIG, 0.01, now_s)
    assert plan.settled in COUNTS


@given(st.integers(1, 300), st.integers(1, 16))
def test_parts_are_neighbours_that_tile_the_push_and_differ_by_one_block_at_most(num_blocks, count):
    blocks = list(range(num_blocks))
    parts = [blocks[part] for part in divide(num_blocks, min(count, num_blocks))]
    assert [block for part in parts for block in part] == blocks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(parts)


def test_nothing_divided_is_a_fault():
    with pytest.raises(ZeroDivisionError):
        divide(3, 0)
