from __future__ import annotations

import msgspec
import pytest
from cluster_views import BOTH, RULES, cluster, endpoint, ref, status
from hypothesis import given
from hypothesis import strategies as st

from pd_core.layout import blocks_for
from pd_core.messages import WorkerState
from router.progress import OurWork
from router.view import (
    ClusterView,
    Health,
    Limits,
    WorkerRef,
    admitted,
    answered,
    computed,
    heard,
    lost,
    placed,
    preempted,
    refused,
    released,
    resumed,
    set_workers,
)

D0 = WorkerRef("d0", "boot-1")


def health(view: ClusterView, name: str, now_s: float) -> Health:
    return view.workers[name].health(now_s, RULES)


def test_a_worker_is_starting_until_it_is_heard() -> None:
    view = set_workers(ClusterView(RULES), [endpoint("d0")], now_s=0.0)
    assert health(view, "d0", 1.0) is Health.STARTING
    assert health(heard(view, status("d0"), 1.0), "d0", 1.0) is Health.READY


@pytest.mark.parametrize(
    ("silent_s", "expected"),
    [(0.0, Health.READY), (1.99, Health.READY), (2.0, Health.SUSPECT), (9.99, Health.SUSPECT), (10.0, Health.DEAD)],
)
def test_silence_makes_a_worker_suspect_and_then_dead(silent_s: float, expected: Health) -> None:
    assert health(cluster("d0", now_s=5.0), "d0", 5.0 + silent_s) is expected


def test_a_suspect_that_is_heard_again_is_ready_again() -> None:
    view = cluster("d0")
    assert health(view, "d0", 5.0) is Health.SUSPECT
    assert health(heard(view, status("d0", 1), 5.0), "d0", 5.0) is Health.READY


def test_a_lost_connection_is_death_at_once_and_a_heartbeat_on_a_new_one_is_life() -> None:
    view = lost(heard(cluster("d0"), status("d0", 7), 0.1), D0)
    assert health(view, "d0", 0.1) is Health.DEAD
    # The new connection may count its heartbeats from the beginning.
    assert health(heard(view, status("d0", 0), 0.2), "d0", 0.2) is Health.READY


def test_a_draining_worker_is_heard_but_not_ready() -> None:
    view = heard(cluster("d0"), status("d0", 1, state=WorkerState.DRAINING), 0.1)
    assert health(view, "d0", 0.1) is Health.DRAINING


def test_a_heartbeat_of_an_earlier_boot_changes_nothing() -> None:
    view = set_workers(cluster("d0"), [endpoint("d0", "boot-2")], now_s=1.0)
    assert heard(view, status("d0", 99, incarnation="boot-1"), 1.1) is view
    assert health(view, "d0", 1.1) is Health.STARTING


def test_a_heartbeat_that_comes_late_changes_nothing() -> None:
    view = heard(cluster("d0"), status("d0", 5, free=10), 1.0)
    assert heard(view, status("d0", 4, free=64), 1.1) is view
    assert heard(view, status("d0", 5, free=64), 1.1) is view
    assert view.workers["d0"].num_free_blocks == 10


def test_a_heartbeat_of_a_stranger_changes_nothing() -> None:
    view = cluster("d0")
    assert heard(view, status("d9"), 1.0) is view


def test_a_new_boot_begins_without_the_work_of_the_old_one() -> None:
    view = placed(cluster("d0", "p0"), D0, "a", OurWork(num_tokens=10, num_blocks=1))
    view = set_workers(view, [endpoint("d0", "boot-2"), endpoint("p0")], now_s=1.0)
    assert view.workers["d0"].num_ours == 0
    assert released(view, D0, "a") is view
    assert view.workers["p0"].status is not None  # the other stays as it was


