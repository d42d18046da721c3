"""Views of small clusters, written down by hand."""

from __future__ import annotations

from pd_core.ledger import LedgerCounts
from pd_core.messages import WorkerEndpoint, WorkerState, WorkerStatus
from router.view import ClusterView, Rules, heard, set_workers

RULES = Rules(suspect_s=2.0, dead_s=10.0, max_prefill=4, max_decode=16)


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
        counters={},
        detail={},
    )


def cluster(*names: str, now_s: float = 0.0) -> ClusterView:
    """All of them ready, each heard once."""
    view = set_workers(ClusterView(RULES), [endpoint(name) for name in names], now_s)
    for name in names:
        view = heard(view, status(name), now_s)
    return view
