"""What the router knows of its workers: who is alive, how full they are, and what we have asked of them ourselves.

    set_workers    who there is, from the supervisor          heard / lost    what they say, or that they say nothing
    placed, ticket_came, started, released                    our own requests, ahead of the next heartbeat

Health of one boot of a worker:

    STARTING --heard--> READY <-----------------> SUSPECT -- dead_s --> DEAD
                          |       silent suspect_s                       ^
                        lost --------------------------------------------'   (until it is heard again)

Pure: every function gives a new view; time comes in. A status of another boot, or one that is older than what we have
already, is dropped and the view comes back unchanged, as the same object.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from pd_core.messages import WorkerEndpoint, WorkerState, WorkerStatus

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


class Health(enum.Enum):
    """READY alone gets new work."""

    STARTING = "starting"  # known, but never heard
    READY = "ready"
    DRAINING = "draining"  # ends what it has, takes nothing new
    SUSPECT = "suspect"  # silent for a while; what it holds is not given up yet
    DEAD = "dead"  # silent for too long, or its connection is gone


class WorkerRef(msgspec.Struct, frozen=True):
    """One boot of one worker."""

    name: str
    incarnation: str


class OurWork(msgspec.Struct, frozen=True):
    """One leg of a request of ours on a worker.

    num_tokens:  of the prompt
    num_blocks:  that it holds until it is over
    is_starting: the leg has not brought its first result yet: the ticket (decode), the first token (prefill)
    is_counted:  a heartbeat made after the reservation has come, so its free blocks are without these already
    """

    num_tokens: int
    num_blocks: int
    is_starting: bool = True
    is_counted: bool = False


class WorkerView(msgspec.Struct, frozen=True):
    """One boot of one worker, as far as we know.

    heard_s:     when the last status came; before the first, when the worker was made known
    last_number: of the last status on the present connection; -1 on a new one
    num_returned_blocks: of ours that were released since the last status: most likely free again
    has_refused: it said that it has no room, and has not been heard since
    turn:        when it last got work, in placements of all workers: the least recent goes first among equals
    """

    endpoint: WorkerEndpoint
    heard_s: float
    status: WorkerStatus | None = None
    last_number: int = -1
    is_lost: bool = False
    num_returned_blocks: int = 0
    has_refused: bool = False
    ours: Mapping[str, OurWork] = {}
    turn: int = 0

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.endpoint.name, self.endpoint.incarnation)

    @property
    def num_ours(self) -> int:
        return len(self.ours)

    @property
    def num_starting(self) -> int:
        return sum(work.is_starting for work in self.ours.values())

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of our requests there: the measure of outstanding work."""
        return sum(work.num_tokens for work in self.ours.values())

    @property
    def num_free_blocks(self) -> int:
        """Free by its last heartbeat and by what we have reserved and released since; from 0 to all.

        Blocks that are released may still be in quarantine, or in a step that ends only now: then the worker refuses,
        and its next heartbeat is waited for. Those of a leg that is starting may be missing twice: a heartbeat does
        not say whether it was made before or after them.
        """
        if self.status is None:
            return 0
        taken = sum(work.num_blocks for work in self.ours.values() if not work.is_counted)
        counts = self.status.blocks
        return min(counts.total, max(0, counts.free + self.num_returned_blocks - taken))

    def health(self, now_s: float, rules: Rules) -> Health:
        silent_s = now_s - self.heard_s
        if self.is_lost or silent_s >= rules.dead_s:
            return Health.DEAD
        if self.status is None:
            return Health.STARTING
        if silent_s >= rules.suspect_s:
            return Health.SUSPECT
        return Health.DRAINING if self.status.state is WorkerState.DRAINING else Health.READY


class Rules(msgspec.Struct, frozen=True):
    """Settings that the view and the policy go by.

    suspect_s, dead_s:       silence after which a worker gets no new work, and is given up
    max_prefill, max_decode: requests of ours that one worker of the role may have
    """

    suspect_s: float
    dead_s: float
    max_prefill: int
    max_decode: int


class Limits(msgspec.Struct, frozen=True):
    """What the smallest worker can hold; a request that fits goes anywhere."""

    context_tokens: int
    prefill_pool_tokens: int
    decode_pool_tokens: int

    @property
    def num_tokens(self) -> int:
        """Most tokens a request may have, prompt and answer together."""
        return min(self.context_tokens, self.prefill_pool_tokens, self.decode_pool_tokens)


