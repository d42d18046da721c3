"""What /metrics shows of the paths that KV takes: of each request's transfers, and what workers counted since boot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from pd_core.transfer import PathTransfer
from router.view import WorkerView

_RATES = (1e6, 1e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2e9, 3e9, 5e9, 7.5e9, 1e10, 2e10, 5e10, 1e11)
_LABELS = ("worker", "role", "path")


class TransferMetrics:
    """Transfers of requests that were handed over, by path."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter("kvrelay_transfer_bytes", "KV bytes sent for handoffs", ["path"], registry=registry)
        self._seconds = Counter(
            "kvrelay_transfer_seconds",
            "Seconds that they were on the path; kvrelay_transfer_bytes by this is its speed",
            ["path"],
            registry=registry,
        )
        self._rates = Histogram(
            "kvrelay_transfer_bytes_per_second",
            "How fast the path was for one handoff, while something was on it",
            ["path"],
            registry=registry,
            buckets=_RATES,
        )

    def sent(self, transfers: Iterable[PathTransfer]) -> None:
        """What one handoff sent."""
        for transfer in transfers:
            self._bytes.labels(transfer.path).inc(transfer.num_bytes)
            self._seconds.labels(transfer.path).inc(transfer.seconds)
            if transfer.seconds > 0:
                self._rates.labels(transfer.path).observe(transfer.num_bytes / transfer.seconds)


def path_families(workers: Iterable[WorkerView]) -> Iterator[Metric]:
    """What each worker's pushes came to since its boot, probes among them; see pd_core.transfer.PathTotals."""
    pushes = CounterMetricFamily("kvrelay_worker_kv_pushes", "Pushes of KV that got through", labels=_LABELS)
    num_bytes = CounterMetricFamily("kvrelay_worker_kv_path_bytes", "KV bytes of those", labels=_LABELS)
    seconds = CounterMetricFamily("kvrelay_worker_kv_path_seconds", "Seconds that they took", labels=_LABELS)
    failures = CounterMetricFamily(
        "kvrelay_worker_kv_push_failures", "Pushes of KV that did not get through", labels=(*_LABELS, "reason")
    )
    fallbacks = CounterMetricFamily(
        "kvrelay_worker_kv_fallbacks",
        "Pushes of KV that took this path because a better one did not work",
        labels=(*_LABELS, "instead_of"),
    )
    for worker in workers:
        for path, totals in (worker.status.transfers if worker.status else {}).items():
            labels = [worker.endpoint.name, worker.endpoint.role, path]
            pushes.add_metric(labels, totals.num_pushes)
            num_bytes.add_metric(labels, totals.num_bytes)
            seconds.add_metric(labels, totals.seconds)
            for reason, num in totals.failures.items():
                failures.add_metric([*labels, reason], num)
            for better, num in totals.instead_of.items():
                fallbacks.add_metric([*labels, better], num)
    yield from (pushes, num_bytes, seconds, failures, fallbacks)
