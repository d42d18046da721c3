"""Whose turn it is: nobody starves, equals keep their order, and who can go need not wait for who cannot."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec
import pytest
from cluster_views import BOTH, RULES, cluster, put, ref, status, take
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policy import Demand, Placement
from router.progress import OurWork
from router.turns import MAX_PASSED, PATIENCE_S, Kept, Turn, Waiter, next_turn
from router.view import ClusterView, Rules, admitted, computed, heard, lost, placed, released

SHORT = Demand(num_prompt=64, max_tokens=8)
LONG = Demand(num_prompt=1000, max_tokens=8)


def waiters(*demands: Demand) -> list[Waiter]:
    return [Waiter(number, demand) for number, demand in enumerate(demands)]


def turn(view: ClusterView, now_s: float, kept: Kept | None, *demands: Demand) -> Turn:
    return next_turn(waiters(*demands), view, now_s, kept)


def fill(view: ClusterView, name: str, num_free: int, now_s: float = 0.0) -> ClusterView:
    """A heartbeat: so many of 64 blocks are free."""
    number = view.workers[name].last_number + 1
    return heard(view, status(name, number, free=num_free), now_s)


def busy_with_long() -> ClusterView:
    """p0 computes a long prompt; there is room for others everywhere."""
    view = cluster("p0", "d0")
    for name in ("p0", "d0"):
        view = heard(view, status(name, 1, free=1024, total=1024), 0.0)
    return put(view, "long", LONG)


def test_the_first_that_has_a_place_has_its_turn() -> None:
    view = cluster("p0", "d0")
    assert turn(view, 0.0, None, SHORT, SHORT).number == 0
    assert turn(view, 0.0, None) == Turn(None, None, None)


def test_a_short_prompt_passes_a_long_one_that_waits_for_another_long_one() -> None:
    view = busy_with_long()
    assert turn(view, 0.0, None, LONG, LONG, SHORT).number == 2
    assert turn(view, 0.0, None, LONG, LONG).number is None


def test_one_that_waits_for_room_may_be_passed_for_a_moment_and_no_longer() -> None:
    view = fill(cluster("p0", "d0"), "d0", 20)
    large = Demand(num_prompt=480, max_tokens=8)
    assert turn(view, 0.0, None, large, SHORT) == Turn(1, turn(view, 0.0, None, SHORT).placement, None)
    late = turn(fill(view, "d0", 20, PATIENCE_S), PATIENCE_S, None, large, SHORT)
    assert late == Turn(None, None, Kept(0, decode="d0"))


def test_others_go_on_where_no_worker_is_kept() -> None:
    view = fill(fill(cluster("p0", "d0", "d1"), "d0", 20), "d1", 10)
    large = Demand(num_prompt=480, max_tokens=8, since_s=-PATIENCE_S)
    first = turn(view, 0.0, None, large, SHORT)
    assert first.kept == Kept(0, decode="d0")
    assert first.placement is not None
    assert first.placement.decode == "d1"


def test_a_worker_stays_kept_though_another_has_more_room_by_now() -> None:
    view = fill(fill(cluster("p0", "d0", "d1"), "d0", 20), "d1", 10)
    large = Demand(num_prompt=480, max_tokens=8, since_s=-PATIENCE_S)
    kept = turn(view, 0.0, None, large).kept
    view = fill(view, "d1", 25)
    assert turn(view, 0.0, kept, large).kept == kept
    placement = turn(fill(view, "d0", 40), 0.0, kept, large, SHORT)
    assert (placement.number, placement.kept) == (0, None)


def test_when_the_kept_worker_dies_or_the_one_that_waits_leaves_it_is_kept_no_more() -> None:
    view = fill(fill(cluster("p0", "d0", "d1"), "d0", 20), "d1", 10)
    large = Demand(num_prompt=480, max_tokens=8, since_s=-PATIENCE_S)
    kept = turn(view, 0.0, None, large).kept
    assert turn(lost(view, ref("d0")), 0.0, kept, large).kept == Kept(0, decode="d1")
    assert next_turn([Waiter(1, SHORT)], view, 0.0, kept).kept is None


def test_one_that_waits_for_both_pools_keeps_a_worker_of_each() -> None:
    large = Demand(num_prompt=480, max_tokens=8, since_s=-PATIENCE_S)
    view = fill(cluster("p0", "d0"), "d0", 20)
    kept = turn(view, 0.0, None, large).kept
    view = placed(fill(view, "d0", 64), ref("p0"), "r", OurWork(480, 40, is_admitted=True))
    assert turn(view, 0.0, kept, large).kept == Kept(0, prefill="p0", decode="d0")


def test_the_oldest_has_workers_kept_for_it_also_when_a_later_one_had_before() -> None:
    """It had its turn, was refused, and is back."""
    large = Demand(num_prompt=480, max_tokens=8, since_s=-PATIENCE_S)
    view = fill(cluster("p0", "d0"), "d0", 20)
    assert turn(view, 0.0, Kept(1, decode="d0"), large, large).kept == Kept(0, decode="d0")


def test_only_so_many_are_ever_passed() -> None:
    view = busy_with_long()
    assert turn(view, 0.0, None, *[LONG] * (MAX_PASSED - 1), SHORT).number == MAX_PASSED - 1
    assert turn(view, 0.0, None, *[LONG] * MAX_PASSED, SHORT).number is None


class Cluster:
    """Workers in virtual time: a prompt takes its time, an answer too, and then the blocks are free."""

    def __init__(self, rules: Rules, num_blocks: int) -> None:
        names = ["d0", "d1"] if rules is BOTH else ["p0", "d0", "d1"]
        self.view = cluster(*names, rules=rules)
        self.num_blocks = num_blocks
        self.now_s = 0.0
        self.kept: Kept | None = None
        self.line: list[tuple[Waiter, float]] = []
        self.placed: list[tuple[Waiter, float]] = []
        self.events: list[tuple[float, int, str, str, str]] = []
        self.num_beats = 0
        self._beat()

    def arrive(self, demand: Demand, answer_s: float, number: int) -> None:
        self.line.append((Waiter(number, msgspec.structs.replace(demand, since_s=self.now_s)), answer_s))
        self._serve()

    def run_until(self, time_s: float) -> None:
        while self.events and self.events[0][0] <= time_s:
            self.now_s, _, what, name, work_id = heapq.heappop(self.events)
            if what == "computed":
                self.view = computed(self.view, ref(name), work_id, self.now_s)
            elif what == "over":
                self.view = released(self.view, ref(name), work_id)
            else:
                self._beat()
            self._serve()
        self.now_s = time_s

    def _serve(self) -> None:
        while self.line:
            chosen = next_turn([waiter for waiter, _ in self.line], self.view, self.now_s, self.kept)
            self.kept = chosen.kept
            if chosen.number is None or chosen.placement is None:
                return
            [(waiter, answer_s)] = [one for one in self.line if one[0].number == chosen.number]
            self.line.remove((waiter, answer_s))
            self.placed.append((waiter, self.now_s))
            self._begin(waiter, answer_s, chosen.placement)

    def _begin(self, waiter: Waiter, answer_s: float, placement: Placement) -> None:
        work_id = str(waiter.number)
        self.view = take(self.view, placement, work_id, waiter.demand, self.now_s)
        computing = placement.prefill or placement.decode
        self.view = admitted(self.view, ref(placement.decode), work_id)
        first_s = self.now_s + 0.02 + (placement.num_ahead + waiter.demand.num_prompt) / 2000
        self._later(first_s, "computed", computing, work_id)
        if placement.prefill is not None:
            self._later(first_s + 0.005, "over", placement.prefill, work_id)
        self._later(first_s + answer_s, "over", placement.decode, work_id)

    def _later(self, time_s: float, what: str, name: str, work_id: str) -> None:
        self.num_beats += 1
        heapq.heappush(self.events, (time_s, self.num_beats, what, name, work_id))

    def _beat(self) -> None:
        for name, worker in self.view.workers.items():
            used = sum(work.num_blocks for work in worker.ours.values() if work.is_admitted)
            number = worker.last_number + 1
            beat = status(name, number, free=max(0, self.num_blocks - used), total=self.num_blocks)
            self.view = heard(self.view, beat, self.now_s)
        self._later(self.now_s + 0.5, "beat", "", "")


ANSWER_S = 2.0
CYCLE_S = PATIENCE_S + ANSWER_S + 2.0
"""From the moment at which a worker is kept until it must be empty: what runs there, a prompt, and a heartbeat."""


@pytest.mark.parametrize("rules", [RULES, BOTH], ids=["two phases", "both on one"])
@pytest.mark.parametrize("num_prompt", [700, 500])
def test_a_large_request_is_served_though_small_ones_never_stop_coming(rules: Rules, num_prompt: int) -> None:
    """Five small ones a second, which together take most of two pools of 48 blocks all the time."""
    sim = Cluster(rules, num_blocks=48)
    for number in range(300):
        sim.run_until(number / 5)
        is_large = number == 100
        sim.arrive(Demand(num_prompt, 8) if is_large else Demand(64, 8), ANSWER_S, number)
    [waited_s] = [at_s - waiter.demand.since_s for waiter, at_s in sim.placed if waiter.number == 100]
    assert waited_s <= CYCLE_S
    passed = [waiter.number for waiter, _ in sim.placed]
    assert passed.index(100) > 100  # others went meanwhile: only one worker was kept


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.floats(0, 0.6),
            st.sampled_from([10, 64, 64, 200, 500, 740]),
            st.sampled_from([1, 20]),
            st.floats(0.01, ANSWER_S),
        ),
        min_size=1,
        max_size=50,
    ),
    rules=st.sampled_from([RULES, BOTH]),
)
def test_everybody_is_served_within_a_bound_and_equals_in_their_order(
    arrivals: Sequence[tuple[float, int, int, float]], rules: Rules
) -> None:
    sim, now_s = Cluster(rules, num_blocks=48), 0.0
    num_before: dict[int, int] = {}
    for number, (gap_s, num_prompt, max_tokens, answer_s) in enumerate(arrivals):
        now_s += gap_s
        sim.run_until(now_s)
        num_before[number] = len(sim.line)
        sim.arrive(Demand(num_prompt, max_tokens), answer_s, number)
    sim.run_until(now_s + CYCLE_S * (len(arrivals) + 1))
    assert sim.line == []
    for waiter, at_s in sim.placed:
        assert at_s - waiter.demand.since_s <= CYCLE_S * (1 + num_before[waiter.number])
    for size in {(waiter.demand.num_prompt, waiter.demand.max_tokens) for waiter, _ in sim.placed}:
        same = [w.number for w, _ in sim.placed if (w.demand.num_prompt, w.demand.max_tokens) == size]
        assert same == sorted(same)


@settings(max_examples=100)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), max_size=12),
    free=st.tuples(st.integers(0, 64), st.integers(0, 64), st.integers(0, 64)),
    since_s=st.floats(-5, 0),
)
def test_the_line_is_looked_at_as_thoroughly_as_one_by_one(
    prompts: list[tuple[int, int]], free: tuple[int, int, int], since_s: float
) -> None:
    """Those that are skipped because a smaller one has no place would have none."""
    view = cluster("p0", "d0", "d1")
    for name, num_free in zip(("p0", "d0", "d1"), free, strict=True):
        view = fill(view, name, num_free)
    view = placed(view, ref("p0"), "r", OurWork(300, 0, num_to_compute=300))
    line = waiters(*(Demand(num_prompt, max_tokens, since_s) for num_prompt, max_tokens in prompts))
    together = next_turn(line, view, 0.0, None)
    names = frozenset[str]() if together.kept is None else together.kept.names
    for waiter in line:
        alone = next_turn([waiter], view, 0.0, None)
        if alone.placement is None:
            continue
        if together.number == waiter.number:
            return
        # One before the next turn has a place alone only on a worker that is kept for an older one.
        assert {alone.placement.prefill, alone.placement.decode} & names
    assert together.number is None
