"""What /ready says: whether a request would be served, and what is known of every worker."""

from __future__ import annotations

from typing import Any

import msgspec

from router.serving import Serving
from router.view import ClusterView, WorkerView


def readiness(serving: Serving, now_s: float) -> dict[str, Any]:
    """JSON-ready. `ready` and, when it is false, `reason`; then workers, limits and the queue."""
    view = serving.fleet.view
    reason = serving.why_not_ready()
    limits = None if view.limits is None else msgspec.to_builtins(view.limits)
    return {
        "ready": reason is None,
        "reason": reason,
        "running": serving.num_running,
        "waiting": serving.num_waiting,
        "max_request_tokens": None if view.limits is None else view.limits.num_tokens,
        "limits": limits,
        "workers": [_worker(view, view.workers[name], now_s) for name in sorted(view.workers)],
    }


def _worker(view: ClusterView, worker: WorkerView, now_s: float) -> dict[str, Any]:
    status = worker.status
    known: dict[str, Any] = {
        "name": worker.endpoint.name,
        "role": worker.endpoint.role,
        "incarnation": worker.endpoint.incarnation,
        "health": worker.health(now_s, view.rules).value,
        "silent_s": round(now_s - worker.heard_s, 3),
    }
    if status is not None:
        known |= {
            "num_running": status.num_running,
            "num_waiting": status.num_waiting,
            "blocks": msgspec.to_builtins(status.blocks),
            "engine": status.detail,
        }
    return known
