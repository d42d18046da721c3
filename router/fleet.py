"""All workers as the router has them: a link to each, and the view made from what they say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from pd_core.errors import KvrelayError, WorkerLost
from pd_core.layout import Fingerprint
from pd_core.ledger import LedgerReport
from pd_core.messages import LedgerSnapshot, PathsProbed, ProbePaths, ReadLedger, WorkerEndpoint, WorkerStatus
from router import view as cluster_view
from router.faults import Faults
from router.legs import WorkerMessages
from router.policy import Demand, Placement, works_of
from router.view import ClusterView, Rules, WorkerRef
from router.worker_link import Connect, WorkerLink

logger = logging.getLogger(__name__)

READ_LEDGER_S = 2.0


class FleetListener(Protocol):
    """Who acts on changes. Called on the event loop, after the view has changed."""

    def on_worker_heard(self) -> None: ...

    def on_worker_lost(self, ref: WorkerRef) -> None: ...

    def on_worker_replaced(self, ref: WorkerRef) -> None: ...


class Fleet:
    """Owns the view: every change of it goes through here. faults: told when a link is not kept any more."""

    def __init__(
        self,
        connect: Connect,
        rules: Rules,
        heartbeat_interval_s: float,
        clock: Callable[[], float],
        faults: Faults,
    ) -> None:
        self.view = ClusterView(rules)
        self.num_stale_statuses = 0
        self._connect = connect
        self._interval_s = heartbeat_interval_s
        self._clock = clock
        self._faults = faults
        self._links: dict[str, WorkerLink] = {}
        self._listener: FleetListener | None = None

    def listen(self, listener: FleetListener) -> None:
        """Sets who acts on changes; there is one."""
        self._listener = listener

    async def set_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """The workers are these from now on. Boots that are not among them are fenced: their links are closed and
        what they held has failed before this returns."""
        self.view = cluster_view.set_workers(self.view, endpoints, self._clock())
        wanted = {endpoint.name: endpoint for endpoint in endpoints}
        fenced = [link for link in self._links.values() if wanted.get(link.endpoint.name) != link.endpoint]
        for link in fenced:
            del self._links[link.endpoint.name]
            if self._listener is not None:
                self._listener.on_worker_replaced(link.ref)
        for name, endpoint in wanted.items():
            if name not in self._links:
                self._links[name] = WorkerLink(endpoint, self._connect, self, self._interval_s, self._faults)
                self._links[name].start()
        await asyncio.gather(*(link.close() for link in fenced))

    async def close(self) -> None:
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()))

    def ref_of(self, name: str) -> WorkerRef:
        return self.view.workers[name].ref

    @contextlib.asynccontextmanager
    async def stream(self, ref: WorkerRef, body: msgspec.Struct, deadline_s: float) -> AsyncIterator[WorkerMessages]:
        """A stream of this boot of the worker. Raises WorkerLost when it is not connected."""
        async with self._link(ref).stream(body, deadline_s) as messages:
            yield messages

    def _link(self, ref: WorkerRef) -> WorkerLink:
        link = self._links.get(ref.name)
        if link is None or link.ref != ref:
            raise WorkerLost(f"worker {ref.name} was replaced")
        return link

    async def read_ledgers(self) -> dict[str, LedgerReport | KvrelayError]:
        """What every worker says of its blocks, or why it says nothing."""

        async def read(link: WorkerLink) -> LedgerReport | KvrelayError:
            try:
                snapshot: LedgerSnapshot = await link.call(ReadLedger(), READ_LEDGER_S)
            except KvrelayError as error:
                return error
            return snapshot.report

        names = sorted(self._links)
        reports = await asyncio.gather(*(read(self._links[name]) for name in names))
        return dict(zip(names, reports, strict=True))

    # our own requests

    def placed(self, placement: Placement, work_id: str, demand: Demand) -> None:
        works = works_of(placement, demand, self.view, self._clock())
        for name, work in works.items():
            self.view = cluster_view.placed(self.view, self.ref_of(name), work_id, work)

    def admitted(self, ref: WorkerRef, work_id: str) -> None:
        self.view = cluster_view.admitted(self.view, ref, work_id)

    def computed(self, ref: WorkerRef, work_id: str) -> None:
        self.view = cluster_view.computed(self.view, ref, work_id, self._clock())

    def preempted(self, ref: WorkerRef, work_id: str) -> None:
        self.view = cluster_view.preempted(self.view, ref, work_id)

    def resumed(self, ref: WorkerRef, work_id: str) -> None:
        self.view = cluster_view.resumed(self.view, ref, work_id)

    def refused(self, ref: WorkerRef) -> None:
        self.view = cluster_view.refused(self.view, ref)

    def released(self, ref: WorkerRef, work_id: str, num_made: int) -> None:
        self.view = cluster_view.released(self.view, ref, work_id, num_made)

    def answered(self, num_tokens: int) -> None:
        self.view = cluster_view.answered(self.view, num_tokens)

    def progress_s(self, ref: WorkerRef) -> float:
        """When this boot was last heard to have run more tokens than before; long ago for another boot."""
        worker = self.view.workers.get(ref.name)
        return worker.progress_s if worker is not None and worker.ref == ref else 0.0

    async def probe_paths(self, prefill: WorkerRef, body: ProbePaths, deadline_s: float) -> PathsProbed:
        """What this boot of a prefill worker finds. Raises WorkerLost when it is not connected, and see ProbePaths."""
        found: PathsProbed = await self._link(prefill).call(body, deadline_s)
        return found

    # what links say

    def on_connected(self, ref: WorkerRef, fingerprint: Fingerprint | None) -> None:
        self.view = cluster_view.connected(self.view, ref, fingerprint)

    def on_status(self, status: WorkerStatus) -> None:
        newer = cluster_view.heard(self.view, status, self._clock())
        if newer is self.view:
            self.num_stale_statuses += 1
            return
        self.view = newer
        if self._listener is not None:
            self._listener.on_worker_heard()

    def on_lost(self, ref: WorkerRef, why: str) -> None:
        logger.warning("worker %s is lost: %s", ref.name, why)
        self.view = cluster_view.lost(self.view, ref)
        if self._listener is not None:
            self._listener.on_worker_lost(ref)
