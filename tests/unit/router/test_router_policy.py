from __future__ import annotations

from collections import Counter

import pytest
from cluster_views import cluster, endpoint, status
from hypothesis import given
from hypothesis import strategies as st

from pd_core.messages import WorkerState
from router.policy import Demand, Placement, missing_role, place
from router.view import ClusterView, OurWork, WorkerRef, heard, lost, placed, refused, released, set_workers, started

SMALL = Demand(num_prompt=10, max_tokens=6)


def take(view: ClusterView, placement: Placement, work_id: str, demand: Demand = SMALL) -> ClusterView:
    for name, blocks in ((placement.prefill, demand.num_prefill_blocks), (placement.decode, demand.num_decode_blocks)):
        view = placed(view, view.workers[name].ref, work_id, OurWork(demand.num_prompt, blocks))
    return view


def test_a_request_goes_to_ready_workers_of_both_roles() -> None:
    placement = place(SMALL, cluster("p0", "d0"), 0.0)
    assert placement is not None
    assert (placement.prefill, placement.decode) == ("p0", "d0")
    assert "p0" in placement.reason


def test_nothing_goes_anywhere_while_a_role_is_missing() -> None:
    assert place(SMALL, cluster("p0"), 0.0) is None
    assert place(SMALL, cluster("d0"), 0.0) is None


def test_a_prefill_worker_takes_one_request_at_a_time_before_its_first_token() -> None:
    view = cluster("p0", "d0")
    first = place(SMALL, view, 0.0)
    assert first is not None
    view = take(view, first, "a")
    assert place(SMALL, view, 0.0) is None
    view = started(view, WorkerRef("p0", "boot-1"), "a")
    assert place(SMALL, view, 0.0) is not None


def test_a_prefill_worker_with_all_its_places_taken_gets_no_more() -> None:
    view = cluster("p0", "d0")
    for i in range(4):
        view = placed(view, WorkerRef("p0", "boot-1"), f"r{i}", OurWork(1, 0, is_starting=False))
    assert place(SMALL, view, 0.0) is None
    assert place(SMALL, released(view, WorkerRef("p0", "boot-1"), "r2"), 0.0) is not None


def test_a_prefill_worker_needs_room_for_the_prompt_until_the_prefill_leg_is_over() -> None:
    """A pool of 40 blocks and prompts of 20: two fit, though the heartbeat still says that all is free."""
    view = heard(cluster("p0", "d0", "d1"), status("p0", 1, free=40, total=40), 0.0)
    big = Demand(num_prompt=320, max_tokens=1)
    for work_id in ("a", "b"):
        placement = place(big, view, 0.0)
        assert placement is not None
        view = started(take(view, placement, work_id, big), WorkerRef("p0", "boot-1"), work_id)
    assert place(SMALL, view, 0.0) is None
    view = heard(view, status("p0", 2, free=0, total=40), 0.1)
    assert place(SMALL, view, 0.1) is None
    placement = place(big, released(view, WorkerRef("p0", "boot-1"), "a"), 0.1)
    assert placement is not None
    assert "20 blocks free, 20 needed; decode" in placement.reason


def test_a_decode_worker_needs_room_for_all_that_the_request_can_become() -> None:
    view = heard(cluster("p0", "d0"), status("d0", 1, free=3), 0.0)
    assert place(Demand(num_prompt=40, max_tokens=9), view, 0.0) is not None  # KV of the last token is never made
    assert place(Demand(num_prompt=40, max_tokens=10), view, 0.0) is None


@pytest.mark.parametrize("name", ["d0", "p0"])
def test_a_worker_that_has_refused_is_asked_again_after_its_next_heartbeat(name: str) -> None:
    view = refused(cluster("p0", "d0"), WorkerRef(name, "boot-1"))
    assert place(SMALL, view, 0.0) is None
    assert place(SMALL, heard(view, status(name, 1), 0.1), 0.1) is not None


def test_sixteen_simultaneous_requests_spread_evenly_over_two_idle_prefill_workers() -> None:
    """The heartbeat is from before all of them; each prefill ends, in any order, when all workers are taken."""
    view = cluster("p0", "p1", "d0", "d1")
    prefills, decodes = Counter[str](), Counter[str]()
    starting: list[tuple[str, str]] = []
    for i in range(16):
        placement = place(SMALL, view, 0.0)
        while placement is None:
            name, work_id = starting.pop(0)
            view = released(view, WorkerRef(name, "boot-1"), work_id)
            placement = place(SMALL, view, 0.0)
        view = take(view, placement, f"r{i}")
        starting.append((placement.prefill, f"r{i}"))
        prefills[placement.prefill] += 1
        decodes[placement.decode] += 1
    assert prefills == {"p0": 8, "p1": 8}
    assert decodes == {"d0": 8, "d1": 8}


def test_a_slow_prefill_worker_gets_few_of_many_requests() -> None:
    """p1 needs ten times as long; 200 unique prompts arrive, one whenever somebody is free."""
    view, now = cluster("p0", "p1", "d0"), 0
    busy_until: dict[str, int] = {}
    count = Counter[str]()
    ids: dict[str, str] = {}
    for i in range(200):
        placement = place(SMALL, view, 0.0)
        while placement is None:
            now = min(busy_until.values())
            for name in [name for name, until in busy_until.items() if until <= now]:
                del busy_until[name]
                view = released(view, WorkerRef(name, "boot-1"), ids[name])
            placement = place(SMALL, view, 0.0)
        name = placement.prefill
        view = placed(view, WorkerRef(name, "boot-1"), f"r{i}", OurWork(10, 0))
        busy_until[name], ids[name] = now + (10 if name == "p1" else 1), f"r{i}"
        count[name] += 1
    assert count["p1"] < 50


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
            view = lost(view, WorkerRef(name, "boot-1"))
    demand = Demand(num_prompt, max_tokens=1)
    placement = place(demand, view, now_s)
    good = {
        name for i, name in enumerate(names) if silent_s[i] < 2 and states[i] is WorkerState.READY and not is_lost[i]
    }
    roomy = {name for name in good if 16 * free[names.index(name)] >= num_prompt}
    prefills = {name for name in roomy if name.startswith("p")}
    decodes = {name for name in roomy if name.startswith("d")}
    if prefills and decodes:
        assert placement is not None
        assert placement.prefill in prefills
        assert placement.decode in decodes
    else:
        assert placement is None
    assert place(demand, view, now_s) == placement  # the same view, the same answer


def test_a_role_is_missing_as_soon_as_its_last_worker_is_silent_or_dead() -> None:
    view = cluster("p0", "d0")
    assert missing_role(view, 1.9) is None
    assert missing_role(view, 2.1) == "prefill"
    assert missing_role(lost(view, WorkerRef("d0", "boot-1")), 0.0) == "decode"
    assert missing_role(set_workers(view, [endpoint("d0")], 0.0), 0.0) == "prefill"
