"""How far our prompts are on a worker, from its heartbeats' totals. Pure.

A heartbeat says how many prompt tokens the worker has computed in all, not whose. Prompts whose first token we have
seen are known to be computed; the rest was spent on the others in the order in which workers compute: who has least
left goes first, and waiting makes shorter. A prompt that we think done is left one token: only its first token tells.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

PROMPT_COUNTERS = ("prefill_tokens_total", "local_prefill_tokens_total")
"""Prompt tokens computed since boot: of a prefill worker, of a decode worker."""


class OurWork(msgspec.Struct, frozen=True):
    """One leg of a request of ours on a worker.

    num_tokens:       of the prompt
    num_blocks:       that it takes when it begins
    num_final_blocks: that it will probably have in the end; num_most_blocks: that it can have at most
    num_to_compute:   prompt tokens whose KV is still to be made there; 0 where it comes from elsewhere
    num_ahead:        prompt tokens that were to be computed before these when it was placed
    waits_since_s:    when it began to wait for a place, or was last known to have had a chunk
    placed_s:         when it was placed
    is_admitted:      it has brought its first result: its blocks are taken
    is_counted:       a heartbeat made after that has come, so the worker's free blocks are without these already
    is_preempted:     its blocks were given to older ones, and it waits to go on
    """

    num_tokens: int
    num_blocks: int
    num_final_blocks: int = 0
    num_most_blocks: int = 0
    num_to_compute: int = 0
    num_ahead: int = 0
    waits_since_s: float = 0.0
    placed_s: float = 0.0
    is_admitted: bool = False
    is_counted: bool = False
    is_preempted: bool = False

    def rank(self, now_s: float, ageing_tokens_per_s: float) -> float:
        """Prompts are computed in the order of this, lowest first."""
        return self.num_to_compute - ageing_tokens_per_s * max(0.0, now_s - self.waits_since_s)


def prompt_tokens(counters: Mapping[str, float]) -> int:
    return int(sum(counters.get(name, 0.0) for name in PROMPT_COUNTERS))


def all_tokens(counters: Mapping[str, float]) -> float:
    """Tokens of every kind that were run through the engine: it grows as long as the worker gets on."""
    return sum(value for name, value in counters.items() if name.endswith("_tokens_total"))


def spread(
    ours: Mapping[str, OurWork], num_computed: int, now_s: float, ageing_tokens_per_s: float
) -> Mapping[str, OurWork]:
    """Our work after the worker has computed so many more prompt tokens of it."""
    under_way = [(work.rank(now_s, ageing_tokens_per_s), work_id) for work_id, work in ours.items()]
    newer = dict(ours)
    for _, work_id in sorted(item for item in under_way if ours[item[1]].num_to_compute > 1):
        if num_computed <= 0:
            break
        work = ours[work_id]
        spent = min(num_computed, work.num_to_compute - 1)
        num_computed -= spent
        newer[work_id] = msgspec.structs.replace(work, num_to_compute=work.num_to_compute - spent, waits_since_s=now_s)
    return newer
