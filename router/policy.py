"""Where a request goes. Pure: the same view gives the same answer.

    prefill: a worker with room for the prompt that can start it within one chunk: what it computes before, in the order
             of shortest remaining work, is no more than that, so no reserved block waits behind a queue; among those
             the one with the least to compute until this prompt's first token, counted longer where it is slow
    decode:  a worker with room for the prompt and some growth of everybody there, and not promised to so many that they
             would take the blocks from each other for ever; among those the least loaded

Workers whose KV differs (see pd_core.layout.Fingerprint) are no pair, and who is in no pair is as good as not there.
Without prefill workers the decode worker has to meet both. Longer prompts do not count as what comes before, because
workers interleave chunks; one that waits here counts as shorter and shorter, as it does there.
A worker that has refused for want of room is not asked again before its next heartbeat: the view may be wrong about
blocks that are only just being freed.
Our own placements count from the moment they are made, not from the next heartbeat: a burst spreads over idle workers
instead of running after the one that looked emptiest.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from pd_core.layout import blocks_for, growth_room
from router.pace import expected_s, slowness
from router.progress import OurWork
from router.view import ClusterView, Health, Role, WorkerView, can_exchange, why_no_exchange

OVERCOMMIT = 1.5
"""Blocks that ours will probably have in the end, all at once, in pools: they grow and end at different times."""

NOBODY: frozenset[str] = frozenset()


class Demand(msgspec.Struct, frozen=True):
    """What a request needs of the cluster. num_prompt: tokens whose KV must be made; max_tokens: to make after them.

    since_s: when it began to wait for a place
    """

    num_prompt: int
    max_tokens: int
    since_s: float = 0.0

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks that prefill holds until decode has taken over their content, and decode from then on."""
        return blocks_for(self.num_prompt)

    def num_final_blocks(self, usual_answer_tokens: float) -> int:
        """Blocks that decode will probably hold in the end."""
        num_answer = min(self.max_tokens, max(1, round(usual_answer_tokens)))
        return blocks_for(self.num_prompt + num_answer - 1)

    @property
    def num_most_blocks(self) -> int:
        """Blocks that decode can hold in the end: of a request's last token no KV is made."""
        return blocks_for(self.num_prompt + self.max_tokens - 1)

    @property
    def num_growth_blocks(self) -> int:
        """Free blocks beside the prompt's at which a decode worker admits it."""
        return growth_room(self.num_prompt_blocks, self.num_most_blocks)

    def rank(self, now_s: float, ageing_tokens_per_s: float) -> float:
        """Its place in the order of prompts: shorter first, and who waits counts as shorter."""
        return self.num_prompt - ageing_tokens_per_s * max(0.0, now_s - self.since_s)


class Placement(msgspec.Struct, frozen=True):
    """The choice, by worker name, and the numbers that made it.

    prefill:    None where decode computes the prompt too
    num_ahead:  prompt tokens that are to be computed there before this prompt's own
    expected_s: until the first token, from prompts of this size; None when there were none
    """

    prefill: str | None
    decode: str
    reason: str
    num_ahead: int = 0
    expected_s: float | None = None


class Obstacle(enum.Enum):
    """Why a request must wait."""

    NOBODY_READY = "no worker of a role is ready, or none that fits one of the other role"
    PROMPTS_FIRST = "prompts that come first are being computed"
    PREFILL_FULL = "no prefill worker has room"
    DECODE_FULL = "no decode worker has room"


Verdict: TypeAlias = Placement | Obstacle


