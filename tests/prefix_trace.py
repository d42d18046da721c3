"""Requests as their prefix blocks: the public trace where its folder is there, a small one of our own where it is not."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from kv_store.policy import EvictionPolicy, typical_cost
from pd_core.layout import BLOCK_TOKENS

_OURS = Path(__file__).parent / "data" / "session_trace.jsonl"
_PUBLIC = "conversation_trace.jsonl"
TRACE_BLOCK_TOKENS = 512
"""A block of the traces; where it counts what a position is in tokens."""
ROOT = b"the tenant's root"[:16]


class TracedRequest(msgspec.Struct, frozen=True):
    """timestamp: ms from the start; hash_ids: one for each block of the prompt, equal ones are equal prefixes."""

    timestamp: int
    hash_ids: list[int]


def load_requests(traces: Path | None) -> list[TracedRequest]:
    path = traces / _PUBLIC if traces and (traces / _PUBLIC).is_file() else _OURS
    return [msgspec.json.decode(line, type=TracedRequest) for line in path.read_bytes().splitlines() if line]


def trace_block_cost(position: int) -> float:
    """The usual cost of a block of the traces, which hold 32 of ours each."""
    return typical_cost(position * TRACE_BLOCK_TOKENS // BLOCK_TOKENS)


def hit_rate(policy: EvictionPolicy, requests: list[TracedRequest], num_blocks: int) -> float:
    """Share of all blocks that lie in the cached front of their request, with room for `num_blocks`."""
    num_hits = num_asked = 0
    for request in requests:
        now_s = request.timestamp / 1000
        names = [number.to_bytes(16, "little") for number in request.hash_ids]
        num_cached = next((at for at, name in enumerate(names) if name not in policy), len(names))
        num_hits, num_asked = num_hits + num_cached, num_asked + len(names)
        if num_cached:
            policy.touch(names[num_cached - 1], now_s)
        for position in range(num_cached, len(names)):
            policy.add(names[position], names[position - 1] if position else ROOT, position, now_s)
        for name in policy.victims(len(policy) - num_blocks):
            policy.remove(name)
    return num_hits / num_asked


def lru_hit_rate(requests: list[TracedRequest], num_blocks: int) -> float:
    """The same for LRU, written without a forest: later blocks of a prefix count as used before earlier ones."""
    kept: OrderedDict[int, None] = OrderedDict()
    num_hits = num_asked = 0
    for request in requests:
        ids = request.hash_ids
        num_hits += next((at for at, number in enumerate(ids) if number not in kept), len(ids))
        num_asked += len(ids)
        for number in reversed(ids):
            kept[number] = None
            kept.move_to_end(number)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return num_hits / num_asked
