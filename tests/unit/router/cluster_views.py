"""Views of small clusters, written down by hand."""

from __future__ import annotations

import msgspec

from pd_core.ledger import LedgerCounts
from pd_core.messages import WorkerEndpoint, WorkerState, WorkerStatus
from router.policy import Demand, Placement, place, works_of
from router.view import ClusterView, Rules, WorkerRef, heard, placed, set_workers

RULES = Rules(
    suspect_s=2.0,
    dead_s=10.0,
    max_prefill=4,
    max_decode=16,
    roles=("prefill", "decode"),
    chunk_tokens=256,
    ageing_tokens_per_s=200.0,
)
BOTH = msgspec.structs.replace(RULES, roles=("decode",))
"""Decode workers compute prompts too."""


def endpoint(name: str, incarnation: str = "boot-1") -> WorkerEndpoint:
    """p… is a prefill worker, d… a decode worker."""
    role = "prefill" if name.startswith("p") else "decode"
    return WorkerEndpoint(name, role, "127.0.0.1", 1, incarnation, pid=1)


def status(
    name: str,
    number: int = 0,
    *,
    incarnation: str = "boot-1",
    free: int = 64,
    total: int = 64,
    context_tokens: int = 512,
    state: WorkerState = WorkerState.READY,
    counters: dict[str, float] | None = None,
) -> WorkerStatus:
    return WorkerStatus(
        name=name,
        role="prefill" if name.startswith("p") else "decode",
        incarnation=incarnation,
        number=number,
        state=state,
        num_running=0,
        num_waiting=0,
        blocks=LedgerCounts(total=total, free=free, reserved=0, held=total - free, quarantined=0),
        context_tokens=context_tokens,
        pool_tokens=total * 16,
        counters=counters or {},
        detail={},
    )


def cluster(*names: str, now_s: float = 0.0, rules: Rules = RULES) -> ClusterView:
    """All of them ready, each heard once."""
    view = set_workers(ClusterView(rules), [endpoint(name) for name in names], now_s)
    for name in names:
        view = heard(view, status(name), now_s)
    return view


def ref(name: str) -> WorkerRef:
    return WorkerRef(name, "boot-1")


def take(view: ClusterView, placement: Placement, work_id: str, demand: Demand, now_s: float = 0.0) -> ClusterView:
    """The view with the placement carried out."""
    for name, work in works_of(placement, demand, view, now_s).items():
        view = placed(view, ref(name), work_id, work)
    return view


def put(view: ClusterView, work_id: str, demand: Demand, now_s: float = 0.0) -> ClusterView:
    """The view with this request placed, which must go."""
    placement = place(demand, view, now_s)
    assert isinstance(placement, Placement), placement
    return take(view, placement, work_id, demand, now_s)
