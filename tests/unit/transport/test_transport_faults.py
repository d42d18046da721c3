"""Faults come from the seed alone, and as often as they were asked for."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kv_transport.inproc_faults import NO_FAULTS, FaultPlan

EVERYTHING = dict.fromkeys(["delay", "stall", "cut", "corrupt", "duplicate", "reorder", "truncate"], 1.0)


@given(st.integers(), st.integers(1, 10**9))
def test_the_same_seed_gives_the_same_faults(seed, num_bytes):
    plans = [FaultPlan(random.Random(seed), corrupt=0.5, cut=0.5, delay=0.5) for _ in range(2)]
    assert [plans[0].draw(num_bytes) for _ in range(20)] == [plans[1].draw(num_bytes) for _ in range(20)]


@given(st.integers(), st.integers(1, 10**9))
def test_a_plan_without_faults_has_none(seed, num_bytes):
    assert FaultPlan(random.Random(seed)).draw(num_bytes) == NO_FAULTS


@given(st.integers(), st.integers(1, 10**9))
def test_a_plan_of_everything_has_everything_and_within_the_frame(seed, num_bytes):
    faults = FaultPlan(random.Random(seed), **EVERYTHING, delay_s=2.0, stall_s=3.0).draw(num_bytes)
    assert 0 <= faults.flipped_bit < num_bytes * 8
    assert 0 <= faults.delay_s < 2.0
    assert faults.stall_s == 3.0
    assert 0 <= faults.cut_at < 1
    assert 0 <= faults.truncated_at < 1
    assert faults.is_duplicated
    assert faults.is_late


def test_another_fault_more_does_not_move_the_others():
    alone = FaultPlan(random.Random(3), corrupt=0.3)
    together = FaultPlan(random.Random(3), corrupt=0.3, duplicate=0.5, cut=0.5)
    assert [alone.draw(1000).flipped_bit for _ in range(50)] == [together.draw(1000).flipped_bit for _ in range(50)]