def test_blocks_that_we_asked_for_are_not_free_before_the_heartbeat_says_so() -> None:
    view = placed(cluster("d0"), D0, "a", OurWork(num_tokens=100, num_blocks=7))
    assert view.workers["d0"].num_free_blocks == 57
    # This heartbeat may have been made before the reservation: it does not count yet.
    view = heard(view, status("d0", 1, free=64), 0.1)
    assert view.workers["d0"].num_free_blocks == 57
    view = heard(admitted(view, D0, "a"), status("d0", 2, free=57), 0.2)
    assert view.workers["d0"].num_free_blocks == 57
    view = released(view, D0, "a")
    assert view.workers["d0"].num_free_blocks == 64  # most likely; the next heartbeat knows
    view = heard(view, status("d0", 3, free=60), 0.3)
    assert view.workers["d0"].num_free_blocks == 60


def test_what_no_heartbeat_has_counted_is_not_returned_twice() -> None:
    view = placed(cluster("d0"), D0, "a", OurWork(num_tokens=100, num_blocks=7))
    view = released(admitted(view, D0, "a"), D0, "a")
    assert view.workers["d0"].num_free_blocks == 64
    assert released(view, D0, "a") is view


def test_a_refusal_stands_until_the_next_heartbeat() -> None:
    view = refused(cluster("d0"), D0)
    assert view.workers["d0"].has_refused
    assert not heard(view, status("d0", 1), 0.1).workers["d0"].has_refused


def test_limits_are_those_of_the_smallest_worker_and_outlive_it() -> None:
    view = set_workers(ClusterView(RULES), [endpoint(name) for name in ("p0", "d0", "d1")], 0.0)
    view = heard(view, status("d0", total=20), 0.0)
    assert view.limits is None  # no prefill worker yet
    view = heard(view, status("p0", total=40, context_tokens=400), 0.0)
    view = heard(view, status("d1", total=10), 0.0)
    assert view.limits == Limits(context_tokens=400, prefill_pool_tokens=640, decode_pool_tokens=160)
    assert view.limits.num_tokens == 160
    view = heard(lost(view, WorkerRef("p0", "boot-1")), status("d0", 1, total=20), 0.1)
    assert view.limits is not None
    assert view.limits.num_tokens == 160


def test_without_prefill_workers_the_limits_are_those_of_the_decode_workers() -> None:
    view = heard(cluster("d0", rules=BOTH), status("d0", 1, total=10, context_tokens=400), 0.1)
    assert view.limits == Limits(context_tokens=400, prefill_pool_tokens=None, decode_pool_tokens=160)
    assert view.limits.num_tokens == 160


def test_a_heartbeat_tells_how_far_the_prompts_are_and_the_shortest_is_taken_to_be_the_first() -> None:
    view = heard(cluster("p0"), status("p0", 1, counters={"prefill_tokens_total": 1000}), 0.0)
    for work_id, num_tokens in (("long", 2000), ("short", 100)):
        view = placed(view, ref("p0"), work_id, OurWork(num_tokens, 7, num_to_compute=num_tokens))
    view = heard(view, status("p0", 2, counters={"prefill_tokens_total": 1356}), 0.5)
    left = {work_id: work.num_to_compute for work_id, work in view.workers["p0"].ours.items()}
    assert left == {"short": 1, "long": 2000 - 356 + 99}  # the last token of one is left until its first token comes


def test_tokens_of_a_prompt_that_is_known_to_be_done_are_not_counted_for_another() -> None:
    view = heard(cluster("p0"), status("p0", 1, counters={"prefill_tokens_total": 0}), 0.0)
    for work_id, num_tokens in (("long", 2000), ("short", 100)):
        view = placed(view, ref("p0"), work_id, OurWork(num_tokens, 7, num_to_compute=num_tokens))
    view = computed(view, ref("p0"), "short", 0.1)
    view = heard(view, status("p0", 2, counters={"prefill_tokens_total": 356}), 0.5)
    assert view.workers["p0"].num_to_compute == 2000 - 256


