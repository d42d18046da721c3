"""Restore or compute: the fits, the plan against trying everything, and that noise never makes it much worse."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store.costs import (
    PrefillCost,
    PrefillRate,
    RestoreChoice,
    StoredPart,
    TierCost,
    TierRate,
    plan_restore,
)
from kv_store.robust_fit import FORGET_S, WINDOW
from pd_core.layout import BLOCK_TOKENS

BLOCK_BYTES = 360 * 1024
PREFILL = PrefillRate(step_s=0.01, token_s=1e-3, look_back_s=2.5e-7, chunk_tokens=512)
DRAM = TierRate(latency_s=2e-4, byte_s=1e-10)
NVME = TierRate(latency_s=1e-3, byte_s=5e-10)


def noise(rng: random.Random) -> float:
    """A fifth up or down, and one time in twenty ten times as long."""
    return rng.lognormvariate(0.0, 0.2) * (10.0 if rng.random() < 0.05 else 1.0)


def fitted_tier(true: TierRate, rng: random.Random, num_reads: int = WINDOW) -> TierRate:
    cost = TierCost(TierRate(1e-3, 1e-9))
    for number in range(num_reads):
        num_bytes = BLOCK_BYTES * round(2 ** rng.uniform(0, 11))
        cost.measure(num_bytes, true.seconds(num_bytes) * noise(rng), float(number))
    return cost.rate(float(num_reads))


def step_seconds(true: PrefillRate, start: int, end: int) -> float:
    looked_back = sum(range(start, end))
    return true.step_s + true.token_s * (end - start) + true.look_back_s * looked_back


def fitted_prefill(true: PrefillRate, rng: random.Random, num_steps: int = WINDOW) -> PrefillRate:
    cost = PrefillCost(PREFILL)
    for number in range(num_steps):
        start = 512 * round(2 ** rng.uniform(0, 6) - 1)
        end = start + rng.choice([512, 512, rng.randint(1, 512)])
        cost.measure(start, end, step_seconds(true, start, end) * noise(rng), float(number))
    return cost.rate(float(num_steps))


# fits


@pytest.mark.parametrize("byte_s", [1e-11, 1e-9, 1e-7, 1e-5])
@pytest.mark.parametrize("latency_s", [1e-5, 1e-3, 0.1])
def test_a_tier_is_known_in_spite_of_noise_and_stalls(latency_s: float, byte_s: float) -> None:
    true = TierRate(latency_s, byte_s)
    for seed in range(3):
        found = fitted_tier(true, random.Random(seed))
        for num_blocks in (1, 30, 1000):
            num_bytes = num_blocks * BLOCK_BYTES
            assert found.seconds(num_bytes) == pytest.approx(true.seconds(num_bytes), rel=0.2, abs=1e-4)


@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
def test_prefill_is_known_by_position(factor: float) -> None:
    true = PrefillRate(PREFILL.step_s * factor, PREFILL.token_s * factor, PREFILL.look_back_s * factor, 512)
    for seed in range(3):
        found = fitted_prefill(true, random.Random(seed))
        for start, end in ((0, 4000), (0, 30000), (16000, 30000)):
            assert found.seconds(start, end) == pytest.approx(true.seconds(start, end), rel=0.2)


def test_without_measurements_what_was_believed_stands() -> None:
    assert TierCost(NVME).rate(0.0) == TierRate(pytest.approx(NVME.latency_s), pytest.approx(NVME.byte_s))
    rate = PrefillCost(PREFILL).rate(0.0)
    assert rate.seconds(0, 4000) == pytest.approx(PREFILL.seconds(0, 4000))
    assert rate.chunk_tokens == 512


def test_one_stalled_read_is_no_slow_disk() -> None:
    cost = TierCost(NVME)
    cost.measure(100 * BLOCK_BYTES, 5.0, 0.0)
    assert cost.rate(0.0).seconds(100 * BLOCK_BYTES) < 2 * NVME.seconds(100 * BLOCK_BYTES)


def test_a_disk_that_gets_slow_is_noticed_within_two_thirds_of_a_window_and_when_it_recovers() -> None:
    cost, num_bytes = TierCost(NVME), 100 * BLOCK_BYTES
    clock = itertools.count()
    for byte_s in (5e-10, 1e-7, 5e-10):
        true = TierRate(1e-3, byte_s)
        for _ in range(WINDOW * 5 // 8):
            cost.measure(num_bytes, true.seconds(num_bytes), float(next(clock)))
        assert cost.rate(0.0).seconds(num_bytes) == pytest.approx(true.seconds(num_bytes), rel=0.2)


def test_reads_of_one_size_only_say_what_that_size_takes() -> None:
    cost = TierCost(TierRate(1e-3, 1e-9))
    for number in range(WINDOW):
        cost.measure(100 * BLOCK_BYTES, 0.5, float(number))
    rate = cost.rate(WINDOW)
    assert rate.seconds(100 * BLOCK_BYTES) == pytest.approx(0.5, rel=0.05)
    assert rate.latency_s >= 0.0
    assert rate.byte_s >= 0.0


def test_old_measurements_are_forgotten_so_that_a_tier_gets_another_chance() -> None:
    cost = TierCost(NVME)
    for number in range(WINDOW):
        cost.measure(100 * BLOCK_BYTES, 60.0, float(number))
    assert cost.rate(WINDOW).seconds(100 * BLOCK_BYTES) > 50.0
    later_s = WINDOW + FORGET_S
    assert cost.rate(later_s).seconds(100 * BLOCK_BYTES) == pytest.approx(NVME.seconds(100 * BLOCK_BYTES))


@pytest.mark.parametrize("took_s", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_is_no_measurement(took_s: float) -> None:
    cost = TierCost(NVME)
    before = cost.rate(0.0)
    for _ in range(WINDOW):
        cost.measure(BLOCK_BYTES, took_s, 0.0)
    assert cost.rate(0.0) == before


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.floats(1e-9, 1e6)), min_size=1, max_size=2 * WINDOW), st.floats(0, 1e9)
)
def test_whatever_is_measured_costs_are_finite_and_never_negative(reads: list[tuple[int, float]], at_s: float) -> None:
    cost = TierCost(NVME)
    for num_bytes, took_s in reads:
        cost.measure(num_bytes, took_s, at_s)
        rate = cost.rate(at_s)
        assert 0.0 <= rate.latency_s < math.inf
        assert 0.0 <= rate.byte_s < math.inf


# the plan


def true_seconds(
    num_blocks: int,
    num_prompt: int,
    num_cached: int,
    parts: list[StoredPart],
    tiers: dict[str, TierRate],
    prefill: PrefillRate,
) -> float:
    """What it takes to restore so many blocks and to compute what is left; written anew."""
    owners = [part.tier for part in parts for _ in range(part.num_blocks)][:num_blocks]
    reads = [tiers[tier].seconds(owners.count(tier) * BLOCK_BYTES) for tier in set(owners)]
    start = (num_cached + num_blocks) * BLOCK_TOKENS
    steps = 1 + (num_prompt - start) / prefill.chunk_tokens
    looked_back = sum(range(start, num_prompt))
    compute_s = prefill.step_s * steps + prefill.token_s * (num_prompt - start) + prefill.look_back_s * looked_back
    return max(reads, default=0.0) + compute_s


RATES = st.builds(TierRate, st.sampled_from([0.0, 1e-4, 1e-2, 1.0]), st.sampled_from([0.0, 1e-10, 3e-9, 3e-8, 1e-6]))
PREFILLS = st.builds(
    PrefillRate,
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([0.0, 1e-7, 1e-5]),
    st.sampled_from([16, 512]),
)
PARTS = st.lists(st.builds(StoredPart, st.sampled_from(["dram", "nvme", "far"]), st.integers(0, 12)), max_size=5)


@settings(max_examples=400)
@given(PARTS, st.integers(0, 6), st.integers(1, 40), st.tuples(RATES, RATES, RATES), PREFILLS)
def test_no_front_of_what_is_stored_is_quicker_than_the_planned_one(
    parts: list[StoredPart],
    num_cached: int,
    num_tail: int,
    rates: tuple[TierRate, TierRate, TierRate],
    prefill: PrefillRate,
) -> None:
    tiers = dict(zip(("dram", "nvme", "far"), rates, strict=True))
    num_stored = sum(part.num_blocks for part in parts)
    num_prompt = (num_cached + num_stored) * BLOCK_TOKENS + num_tail
    plan = plan_restore(num_prompt, num_cached, parts, tiers, prefill, BLOCK_BYTES)
    taken_s = [
        true_seconds(num_blocks, num_prompt, num_cached, parts, tiers, prefill) for num_blocks in range(num_stored + 1)
    ]
    assert plan.total_s == pytest.approx(taken_s[plan.num_blocks])
    assert plan.total_s <= min(taken_s) * (1 + 1e-9)
    match plan.choice:
        case RestoreChoice.REUSE:
            assert (num_stored, num_cached > 0) == (0, True)
        case RestoreChoice.RESTORE:
            assert plan.num_blocks == num_stored > 0
        case RestoreChoice.RESTORE_FRONT:
            assert 0 < plan.num_blocks < num_stored
        case RestoreChoice.RECOMPUTE:
            assert plan.num_blocks == 0


def test_a_chat_that_comes_back_is_restored_and_the_plan_says_so() -> None:
    plan = plan_restore(4020, 0, [StoredPart("dram", 250)], {"dram": DRAM}, PREFILL, BLOCK_BYTES)
    assert (plan.choice, plan.num_blocks) == (RestoreChoice.RESTORE, 250)
    assert plan.reason == (
        "restore all 250 blocks from dram in 9.4 ms, compute 20 tokens in 50.4 ms; restoring nothing takes 6.13 s"
    )


def test_a_disk_slower_than_computing_is_not_read() -> None:
    slow = TierRate(latency_s=0.01, byte_s=1e-6)
    plan = plan_restore(4020, 0, [StoredPart("nvme", 250)], {"nvme": slow}, PREFILL, BLOCK_BYTES)
    assert (plan.choice, plan.num_blocks, plan.restore_s) == (RestoreChoice.RECOMPUTE, 0, 0.0)
    assert plan.reason == "compute 4020 tokens in 6.13 s; restoring all 250 blocks takes 92.22 s"


def test_the_front_in_memory_is_restored_and_the_rest_on_a_slow_disk_computed() -> None:
    tiers = {"dram": DRAM, "nvme": TierRate(latency_s=0.01, byte_s=1e-6)}
    parts = [StoredPart("dram", 200), StoredPart("nvme", 50)]
    plan = plan_restore(4020, 0, parts, tiers, PREFILL, BLOCK_BYTES)
    assert (plan.choice, plan.num_blocks) == (RestoreChoice.RESTORE_FRONT, 200)
    assert plan.reason == (
        "restore 200 of 250 blocks from dram in 7.6 ms, compute 820 tokens in 1.59 s; "
        "restoring nothing takes 6.13 s, restoring all 250 blocks takes 18.49 s"
    )


def test_a_slow_tier_is_read_as_far_as_it_keeps_up_with_the_others() -> None:
    """Both read at the same time: what comes while the other one reads costs nothing."""
    tiers = {"dram": TierRate(0.0, 1e-9), "nvme": TierRate(0.0, 2e-7)}
    parts = [StoredPart("dram", 1000), StoredPart("nvme", 1000)]
    plan = plan_restore(2000 * 16 + 1, 0, parts, tiers, PrefillRate(0.0, 1e-3, 0.0, 512), BLOCK_BYTES)
    assert (plan.choice, plan.num_blocks) == (RestoreChoice.RESTORE_FRONT, 1005)


def test_of_equally_quick_ways_that_which_computes_least_is_taken() -> None:
    """So that the prefill worker is free for others. A block takes a second both ways."""
    tiers, prefill = {"nvme": TierRate(0.0, 2.0**-10)}, PrefillRate(0.0, 2.0**-4, 0.0, 512)
    plan = plan_restore(161, 0, [StoredPart("nvme", 10)], tiers, prefill, block_bytes=2**10)
    assert (plan.choice, plan.num_blocks) == (RestoreChoice.RESTORE, 10)


def test_where_all_is_here_there_is_nothing_to_choose() -> None:
    plan = plan_restore(100, 6, [], {}, PREFILL, BLOCK_BYTES)
    assert (plan.choice, plan.num_blocks) == (RestoreChoice.REUSE, 0)
    assert plan.reason == "reuse 6 blocks, compute 4 tokens in 14.2 ms; nothing more is stored"
    plan = plan_restore(100, 0, [StoredPart("dram", 0)], {}, PREFILL, BLOCK_BYTES)
    assert (plan.choice, plan.reason) == (RestoreChoice.RECOMPUTE, "compute 100 tokens in 113.2 ms; nothing is stored")


def test_the_last_token_is_always_computed() -> None:
    for num_prompt in (64, 63):
        with pytest.raises(ValueError, match="do not fit"):
            plan_restore(num_prompt, 1, [StoredPart("dram", 3)], {"dram": DRAM}, PREFILL, BLOCK_BYTES)


def test_in_spite_of_noise_no_choice_is_a_tenth_slower_than_the_better_one() -> None:
    """Over tiers of ten megabytes to a hundred gigabytes a second, prefill of 100 to 100,000 tokens a second."""
    rng = random.Random(5)
    chosen: set[RestoreChoice] = set()
    for byte_s, latency_s, factor in itertools.product(
        [10.0**-power for power in (7, 7.5, 8, 8.5, 9, 9.5, 10, 11)], [1e-4, 0.02], [0.01, 0.1, 0.3, 1.0, 10.0]
    ):
        true_tier = TierRate(latency_s, byte_s)
        true_prefill = PrefillRate(0.01 * factor, 1e-3 * factor, 2.5e-7 * factor, 512)
        tier, prefill = fitted_tier(true_tier, rng), fitted_prefill(true_prefill, rng)
        for num_stored in (4, 30, 250, 1900):
            num_prompt = num_stored * BLOCK_TOKENS + 20
            plan = plan_restore(num_prompt, 0, [StoredPart("nvme", num_stored)], {"nvme": tier}, prefill, BLOCK_BYTES)
            chosen.add(plan.choice)

            def takes_s(num_blocks: int, num_prompt: int = num_prompt) -> float:
                read_s = true_tier.seconds(num_blocks * BLOCK_BYTES) if num_blocks else 0.0  # noqa: B023
                return read_s + true_prefill.seconds(num_blocks * BLOCK_TOKENS, num_prompt)  # noqa: B023

            assert takes_s(plan.num_blocks) <= 1.1 * min(takes_s(0), takes_s(num_stored)), (
                f"{plan} at {true_tier}, {true_prefill}"
            )
    assert chosen == {RestoreChoice.RESTORE, RestoreChoice.RECOMPUTE}
