"""What the router knows of its workers: who is alive, how full they are, and what we have asked of them ourselves.

    set_workers    who there is, from the supervisor          connected, heard / lost   what they say, or that they
                                                              say nothing
    placed, admitted, computed, preempted, resumed, released  our own requests, ahead of the next heartbeat
    answered                                                  how long answers are

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

from pd_core.errors import LayoutMismatch
from pd_core.layout import Fingerprint, blocks_for, check_pairing, growth_room
from pd_core.messages import WorkerEndpoint, WorkerState, WorkerStatus
from router.pace import Pace, Usual, learn
from router.progress import OurWork, all_tokens, prompt_tokens, spread

Role = Literal["prefill", "decode"]

FIRST_GUESS_TOKENS = 256.0
"""Tokens of an answer, before any was seen."""
FOLLOW_ANSWERS = 0.1
"""By how much the usual answer follows each new one."""


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


class WorkerView(msgspec.Struct, frozen=True):
    """One boot of one worker, as far as we know.

    heard_s:     when the last status came; before the first, when the worker was made known
    last_number: of the last status on the present connection; -1 on a new one
    num_returned_blocks: of ours that were released since the last status: most likely free again
    num_uncounted_tokens: of prompts that are done, since the last status: the next one's total has them
    has_refused: it said that it has no room, and has not been heard since
    turn:        when it last got work, in placements of all workers: the least recent goes first among equals
    pace:        how fast it is at our prompts
    progress_s:  when it was last heard to have run more tokens than before
    fingerprint: of its KV, as it says itself; None before it has, or when it keeps none
    """

    endpoint: WorkerEndpoint
    heard_s: float
    status: WorkerStatus | None = None
    last_number: int = -1
    is_lost: bool = False
    num_returned_blocks: int = 0
    num_uncounted_tokens: int = 0
    has_refused: bool = False
    ours: Mapping[str, OurWork] = {}
    turn: int = 0
    pace: Pace = Pace()
    progress_s: float = 0.0
    fingerprint: Fingerprint | None = None

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.endpoint.name, self.endpoint.incarnation)

    @property
    def num_ours(self) -> int:
        return len(self.ours)

    @property
    def num_to_compute(self) -> int:
        """Prompt tokens of our requests that are still to be computed there: the measure of outstanding work."""
        return sum(work.num_to_compute for work in self.ours.values())

    @property
    def num_final_blocks(self) -> int:
        """Blocks that all of ours together will probably have in the end."""
        return sum(work.num_final_blocks for work in self.ours.values())

    @property
    def num_growth_blocks(self) -> int:
        """Blocks that are kept free there for the growth of ours, when another is admitted."""
        room = sum(growth_room(work.num_blocks, work.num_most_blocks) for work in self.ours.values())
        left = sum(work.num_most_blocks for work in self.ours.values()) - (self.num_blocks - self.num_free_blocks)
        return max(0, min(room, left))

    @property
    def num_blocks(self) -> int:
        """Of its pool; 0 before it was heard."""
        return 0 if self.status is None else self.status.blocks.total

    @property
    def has_preempted(self) -> bool:
        """One of ours waits for its blocks: nobody else is admitted before it goes on."""
        return any(work.is_preempted for work in self.ours.values())

    def num_ahead(self, rank: float, now_s: float, ageing_tokens_per_s: float) -> int:
        """Prompt tokens of ours that are computed there before a prompt of this rank; see OurWork.rank."""
        return sum(
            work.num_to_compute
            for work in self.ours.values()
            if work.num_to_compute and work.rank(now_s, ageing_tokens_per_s) <= rank
        )

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


def can_exchange(one: WorkerView, other: WorkerView) -> bool:
    """Whether KV of one can go into the other's pool, as far as is known."""
    ours, theirs = one.fingerprint, other.fingerprint
    return ours is theirs or ours is None or theirs is None or ours == theirs


def why_no_exchange(prefill: WorkerView, decode: WorkerView) -> str | None:
    """What differs between the two, with both values; None when KV can go from one to the other."""
    if prefill.fingerprint is None or decode.fingerprint is None or can_exchange(prefill, decode):
        return None
    try:
        check_pairing(prefill.fingerprint, decode.fingerprint)
    except LayoutMismatch as error:
        return f"{prefill.endpoint.name} (ours) and {decode.endpoint.name} (theirs): {error.message}"
    return None


