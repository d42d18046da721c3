"""What /metrics shows: the router's own figures, and what every worker said in its last heartbeat."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pd_core.transfer import PathTransfer
from router.serving import Serving
from router.timeline import Timeline
from router.transfer_metrics import TransferMetrics, path_families
from router.view import Health, WorkerView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LABELS = ("worker", "role")


class RouterMetrics:
    """The router's figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._replies = Counter("kvrelay_requests", "Replies by HTTP status", ["status"], registry=self.registry)
        self._outcomes = Counter(
            "kvrelay_request_outcomes",
            "Requests that had a turn or waited for one",
            ["outcome"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "kvrelay_prompt_tokens",
            "Tokens of prompts that had an answer, each prompt once however many choices it has",
            registry=self.registry,
        )
        self._kv_bytes = Counter("kvrelay_handoff_bytes", "KV bytes handed over", ["path"], registry=self.registry)
        self._transfers = TransferMetrics(self.registry)
        self._ttft = self._seconds("kvrelay_ttft_seconds", "From a request's arrival to its first token")
        self._queue = self._seconds("kvrelay_queue_seconds", "From a request's arrival in the queue to its turn")
        self._e2e = self._seconds("kvrelay_e2e_seconds", "From a request's arrival to its end, if it finished")
        self._exposed = Histogram(
            "kvrelay_handoff_exposed_seconds",
            "From a request's first token to decode's having all its KV",
            ["path"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._handoff = Histogram(
            "kvrelay_handoff_seconds",
            "From a ticket to its commit: computing the prompt, and moving its KV meanwhile",
            ["path"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._preemptions = Counter(
            "kvrelay_preemptions", "Sequences whose blocks were given to older ones", registry=self.registry
        )
        self._refusals = Counter(
            "kvrelay_turns_given_back", "Placements that a worker refused for want of room", registry=self.registry
        )
        self._gaps = TokenGaps()
        self.registry.register(self._gaps)
        self.token_given = self._gaps.add

    def _seconds(self, name: str, sentence: str) -> Histogram:
        return Histogram(name, sentence, registry=self.registry, buckets=_SECONDS)

    def replied(self, status: int) -> None:
        self._replies.labels(str(status)).inc()

    def prompt_answered(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def kv_sent(self, transfers: Sequence[PathTransfer]) -> None:
        self._transfers.sent(transfers)

    def request_over(self, timeline: Timeline) -> None:
        self._outcomes.labels(timeline.outcome).inc()
        if timeline.ttft_s is not None:
            self._ttft.observe(timeline.ttft_s)
        if timeline.queue_s is not None:
            self._queue.observe(timeline.queue_s)
        if timeline.e2e_s is not None and timeline.outcome == "finished":
            self._e2e.observe(timeline.e2e_s)
        if timeline.num_kv_bytes is not None and timeline.path is not None:
            self._kv_bytes.labels(timeline.path).inc(timeline.num_kv_bytes)
            self._handoff.labels(timeline.path).observe(timeline.handoff_s or 0.0)
            if timeline.exposed_s is not None:
                self._exposed.labels(timeline.path).observe(timeline.exposed_s)
        self._preemptions.inc(timeline.num_preemptions)
        self._refusals.inc(timeline.num_refusals)

    def watch(self, serving: Serving, clock: Callable[[], float]) -> None:
        """Adds what is read at the moment of a scrape."""
        self.registry.register(ClusterCollector(serving, clock))

    def scrape(self) -> bytes:
        return generate_latest(self.registry)


class TokenGaps(Collector):
    """What is counted for every token, so in the cheapest way there is: plain numbers until somebody scrapes.

    gap_s: since the request's token before; None for its first
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_GAP_SECONDS) + 1)
        self._sum_s = 0.0
        self._num_first = 0

    def add(self, gap_s: float | None) -> None:
        if gap_s is None:
            self._num_first += 1
        else:
            self._counts[bisect.bisect_left(_GAP_SECONDS, gap_s)] += 1
            self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        num_tokens = self._num_first + sum(self._counts)
        yield CounterMetricFamily("kvrelay_generated_tokens", "Tokens given to clients", value=num_tokens)
        bounds = [*map(floatToGoString, _GAP_SECONDS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(
            "kvrelay_itl_seconds", "From one token to the next", buckets=buckets, sum_value=self._sum_s
        )


class ClusterCollector(Collector):
    """Gauges of now, and the workers' own totals under `kvrelay_worker_…`, labelled by worker and role."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        self._serving = serving
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        serving = self._serving
        yield GaugeMetricFamily("kvrelay_requests_running", "Requests on workers", value=serving.num_running)
        yield GaugeMetricFamily("kvrelay_requests_waiting", "Requests in the queue", value=serving.num_waiting)
        yield CounterMetricFamily(
            "kvrelay_stale_statuses", "Heartbeats of another boot or order", value=serving.fleet.num_stale_statuses
        )
        workers = list(serving.fleet.view.workers.values())
        yield from self._gauges(workers)
        yield from self._counters(workers)
        yield from path_families(workers)

    def _gauges(self, workers: list[WorkerView]) -> Iterator[Metric]:
        view, now_s = self._serving.fleet.view, self._clock()
        ready = GaugeMetricFamily("kvrelay_worker_ready", "1 when it gets new work", labels=_LABELS)
        running = GaugeMetricFamily("kvrelay_worker_running", "Requests that run there", labels=_LABELS)
        waiting = GaugeMetricFamily("kvrelay_worker_waiting", "Requests that wait there", labels=_LABELS)
        blocks = GaugeMetricFamily("kvrelay_worker_blocks", "KV blocks by state", labels=(*_LABELS, "state"))
        for worker in workers:
            labels = [worker.endpoint.name, worker.endpoint.role]
            ready.add_metric(labels, float(worker.health(now_s, view.rules) is Health.READY))
            if worker.status is None:
                continue
            running.add_metric(labels, worker.status.num_running)
            waiting.add_metric(labels, worker.status.num_waiting)
            counts = worker.status.blocks
            for state in ("free", "reserved", "held", "quarantined"):
                blocks.add_metric([*labels, state], getattr(counts, state))
        yield from (ready, running, waiting, blocks)

    def _counters(self, workers: list[WorkerView]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for worker in workers:
            for counter, value in (worker.status.counters if worker.status else {}).items():
                name = "kvrelay_worker_" + re.sub(r"[^a-zA-Z0-9_]", "_", counter).removesuffix("_total")
                family = families.setdefault(name, CounterMetricFamily(name, f"{counter} since boot", labels=_LABELS))
                family.add_metric([worker.endpoint.name, worker.endpoint.role], value)
        yield from families.values()
