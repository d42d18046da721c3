"""What /ready says: whether a request would be served, and what is known of every worker."""

from __future__ import annotations

from typing import Any

import msgspec

from router.policy import mismatches
from router.serving import Serving
from router.throughput import WINDOW_S
from router.view import ClusterView, WorkerView


def readiness(serving: Serving, now_s: float) -> dict[str, Any]:
    """JSON-ready. `ready` and, when it is false, `reason`; then the queue, limits, throughput and every worker."""
    view = serving.fleet.view
    reason = serving.why_not_ready()
    limits = None if view.limits is None else msgspec.to_builtins(view.limits)
    prompt_tokens_per_s, generated_tokens_per_s = serving.throughput.per_second(now_s)
    return {
        "ready": reason is None,
        "reason": reason,
        "running": serving.num_running,
        "waiting": serving.num_waiting,
        "max_queue": serving.max_waiting,
        "throughput": {
            "window_s": WINDOW_S,
            "prompt_tokens_per_s": round(prompt_tokens_per_s, 1),
            "generated_tokens_per_s": round(generated_tokens_per_s, 1),
        },
        "max_request_tokens": None if view.limits is None else view.limits.num_tokens,
        "limits": limits,
        "kv_mismatches": [
            {"prefill": prefill, "decode": decode, "why": why} for (prefill, decode), why in mismatches(view).items()
        ],
        "workers": [_worker(view, view.workers[name], now_s) for name in sorted(view.workers)],
    }


def _worker(view: ClusterView, worker: WorkerView, now_s: float) -> dict[str, Any]:
    status = worker.status
    endpoint = worker.endpoint
    known: dict[str, Any] = {
        "name": endpoint.name,
        "role": endpoint.role,
        "pid": endpoint.pid,
        "host": endpoint.host,
        "port": endpoint.port,
        "incarnation": endpoint.incarnation,
        "health": worker.health(now_s, view.rules).value,
        "silent_s": round(now_s - worker.heard_s, 3),
        "num_ours": worker.num_ours,
        "num_to_compute": worker.num_to_compute,
    }
    if status is not None:
        known |= {
            "num_running": status.num_running,
            "num_waiting": status.num_waiting,
            "blocks": msgspec.to_builtins(status.blocks),
            "counters": status.counters,
            "engine": status.detail,
            "kv_paths": status.kv_paths,
            "transfers": {path: msgspec.to_builtins(totals) for path, totals in status.transfers.items()},
        }
    return known
