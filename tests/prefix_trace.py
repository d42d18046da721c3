"""Requests as their prefix blocks: the public trace, or a small one of our own, which is always there."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kv_store.policy import ForestPolicy, typical_cost
from pd_core.layout import BLOCK_TOKENS

_OURS = Path(__file__).parent / "data" / "session_trace.jsonl"
_PUBLIC = "conversation_trace.jsonl"
TRACE_BLOCK_TOKENS = 512
"""A block of the traces; where it counts what a position is in tokens."""
ROOT = b"the tenant's root"[:16]


class _Line(msgspec.Struct, frozen=True):
    """timestamp: ms from the start; hash_ids: one for each block of the prompt, equal ones are equal prefixes."""

    timestamp: int
    hash_ids: list[int]


class TracedRequest(msgspec.Struct, frozen=True):
    now_s: float
    names: list[bytes]


def has_public_trace(traces: Path) -> bool:
    return (traces / _PUBLIC).is_file()


def load_requests(traces: Path | None) -> list[TracedRequest]:
    """The public trace, or ours when `traces` is None."""
    path = traces / _PUBLIC if traces else _OURS
    lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines() if line]
    return [
        TracedRequest(line.timestamp / 1000, [number.to_bytes(16, "little") for number in line.hash_ids])
        for line in lines
    ]


def trace_block_cost(position: int) -> float:
    """The usual cost of a block of the traces, which hold 32 of ours each."""
    return typical_cost(position * TRACE_BLOCK_TOKENS // BLOCK_TOKENS)


def hit_rate(policy: ForestPolicy, requests: list[TracedRequest], num_blocks: int) -> float:
    """Share of all blocks that lie in the cached front of their request, with room for `num_blocks`."""
    return _share(policy, requests, num_blocks, lambda num_front: num_front)


def saved_share(policy: ForestPolicy, requests: list[TracedRequest], num_blocks: int) -> float:
    """Share of all computing that the cached fronts save."""
    most = max(len(request.names) for request in requests)
    costs = [0.0, *itertools.accumulate(trace_block_cost(position) for position in range(most))]
    return _share(policy, requests, num_blocks, costs.__getitem__)


def _share(
    policy: ForestPolicy, requests: list[TracedRequest], num_blocks: int, front_value: Callable[[int], float]
) -> float:
    saved = total = 0.0
    for request in requests:
        names, now_s = request.names, request.now_s
        num_cached = _num_cached(names, policy)
        saved, total = saved + front_value(num_cached), total + front_value(len(names))
        if num_cached:
            policy.touch(names[num_cached - 1], now_s)
        for position in range(num_cached, len(names)):
            policy.add(names[position], names[position - 1] if position else ROOT, position, now_s)
        for name in policy.victims(len(policy) - num_blocks):
            policy.remove(name)
    return saved / total


def lru_hit_rate(requests: list[TracedRequest], num_blocks: int) -> float:
    """The same for LRU, written without a forest: later blocks of a prefix count as used before earlier ones."""
    kept: OrderedDict[bytes, None] = OrderedDict()
    num_hits = num_asked = 0
    for request in requests:
        num_hits += _num_cached(request.names, kept)
        num_asked += len(request.names)
        for name in reversed(request.names):
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return num_hits / num_asked


def _num_cached(names: Sequence[bytes], cached: ForestPolicy | OrderedDict[bytes, None]) -> int:
    """Length of the front that is cached."""
    return next((at for at, name in enumerate(names) if name not in cached), len(names))
