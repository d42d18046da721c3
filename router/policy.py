"""Where a request goes. Pure: the same view gives the same answer.

    prefill: a worker with room for the prompt and nothing of ours before its first token, so that the request starts
             within one chunk and no reserved block waits behind a queue; among those the one with the least outstanding
             work
    decode:  a worker with room for all that the request can become; among those the one with the least of our requests

A worker that has refused for want of room is not asked again before its next heartbeat: the view may be wrong about
blocks that are only just being freed.
Our own placements count from the moment they are made, not from the next heartbeat: a burst spreads over idle workers
instead of running after the one that looked emptiest.
"""

from __future__ import annotations

import msgspec

from pd_core.layout import blocks_for
from router.view import ClusterView, Health, Role, WorkerView


class Demand(msgspec.Struct, frozen=True):
    """What a request needs of the cluster. num_prompt: tokens whose KV must be made; max_tokens: to make after them."""

    num_prompt: int
    max_tokens: int

    @property
    def num_prefill_blocks(self) -> int:
        """Blocks that prefill holds, from its admission until decode has taken over their content."""
        return blocks_for(self.num_prompt)

    @property
    def num_decode_blocks(self) -> int:
        """Blocks that decode reserves: of a request's last token no KV is made."""
        return blocks_for(self.num_prompt + self.max_tokens - 1)


class Placement(msgspec.Struct, frozen=True):
    """The choice, by worker name, and the numbers that made it."""

    prefill: str
    decode: str
    reason: str


def place(demand: Demand, view: ClusterView, now_s: float) -> Placement | None:
    """The two workers for this request, or None: it must wait. Only READY workers are chosen."""
    prefills = [w for w in _ready(view, "prefill", now_s) if _can_prefill(w, view, demand)]
    decodes = [w for w in _ready(view, "decode", now_s) if _can_decode(w, view, demand)]
    if not prefills or not decodes:
        return None
    prefill = min(prefills, key=lambda w: (w.num_tokens, w.num_ours, w.turn, w.endpoint.name))
    decode = min(decodes, key=lambda w: (w.num_ours, -w.num_free_blocks, w.turn, w.endpoint.name))
    return Placement(prefill.endpoint.name, decode.endpoint.name, _reason(prefill, decode, demand))


def missing_role(view: ClusterView, now_s: float) -> Role | None:
    """A role that nobody can fill now: all its workers are silent, dead, starting or draining.

    Who would wait for a silent worker to be called dead would wait longer than a client should.
    """
    for role in ("prefill", "decode"):
        if not view.of_role(role, (Health.READY,), now_s):
            return role
    return None


def _ready(view: ClusterView, role: Role, now_s: float) -> list[WorkerView]:
    return view.of_role(role, (Health.READY,), now_s)


def _can_prefill(worker: WorkerView, view: ClusterView, demand: Demand) -> bool:
    return (
        not worker.has_refused
        and worker.num_starting == 0
        and worker.num_ours < view.rules.max_prefill
        and worker.num_free_blocks >= demand.num_prefill_blocks
    )


def _can_decode(worker: WorkerView, view: ClusterView, demand: Demand) -> bool:
    return (
        not worker.has_refused
        and worker.num_ours < view.rules.max_decode
        and worker.num_free_blocks >= demand.num_decode_blocks
    )


def _reason(prefill: WorkerView, decode: WorkerView, demand: Demand) -> str:
    return (
        f"prefill {prefill.endpoint.name}: {prefill.num_ours} of ours with {prefill.num_tokens} tokens, "
        f"{prefill.num_free_blocks} blocks free, {demand.num_prefill_blocks} needed; "
        f"decode {decode.endpoint.name}: {decode.num_ours} of ours, "
        f"{decode.num_free_blocks} blocks free, {demand.num_decode_blocks} needed"
    )
