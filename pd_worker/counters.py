"""Totals since boot, for the heartbeat. Names are those of the metrics."""

from __future__ import annotations

COUNTER_NAMES = (
    "prefill_tokens_total",  # prompt tokens run through the engine of a prefill worker
    "local_prefill_tokens_total",  # the same on a decode worker, where a prompt is computed for the first time
    "recomputed_tokens_total",  # tokens run again because their sequence had been preempted: no work of users
    "decode_tokens_total",  # tokens drawn by a decode worker
    "preemptions_total",  # how often a sequence gave its blocks to older ones
    "handoffs_committed_total",
    "handoffs_aborted_total",  # failed; on decode workers without those that the router took back
    "kv_bytes_sent_total",
    "kv_bytes_received_total",
    "kv_blocks_corrupt_total",  # blocks that came with other bytes than their digest says
    "kv_blocks_duplicate_total",  # blocks that were there already, or that another writer was just writing
    "kv_frames_stale_total",  # frames for tickets that nobody waits for
    "kv_connections_refused_total",  # senders that could not prove themselves, do not fit, or were too many
    "requests_cancelled_total",  # whose router left: before the commit counted by prefill, then by decode
    "steps_total",  # engine steps
)


class Counters:
    """One number for each name; they only grow."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTER_NAMES, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Raises KeyError for a name that is not in the list."""
        self._values[name] += amount

    def values(self) -> dict[str, float]:
        return dict(self._values)
