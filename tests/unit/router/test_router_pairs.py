"""Workers whose KV differs: no request is sent between them, whoever else is busy, and what differs is said."""

from __future__ import annotations

import msgspec
from cluster_views import BOTH, cluster, endpoint, put, ref, status
from hypothesis import given
from hypothesis import strategies as st

from pd_core.layout import BlockLayout, Fingerprint
from router.policy import Demand, Obstacle, Placement, mismatches, place, room_to_keep, why_nobody
from router.turns import Kept, Waiter, next_turn
from router.view import ClusterView, WorkerRef, connected, heard, lost, refused, set_workers

SMALL = Demand(num_prompt=10, max_tokens=6)
LAYOUT = BlockLayout("plain", num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
FP = Fingerprint("weights", "settings", "tokenizer", "numerics", LAYOUT)
OTHER = {
    "A": FP,
    "B": msgspec.structs.replace(FP, weights="others"),
    "C": msgspec.structs.replace(FP, layout=msgspec.structs.replace(LAYOUT, dtype="float32")),
}


def with_kv(view: ClusterView, **kinds: str | None) -> ClusterView:
    """Each worker has said what KV it has, as an object of its own; None says nothing of it."""
    for name, kind in kinds.items():
        said = None if kind is None else msgspec.convert(msgspec.to_builtins(OTHER[kind]), Fingerprint)
        view = connected(view, ref(name), said)
    return view


def test_a_request_goes_to_workers_that_can_exchange_kv_however_idle_the_others_are() -> None:
    view = with_kv(cluster("p0", "p1", "d0", "d1"), p0="A", p1="B", d0="A", d1="C")
    for number in range(3):
        placement = place(SMALL, view, 0.0)
        assert isinstance(placement, Placement)
        assert (placement.prefill, placement.decode) == ("p0", "d0")
        view = put(view, f"r{number}", SMALL)


def test_while_the_one_that_fits_is_full_a_request_waits_for_it() -> None:
    view = with_kv(cluster("p0", "d0", "d1", "p1"), p0="A", d0="A", p1="B", d1="B")
    full = refused(refused(view, ref("d0")), ref("p1"))
    assert place(SMALL, full, 0.0) is Obstacle.DECODE_FULL
    assert isinstance(place(SMALL, refused(view, ref("d0")), 0.0), Placement)


def test_where_nobody_fits_anybody_that_is_said_with_both_values() -> None:
    view = with_kv(cluster("p0", "d0"), p0="A", d0="C")
    assert place(SMALL, view, 0.0) is Obstacle.NOBODY_READY
    why = why_nobody(view, 0.0)
    assert why is not None
    assert "p0 (ours) and d0 (theirs)" in why
    assert "bfloat16" in why
    assert "float32" in why
    assert list(mismatches(view)) == [("p0", "d0")]
    assert next_turn([Waiter(0, SMALL)], view, 9.0, None).placement is None


def test_a_worker_that_nobody_fits_is_not_kept_for_a_request_that_waits_for_room() -> None:
    view = with_kv(cluster("p0", "d0", "d1"), p0="A", d0="A", d1="B")
    view = heard(view, status("d0", 1, free=3), 0.0)
    large = Demand(num_prompt=16 * 20, max_tokens=6)
    assert room_to_keep("decode", large, view, 0.0) == "d0"
    assert next_turn([Waiter(0, large)], view, 1.5, None).kept == Kept(0, None, "d0")


def test_a_boot_that_comes_back_with_the_right_kv_is_a_pair_again_and_a_role_that_is_missing_is_named_first() -> None:
    view = with_kv(cluster("p0", "d0"), p0="A", d0="B")
    again = set_workers(view, [endpoint("p0"), endpoint("d0", "boot-2")], 0.0)
    assert mismatches(again) == {}
    again = heard(connected(again, WorkerRef("d0", "boot-2"), FP), status("d0", incarnation="boot-2"), 0.0)
    assert why_nobody(again, 0.0) is None
    assert isinstance(place(SMALL, again, 0.0), Placement)
    assert why_nobody(lost(view, ref("p0")), 0.0) == "no prefill worker is ready"
    assert connected(view, WorkerRef("d0", "boot-9"), FP) is view


def test_a_worker_alone_needs_no_other_that_fits() -> None:
    view = with_kv(cluster("d0", "d1", rules=BOTH), d0="A", d1="B")
    assert isinstance(place(SMALL, view, 0.0), Placement)
    assert why_nobody(view, 0.0) is None
    assert mismatches(view) == {}


KINDS = st.sampled_from(["A", "B", "C", None])


@given(st.lists(KINDS, min_size=1, max_size=4), st.lists(KINDS, min_size=1, max_size=4), st.integers(0, 6))
def test_whoever_is_chosen_can_exchange_kv_and_somebody_is_as_long_as_a_pair_can(
    prefills: list[str | None], decodes: list[str | None], num_before: int
) -> None:
    kinds = {f"p{i}": kind for i, kind in enumerate(prefills)} | {f"d{i}": kind for i, kind in enumerate(decodes)}
    view = with_kv(cluster(*kinds), **kinds)
    can = {
        (p, d)
        for p in kinds
        for d in kinds
        if p[0] == "p" and d[0] == "d" and (None in (kinds[p], kinds[d]) or kinds[p] == kinds[d])
    }
    assert set(mismatches(view)) == {(p, d) for p in kinds for d in kinds if p[0] == "p" and d[0] == "d"} - can
    assert (why_nobody(view, 0.0) is None) == bool(can)
    for number in range(num_before + 1):
        placement = place(SMALL, view, 0.0)
        if isinstance(placement, Placement):
            assert (placement.prefill, placement.decode) in can
            view = put(view, f"r{number}", SMALL)
        else:
            assert (placement is Obstacle.NOBODY_READY) == (not can)