class Rules(msgspec.Struct, frozen=True):
    """Settings that the view and the policy go by.

    suspect_s, dead_s:       silence after which a worker gets no new work, and is given up
    max_prefill, max_decode: requests of ours that one worker of the role may have
    roles:                   those that a request needs; without "prefill", decode workers compute prompts too
    chunk_tokens:            prompt tokens of one engine step, of whoever computes prompts
    ageing_tokens_per_s:     a prompt counts as so many tokens shorter for every second that it waits
    """

    suspect_s: float
    dead_s: float
    max_prefill: int
    max_decode: int
    roles: tuple[Role, ...]
    chunk_tokens: int
    ageing_tokens_per_s: float

    @property
    def computes_prompts(self) -> Role:
        return "prefill" if "prefill" in self.roles else "decode"


class Limits(msgspec.Struct, frozen=True):
    """What the smallest worker can hold; a request that fits goes anywhere. Without prefill workers theirs is None."""

    context_tokens: int
    prefill_pool_tokens: int | None
    decode_pool_tokens: int

    @property
    def num_tokens(self) -> int:
        """Most tokens a request may have, prompt and answer together."""
        pools = [tokens for tokens in (self.prefill_pool_tokens, self.decode_pool_tokens) if tokens is not None]
        return min(self.context_tokens, *pools)


class ClusterView(msgspec.Struct, frozen=True):
    """All workers by name.

    limits: of the workers as they were when all roles were last there; a worker's death does not change the answer
            to a request that never fits. None before that.
    usual_s: how long prompts take to their first token, by size
    usual_answer_tokens: how long answers are
    """

    rules: Rules
    workers: Mapping[str, WorkerView] = {}
    limits: Limits | None = None
    num_placed: int = 0
    usual_s: Usual = {}
    usual_answer_tokens: float = FIRST_GUESS_TOKENS

    def of_role(self, role: Role, healths: Iterable[Health], now_s: float) -> list[WorkerView]:
        """Workers of the role whose health is one of these, by name."""
        wanted = tuple(healths)  # no set: enum hashes in Python
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


def connected(view: ClusterView, ref: WorkerRef, fingerprint: Fingerprint | None) -> ClusterView:
    """There is a connection to this boot, and it has said what KV it has."""
    worker = _find(view, ref)
    if worker is None:
        return view
    same = next((w.fingerprint for w in view.workers.values() if w.fingerprint == fingerprint), fingerprint)
    return _with(view, msgspec.structs.replace(worker, fingerprint=same))  # one object: quick to compare


def heard(view: ClusterView, status: WorkerStatus, now_s: float) -> ClusterView:
    """A heartbeat came. The same view when it is of another boot, or not newer than the last."""
    worker = view.workers.get(status.name)
    if worker is None or worker.endpoint.incarnation != status.incarnation or status.number <= worker.last_number:
        return view
    num_before = 0 if worker.status is None else prompt_tokens(worker.status.counters)
    num_computed = max(0, prompt_tokens(status.counters) - num_before)
    # A first token that came before this heartbeat was made before it too: both come over one connection.
    ours = spread(worker.ours, num_computed - worker.num_uncounted_tokens, now_s, view.rules.ageing_tokens_per_s)
    has_got_on = worker.status is None or all_tokens(status.counters) > all_tokens(worker.status.counters)
    newer = msgspec.structs.replace(
        worker,
        status=status,
        heard_s=now_s,
        last_number=status.number,
        is_lost=False,
        num_returned_blocks=0,
        num_uncounted_tokens=0,
        has_refused=False,
        ours={work_id: _counted(work) for work_id, work in ours.items()},
        progress_s=now_s if has_got_on else worker.progress_s,
    )
    changed = _with(view, newer)
    return msgspec.structs.replace(changed, limits=_limits(changed, now_s) or view.limits)


def _counted(work: OurWork) -> OurWork:
    if work.is_counted or not work.is_admitted:
        return work
    return msgspec.structs.replace(work, is_counted=True)


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


