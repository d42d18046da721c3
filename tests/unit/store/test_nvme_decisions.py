"""Where room comes from, and what a trouble of the disk stops."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kv_store.nvme_health import Health, TierState, Trouble
from kv_store.nvme_room import (
    EvictBlock,
    EvictSet,
    Grow,
    NoRoom,
    OtherSet,
    Quarters,
    Room,
    Shrink,
    UseFreeSlot,
    footprint_bytes,
    growth_step,
    next_step,
    over_quota,
)

SLOT = 4096
OLD, NEW = OtherSet("old", 10 * SLOT, 1.0), OtherSet("new", 10 * SLOT, 2.0)


def room(
    num_slots: int, quota_slots: int, quarters: Quarters | None = None, num_free: int = 0, can_grow: bool = True
) -> Room:
    quota_bytes = footprint_bytes(quota_slots, SLOT)
    return Room(num_slots, num_free, SLOT, quota_bytes, quarters or Quarters(), can_grow, step_slots=4)


def test_a_free_slot_is_taken_before_anything_else() -> None:
    assert next_step(room(4, 10, num_free=1)) == UseFreeSlot()


def test_a_set_grows_by_steps_up_to_the_quota() -> None:
    assert next_step(room(0, 10)) == Grow(4)
    assert next_step(room(8, 10)) == Grow(10)
    assert next_step(room(10, 10)) == EvictBlock()


def test_another_set_goes_only_when_the_quota_needs_it_and_the_oldest_first() -> None:
    quarters = Quarters((NEW, OLD), 0)
    assert next_step(room(4, 30, quarters)) == Grow(8)
    assert next_step(room(10, 30, quarters)) == EvictSet("old")
    assert next_step(room(10, 30, quarters.without("old"))) == Grow(14)


def test_strangers_take_room_but_never_go() -> None:
    assert next_step(room(10, 20, Quarters((), 10 * SLOT))) == EvictBlock()
    assert isinstance(next_step(room(0, 5, Quarters((), 5 * SLOT))), NoRoom)
    assert next_step(room(0, 15, Quarters((OLD,), 15 * SLOT))) != EvictSet("old")  # it would not help


def test_a_disk_that_is_full_leaves_evicting_blocks_of_our_own() -> None:
    assert next_step(room(4, 10, can_grow=False)) == EvictBlock()
    assert isinstance(next_step(room(0, 10, can_grow=False)), NoRoom)


def test_at_a_start_over_the_quota_other_sets_go_first_then_slots() -> None:
    quota_bytes = footprint_bytes(10, SLOT)
    assert over_quota(10, SLOT, quota_bytes, Quarters()) is None
    assert over_quota(10, SLOT, quota_bytes, Quarters((NEW, OLD), 0)) == EvictSet("old")
    assert over_quota(12, SLOT, quota_bytes, Quarters()) == Shrink(10)
    assert over_quota(0, SLOT, 0, Quarters()) is None  # nothing is left to go


others = st.lists(st.builds(OtherSet, st.text(max_size=3), st.integers(0, 30 * SLOT), st.floats(0, 9)), max_size=4)


@given(
    st.integers(0, 40),
    st.integers(0, 60 * SLOT),
    st.builds(Quarters, others.map(lambda sets: tuple({s.name: s for s in sets}.values())), st.integers(0, 30 * SLOT)),
)
def test_following_the_steps_ends_and_stays_within_the_quota(
    num_slots: int, quota_bytes: int, quarters: Quarters
) -> None:
    for _ in range(10):
        step = over_quota(num_slots, SLOT, quota_bytes, quarters)
        if step is None:
            break
        num_slots = step.num_slots if isinstance(step, Shrink) else num_slots
        quarters = quarters.without(step.name) if isinstance(step, EvictSet) else quarters
    assert num_slots == 0 or footprint_bytes(num_slots, SLOT) + quarters.num_bytes <= quota_bytes
    for _ in range(40):
        facts = Room(num_slots, 0, SLOT, quota_bytes, quarters, True, 4)
        growth = growth_step(facts)
        if growth is None:
            assert isinstance(next_step(facts), EvictBlock | NoRoom)
            break
        if isinstance(growth, Grow):
            assert growth.num_slots > num_slots
            num_slots = growth.num_slots
            assert footprint_bytes(num_slots, SLOT) + quarters.num_bytes <= quota_bytes
        else:
            quarters = quarters.without(growth.name)
    assert growth_step(msgspec.structs.replace(facts, num_slots=num_slots, quarters=quarters)) is None


def test_each_trouble_stops_what_it_must_and_no_more() -> None:
    table = {
        Trouble.FULL: (True, True, False),
        Trouble.READ_ONLY: (True, False, False),
        Trouble.FAILING: (False, False, False),
        Trouble.STUCK: (False, False, False),
        Trouble.CLOSED: (False, False, False),
    }
    for trouble, can in table.items():
        health = Health(1.0, 30.0)
        assert (health.state, health.can_read, health.can_write, health.can_grow) == (TierState.OK, True, True, True)
        assert health.found(trouble, "why", 0.0)
        assert (health.can_read, health.can_write, health.can_grow) == can
        assert health.state is (TierState.OFF if trouble is Trouble.CLOSED else TierState.DEGRADED)
        assert health.reason == "why"
        assert health.over(trouble) and not health.over(trouble)
        assert (health.state, health.reason) == (TierState.OK, None)


def test_of_several_troubles_the_worst_is_the_reason() -> None:
    health = Health(1.0, 30.0)
    health.found(Trouble.FULL, "full", 0.0)
    health.found(Trouble.STUCK, "stuck", 0.0)
    assert health.reason == "stuck"
    health.over(Trouble.STUCK)
    assert health.reason == "full"


def test_the_backoff_doubles_up_to_its_most_and_starts_anew_after_a_recovery() -> None:
    health = Health(1.0, 5.0)
    now_s, waits_s = 0.0, []
    for _ in range(5):
        health.found(Trouble.FULL, "full", now_s)
        began_s = now_s
        while Trouble.FULL not in health.due(now_s):
            now_s += 0.5
        waits_s.append(now_s - began_s)
    assert waits_s == [1.0, 2.0, 4.0, 5.0, 5.0]
    health.over(Trouble.FULL)
    health.found(Trouble.FULL, "full", now_s)
    assert health.due(now_s + 1.0) == [Trouble.FULL]


def test_errors_of_work_that_was_under_way_do_not_prolong_the_backoff() -> None:
    health = Health(1.0, 30.0)
    assert health.found(Trouble.FAILING, "one", 0.0)
    for _ in range(50):
        assert not health.found(Trouble.FAILING, "another", 0.5)
    assert health.due(1.0) == [Trouble.FAILING]
    assert health.reason == "one"


def test_while_it_opens_the_reason_of_the_first_failure_replaces_that() -> None:
    health = Health(1.0, 30.0)
    health.opens("is being opened", 0.0)
    assert (health.state, health.reason) == (TierState.OFF, "is being opened")
    assert health.found(Trouble.CLOSED, "locked", 0.1)
    assert health.reason == "locked"
    assert health.due(1.1) == [Trouble.CLOSED]