def place(demand: Demand, view: ClusterView, now_s: float, kept: frozenset[str] = NOBODY) -> Verdict:
    """The workers for this request, or why it must wait. Only READY workers are chosen, and none of `kept`."""
    rules = view.rules
    ready = pairable(view, now_s)
    if not all(ready.values()):
        return Obstacle.NOBODY_READY
    decodes = [w for w in ready["decode"] if w.endpoint.name not in kept and _can_decode(w, view, demand)]
    if not decodes:
        return Obstacle.DECODE_FULL
    computing = decodes
    if "prefill" in rules.roles:
        computing = [w for w in ready["prefill"] if w.endpoint.name not in kept and _can_hold(w, view, demand)]
        if not computing:
            return Obstacle.PREFILL_FULL
        computing = [w for w in computing if any(can_exchange(w, decode) for decode in decodes)]
        if not computing:
            return Obstacle.DECODE_FULL
    rank = demand.rank(now_s, rules.ageing_tokens_per_s)
    computing = [w for w in computing if w.num_ahead(rank, now_s, rules.ageing_tokens_per_s) <= rules.chunk_tokens]
    if not computing:
        return Obstacle.PROMPTS_FIRST
    prefill = min(computing, key=lambda w: _prompt_cost(w, ready[rules.computes_prompts], view, demand, now_s))
    if "prefill" not in rules.roles:
        return _placement(prefill, None, view, demand, now_s)
    decode = min((w for w in decodes if can_exchange(prefill, w)), key=lambda w: _decode_cost(w, view))
    return _placement(decode, prefill, view, demand, now_s)


def pairable(view: ClusterView, now_s: float) -> dict[Role, list[WorkerView]]:
    """READY workers by role, in order of their names; those alone that can exchange KV with one of the other role."""
    ready = {role: view.of_role(role, (Health.READY,), now_s) for role in view.rules.roles}
    prefills, decodes = ready.get("prefill"), ready["decode"]
    if not prefills or all(worker.fingerprint is prefills[0].fingerprint for worker in (*prefills, *decodes)):
        return ready
    return {
        "prefill": [w for w in prefills if any(can_exchange(w, other) for other in decodes)],
        "decode": [w for w in decodes if any(can_exchange(other, w) for other in prefills)],
    }


def why_nobody(view: ClusterView, now_s: float) -> str | None:
    """Why no request can be served now, whatever it needs; None when one can.

    No worker of a role is ready, or none can exchange KV with any of the other role: then with what differs.
    """
    role = missing_role(view, now_s)
    if role is not None:
        return f"no {role} worker is ready"
    if all(pairable(view, now_s).values()):
        return None
    return "no prefill worker has a decode worker that its KV fits: " + "; ".join(mismatches(view).values())


def mismatches(view: ClusterView) -> dict[tuple[str, str], str]:
    """Prefill and decode workers, by their names, that can hand nothing over, and what differs, with both values."""
    workers = [view.workers[name] for name in sorted(view.workers)]
    pairs = [(p, d) for p in workers for d in workers if (p.endpoint.role, d.endpoint.role) == ("prefill", "decode")]
    found = {(p.endpoint.name, d.endpoint.name): why_no_exchange(p, d) for p, d in pairs}
    return {names: why for names, why in found.items() if why is not None}


def missing_role(view: ClusterView, now_s: float) -> Role | None:
    """A role that nobody can fill now: all its workers are silent, dead, starting or draining.

    Who would wait for a silent worker to be called dead would wait longer than a client should.
    """
    for role in view.rules.roles:
        if not view.of_role(role, (Health.READY,), now_s):
            return role
    return None


def works_of(placement: Placement, demand: Demand, view: ClusterView, now_s: float) -> dict[str, OurWork]:
    """What the placement puts on its workers, by their names."""
    blocks = demand.num_prompt_blocks
    computing = OurWork(
        num_tokens=demand.num_prompt,
        num_blocks=blocks,
        num_final_blocks=blocks,
        num_most_blocks=blocks,
        num_to_compute=demand.num_prompt,
        num_ahead=placement.num_ahead,
        waits_since_s=demand.since_s,
        placed_s=now_s,
    )
    decoding = msgspec.structs.replace(
        computing,
        num_final_blocks=demand.num_final_blocks(view.usual_answer_tokens),
        num_most_blocks=demand.num_most_blocks,
    )
    if placement.prefill is None:
        return {placement.decode: decoding}
    return {
        placement.prefill: computing,
        placement.decode: msgspec.structs.replace(decoding, num_to_compute=0, num_ahead=0),
    }


