from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from cluster_views import BOTH, RULES, cluster, endpoint, put, ref, status, take
from hypothesis import given
from hypothesis import strategies as st

from pd_core.messages import WorkerState
from router.policy import Demand, Obstacle, Placement, missing_role, place, room_to_keep
from router.progress import OurWork
from router.view import (
    ClusterView,
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

SMALL = Demand(num_prompt=10, max_tokens=6)
SHORT = Demand(num_prompt=64, max_tokens=6)
LONG = Demand(num_prompt=4000, max_tokens=6)


def chosen(demand: Demand, view: ClusterView, now_s: float = 0.0) -> Placement:
    placement = place(demand, view, now_s)
    assert isinstance(placement, Placement), placement
    return placement


def large(*names: str, free: int = 4096) -> ClusterView:
    """Workers with room for many long prompts."""
    view = cluster(*names)
    for name in names:
        view = heard(view, status(name, 1, free=free, total=free, context_tokens=8192), 0.0)
    return view


def test_a_request_goes_to_ready_workers_of_both_roles() -> None:
    placement = chosen(SMALL, cluster("p0", "d0"))
    assert (placement.prefill, placement.decode) == ("p0", "d0")
    assert "p0" in placement.reason


def test_where_decode_computes_prompts_it_is_the_only_worker() -> None:
    placement = chosen(SMALL, cluster("d0", rules=BOTH))
    assert (placement.prefill, placement.decode) == (None, "d0")
    assert "both on d0" in placement.reason


def test_nothing_goes_anywhere_while_a_role_is_missing() -> None:
    assert place(SMALL, cluster("p0"), 0.0) is Obstacle.NOBODY_READY
    assert place(SMALL, cluster("d0"), 0.0) is Obstacle.NOBODY_READY


def test_a_short_prompt_need_not_wait_for_a_long_one_and_a_long_one_waits_for_another() -> None:
    view = put(large("p0", "d0"), "long", LONG)
    assert chosen(SHORT, view).num_ahead == 0
    assert place(LONG, view, 0.0) is Obstacle.PROMPTS_FIRST
    nearly_done = heard(view, status("p0", 2, free=3800, total=4096, counters={"prefill_tokens_total": 3800}), 1.0)
    assert chosen(LONG, nearly_done, 1.0).num_ahead == 200  # one chunk, and then it is its turn


def test_as_many_short_prompts_are_opened_as_start_within_one_chunk() -> None:
    """A chunk is 256 tokens: four are computed in one step, and a fifth waits for that one step."""
    view = msgspec.structs.replace(large("p0", "d0"), rules=msgspec.structs.replace(RULES, max_prefill=16))
    for number in range(5):
        assert chosen(SHORT, view).num_ahead == 64 * number
        view = put(view, str(number), SHORT)
    assert place(SHORT, view, 0.0) is Obstacle.PROMPTS_FIRST
    assert place(SHORT, view, 1.9) is Obstacle.PROMPTS_FIRST  # those that were there before have waited as long
    assert isinstance(place(SHORT, computed(view, ref("p0"), "3", 0.1), 0.1), Placement)


def test_a_long_prompt_that_has_waited_is_let_in_however_many_short_ones_came_after_it() -> None:
    view = large("p0", "d0")
    rules = msgspec.structs.replace(RULES, max_prefill=16)
    view = msgspec.structs.replace(view, rules=rules)
    for name in ("p0", "d0"):
        view = heard(view, status(name, 2, free=4096, total=4096), 20.0)
    for number in range(5):
        view = put(view, str(number), msgspec.structs.replace(SHORT, since_s=20.0), 20.0)
    waited = msgspec.structs.replace(LONG, since_s=0.0)
    assert place(msgspec.structs.replace(LONG, since_s=20.0), view, 20.0) is Obstacle.PROMPTS_FIRST
    assert isinstance(place(waited, view, 20.0), Placement)


def test_a_prefill_worker_with_all_its_places_taken_gets_no_more() -> None:
    view = cluster("p0", "d0")
    for i in range(4):
        view = placed(view, ref("p0"), f"r{i}", OurWork(1, 0, is_admitted=True))
    assert place(SMALL, view, 0.0) is Obstacle.PREFILL_FULL
    assert isinstance(place(SMALL, released(view, ref("p0"), "r2"), 0.0), Placement)


def test_a_prefill_worker_needs_room_for_the_prompt_until_the_prefill_leg_is_over() -> None:
    """A pool of 40 blocks and prompts of 20: two fit, though the heartbeat still says that all is free."""
    view = heard(cluster("p0", "d0", "d1"), status("p0", 1, free=40, total=40), 0.0)
    big = Demand(num_prompt=320, max_tokens=1)
    for work_id in ("a", "b"):
        view = computed(put(view, work_id, big), ref("p0"), work_id, 0.0)
    assert place(SMALL, view, 0.0) is Obstacle.PREFILL_FULL
    view = heard(view, status("p0", 2, free=0, total=40), 0.1)
    assert place(SMALL, view, 0.1) is Obstacle.PREFILL_FULL
    placement = chosen(big, released(view, ref("p0"), "a"), 0.1)
    assert "20 blocks free, 20 needed; decode" in placement.reason


def test_a_decode_worker_needs_room_for_the_prompt_and_a_little_growth() -> None:
    view = heard(cluster("p0", "d0"), status("d0", 1, free=5), 0.0)
    assert isinstance(place(Demand(num_prompt=48, max_tokens=400), view, 0.0), Placement)
    assert place(Demand(num_prompt=49, max_tokens=400), view, 0.0) is Obstacle.DECODE_FULL
    assert isinstance(place(Demand(num_prompt=79, max_tokens=2), view, 0.0), Placement)  # it never grows


def test_growth_of_those_that_run_is_left_free_too() -> None:
    """16 blocks: 5 and 2 to grow; 5 and 2, and the first's 2; then 6 are left."""
    demand = Demand(num_prompt=80, max_tokens=48)
    view = heard(cluster("p0", "d0"), status("d0", 1, free=16, total=16), 0.0)
    for work_id in ("a", "b"):
        view = computed(put(view, work_id, demand), ref("p0"), work_id, 0.0)
    assert place(demand, view, 0.0) is Obstacle.DECODE_FULL
    assert place(SMALL, view, 0.0) != Obstacle.DECODE_FULL  # 1 block and 4 of growth


def test_a_pool_is_not_promised_to_so_many_that_they_could_never_all_finish_there() -> None:
    """Answers as long as usual: 64 blocks take ten requests that will have 10 each, though 21 would fit at first."""
    view = msgspec.structs.replace(cluster("p0", "d0"), usual_answer_tokens=144.0)
    demand = Demand(num_prompt=16, max_tokens=1000)
    for number in range(9):
        view = put(view, str(number), demand)
        view = released(computed(view, ref("p0"), str(number), 0.0), ref("p0"), str(number))
    assert place(demand, view, 0.0) is Obstacle.DECODE_FULL
    assert isinstance(place(Demand(16, max_tokens=3), view, 0.0), Placement)


def test_alone_even_the_largest_request_is_placed() -> None:
    view = heard(cluster("p0", "d0"), status("d0", 1, free=4, total=4), 0.0)
    assert isinstance(place(Demand(num_prompt=10, max_tokens=54), view, 0.0), Placement)


def test_where_a_sequence_was_preempted_nobody_new_is_placed_until_it_goes_on() -> None:
    view = put(cluster("p0", "d0"), "a", SMALL)
    view = preempted(computed(view, ref("p0"), "a", 0.0), ref("d0"), "a")
    assert place(SMALL, view, 0.0) is Obstacle.DECODE_FULL
    assert isinstance(place(SMALL, resumed(view, ref("d0"), "a"), 0.0), Placement)


@pytest.mark.parametrize("name", ["d0", "p0"])
def test_a_worker_that_has_refused_is_asked_again_after_its_next_heartbeat(name: str) -> None:
    view = refused(cluster("p0", "d0"), ref(name))
    assert isinstance(place(SMALL, view, 0.0), Obstacle)
    assert isinstance(place(SMALL, heard(view, status(name, 1), 0.1), 0.1), Placement)


def test_a_worker_that_is_kept_for_another_request_is_not_chosen() -> None:
    view = cluster("p0", "d0", "d1")
    for _ in range(3):
        placement = place(SMALL, view, 0.0, frozenset({"d0"}))
        assert isinstance(placement, Placement)
        assert placement.decode == "d1"
    assert place(SMALL, view, 0.0, frozenset({"d0", "d1"})) is Obstacle.DECODE_FULL


def test_the_worker_to_keep_for_a_large_request_is_the_one_with_most_room_whose_pool_can_hold_it() -> None:
    view = cluster("p0", "d0", "d1", "d2")
    for name, free, total in (("d0", 5, 64), ("d1", 9, 64), ("d2", 10, 10)):
        view = heard(view, status(name, 1, free=free, total=total), 0.0)
    assert room_to_keep("decode", Demand(num_prompt=320, max_tokens=10), view, 0.0) == "d1"
    assert room_to_keep("decode", Demand(num_prompt=1600, max_tokens=10), view, 0.0) is None


@pytest.mark.parametrize("rules", [RULES, BOTH], ids=["two phases", "both on one"])
@pytest.mark.parametrize("num_prompt", [10, 64, 250])
def test_sixteen_simultaneous_requests_spread_evenly_over_two_idle_workers(num_prompt: int, rules: object) -> None:
    """The heartbeat is from before all of them; the oldest prompt is done whenever all workers are taken."""
    names = ["p0", "p1", "d0", "d1"] if rules is RULES else ["d0", "d1"]
    view = msgspec.structs.replace(large(*names), rules=rules)
    demand = Demand(num_prompt, max_tokens=6)
    computing, decodes = Counter[str](), Counter[str]()
    starting: list[tuple[str, str]] = []
    for i in range(16):
        while not isinstance(placement := place(demand, view, 0.0), Placement):
            name, work_id = starting.pop(0)
            view = computed(view, ref(name), work_id, 0.1)
            if rules is RULES:
                view = released(view, ref(name), work_id)
        view = take(view, placement, f"r{i}", demand)
        name = placement.prefill or placement.decode
        starting.append((name, f"r{i}"))
        computing[name] += 1
        decodes[placement.decode] += 1
    assert all(6 <= count <= 10 for count in (*computing.values(), *decodes.values()))
    assert len(computing) == len(decodes) == 2


@pytest.mark.parametrize("at_once", [1, 4, 12])
def test_a_slow_prefill_worker_gets_few_of_many_requests(at_once: int) -> None:
    """p1 needs ten times as long for each; 200 unique prompts, never more than `at_once` of them under way."""
    view, now_s = large("p0", "p1", "d0"), 0.0
    ends: list[tuple[float, str, str]] = []
    free_from_s = {"p0": 0.0, "p1": 0.0}
    count = Counter[str]()
    for i in range(200):
        placement = place(SHORT, view, now_s) if len(ends) < at_once else None
        while not isinstance(placement, Placement):
            ends.sort()
            now_s, name, work_id = ends.pop(0)
            view = released(computed(view, ref(name), work_id, now_s), ref(name), work_id)
            view = released(view, ref("d0"), work_id)
            for number, other in enumerate(view.workers):  # heartbeats
                view = heard(view, status(other, 10 * i + number + 2, free=4096, total=4096), now_s)
            placement = place(SHORT, view, now_s)
        name = placement.prefill or ""
        view = take(view, placement, f"r{i}", SHORT, now_s)
        free_from_s[name] = max(now_s, free_from_s[name]) + (0.5 if name == "p1" else 0.05)
        ends.append((free_from_s[name], name, f"r{i}"))
        count[name] += 1
    assert 1 <= count["p1"] < 50


def test_requests_that_come_one_by_one_find_every_equal_worker_in_turn() -> None:
    view = cluster("p0", "p1", "d0", "d1")
    workers = Counter[str]()
    for i in range(20):
        now_s = i * 1.0
        for name in view.workers:
            view = heard(view, status(name, i + 1), now_s)
        placement = chosen(SMALL, view, now_s)
        view = take(view, placement, str(i), SMALL, now_s)
        # p1 is a third slower than p0: not clearly slow.
        view = computed(
            view, ref(placement.prefill or ""), str(i), now_s + (0.04 if placement.prefill == "p1" else 0.03)
        )
        for name in (placement.prefill or "", placement.decode):
            view = released(view, ref(name), str(i))
            workers[name] += 1
    assert workers == {"p0": 10, "p1": 10, "d0": 10, "d1": 10}


def test_what_was_predicted_is_said_with_the_placement() -> None:
    view = put(cluster("p0", "d0"), "a", SHORT)
    assert chosen(SHORT, view).expected_s is None
    view = computed(view, ref("p0"), "a", 0.2)
    placement = chosen(SHORT, view, 0.2)
    assert (placement.num_ahead, placement.expected_s) == (0, pytest.approx(0.2))


@given(
    silent_s=st.lists(st.floats(0, 15), min_size=6, max_size=6),
    states=st.lists(st.sampled_from(WorkerState), min_size=6, max_size=6),
    is_lost=st.lists(st.booleans(), min_size=6, max_size=6),
    free=st.lists(st.integers(0, 64), min_size=6, max_size=6),
    num_prompt=st.integers(1, 600),
)
def test_only_workers_that_are_ready_and_have_room_are_ever_chosen(
    silent_s: list[float], states: list[WorkerState], is_lost: list[bool], free: list[int], num_prompt: int
) -> None:
    names = ["p0", "p1", "p2", "d0", "d1", "d2"]
    view, now_s = cluster(*names), 20.0
    for i, name in enumerate(names):
        view = heard(view, status(name, 1, state=states[i], free=free[i]), now_s - silent_s[i])
        if is_lost[i]:
            view = lost(view, ref(name))
    demand = Demand(num_prompt, max_tokens=1)
    placement = place(demand, view, now_s)
    good = {
        name for i, name in enumerate(names) if silent_s[i] < 2 and states[i] is WorkerState.READY and not is_lost[i]
    }
    roomy = {name for name in good if 16 * free[names.index(name)] >= num_prompt}
    prefills = {name for name in roomy if name.startswith("p")}
    decodes = {name for name in roomy if name.startswith("d")}
    if prefills and decodes:
        assert isinstance(placement, Placement)
        assert placement.prefill in prefills
        assert placement.decode in decodes
    else:
        assert isinstance(placement, Obstacle)
    assert place(demand, view, now_s) == placement  # the same view, the same answer


def test_a_role_is_missing_as_soon_as_its_last_worker_is_silent_or_dead() -> None:
    view = cluster("p0", "d0")
    assert missing_role(view, 1.9) is None
    assert missing_role(view, 2.1) == "prefill"
    assert missing_role(lost(view, ref("d0")), 0.0) == "decode"
    assert missing_role(set_workers(view, [endpoint("d0")], 0.0), 0.0) == "prefill"
    assert missing_role(cluster("d0", rules=BOTH), 0.0) is None
    assert missing_role(cluster("d0", rules=BOTH), 2.1) == "decode"