def admitted(view: ClusterView, ref: WorkerRef, work_id: str) -> ClusterView:
    """The worker has taken the leg's blocks."""
    return _change(view, ref, work_id, is_admitted=True)


def computed(view: ClusterView, ref: WorkerRef, work_id: str, now_s: float) -> ClusterView:
    """The leg's prompt is computed there: its first token has come."""
    worker = _find(view, ref)
    if worker is None or work_id not in worker.ours:
        return view
    work = worker.ours[work_id]
    if work.num_to_compute == 0:
        return _change(view, ref, work_id, is_admitted=True)
    num_tokens = work.num_ahead + work.num_tokens
    usual_s, pace = learn(view.usual_s, worker.pace, num_tokens, now_s - work.placed_s, now_s)
    done = msgspec.structs.replace(work, num_to_compute=0, is_admitted=True)
    newer = msgspec.structs.replace(
        worker,
        ours={**worker.ours, work_id: done},
        pace=pace,
        num_uncounted_tokens=worker.num_uncounted_tokens + work.num_to_compute,
    )
    return msgspec.structs.replace(_with(view, newer), usual_s=usual_s)


def preempted(view: ClusterView, ref: WorkerRef, work_id: str) -> ClusterView:
    """The leg's blocks were given to older ones; it goes on by itself when there is room again."""
    return _change(view, ref, work_id, is_preempted=True)


def resumed(view: ClusterView, ref: WorkerRef, work_id: str) -> ClusterView:
    """One that was preempted has brought a token again."""
    return _change(view, ref, work_id, is_preempted=False)


def answered(view: ClusterView, num_tokens: int) -> ClusterView:
    """An answer was so long."""
    usual = view.usual_answer_tokens
    return msgspec.structs.replace(view, usual_answer_tokens=usual + FOLLOW_ANSWERS * (num_tokens - usual))


def refused(view: ClusterView, ref: WorkerRef) -> ClusterView:
    """It has no room; it is asked again when its next heartbeat has come."""
    worker = _find(view, ref)
    return view if worker is None else _with(view, msgspec.structs.replace(worker, has_refused=True))


def released(view: ClusterView, ref: WorkerRef, work_id: str, num_made: int = 0) -> ClusterView:
    """The leg is closed. num_made: tokens of its answer, which tell how far it has grown."""
    worker = _find(view, ref)
    if worker is None or work_id not in worker.ours:
        return view
    ours = dict(worker.ours)
    work = ours.pop(work_id)
    num_returned = worker.num_returned_blocks
    if work.is_counted and not work.is_preempted:  # what was preempted holds nothing
        num_grown = min(work.num_most_blocks, blocks_for(work.num_tokens + max(0, num_made - 1)))
        num_returned += max(work.num_blocks, num_grown)
    return _with(view, msgspec.structs.replace(worker, ours=ours, num_returned_blocks=num_returned))


def _find(view: ClusterView, ref: WorkerRef) -> WorkerView | None:
    worker = view.workers.get(ref.name)
    return worker if worker is not None and worker.endpoint.incarnation == ref.incarnation else None


def _change(view: ClusterView, ref: WorkerRef, work_id: str, **changes: object) -> ClusterView:
    worker = _find(view, ref)
    if worker is None or work_id not in worker.ours:
        return view
    work = msgspec.structs.replace(worker.ours[work_id], **changes)
    return _with(view, msgspec.structs.replace(worker, ours={**worker.ours, work_id: work}))


def _with(view: ClusterView, worker: WorkerView) -> ClusterView:
    return msgspec.structs.replace(view, workers={**view.workers, worker.endpoint.name: worker})


def _limits(view: ClusterView, now_s: float) -> Limits | None:
    alive = (Health.READY, Health.DRAINING, Health.SUSPECT)
    by_role = {role: [w.status for w in view.of_role(role, alive, now_s) if w.status] for role in view.rules.roles}
    if not all(by_role.values()):
        return None
    pools = {role: min(status.pool_tokens for status in statuses) for role, statuses in by_role.items()}
    return Limits(
        context_tokens=min(status.context_tokens for statuses in by_role.values() for status in statuses),
        prefill_pool_tokens=pools.get("prefill"),
        decode_pool_tokens=pools["decode"],
    )