class ClusterView(msgspec.Struct, frozen=True):
    """All workers by name.

    limits: of the workers as they were when both roles were last there; a worker's death does not change the answer
            to a request that never fits. None before that.
    """

    rules: Rules
    workers: Mapping[str, WorkerView] = {}
    limits: Limits | None = None
    num_placed: int = 0

    def of_role(self, role: Role, healths: Iterable[Health], now_s: float) -> list[WorkerView]:
        """Workers of the role whose health is one of these, by name."""
        wanted = set(healths)
        workers = [self.workers[name] for name in sorted(self.workers)]
        return [w for w in workers if w.endpoint.role == role and w.health(now_s, self.rules) in wanted]


def set_workers(view: ClusterView, endpoints: Iterable[WorkerEndpoint], now_s: float) -> ClusterView:
    """The workers are these now. A boot that was known stays as it is; any other begins anew, without our work."""
    workers: dict[str, WorkerView] = {}
    for endpoint in endpoints:
        known = view.workers.get(endpoint.name)
        is_same = known is not None and known.endpoint == endpoint
        workers[endpoint.name] = known if known is not None and is_same else WorkerView(endpoint, heard_s=now_s)
    return msgspec.structs.replace(view, workers=workers)


def heard(view: ClusterView, status: WorkerStatus, now_s: float) -> ClusterView:
    """A heartbeat came. The same view when it is of another boot, or not newer than the last."""
    worker = view.workers.get(status.name)
    if worker is None or worker.endpoint.incarnation != status.incarnation or status.number <= worker.last_number:
        return view
    ours = {
        work_id: work if work.is_starting else msgspec.structs.replace(work, is_counted=True)
        for work_id, work in worker.ours.items()
    }
    newer = msgspec.structs.replace(
        worker,
        status=status,
        heard_s=now_s,
        last_number=status.number,
        is_lost=False,
        num_returned_blocks=0,
        has_refused=False,
        ours=ours,
    )
    changed = _with(view, newer)
    return msgspec.structs.replace(changed, limits=_limits(changed, now_s) or view.limits)


def lost(view: ClusterView, ref: WorkerRef) -> ClusterView:
    """The connection to this boot is gone, and with it everything that it held of ours."""
    worker = _find(view, ref)
    if worker is None:
        return view
    return _with(view, msgspec.structs.replace(worker, is_lost=True, last_number=-1))


def placed(view: ClusterView, ref: WorkerRef, work_id: str, work: OurWork) -> ClusterView:
    """We are about to open a leg of this request there."""
    worker = _find(view, ref)
    if worker is None:
        return view
    turn = view.num_placed + 1
    newer = msgspec.structs.replace(worker, ours={**worker.ours, work_id: work}, turn=turn)
    return msgspec.structs.replace(_with(view, newer), num_placed=turn)


def started(view: ClusterView, ref: WorkerRef, work_id: str) -> ClusterView:
    """The leg has brought its first result: the ticket, or the first token."""
    worker = _find(view, ref)
    if worker is None or work_id not in worker.ours:
        return view
    work = msgspec.structs.replace(worker.ours[work_id], is_starting=False)
    return _with(view, msgspec.structs.replace(worker, ours={**worker.ours, work_id: work}))


def refused(view: ClusterView, ref: WorkerRef) -> ClusterView:
    """It has no room; it is asked again when its next heartbeat has come."""
    worker = _find(view, ref)
    return view if worker is None else _with(view, msgspec.structs.replace(worker, has_refused=True))


def released(view: ClusterView, ref: WorkerRef, work_id: str) -> ClusterView:
    """The leg is closed."""
    worker = _find(view, ref)
    if worker is None or work_id not in worker.ours:
        return view
    ours = dict(worker.ours)
    work = ours.pop(work_id)
    num_returned = worker.num_returned_blocks + (work.num_blocks if work.is_counted else 0)
    return _with(view, msgspec.structs.replace(worker, ours=ours, num_returned_blocks=num_returned))


def _find(view: ClusterView, ref: WorkerRef) -> WorkerView | None:
    worker = view.workers.get(ref.name)
    return worker if worker is not None and worker.endpoint.incarnation == ref.incarnation else None


def _with(view: ClusterView, worker: WorkerView) -> ClusterView:
    return msgspec.structs.replace(view, workers={**view.workers, worker.endpoint.name: worker})


def _limits(view: ClusterView, now_s: float) -> Limits | None:
    alive = (Health.READY, Health.DRAINING, Health.SUSPECT)
    by_role = {role: [w.status for w in view.of_role(role, alive, now_s) if w.status] for role in ROLES}
    if not all(by_role.values()):
        return None
    return Limits(
        context_tokens=min(status.context_tokens for statuses in by_role.values() for status in statuses),
        prefill_pool_tokens=min(status.pool_tokens for status in by_role["prefill"]),
        decode_pool_tokens=min(status.pool_tokens for status in by_role["decode"]),
    )