def room_to_keep(role: Role, demand: Demand, view: ClusterView, now_s: float) -> str | None:
    """The worker that will soonest have room for this request when it takes nobody else: the one with most free."""
    need = demand.num_prompt_blocks + (demand.num_growth_blocks if role == "decode" else 0)
    large = [w for w in pairable(view, now_s).get(role, []) if w.num_blocks >= need]
    if not large:
        return None
    return min(large, key=lambda w: (-w.num_free_blocks, w.num_ours, w.endpoint.name)).endpoint.name


def _can_hold(worker: WorkerView, view: ClusterView, demand: Demand) -> bool:
    return (
        not worker.has_refused
        and worker.num_ours < view.rules.max_prefill
        and worker.num_free_blocks >= demand.num_prompt_blocks
    )


def _can_decode(worker: WorkerView, view: ClusterView, demand: Demand) -> bool:
    if worker.has_refused or worker.has_preempted or worker.num_ours >= view.rules.max_decode:
        return False
    if worker.num_free_blocks < demand.num_prompt_blocks + demand.num_growth_blocks + worker.num_growth_blocks:
        return False
    final = worker.num_final_blocks + demand.num_final_blocks(view.usual_answer_tokens)
    return worker.num_ours == 0 or final <= OVERCOMMIT * worker.num_blocks


def _decode_cost(worker: WorkerView, view: ClusterView) -> tuple[float | str, ...]:
    """The resource that is scarcer there counts: places in the batch, or blocks."""
    places = worker.num_ours / view.rules.max_decode
    blocks = worker.num_final_blocks / max(1, worker.num_blocks)
    return (max(places, blocks), min(places, blocks), worker.turn, worker.endpoint.name)


def _prompt_cost(
    worker: WorkerView, others: Sequence[WorkerView], view: ClusterView, demand: Demand, now_s: float
) -> tuple[float | str, ...]:
    """Work until this prompt's first token, then all that is to be computed there; decode's load where it does both."""
    ageing = view.rules.ageing_tokens_per_s
    num_tokens = worker.num_ahead(demand.num_prompt, now_s, ageing) + demand.num_prompt
    work = num_tokens * slowness(worker.pace, (other.pace for other in others), now_s)
    if worker.endpoint.role == "decode":
        return (work, *_decode_cost(worker, view))
    return (work, worker.num_to_compute, worker.num_ours, worker.turn, worker.endpoint.name)


def _placement(
    decode: WorkerView, prefill: WorkerView | None, view: ClusterView, demand: Demand, now_s: float
) -> Placement:
    computing = prefill or decode
    num_ahead = computing.num_ahead(demand.num_prompt, now_s, view.rules.ageing_tokens_per_s)
    num_tokens = num_ahead + demand.num_prompt
    prompt = (
        f"{computing.endpoint.name}: {num_ahead} prompt tokens first of {computing.num_to_compute} there, "
        f"{computing.num_free_blocks} blocks free, {demand.num_prompt_blocks} needed"
    )
    answer = (
        f"decode {decode.endpoint.name}: {decode.num_ours} of ours, which will have {decode.num_final_blocks} of "
        f"{decode.num_blocks} blocks, {decode.num_free_blocks} free, {demand.num_prompt_blocks} needed"
    )
    return Placement(
        prefill=None if prefill is None else prefill.endpoint.name,
        decode=decode.endpoint.name,
        reason=f"{'both on' if prefill is None else 'prefill'} {prompt}; {answer}",
        num_ahead=num_ahead,
        expected_s=expected_s(view.usual_s, computing.pace, num_tokens, now_s),
    )