@given(
    st.lists(st.integers(1, 3000), max_size=6),
    st.lists(st.integers(0, 5000), max_size=6),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_whatever_a_worker_says_it_has_computed_what_is_left_never_grows_and_never_is_nothing(
    prompts: list[int], steps: list[int], done: list[int]
) -> None:
    view, total, now_s = cluster("p0"), 0, 0.0
    for number, num_tokens in enumerate(prompts):
        view = placed(view, ref("p0"), str(number), OurWork(num_tokens, 1, num_to_compute=num_tokens))
    over: set[str] = set()
    for number, num_computed in enumerate(steps):
        if number < len(done):
            over.add(str(done[number]))
            view = computed(view, ref("p0"), str(done[number]), now_s)
        before = view.workers["p0"].ours
        total, now_s = total + num_computed, now_s + 0.5
        view = heard(view, status("p0", number + 1, counters={"prefill_tokens_total": total}), now_s)
        for work_id, work in view.workers["p0"].ours.items():
            assert work.num_to_compute <= before[work_id].num_to_compute
            assert (work.num_to_compute == 0) == (work_id in over)


def test_progress_is_when_more_tokens_were_heard_of_and_silence_or_idleness_is_none() -> None:
    view = heard(cluster("d0"), status("d0", 1, counters={"decode_tokens_total": 5}), 1.0)
    assert view.workers["d0"].progress_s == 1.0
    view = heard(view, status("d0", 2, counters={"decode_tokens_total": 5}), 2.0)
    assert view.workers["d0"].progress_s == 1.0
    view = heard(view, status("d0", 3, counters={"decode_tokens_total": 5, "recomputed_tokens_total": 16}), 3.0)
    assert view.workers["d0"].progress_s == 3.0


def test_blocks_of_one_that_was_preempted_are_not_expected_back_from_it() -> None:
    view = placed(cluster("d0"), D0, "a", OurWork(num_tokens=100, num_blocks=7))
    view = heard(admitted(view, D0, "a"), status("d0", 1, free=57), 0.1)
    view = heard(preempted(view, D0, "a"), status("d0", 2, free=64), 0.2)
    assert view.workers["d0"].has_preempted
    assert released(view, D0, "a").workers["d0"].num_free_blocks == 64
    assert not resumed(view, D0, "a").workers["d0"].has_preempted


def test_what_has_grown_gives_back_what_it_grew_to() -> None:
    view = placed(cluster("d0"), D0, "a", OurWork(num_tokens=80, num_blocks=5, num_most_blocks=8))
    view = heard(admitted(view, D0, "a"), status("d0", 1, free=8, total=16), 0.1)
    assert released(view, D0, "a", num_made=1).workers["d0"].num_free_blocks == 13
    assert released(view, D0, "a", num_made=18).workers["d0"].num_free_blocks == 15
    assert released(view, D0, "a", num_made=48).workers["d0"].num_free_blocks == 16


def test_the_usual_answer_follows_what_comes() -> None:
    view = cluster("d0")
    for _ in range(60):
        view = answered(view, 48)
    assert 48 <= view.usual_answer_tokens < 50


@given(st.integers(1, 10_000))
def test_blocks_hold_the_tokens_and_not_one_block_more(num_tokens: int) -> None:
    num_blocks = blocks_for(num_tokens)
    assert 16 * (num_blocks - 1) < num_tokens <= 16 * num_blocks


@given(st.lists(st.tuples(st.sampled_from(["boot-1", "boot-2"]), st.integers(0, 20)), max_size=40))
def test_whatever_the_order_the_newest_heartbeat_of_this_boot_is_the_one_believed(
    arrivals: list[tuple[str, int]],
) -> None:
    view = set_workers(ClusterView(RULES), [endpoint("d0", "boot-1")], 0.0)
    for incarnation, number in arrivals:
        view = heard(view, status("d0", number, incarnation=incarnation, free=number), 0.0)
    mine = [number for incarnation, number in arrivals if incarnation == "boot-1"]
    worker = view.workers["d0"]
    assert (worker.status.number if worker.status else None) == (max(mine) if mine else None)


def test_a_view_is_a_value() -> None:
    view = cluster("d0")
    changed = placed(view, D0, "a", OurWork(num_tokens=1, num_blocks=1))
    assert view.workers["d0"].num_ours == 0
    assert changed.workers["d0"].num_ours == 1
    with pytest.raises(AttributeError):
        view.num_placed = 3  # type: ignore[misc]
    assert msgspec.structs.asdict(view)["num_placed"] == 0
